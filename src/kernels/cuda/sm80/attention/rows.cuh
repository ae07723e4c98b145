#pragma once

#include "kernels/cuda/common/row_state.cuh"
#include "kernels/cuda/sm80/attention/pieces.cuh"

/// The rows of an item and the places of its tokens.
namespace folio::inline v0::kernels::cuda::sm80 {

/// This thread's number, read anew: so that what one way derives from it is not kept in registers through the others.
__device__ __forceinline__ int32_t thread_number() {
  int32_t number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

/// Where a token of a segment lies. Ragged: page 0 and the token of the tensor.
struct TokenPlace {
  int32_t page;
  int32_t in_page;  ///< negative: no row of the item sees the token, which is not read
};

/// Where a token's key and value begin, in elements; kUnseen for both where no row sees it.
struct TokenOffsets {
  int64_t k;
  int64_t v;
};
constexpr int64_t kUnseen = INT64_MIN;

/// Where keys or values of an item lie, in bytes: of a segment's head.
struct alignas(16) PieceSteps {
  const std::byte* begin;  ///< page 0; ragged: the row's first token
  int64_t page;
  int64_t token;
};

/// Where a token's page stands in its row of the page table.
struct TokenColumn {
  int32_t column;
  int32_t in_page;  ///< as TokenPlace's
};

/// One item's constants. In shared memory: registers are what this kernel is short of.
struct ItemContext {
  scheduler::WorkTile item;
  const SegmentParams* segment;
  int32_t num_rows;
  int32_t first_tile;  ///< local token: a multiple of kTokens
  int32_t num_tiles;   ///< of kTokens
  int64_t first_pos;
  KvShard shard;
  bool custom;          ///< the custom mask's bits apply
  bool even;            ///< 16 tokens from a multiple of 16 on lie one token stride apart
  int32_t first_token;  ///< ragged: the row's first token
  alignas(16) Sight sight;
  alignas(16) const int32_t* pages;  ///< of the item's row of the page table; null: ragged
  int32_t page_shift;                ///< the page size is 2^page_shift; -1 if it is no power of two
  int32_t page_mask;                 ///< of a token's bits, those that say where it lies in its page
  PieceSteps steps[2];               ///< of keys and of values
};

/// How a row of an item ends. A factor below 0 means that there is nothing to be multiplied.
struct RowEnding {
  int64_t at;    ///< of the output, or of the partial results
  float scale;   ///< of the item's values
  float before;  ///< of the chain's values before the item
  float here;    ///< of the item's
  float factor;  ///< of the output
};

/// What is known of each row of an item, in shared memory, besides the tiles.
template <int32_t Rows>
struct RowInfo {
  union {
    struct {
      int64_t mask_bit[Rows];    ///< custom mask: local token j stands at bit mask_bit + j of the mask's bytes,
      int32_t mask_begin[Rows];  ///< if j >= mask_begin; earlier tokens are visible
      int32_t position[Rows];
      int32_t visible_begin[Rows];  ///< local tokens; rows beyond the item's see nothing
      int32_t visible_end[Rows];
    };
    RowEnding ending[Rows];  ///< once the item's tokens are through
  };
  int32_t request[Rows];
  float logit_scale[Rows];  ///< the wide way's
  float score_scale[Rows];  ///< the wide way's: what is left of it once signs and zeros are seen to
  int8_t
      query_exponent[Rows];  ///< kernels of codes: queries in shared memory are to be multiplied with 2 to this power
  /// The wide way's elsewhere: where the keys and the values begin of the tokens that a warp copies, which are every
  /// fourth of each 16 of a tile: by tile, warp, key or value, number and 16. Null where no row sees the token.
  const std::byte* places[2][kWarps][2][4][kTokens / 16];
  int32_t page_ids[2][Rows > kLargeRows ? kThreads : 1];  ///< by tile: of the token that a thread looks up
  ItemContext context;
  scheduler::WorkTile next;  ///< the item after this one, where there is one
  union {
    struct {
      int64_t query[Rows];  ///< where a row's queries begin, in elements; while they are copied and rows are bound
      Sight sight[kWarps];
    };
    TokenOffsets offsets[2][kTokens];  ///< the wide way's, where tokens' places are no addresses
    struct {
      float top[Rows];  ///< of each state; then what its values are to be multiplied with
      float sum[Rows];
    } result;  ///< once the item's tokens are through
  };
};

/// A row's q head and token.
struct RowPlace {
  int32_t token;
  int32_t q_head;
};
__device__ __forceinline__ RowPlace row_place(const AttentionParams& params, const scheduler::WorkTile& item,
                                              int32_t row) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  const int32_t packed = item.row_begin + row;
  return {packed / group_size, item.kv_head * group_size + packed % group_size};
}

/// The item's constants but for its sight, by one thread.
__device__ __forceinline__ void begin_item(const AttentionParams& params, const scheduler::PlanView& plan,
                                           const scheduler::WorkTile& item, ItemContext& context) {
  const scheduler::SegmentLengths& lengths = plan.segments[item.segment];
  context.item = item;
  context.segment = &params.segments[item.segment];
  context.num_rows = item.row_end - item.row_begin;
  context.first_tile = item.kv_begin / kTokens * kTokens;
  context.num_tiles = 0;
  context.custom = params.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig;
  if (item.kv_begin >= item.kv_end) return;
  context.num_tiles = (item.kv_end - context.first_tile + kTokens - 1) / kTokens;
  context.first_pos = lengths.first_pos[item.kv_row];
  context.shard = lengths.shard;
  const SegmentParams& segment = *context.segment;
  context.even = !segment.paged || segment.page_size % 16 == 0;
  const auto element = static_cast<int64_t>(size_of(segment.dtype));
  const auto steps_of = [&](const void* data, const KvStrides& strides) {
    return PieceSteps{static_cast<const std::byte*>(data) + element * item.kv_head * strides.head,
                      element * strides.page, element * strides.token};
  };
  context.steps[0] = steps_of(segment.k, segment.k_strides);
  context.steps[1] = steps_of(segment.v, segment.v_strides);
  context.pages = nullptr;
  context.page_shift = 0;
  context.page_mask = -1;
  if (segment.paged) {
    const bool is_power = (segment.page_size & (segment.page_size - 1)) == 0;
    context.page_shift = is_power ? __ffs(segment.page_size) - 1 : -1;
    context.page_mask = segment.page_size - 1;
    context.pages =
        segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[item.kv_row]}
                                                     : item.kv_row * segment.row_stride + segment.first_column);
  } else {
    context.first_token = segment.indptr[item.kv_row];
    for (PieceSteps& steps : context.steps) steps.begin += context.first_token * steps.token;
  }
}

/// Binds the item's rows to requests, positions and visible tokens. Passes barriers.
template <int32_t Rows>
__device__ __forceinline__ void bind_rows(const AttentionParams& params, const scheduler::PlanView& plan,
                                          RowInfo<Rows>& rows) {
  ItemContext& context = rows.context;
  const scheduler::WorkTile& item = context.item;
  const scheduler::SegmentLengths& lengths = plan.segments[item.segment];
  const int32_t row = static_cast<int32_t>(threadIdx.x);
  Sight sight{INT32_MAX, 0, 0, INT32_MAX};
  if (row < Rows) {
    int32_t begin = 0;
    int32_t end = 0;
    if (row < context.num_rows && item.kv_begin < item.kv_end) {
      const int32_t token = row_place(params, item, row).token;
      int32_t request = item.request;
      while (plan.cu_q[request + 1] <= token) ++request;
      const int32_t index = token - plan.cu_q[request];
      const int64_t position = int64_t{plan.q_first_pos[request]} + index;
      const scheduler::MaskBounds mask_bounds =
          scheduler::mask_bounds(params.mask, lengths.mask, params.window_left, params.window_right);
      const scheduler::TokenRange range = scheduler::visible_range(
          {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard}, mask_bounds, position);
      begin = static_cast<int32_t>(range.begin < item.kv_begin ? item.kv_begin : range.begin);
      end = static_cast<int32_t>(range.end > item.kv_end ? item.kv_end : range.end);
      if (begin >= end) begin = end = 0;
      rows.position[row] = static_cast<int32_t>(position);
      rows.request[row] = request;
      rows.mask_begin[row] = INT32_MAX;
      if (context.custom) {
        const int32_t mask_begin = plan.mask_first_column[request] - lengths.key_offset[request];
        rows.mask_begin[row] = mask_begin;
        rows.mask_bit[row] =
            8 * plan.mask_byte_indptr[request] + int64_t{index} * plan.mask_columns[request] - mask_begin;
      }
      if (begin < end) {
        sight.any_begin = begin;
        sight.any_end = end;
      }
      sight.all_begin = begin;
      sight.all_end = end;
    }
    rows.visible_begin[row] = begin;
    rows.visible_end[row] = end;
  }
  constexpr uint32_t kAll = 0xffffffffu;
  sight.any_begin = __reduce_min_sync(kAll, sight.any_begin);
  sight.any_end = __reduce_max_sync(kAll, sight.any_end);
  sight.all_begin = __reduce_max_sync(kAll, sight.all_begin);
  sight.all_end = __reduce_min_sync(kAll, sight.all_end);
  if (threadIdx.x % 32 == 0) rows.sight[threadIdx.x / 32] = sight;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int32_t w = 1; w < kWarps; ++w) {
      const Sight other = rows.sight[w];
      sight.any_begin = min(sight.any_begin, other.any_begin);
      sight.any_end = max(sight.any_end, other.any_end);
      sight.all_begin = max(sight.all_begin, other.all_begin);
      sight.all_end = min(sight.all_end, other.all_end);
    }
    context.sight = sight;
  }
  __syncthreads();
}

/// Where to look a token of the item up. Ragged: where it lies.
__device__ __forceinline__ TokenColumn column_of(const ItemContext& context, int32_t token) {
  if (token < context.sight.any_begin || token >= context.sight.any_end) return {0, -1};
  if (context.pages == nullptr) return {0, context.first_token + token};
  if (context.page_shift >= 0) return {token >> context.page_shift, token & context.page_mask};
  const auto page_size = static_cast<uint32_t>(context.segment->page_size);
  const auto column = static_cast<int32_t>(static_cast<uint32_t>(token) / page_size);
  return {column, token - column * static_cast<int32_t>(page_size)};
}

/// The place of a token of the item. The one read that precedes a token's own.
__device__ __forceinline__ TokenPlace place_of(const ItemContext& context, int32_t token) {
  const TokenColumn at = column_of(context, token);
  return {at.in_page >= 0 && context.pages != nullptr ? context.pages[at.column] : 0, at.in_page};
}

__device__ __forceinline__ int64_t offset_of(const TokenPlace& place, const KvStrides& strides, int32_t head) {
  if (place.in_page < 0) return kUnseen;
  return place.page * strides.page + place.in_page * strides.token + head * strides.head;
}
__device__ __forceinline__ TokenOffsets offsets_of(const ItemContext& context, const TokenPlace& place) {
  const SegmentParams& segment = *context.segment;
  return {offset_of(place, segment.k_strides, context.item.kv_head),
          offset_of(place, segment.v_strides, context.item.kv_head)};
}

/// Begins the copy of an item to rows.next.
template <int32_t Rows>
__device__ __forceinline__ void fetch_item(const scheduler::WorkTile& item, RowInfo<Rows>& rows) {
  constexpr auto kWords = static_cast<int32_t>(sizeof(scheduler::WorkTile) / 4);
  static_assert(sizeof(scheduler::WorkTile) % 4 == 0 && kWords <= 32);
  const int32_t thread = thread_number();
  if (thread >= kWords) return;
  ptx::cp_async_4(ptx::shared_address(&rows.next) + 4 * static_cast<uint32_t>(thread),
                  reinterpret_cast<const int32_t*>(&item) + thread);
}

/// Where each of `num_rows` rows' queries begin, in elements, to rows.query; kUnseen for rows that the item has not.
template <int32_t Rows>
__device__ __forceinline__ void locate_queries(const AttentionParams& params, RowInfo<Rows>& rows, int32_t num_rows) {
  const int32_t row = thread_number();
  if (row >= num_rows) return;
  const RowPlace place = row_place(params, rows.context.item, row);
  rows.query[row] =
      row < rows.context.num_rows ? place.token * params.q_token_stride + place.q_head * params.q_head_stride : kUnseen;
}

/// The queries to a tile of `num_rows` rows; zeros for rows that the item has not.
template <typename T, int32_t Dim, int32_t Rows>
__device__ __forceinline__ void copy_queries(const AttentionParams& params, const RowInfo<Rows>& rows, uint32_t tile,
                                             int32_t num_rows) {
  constexpr int32_t kPieces = Dim / kPiece;
  const PieceSource source{params.q, params.q_dtype, params.q_wide};
  const int32_t thread = thread_number();
  if (source.direct() && params.head_dim_qk == Dim) {
#pragma unroll 2
    for (int32_t i = thread; i < num_rows * kPieces; i += kThreads) {
      const int64_t at = rows.query[i / kPieces];
      const int32_t d = i % kPieces * kPiece;
      ptx::cp_async_16(tile + piece_offset(Dim, i / kPieces, i % kPieces),
                       static_cast<const T*>(params.q) + (at != kUnseen ? at + d : 0), at != kUnseen);
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = thread; i < num_rows * kPieces; i += kThreads) {
    const int32_t row = i / kPieces;
    const int32_t d = i % kPieces * kPiece;
    const int64_t at = rows.query[row];
    const bool valid = at != kUnseen && d < params.head_dim_qk;
    copy_any_piece<T>(tile + piece_offset(Dim, row, i % kPieces), source, valid ? at + d : 0, valid);
  }
}

/// Keys or values of a tile that warps share, by the CTA, to rows of `Pitch` elements; of those that no row
/// sees, zeros. `whole`: all tokens are seen, and pieces may be copied as they are.
template <typename T, int32_t Dim, int32_t Tokens, int32_t Pitch = Dim>
__device__ __forceinline__ void copy_tile(uint32_t tile, const TokenOffsets* tokens, int64_t TokenOffsets::*half,
                                          const PieceSource& source, int32_t head_dim, bool whole, int32_t thread) {
  constexpr int32_t kPieces = Dim / kPiece;
  constexpr int32_t kCopies = Tokens * kPieces / kThreads;
  static_assert(kCopies * kThreads == Tokens * kPieces);
  if (whole && head_dim == Dim) {
#pragma unroll 4
    for (int32_t i = 0; i < kCopies; ++i) {
      const int32_t row = (i * kThreads + thread) / kPieces;
      const int32_t piece = (i * kThreads + thread) % kPieces;
      ptx::cp_async_16(tile + piece_offset(Pitch, row, piece),
                       static_cast<const T*>(source.data) + tokens[row].*half + piece * kPiece);
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = thread; i < Tokens * kPieces; i += kThreads) {
    const int32_t row = i / kPieces;
    const int32_t d = i % kPieces * kPiece;
    const int64_t offset = tokens[row].*half;
    const bool valid = offset != kUnseen && d < head_dim;
    copy_any_piece<T>(tile + piece_offset(Pitch, row, i % kPieces), source, valid ? offset + d : 0, valid);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
