#pragma once

#include "kernels/cuda/sm90/prefill/producer.cuh"
#include "ptx/wgmma.cuh"

/// The producer warpgroup of FP8 MMA. K lands where GEMM0 reads it. GEMM1 wants V with tokens along its rows: V lands
/// beside, and the warp that has loaded it transposes it (see vt_column).
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Transposes V of a warp's 32 tokens, sixteen at a time. ldmatrix with .trans gives a lane two components of two
/// tokens. Two such words, permuted, give it one component of four tokens: a row of a matrix for stmatrix.
class VTransposer {
 public:
  __device__ __forceinline__ explicit VTransposer(int32_t lane)
      : load_offset_(fp8_tile_offset(lane % 16, 0) & ~0x70),
        load_chunk_(lane / 16),
        row_(lane % 8),
        store_row_(lane / 16 * 16 + 2 * row_ + (lane / 8 % 2 ^ row_ / 4)),
        first_(lane < 16 ? 0x6420u : 0x7531u),
        token_(2 * (lane % 4)) {}

  /// `from`: the warp's tokens of V; `to`: the tile of V transposed.
  __device__ __forceinline__ void transpose(uint32_t from, uint32_t to, int32_t warp) const {
#pragma unroll
    for (int32_t m = 0; m < 2; ++m) {
      uint32_t words[4][4];
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) load(from, m, n, words[n]);
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) store(to, 2 * warp + m, n, words[n]);
    }
  }

  /// The same of a tile that some rows see in part: of the warp's tokens, those outside of [begin, end) become zeros.
  /// Returns whether others hold NaN.
  __device__ __forceinline__ bool transpose_edge(uint32_t from, uint32_t to, int32_t warp, int32_t begin,
                                                 int32_t end) const {
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (int32_t m = 0; m < 2; ++m) {
      uint32_t keep[2];
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const int32_t token = 16 * m + 8 * i + token_;
        keep[i] =
            (token >= begin && token < end ? 0xffffu : 0u) | (token + 1 >= begin && token + 1 < end ? 0xffff0000u : 0u);
      }
#pragma unroll 1
      for (int32_t n = 0; n < 4; ++n) {
        uint32_t words[4];
        load(from, m, n, words);
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          words[i] &= keep[i % 2];
          nonfinite |= nonfinite_mask<__half, Fp8::kE4M3>(words[i]);
        }
        store(to, 2 * warp + m, n, words);
      }
    }
    return nonfinite != 0;
  }

 private:
  /// Components 32n to 32n + 31 of the warp's tokens 16m to 16m + 15: eight tokens, the other eight, and the same of
  /// the next sixteen components.
  __device__ __forceinline__ void load(uint32_t from, int32_t m, int32_t n, uint32_t (&words)[4]) const {
    ptx::ldmatrix_x4_trans(words, from + static_cast<uint32_t>(16 * kFp8RowBytes * m + load_offset_ +
                                                               (((2 * n + load_chunk_) ^ row_) & 7) * 16));
  }
  /// Every other row of a matrix is an odd component, so that stmatrix has no bank conflicts.
  __device__ __forceinline__ void store(uint32_t to, int32_t sixteen, int32_t n, const uint32_t (&words)[4]) const {
    const uint32_t second = first_ ^ 0x1111u;
    const uint32_t matrices[4] = {__byte_perm(words[0], words[1], first_), __byte_perm(words[0], words[1], second),
                                  __byte_perm(words[2], words[3], first_), __byte_perm(words[2], words[3], second)};
    ptx::stmatrix_x4(to + static_cast<uint32_t>(32 * kFp8RowBytes * n + fp8_tile_offset(store_row_, sixteen)),
                     matrices);
  }

  const int32_t load_offset_;  ///< of the token whose address the lane gives
  const int32_t load_chunk_;   ///< which of two chunks
  const int32_t row_;          ///< of a matrix, whose address the lane gives
  const int32_t store_row_;    ///< its component
  const uint32_t first_;       ///< which bytes of two words make the first matrix; the others make the second
  const int32_t token_;        ///< of eight, of a word's first two bytes
};

class Fp8MmaProducer : public Producer<__half, kFp8MmaDims.qk, kFp8MmaDims.v, Variant::kPlain, kWarpgroupWarps> {
  using Base = Producer<__half, kFp8MmaDims.qk, kFp8MmaDims.v, Variant::kPlain, kWarpgroupWarps>;
  friend Base;
  friend typename Base::Fetcher;
  static constexpr int32_t kWarpTokens = kFp8MmaBlockN / kWarpgroupWarps;  ///< a producer warp's, one after the other
  static constexpr uint32_t kWarpBytes = kWarpTokens * kFp8RowBytes;
  static_assert(kWarpTokens == 32 && kWarpTokens == kMaxFp8TmaTokens);

 public:
  __device__ __forceinline__ Fp8MmaProducer(const PrefillParams& params, unsigned char* memory, SharedStorage& storage)
      : Base(params, memory, storage), transposer_(lane_) {}

  __device__ __forceinline__ void run() { this->run_as(*this); }

 private:
  static constexpr bool kLateQ = false;

  /// Loads Q and commits the work tile.
  __device__ __forceinline__ void load_q(int32_t tile_buffer) const {
    constexpr int32_t kChunks = kFp8RowBytes / 16;
    const AttentionParams& params = params_.attention;
    const auto* const data = static_cast<const uint8_t*>(params.q);
    const bool is_16B_aligned = (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(params.q_token_stride) |
                                 static_cast<uintptr_t>(params.q_head_stride)) %
                                    16 ==
                                0;
    const uint32_t to = q_buffer(tile_buffer) + static_cast<uint32_t>(warp_ / 2 * q_bytes(kFp8MmaDims.qk));
#pragma unroll 2
    for (int32_t i = lane_; i < 32 * kChunks; i += 32) {
      const int64_t at = __shfl_sync(kAllLanes, q_offset_[0], i / kChunks);
      const int32_t row = 32 * (warp_ % 2) + i / kChunks;  // of the consumer warpgroup
      const uint32_t target = to + static_cast<uint32_t>(fp8_tile_offset(row, i % kChunks));
      const uint8_t* const from = data + (at < 0 ? 0 : at + i % kChunks * 16);
      if (is_16B_aligned) {
        ptx::cp_async_16(target, from, at >= 0);
      } else {
        copy_fp8_16B(target, from, at >= 0);
      }
    }
    commit_work_tile(tile_buffer);
  }

  __device__ __forceinline__ void load_tiles(const KvTiles& tiles, const SegmentParams& segment,
                                             const SegmentLoad& load, const int32_t* pages,
                                             const scheduler::WorkTile& work_tile) {
    if (load.tma_tokens == 0) {
      load_by_threads(tiles, segment, load, pages, work_tile);
    } else if (load.tma_tokens == 8) {
      load_by_tma<4>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    } else if (load.tma_tokens == 16) {
      load_by_tma<2>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    } else {
      load_by_tma<1>(tiles, params_.maps[work_tile.segment], load, pages, work_tile.kv_head);
    }
  }

  __device__ __forceinline__ PipelineStage next_k_stage() {
    return next_stage(storage_.k_pipeline, fp8_k_state_, memory_, kFp8TileBytes);
  }
  __device__ __forceinline__ PipelineStage next_vt_stage() {
    return next_stage(storage_.v_pipeline, vt_state_, memory_ + kVtOffset, kFp8TileBytes);
  }
  /// This warp's part of a raw V tile, and the barrier of its TMA.
  __device__ __forceinline__ uint32_t raw_v(uint32_t stage) const {
    return memory_ + kRawVOffset + stage * kFp8TileBytes + static_cast<uint32_t>(warp_) * kWarpBytes;
  }
  __device__ __forceinline__ uint32_t raw_v_landed(uint32_t stage) const {
    return ptx::shared_address(storage_.fp8_landed) + 8 * (stage * kWarpgroupWarps + static_cast<uint32_t>(warp_));
  }

  /// Pages of a multiple of eight tokens, by TMA; the warp has `TmaTiles` of a KV tile. It transposes a V tile when it
  /// has issued the next KV tile. Steps towards the next work tile as in Producer::load_by_tma.
  template <int32_t TmaTiles>
  __device__ __forceinline__ void load_by_tma(const KvTiles& tiles, const PrefillParams::Maps& maps,
                                              const SegmentLoad& load, const int32_t* pages, int32_t head) {
    constexpr int32_t kAtOnce = 32 / TmaTiles;  // KV tiles whose TMA tiles the lanes look up
    const uint64_t policy = ptx::evict_last_policy();
    int32_t here = -1;
    TmaTile next = find_fp8_tma_tile<TmaTiles>(tiles, 0, load, pages);
#pragma unroll 1
    for (int32_t i = 0; i <= tiles.count; ++i) {
      if (i < tiles.count) {
        if (i % kAtOnce == 0) {
          here = next.atom < 0 ? -1 : next.page * load.atoms_per_page + next.atom;
          next = find_fp8_tma_tile<TmaTiles>(tiles, i + kAtOnce, load, pages);  // completes before it is used
        }
        int32_t at[TmaTiles];
#pragma unroll
        for (int32_t b = 0; b < TmaTiles; ++b) at[b] = __shfl_sync(kAllLanes, here, i % kAtOnce * TmaTiles + b);
        const PipelineStage k = next_k_stage();
        producer_acquire(k);
        issue_tma<TmaTiles>(k, maps, at, head, policy);
        __syncwarp();  // whole warps load matrices
        raw_v_write_.advance();
      }
      if (i == 0) continue;
      transpose_v(tiles, i - 1);
      if (is_prefetch_due(i, tiles.count)) prefetch_next_tile(*this);
    }
  }

  /// Issues the warp's TMA tiles of a KV tile.
  template <int32_t TmaTiles>
  __device__ __forceinline__ void issue_tma(const PipelineStage& k_stage, const PrefillParams::Maps& maps,
                                            const int32_t (&at)[TmaTiles], int32_t head, uint64_t policy) const {
    constexpr uint32_t kTmaBytes = kWarpBytes / TmaTiles;
    const uint32_t landed = raw_v_landed(raw_v_write_.stage);
    const uint32_t k = k_stage.tile + static_cast<uint32_t>(warp_) * kWarpBytes;
    const uint32_t v = raw_v(raw_v_write_.stage);
    if (!ptx::elect_one()) return;
    uint32_t bytes = 0;
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) bytes += at[b] >= 0 ? kTmaBytes : 0;
    ptx::mbarrier_arrive_expect_tx(k_stage.full, bytes);
    ptx::mbarrier_arrive_expect_tx(landed, bytes);
#pragma unroll
    for (int32_t b = 0; b < TmaTiles; ++b) {
      if (at[b] < 0) continue;
      ptx::tma_load_5d(k + b * kTmaBytes, &maps.k, k_stage.full, 0, 0, 0, head, at[b], policy);
      ptx::tma_load_5d(v + b * kTmaBytes, &maps.v, landed, 0, 0, 0, head, at[b], policy);
    }
    ptx::mbarrier_arrive(k_stage.full, 32 * kLaneArrivals - 1);
  }

  /// Transposes V tile `i`, which TMA brings, and commits it.
  __device__ __forceinline__ void transpose_v(const KvTiles& tiles, int32_t i) {
    const PipelineStage stage = next_vt_stage();
    ptx::mbarrier_wait_warp(raw_v_landed(raw_v_read_.stage), raw_v_read_.parity);
    const uint32_t raw = raw_v(raw_v_read_.stage);
    raw_v_read_.advance();
    producer_acquire(stage);
    transpose(tiles, i, raw, stage);
  }

  /// Transposes this warp's tokens of V tile `i`, which are complete.
  __device__ __forceinline__ void transpose(const KvTiles& tiles, int32_t i, uint32_t raw,
                                            const PipelineStage& stage) const {
    if (!tiles.is_edge(i)) {
      transposer_.transpose(raw, stage.tile, warp_);
    } else {
      const int32_t first = tiles.first_token(i) + warp_ * kWarpTokens;
      const bool nonfinite = transposer_.transpose_edge(raw, stage.tile, warp_, tiles.visible.any_begin - first,
                                                        tiles.visible.any_end - first);
      const bool any = __any_sync(kAllLanes, nonfinite);
      if (lane_ == 0) storage_.nonfinite[stage.index][warp_] = any ? 1 : 0;
    }
    producer_commit(stage);
    __syncwarp();  // all lanes have read what the next copies overwrite
  }

  /// Any other K and V.
  __device__ __forceinline__ void load_by_threads(const KvTiles& tiles, const SegmentParams& segment,
                                                  const SegmentLoad& load, const int32_t* pages,
                                                  const scheduler::WorkTile& work_tile) {
    const int32_t first_token = segment.paged ? 0 : segment.indptr[work_tile.kv_row];
#pragma unroll 1
    for (int32_t i = 0; i < tiles.count; ++i) {
      const PipelineStage k = next_k_stage();
      producer_acquire(k);
      copy_tokens(tiles, i, k.tile + static_cast<uint32_t>(warp_) * kWarpBytes, segment.k, segment.k_strides,
                  work_tile.kv_head, load, pages, first_token);
      producer_commit_copies(k, load.is_16B_aligned);
      const uint32_t raw = raw_v(raw_v_write_.stage);
      copy_tokens(tiles, i, raw, segment.v, segment.v_strides, work_tile.kv_head, load, pages, first_token);
      if (lane_ == 0) ptx::mbarrier_arrive(raw_v_landed(raw_v_write_.stage));  // its phases count KV tiles
      ptx::mbarrier_wait_warp(raw_v_landed(raw_v_read_.stage), raw_v_read_.parity);
      raw_v_write_.advance();
      raw_v_read_.advance();
      ptx::cp_async_wait_all();
      __syncwarp();
      const PipelineStage vt = next_vt_stage();
      producer_acquire(vt);
      transpose(tiles, i, raw, vt);
    }
  }

  /// Copies this warp's tokens of a KV tile; zeros for tokens that no row sees.
  __device__ __forceinline__ void copy_tokens(const KvTiles& tiles, int32_t i, uint32_t to, const void* data,
                                              const KvStrides& strides, int32_t head, const SegmentLoad& load,
                                              const int32_t* pages, int32_t first_token) const {
    constexpr int32_t kChunks = kFp8RowBytes / 16;
    const int64_t begin = token_begin(tiles, i, strides, head, load, pages, first_token);
#pragma unroll 1
    for (int32_t n = lane_; n < kWarpTokens * kChunks; n += 32) {
      const int64_t at = __shfl_sync(kAllLanes, begin, n / kChunks);
      const uint32_t target = to + static_cast<uint32_t>(fp8_tile_offset(n / kChunks, n % kChunks));
      const uint8_t* const from = static_cast<const uint8_t*>(data) + (at < 0 ? 0 : at + n % kChunks * 16);
      if (load.is_16B_aligned) {
        ptx::cp_async_16(target, from, at >= 0);
      } else {
        copy_fp8_16B(target, from, at >= 0);
      }
    }
  }

  const VTransposer transposer_;
  PipelineState<kKStages> fp8_k_state_;
  PipelineState<kVtStages> vt_state_;
  PipelineState<kRawVStages> raw_v_write_;  ///< where the next V tile lands
  PipelineState<kRawVStages> raw_v_read_;   ///< the next V tile to transpose
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
