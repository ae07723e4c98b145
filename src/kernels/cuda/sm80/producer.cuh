#pragma once

#include "kernels/cuda/sm80/load_q.cuh"

/// The producer side: work tiles, page ids, K and V. There are no producer warps: every thread issues cp.async for its
/// share, one or more KV tiles ahead of the MMA.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Sets the constants of a work tile, but for its visible range. By one thread.
__device__ __forceinline__ void init_work_tile(const AttentionParams& params, const scheduler::PlanView& plan,
                                               const scheduler::WorkTile& work_tile, WorkTileContext& context) {
  const scheduler::SegmentLengths& lengths = plan.segments[work_tile.segment];
  context.work_tile = work_tile;
  context.segment = &params.segments[work_tile.segment];
  context.num_rows = work_tile.row_end - work_tile.row_begin;
  context.first_tile = work_tile.kv_begin / kKvTile * kKvTile;
  context.num_tiles = 0;
  context.custom = params.mask.kind == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig;
  if (work_tile.kv_begin >= work_tile.kv_end) return;
  context.num_tiles = (work_tile.kv_end - context.first_tile + kKvTile - 1) / kKvTile;
  context.first_pos = lengths.first_pos[work_tile.kv_row];
  context.shard = lengths.shard;
  const SegmentParams& segment = *context.segment;
  context.even = !segment.paged || segment.page_size % 16 == 0;
  const auto element = static_cast<int64_t>(size_of(segment.dtype));
  const auto steps_of = [&](const void* data, const KvStrides& strides) {
    return TokenStrides{static_cast<const std::byte*>(data) + element * work_tile.kv_head * strides.head,
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
        segment.indices + (segment.indptr != nullptr ? int64_t{segment.indptr[work_tile.kv_row]}
                                                     : work_tile.kv_row * segment.row_stride + segment.first_column);
  } else {
    context.first_token = segment.indptr[work_tile.kv_row];
    for (TokenStrides& steps : context.steps) steps.begin += context.first_token * steps.token;
  }
}

/// Begins the copy of the next work tile to storage.next.
template <int32_t Rows>
__device__ __forceinline__ void prefetch_work_tile(const scheduler::WorkTile& work_tile, SharedStorage<Rows>& storage) {
  constexpr auto kWords = static_cast<int32_t>(sizeof(scheduler::WorkTile) / 4);
  static_assert(sizeof(scheduler::WorkTile) % 4 == 0 && kWords <= 32);
  const int32_t thread = thread_index();
  if (thread >= kWords) return;
  ptx::cp_async_4(ptx::shared_address(&storage.next) + 4 * static_cast<uint32_t>(thread),
                  reinterpret_cast<const int32_t*>(&work_tile) + thread);
}

/// Where to look up a token. Ragged: where it lies.
__device__ __forceinline__ TokenColumn column_of(const WorkTileContext& context, int32_t token) {
  if (token < context.visible_range.any_begin || token >= context.visible_range.any_end) return {0, -1};
  if (context.pages == nullptr) return {0, context.first_token + token};
  if (context.page_shift >= 0) return {token >> context.page_shift, token & context.page_mask};
  const auto page_size = static_cast<uint32_t>(context.segment->page_size);
  const auto column = static_cast<int32_t>(static_cast<uint32_t>(token) / page_size);
  return {column, token - column * static_cast<int32_t>(page_size)};
}

/// Looks up a token: the one read that must precede the read of its K and V.
__device__ __forceinline__ TokenPlace place_of(const WorkTileContext& context, int32_t token) {
  const TokenColumn at = column_of(context, token);
  return {at.in_page >= 0 && context.pages != nullptr ? context.pages[at.column] : 0, at.in_page};
}

__device__ __forceinline__ int64_t offset_of(const TokenPlace& place, const KvStrides& strides, int32_t head) {
  if (place.in_page < 0) return kNotVisible;
  return place.page * strides.page + place.in_page * strides.token + head * strides.head;
}
__device__ __forceinline__ TokenOffsets offsets_of(const WorkTileContext& context, const TokenPlace& place) {
  const SegmentParams& segment = *context.segment;
  return {offset_of(place, segment.k_strides, context.work_tile.kv_head),
          offset_of(place, segment.v_strides, context.work_tile.kv_head)};
}

/// Copies a K or V tile that all warps share, to rows of `Pitch` elements; zeros for tokens that no row sees. `whole`:
/// some row sees each token, and cp.async can copy all chunks.
template <typename T, int32_t Dim, int32_t Tokens, int32_t Pitch = Dim>
__device__ __forceinline__ void copy_tile(uint32_t tile, const TokenOffsets* tokens, int64_t TokenOffsets::*half,
                                          const ChunkSource& source, int32_t head_dim, bool whole, int32_t thread) {
  constexpr int32_t kChunks = Dim / kChunk;
  constexpr int32_t kCopies = Tokens * kChunks / kThreads;
  static_assert(kCopies * kThreads == Tokens * kChunks);
  if (whole && head_dim == Dim) {
#pragma unroll 4
    for (int32_t i = 0; i < kCopies; ++i) {
      const int32_t row = (i * kThreads + thread) / kChunks;
      const int32_t chunk = (i * kThreads + thread) % kChunks;
      ptx::cp_async_16(tile + swizzled_offset(Pitch, row, chunk),
                       static_cast<const T*>(source.data) + tokens[row].*half + chunk * kChunk);
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = thread; i < Tokens * kChunks; i += kThreads) {
    const int32_t row = i / kChunks;
    const int32_t d = i % kChunks * kChunk;
    const int64_t offset = tokens[row].*half;
    const bool valid = offset != kNotVisible && d < head_dim;
    copy_any_chunk<T>(tile + swizzled_offset(Pitch, row, i % kChunks), source, valid ? offset + d : 0, valid);
  }
}

/// Moves a swizzled address by chunks: bits 4 to 6 change by XOR, the bits above by addition.
__device__ __forceinline__ uint32_t advance_swizzled(uint32_t address, int32_t chunk) {
  return (address ^ static_cast<uint32_t>((chunk & 7) << 4)) + static_cast<uint32_t>((chunk >> 3) << 7);
}

/// The same in rows of fp8: where these have 64 or 192 bytes, only bits 4 and 5 change by XOR.
template <int32_t Dim>
__device__ __forceinline__ uint32_t advance_swizzled_fp8(uint32_t address, int32_t chunk) {
  if constexpr (Dim % 128 == 0) return advance_swizzled(address, chunk);
  return (address ^ static_cast<uint32_t>((chunk & 3) << 4)) + static_cast<uint32_t>((chunk >> 2) << 6);
}

/// The producer of the prefill path. Page ids are looked up three KV tiles ahead, addresses are computed two tiles
/// ahead, K and V are copied one tile ahead. Each warp computes the addresses of the tokens that it copies: four of
/// each 16 of a KV tile, eight threads a token. Elsewhere (page sizes that are no power of two, padded head dimensions)
/// the CTA looks up tokens one by one. KV tiles are named by their first token.
template <typename T, int32_t DimQk, int32_t DimV, bool Fp8, int32_t Rows>
class PrefillProducer {
 protected:
  static constexpr int32_t kTile = prefill_kv_tile({DimQk, DimV});
  static constexpr int32_t kGroups = kTile / 16;
  static constexpr int32_t kTokenThreads = 8;  ///< threads that copy a token
  static_assert(kThreads == 16 * kTokenThreads && DimQk % (8 * kChunk) == 0 && DimV % (8 * kChunk) == 0);

  __device__ __forceinline__ PrefillProducer(const AttentionParams& params, const WorkTileContext& context,
                                             SharedStorage<Rows>& storage, uint32_t shared)
      : params_(params), context_(context), storage_(storage), q_(opaque(shared)), thread_(thread_index()) {}

  /// Places in shared memory are derived from the address of Q, which the compiler does not know. Else it would compute
  /// a reference to shared memory anew from a special register at every use.
  __device__ __forceinline__ uint32_t stages() const { return q_ + 2 * Rows * DimQk; }
  __device__ __forceinline__ uint32_t context_field(size_t offset) const {
    constexpr auto kContext = static_cast<uint32_t>(offsetof(SharedStorage<Rows>, context));
    return q_ + tile_bytes({DimQk, DimV}) + kContext + static_cast<uint32_t>(offset);
  }

  /// This thread's number; what is derived from it is computed anew: see opaque.
  __device__ __forceinline__ int32_t lane_and_warp() const {
    return static_cast<int32_t>(opaque(static_cast<uint32_t>(thread_)));
  }
  /// Whether tokens are copied by address, and without a conversion.
  __device__ __forceinline__ void choose_copies() {
    const SegmentParams& segment = params_.segments[context_.work_tile.segment];
    direct_ = segment.wide && params_.head_dim_qk == DimQk && params_.head_dim_v == DimV &&
              (context_.pages == nullptr || context_.page_shift >= 0);
    unconverted_ = direct_ && !is_fp8(segment.dtype);
  }

  /// Fills the pipeline: addresses of the first two KV tiles, page ids of the third.
  __device__ __forceinline__ void prologue(int32_t begin) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      if (direct_) {
        prefetch_page_id(begin + i * kTile, load_range_and_pages());
      } else {
        prefetch_page_id_of_token(begin + i * kTile);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (direct_) {
      store_addresses(begin, load_address_terms(begin));
      store_addresses(begin + kTile, load_address_terms(begin + kTile));
      __syncwarp();
      prefetch_page_id(begin + 2 * kTile, load_range_and_pages());
    } else {
      store_offsets(begin);
      prefetch_page_id_of_token(begin + 2 * kTile);
      __syncthreads();
    }
  }

  /// What a look-up reads from shared memory, ahead of its use.
  struct RangeAndPages {
    uint4 visible_range;
    uint4 pages;  ///< address, shift, mask
  };
  struct AddressTerms {
    RangeAndPages common;
    uint32_t page;
    uint4 begin_and_page;  ///< of TokenStrides
    uint2 token;
  };
  __device__ __forceinline__ RangeAndPages load_range_and_pages() const {
    return {ptx::ld_shared_16(context_field(offsetof(WorkTileContext, visible_range))),
            ptx::ld_shared_16(context_field(offsetof(WorkTileContext, pages)))};
  }
  __device__ __forceinline__ AddressTerms load_address_terms(int32_t first) const {
    const int32_t thread = lane_and_warp();
    const uint32_t steps = context_field(offsetof(WorkTileContext, steps)) +
                           static_cast<uint32_t>(thread % 32 / 16) * static_cast<uint32_t>(sizeof(TokenStrides));
    AddressTerms facts;
    facts.page = ptx::ld_shared_4(page_id(first));
    facts.common = load_range_and_pages();
    facts.begin_and_page = ptx::ld_shared_16(steps);
    facts.token = ptx::ld_shared_8(steps + 16);
    return facts;
  }
  __device__ __forceinline__ static int64_t make_int64(uint32_t low, uint32_t high) {
    return static_cast<int64_t>(uint64_t{high} << 32 | low);
  }

  /// The token of a KV tile whose address this lane computes; -1 where no row sees it.
  __device__ __forceinline__ static int32_t own_token(int32_t first, int32_t thread, const uint4& visible_range) {
    const int32_t token = first + thread % 4 * 16 + thread / 32 * 4 + thread / 4 % 4;
    const bool seen = thread % 4 < kGroups && token >= static_cast<int32_t>(visible_range.x) &&
                      token < static_cast<int32_t>(visible_range.y);
    return seen ? token : -1;
  }

  /// Begins to look up the page id of own_token. Like store_addresses it has no branches and keeps no registers, so
  /// that both can stand among MMAs.
  __device__ __forceinline__ void prefetch_page_id(int32_t first, const RangeAndPages& known) const {
    const int32_t token = own_token(first, lane_and_warp(), known.visible_range);
    const int64_t pages = make_int64(known.pages.x, known.pages.y);
    ptx::cp_async_4(page_id(first), reinterpret_cast<const int32_t*>(pages) + (token >> (known.pages.z & 31u)),
                    direct_ && token >= 0 && pages != 0);
  }

  /// Stores the address of own_token, for copies behind the next barrier: K by half of the lanes, V by the others.
  __device__ __forceinline__ void store_addresses(int32_t first, const AddressTerms& facts) const {
    const int32_t thread = lane_and_warp();
    const int32_t token = own_token(first, thread, facts.common.visible_range);
    const bool paged = (facts.common.pages.x | facts.common.pages.y) != 0;
    const int32_t page = paged ? static_cast<int32_t>(facts.page) : 0;
    const int64_t at = make_int64(facts.begin_and_page.x, facts.begin_and_page.y) +
                       page * make_int64(facts.begin_and_page.z, facts.begin_and_page.w) +
                       (token & static_cast<int32_t>(facts.common.pages.w)) * make_int64(facts.token.x, facts.token.y);
    const uint32_t place =
        addresses(first) + 8 * (((thread / 32 * 2 + thread / 16 % 2) * 4 + thread / 4 % 4) * 4 + thread % 4);
    ptx::st_shared_8(place, token >= 0 ? static_cast<uint64_t>(at) : 0);
  }
  /// Where the addresses of a KV tile are stored.
  __device__ __forceinline__ uint32_t addresses(int32_t first) const {
    constexpr auto kPlaces = static_cast<uint32_t>(offsetof(SharedStorage<Rows>, addresses));
    return q_ + tile_bytes({DimQk, DimV}) + kPlaces +
           parity(first) * static_cast<uint32_t>(sizeof(SharedStorage<Rows>::addresses) / 2);
  }

  /// Where this thread's page id of a KV tile is copied to.
  __device__ __forceinline__ uint32_t page_id(int32_t first) const {
    constexpr auto kPageIds = static_cast<uint32_t>(offsetof(SharedStorage<Rows>, page_ids));
    return q_ + tile_bytes({DimQk, DimV}) + kPageIds + 4 * (parity(first) * kThreads + static_cast<uint32_t>(thread_));
  }
  __device__ __forceinline__ static uint32_t parity(int32_t first) {
    return static_cast<uint32_t>(first) / kTile & 1u;
  }

  /// The look-up of the generic path: a thread a token.
  __device__ __forceinline__ void prefetch_page_id_of_token(int32_t first) const {
    if (thread_ >= kTile) return;
    const TokenColumn at = column_of(context_, first + thread_);
    ptx::cp_async_4(page_id(first), context_.pages + at.column, at.in_page >= 0 && context_.pages != nullptr);
  }

  /// Stores the offsets of the tokens that were looked up one by one.
  __device__ __forceinline__ void store_offsets(int32_t first) const {
    if (thread_ >= kTile) return;
    const TokenColumn at = column_of(context_, first + thread_);
    const int32_t page = context_.pages != nullptr ? static_cast<int32_t>(ptx::ld_shared_4(page_id(first))) : 0;
    storage_.offsets[parity(first)][thread_] = offsets_of(context_, {page, at.in_page});
  }

  __device__ __forceinline__ void copy_keys(int32_t first, uint32_t stage) const {
    if (unconverted_ || direct_) {
      copy_by_address<DimQk>(0, first, stage);
    } else {
      const SegmentParams& segment = params_.segments[context_.work_tile.segment];
      copy_tokens<DimQk>({segment.k, segment.dtype, segment.wide}, &TokenOffsets::k, params_.head_dim_qk, first, stage);
    }
  }
  __device__ __forceinline__ void copy_values(int32_t first, uint32_t stage) const {
    if (unconverted_ || direct_) {
      copy_by_address<DimV>(1, first, stage);
    } else {
      const SegmentParams& segment = params_.segments[context_.work_tile.segment];
      copy_tokens<DimV>({segment.v, segment.dtype, segment.wide}, &TokenOffsets::v, params_.head_dim_v, first, stage);
    }
  }

  /// Copies the K (0) or V (1) of a KV tile, this thread's share of the tokens that its warp found; zeros for tokens
  /// that no row sees. fp8 is upcast on the way, or, in fp8 instantiations, staged.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_by_address(int32_t half, int32_t first, uint32_t stage) const {
    const int32_t thread = lane_and_warp();
    if constexpr (Fp8) {
      Fp8Stage<Dim, kTile>::copy(stage, storage_.addresses[parity(first)][thread / 32][half][thread % 32 / 8], thread);
    } else {
      constexpr int32_t kChunks = Dim / (kTokenThreads * kChunk);
      constexpr int32_t kChunkStep = kTokenThreads * 16;
      const uint32_t to = stage + swizzled_offset(Dim, thread / kTokenThreads, thread % kTokenThreads);
      const int32_t in_token = 16 * (thread % kTokenThreads);
      if (unconverted_) {
        const std::byte* from[kGroups];  // all read before the first copy, which is a compiler barrier
        const uint32_t stored =
            addresses(first) + 8 * (((static_cast<uint32_t>(thread) / 32 * 2 + half) * 4 + thread % 32 / 8) * 4);
#pragma unroll
        for (int32_t i = 0; i < kGroups; i += 2) {
          const uint4 two = ptx::ld_shared_16(stored + 8 * i);
          from[i] = reinterpret_cast<const std::byte*>(make_int64(two.x, two.y));
          from[i + 1] = reinterpret_cast<const std::byte*>(make_int64(two.z, two.w));
        }
#pragma unroll
        for (int32_t i = 0; i < kGroups; ++i) {
#pragma unroll
          for (int32_t j = 0; j < kChunks; ++j) {
            ptx::cp_async_16(to + 32 * i * Dim + kChunkStep * j, from[i] + in_token + kChunkStep * j,
                             from[i] != nullptr);
          }
        }
        return;
      }
      const auto& stored = storage_.addresses[parity(first)][thread / 32][half][thread % 32 / 8];
      const DType dtype = params_.segments[context_.work_tile.segment].dtype;
#pragma unroll 1
      for (int32_t i = 0; i < kGroups; ++i) {
        const std::byte* const from = stored[i];
        uint2 fp8[kChunks];
#pragma unroll
        for (int32_t j = 0; j < kChunks; ++j) {
          fp8[j] = from != nullptr ? *reinterpret_cast<const uint2*>(from + (in_token + kChunkStep * j) / 2) : uint2{};
        }
#pragma unroll
        for (int32_t j = 0; j < kChunks; ++j) {
          ptx::st_shared_16(to + 32 * i * Dim + kChunkStep * j, upcast_fp8x8<T>(fp8[j], dtype));
        }
      }
    }
  }

  /// The same for tokens that were looked up one by one.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(const ChunkSource& source, int64_t TokenOffsets::*half, int32_t head_dim,
                                              int32_t first, uint32_t stage) const {
    const bool whole =
        source.direct() && first >= context_.visible_range.any_begin && first + kTile <= context_.visible_range.any_end;
    copy_tile<T, Dim, kTile>(stage, storage_.offsets[parity(first)], half, source, head_dim, whole, thread_);
  }

  const AttentionParams& params_;
  const WorkTileContext& context_;
  SharedStorage<Rows>& storage_;
  const uint32_t q_;  ///< where shared memory begins, with Q
  const int32_t thread_;
  bool direct_;       ///< tokens are copied by address
  bool unconverted_;  ///< and without a conversion
};

}  // namespace folio::inline v0::kernels::cuda::sm80
