#pragma once

#include <cstddef>

#include "kernels/cuda/sm90/common/copy.cuh"
#include "kernels/cuda/sm90/common/prefetch.cuh"
#include "kernels/cuda/sm90/common/tile_scheduler.cuh"
#include "kernels/cuda/sm90/decode/smem.cuh"
#include "ptx/memory.cuh"

/// From global to shared memory: places of tokens in the page table, KV tiles without TMA, and queries.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Locates the tokens of a work tile's segment row.
struct PageTableRow {
  const int32_t* pages;  ///< null: ragged
  int32_t first_token;   ///< ragged
  uint32_t page_size;
  int32_t shift;  ///< the page size is 2^shift; -1 if it is no power of two
  int32_t begin;  ///< tokens to be read: [begin, end)
  int32_t end;

  __device__ __forceinline__ bool has(int32_t token, int32_t copy_tokens) const {
    return token + copy_tokens > begin && token < end;
  }

  /// The places of kCount copies of `copy_tokens` tokens each, `step` tokens apart. Issues all loads before it needs
  /// the first.
  template <int32_t kCount>
  __device__ __forceinline__ void locate(int32_t token, int32_t step, int32_t copy_tokens,
                                         TokenPlace (&places)[kCount]) const {
    uint32_t columns[kCount];
    if (shift >= 0) {
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) columns[i] = static_cast<uint32_t>(token + i * step) >> shift;
    } else {
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) columns[i] = static_cast<uint32_t>(token + i * step) / page_size;
    }
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) {
      const int32_t at = token + i * step;
      const bool visible = has(at, copy_tokens);
      const int32_t in_page = pages == nullptr ? first_token + at : at - static_cast<int32_t>(columns[i] * page_size);
      places[i] = {0, visible ? in_page : -1};
      ptx::ld_global_4_if(places[i].page, pages + columns[i], visible && pages != nullptr);
    }
  }
};

/// Of a work tile that has keys. Until the mask bounds are known, all tokens of the work tile are to be read.
__device__ __forceinline__ PageTableRow page_table_row(const AttentionParams& params, const scheduler::WorkTile& tile,
                                                       const IndptrCache& indptr) {
  const SegmentParams& segment = params.segments[tile.segment];
  PageTableRow row{nullptr, 0, static_cast<uint32_t>(segment.page_size), -1, tile.kv_begin, tile.kv_end};
  const int32_t begin = segment.indptr != nullptr ? indptr.begin_of(params, tile) : 0;
  if (!segment.paged) {
    row.first_token = begin;
    return row;
  }
  row.pages = segment.indices +
              (segment.indptr != nullptr ? int64_t{begin} : tile.kv_row * segment.row_stride + segment.first_column);
  if ((row.page_size & (row.page_size - 1)) == 0) row.shift = __ffs(segment.page_size) - 1;
  return row;
}

/// A consumer warp's first KV tiles, located by the warp itself from the CTA's first work tile. Their copies begin
/// before the scheduler warp knows the mask bounds: that saves 5 of a short batch's 15 microseconds.
struct FirstTiles {
  TokenPlace place{};  ///< lanes 2i and 2i + 1: of the TMA tiles of KV tile i
  int32_t count = 0;   ///< KV tiles; 0 without TMA
  int32_t copy_tokens = kCpAsync;
  int32_t head = 0;
  int32_t segment = 0;
};

/// Brings parameters to the SM's constant cache, one line per warp: segment 0's and those behind the segments. A later
/// first read would wait behind the first KV copies.
__device__ __forceinline__ void prefetch_parameters(const AttentionParams& params) {
  constexpr int32_t kLine = 64 / sizeof(uint32_t);
  constexpr int32_t kSegmentLines = 4;
  constexpr auto kAlone = static_cast<int32_t>(offsetof(AttentionParams, num_q_heads) / sizeof(uint32_t));
  static_assert((kAlone + kLine * (8 - kSegmentLines) + 1) * sizeof(uint32_t) <= sizeof(AttentionParams));
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;  // of up to nine
  const int32_t word = warp < kSegmentLines ? kLine * warp : kAlone + kLine * (warp - kSegmentLines);
  ptx::read_constant(reinterpret_cast<const uint32_t*>(&params) + word);
}

/// By all lanes of consumer warp `warp`. `stages`: most KV tiles; `step`: tokens from one of its tiles to the next.
__device__ __forceinline__ FirstTiles locate_first_tiles(const DecodeParams& params, int32_t warp, int32_t lane,
                                                         int32_t stages, int32_t step) {
  const AttentionParams& attention = params.attention;
  const IndptrCache indptr(attention, lane);
  const scheduler::PlanView& plan = attention.plan->view;
  const auto index = static_cast<int32_t>(blockIdx.x);
  FirstTiles tiles;
  if (index >= plan.num_dynamic_tiles || index >= first_decode_ctas(attention)) return tiles;
  const scheduler::WorkTile tile = plan.work_tiles[index];
  const int32_t first = tile.kv_begin / kTileTokens * kTileTokens + warp * kTileTokens;
  tiles.copy_tokens = params.copy_tokens[tile.segment];
  tiles.head = tile.kv_head;
  tiles.segment = tile.segment;
  if (tiles.copy_tokens == kCpAsync || tile.kv_begin >= tile.kv_end || first >= tile.kv_end) return tiles;
  tiles.count = min((tile.kv_end - first + step - 1) / step, stages);
  const PageTableRow row = page_table_row(attention, tile, indptr);
  const int32_t in_tile = tiles.copy_tokens == kTmaHalfTile ? lane % 2 * kTmaHalfTile : 0;
  TokenPlace place[1];
  row.locate(first + lane / 2 * step + in_tile, 0, tiles.copy_tokens, place);
  tiles.place = place[0];
  return tiles;
}

/// Copies the keys or the values of a KV tile by a warp's threads, token by token, in the layout of kTmaWholeTile.
/// Tokens that no row sees become zeros. `cp_async_16B`: data needs no conversion, and every head of a token begins at
/// a multiple of 16 bytes.
template <typename T, int32_t Dim, Fp8 kFp8>
__device__ __forceinline__ void copy_kv_tile(uint32_t smem, const TokenPlace* places, const void* data, DType dtype,
                                             const KvStrides& strides, int32_t head, bool cp_async_16B, int32_t lane) {
  constexpr int32_t kBytes = element_bytes(kFp8);
  constexpr int32_t kElements = 16 / kBytes;
  constexpr int32_t kChunks = Dim / kElements;
  const int64_t of_head = head * strides.head;
  if (cp_async_16B) {  // each lane computes one token's address: the 64-bit arithmetic is most of the work
    static_assert(kTileTokens * kChunks % 32 == 0);
    const TokenPlace mine = places[lane % kTileTokens];
    const uint32_t visible = __ballot_sync(kAllLanes, mine.in_page >= 0);
    const int64_t at = mine.in_page < 0 ? 0 : mine.page * strides.page + mine.in_page * strides.token + of_head;
    const auto begins = reinterpret_cast<uint64_t>(static_cast<const uint8_t*>(data) + kBytes * at);
    const auto copy = [&](uint32_t to, int32_t token, int32_t chunk) {
      const auto* const from = reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, begins, token));
      ptx::cp_async_16(to, from + 16 * chunk, (visible >> token & 1) != 0);
    };
    if constexpr (32 % kChunks == 0) {  // a lane has one chunk of every token: offsets of eight differ by constants
      constexpr int32_t kStep = 32 / kChunks;
      constexpr int32_t kWidth = swizzle_bytes(Dim, kBytes);
      static_assert(kWidth == 128 || kStep == 8);
      const int32_t chunk = lane % kChunks;
      int32_t token = lane / kChunks;
      auto to = smem + static_cast<uint32_t>(swizzled_offset(Dim, kBytes, kTmaWholeTile, token, chunk));
#pragma unroll 1
      for (; token < kTileTokens; token += 8) {
#pragma unroll
        for (int32_t next = 0; next < 8; next += kStep) {
          copy((to ^ static_cast<uint32_t>(16 * next)) + static_cast<uint32_t>(next * kWidth), token + next, chunk);
        }
        to += 8 * kWidth;
      }
    } else {
#pragma unroll 4
      for (int32_t i = lane; i < kTileTokens * kChunks; i += 32) {
        const int32_t token = i / kChunks;
        const int32_t chunk = i % kChunks;
        copy(smem + static_cast<uint32_t>(swizzled_offset(Dim, kBytes, kTmaWholeTile, token, chunk)), token, chunk);
      }
    }
    return;
  }
#pragma unroll 1
  for (int32_t i = lane; i < kTileTokens * kChunks; i += 32) {
    const int32_t token = i / kChunks;
    const int32_t chunk = i % kChunks;
    const TokenPlace place = places[token];
    const bool valid = place.in_page >= 0;
    const int64_t at = place.page * strides.page + place.in_page * strides.token + of_head + chunk * kElements;
    const uint32_t to = smem + static_cast<uint32_t>(swizzled_offset(Dim, kBytes, kTmaWholeTile, token, chunk));
    if constexpr (kFp8 == Fp8::kNone) {
      copy_upcast_16B<T>(to, data, dtype, at, valid);
    } else {
      copy_fp8_16B(to, static_cast<const uint8_t*>(data) + at, valid);
    }
  }
}

/// Whether keys and values of a KV tile are copied together by cp_async_kv_tile: a lane has the same chunk of each.
template <int32_t DimQk, int32_t DimV, Fp8 kFp8>
constexpr bool copies_keys_with_values() {
  constexpr int32_t kChunks = DimQk * element_bytes(kFp8) / 16;
  return DimQk == DimV && 32 % kChunks == 0 && swizzle_bytes(DimQk, element_bytes(kFp8)) == 128;
}

/// Keys and values that need no conversion, and of which every head of a token begins at a multiple of 16 bytes: the
/// values' memory follows the keys'. A lane computes the address of one token's keys or values; 64-bit arithmetic is
/// most of the work.
template <int32_t Dim, Fp8 kFp8>
__device__ __forceinline__ void cp_async_kv_tile(uint32_t smem, const TokenPlace* places, const SegmentParams& segment,
                                                 int32_t head, int32_t lane) {
  constexpr int32_t kBytes = element_bytes(kFp8);
  constexpr int32_t kChunks = Dim * kBytes / 16;
  constexpr int32_t kStep = 32 / kChunks;  // tokens of one instruction
  constexpr int32_t kWidth = swizzle_bytes(Dim, kBytes);
  const TokenPlace place = places[lane % kTileTokens];
  const bool is_k = lane < kTileTokens;
  const KvStrides& strides = is_k ? segment.k_strides : segment.v_strides;
  const int64_t at = place.page * strides.page + place.in_page * strides.token + head * strides.head;
  const auto* const data = static_cast<const uint8_t*>(is_k ? segment.k : segment.v);
  const uint64_t mine = place.in_page < 0 ? 0 : reinterpret_cast<uint64_t>(data + kBytes * at);  // 0: no row sees it
  const auto copy = [&](uint32_t to, int32_t of) {
    const uint64_t from = __shfl_sync(kAllLanes, mine, of);
    ptx::cp_async_16(to, reinterpret_cast<const uint8_t*>(from) + (from == 0 ? 0 : lane % kChunks * 16), from != 0);
  };
  const int32_t token = lane / kChunks;
  const auto to = smem + static_cast<uint32_t>(swizzled_offset(Dim, kBytes, kTmaWholeTile, token, lane % kChunks));
#pragma unroll
  for (int32_t next = 0; next < kTileTokens; next += kStep) {  // the swizzle repeats after eight tokens
    const uint32_t there = (to ^ static_cast<uint32_t>(16 * (next % 8))) + static_cast<uint32_t>(next * kWidth);
    copy(there, token + next);
    copy(there + tile_bytes(Dim, kBytes), kTileTokens + token + next);
  }
}

/// Queries of any type and address. A call, not inlined: it is rare and would stand between common instructions.
template <typename T>
__device__ FOLIO_CALLED void copy_query_16B(const AttentionParams& params, uint32_t smem, int64_t at, bool valid) {
  copy_upcast_16B<T>(smem, params.q, params.q_dtype, at, valid);
}

/// Copies the queries of kRows rows to shared memory, by one warp. `query` of the functions is where the queries of the
/// lane's row begin, in elements; negative: a row that the work tile does not have, whose queries become zeros.
template <typename T, int32_t DimQk, Fp8 kFp8, int32_t kRows>
class QueryProducer {
  static constexpr int32_t kStride = query_stride({DimQk, DimQk, element_bytes(kFp8)});

 public:
  /// `queries`: [kBatchStages][kMaxRows][query_stride].
  __device__ __forceinline__ QueryProducer(const AttentionParams& params, uint32_t queries, int32_t lane)
      : params_(params), queries_(queries), lane_(lane) {}

  /// Whether cp.async of 16 bytes can copy the queries as they are.
  __device__ __forceinline__ bool is_direct() const { return params_.q_wide && !is_fp8(params_.q_dtype); }
  __device__ __forceinline__ void cp_async(int32_t context, int64_t query) const {
    for_chunks<4>(context, query, [this](uint32_t to, int64_t at, bool valid) {
      ptx::cp_async_16(to, static_cast<const uint16_t*>(params_.q) + (valid ? at : 0), valid);
    });
  }
  __device__ __forceinline__ void copy(int32_t context, int64_t query) const {
    if (is_direct()) return cp_async(context, query);
    for_chunks<1>(context, query,
                  [this](uint32_t to, int64_t at, bool valid) { copy_query_16B<T>(params_, to, at, valid); });
  }

  /// Converts queries to float16, which GEMM0 takes beside dequantized keys. Of a bfloat16 row, the largest power of
  /// two becomes 2^14, so that elements down to 2^-28 of it stay exact; the lane's `scale` takes the difference.
  __device__ __forceinline__ void convert(int32_t context, int64_t query, float& scale) const {
    constexpr int32_t kPairs = DimQk / 64;  // of a lane
    constexpr int32_t kMaxExponent = 14;
    const uint32_t to = queries_ + static_cast<uint32_t>(context * kMaxRows * kStride);
#pragma unroll 8
    for (int32_t r = 0; r < kRows; ++r) {
      const int64_t at = __shfl_sync(kAllLanes, query, r);
      uint32_t pairs[kPairs];
      uint32_t most = 0;
#pragma unroll
      for (int32_t i = 0; i < kPairs; ++i) {
        pairs[i] = at < 0 ? 0 : load_pair(at + 2 * (lane_ + 32 * i));
        most = max(most, magnitude(pairs[i]));
      }
      if (params_.q_dtype == DType::kBFloat16) {
        most = __reduce_max_sync(kAllLanes, most);
        const int32_t exponent =
            most == 0 ? 0 : min(max(static_cast<int32_t>(most >> 7) - 127 - kMaxExponent, -120), 120);
        const float factor = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
        for (int32_t i = 0; i < kPairs; ++i) {
          pairs[i] = ptx::pack_two<__half>(__uint_as_float(pairs[i] << 16) * factor,
                                           __uint_as_float(pairs[i] & 0xffff0000u) * factor);
        }
        if (lane_ == r) scale *= __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
      }
#pragma unroll
      for (int32_t i = 0; i < kPairs; ++i) {
        ptx::st_shared_4(to + static_cast<uint32_t>(r * kStride + 4 * (lane_ + 32 * i)), pairs[i]);
      }
    }
  }

 private:
  /// Calls copy(shared address, element, valid) for the 16-byte chunks of kRows rows.
  template <int32_t kUnroll, typename Copy>
  __device__ __forceinline__ void for_chunks(int32_t context, int64_t query, const Copy& copy) const {
    constexpr int32_t kChunks = DimQk / kElementsPer16B;
    const uint32_t to = queries_ + static_cast<uint32_t>(context * kMaxRows * kStride);
#pragma unroll kUnroll
    for (int32_t i = lane_; i < kRows * kChunks; i += 32) {
      const int32_t d = i % kChunks * kElementsPer16B;
      const int64_t at = __shfl_sync(kAllLanes, query, i / kChunks);
      const bool valid = at >= 0 && d < params_.head_dim_qk;
      copy(to + static_cast<uint32_t>(i / kChunks * kStride + 2 * d), at + d, valid);
    }
  }

  /// Two neighbouring elements in their own 16-bit type; fp8 ones as float16.
  __device__ __forceinline__ uint32_t load_pair(int64_t at) const {
    if (is_fp8(params_.q_dtype)) {
      const auto* const from = static_cast<const uint8_t*>(params_.q) + at;
      return upcast_fp8x2<__half>(from[0] | uint32_t{from[1]} << 8,
                                  params_.q_dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3);
    }
    const auto* const from = static_cast<const uint16_t*>(params_.q) + at;
    if (params_.q_wide) return *reinterpret_cast<const uint32_t*>(from);
    return from[0] | uint32_t{from[1]} << 16;
  }

  /// Magnitude bits of the larger of two bfloat16; Inf and NaN count as 0.
  __device__ __forceinline__ static uint32_t magnitude(uint32_t pair) {
    const uint32_t low = pair & 0x7fffu;
    const uint32_t high = pair >> 16 & 0x7fffu;
    return max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u);
  }

  const AttentionParams& params_;
  const uint32_t queries_;
  const int32_t lane_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
