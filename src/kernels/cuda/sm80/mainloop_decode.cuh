#pragma once

#include "kernels/cuda/sm80/epilogue.cuh"
#include "kernels/cuda/sm80/nonfinite.cuh"
#include "kernels/cuda/sm80/producer.cuh"

/// Decode path: work tiles of up to 16 rows. Each warp has 16 of the 64 tokens of every KV tile: it looks them up,
/// copies them to its own stages and keeps its own row states. Warps do not meet in the mainloop; the epilogue reduces
/// their states in a fixed order.
namespace folio::inline v0::kernels::cuda::sm80 {

/// Where a lane's chunks of K or V come from.
struct LaneSource {
  const char* head;   ///< the KV head of page 0's first token
  int64_t page_step;  ///< bytes
  int64_t token_step;
};

/// `Fp8`: K and V are e4m3 and stay so in shared memory; T is float16.
template <typename T, int32_t DimQk, int32_t DimV, bool Fp8, int32_t Rows>
class DecodeMainloop {
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr int32_t kStages = Fp8 ? decode_fp8_stages(kDims) : decode_stages(kDims);
  static constexpr int32_t kWarpTokens = kKvTile / kWarps;  ///< tokens of a KV tile for each warp
  static constexpr int32_t kBytes = Fp8 ? 1 : 2;            ///< of an element
  static constexpr int32_t kChunkElements = 16 / kBytes;
  static constexpr int32_t kKeyBytes = kBytes * kWarpTokens * DimQk;
  static constexpr int32_t kStageBytes = kBytes * kWarpTokens * (DimQk + DimV);
  static constexpr bool kQueriesInRegisters = DimQk <= 128;
  static constexpr int32_t kQuerySteps = kQueriesInRegisters ? DimQk / 16 : 1;
  static constexpr uint32_t kAll = 0xffffffffu;
  static_assert(kWarpTokens == 16);

 public:
  __device__ __forceinline__ DecodeMainloop(const AttentionParams& params, const WorkTileContext& context,
                                            SharedStorage<Rows>& storage, uint32_t shared)
      : params_(params),
        context_(context),
        storage_(storage),
        thread_(thread_index()),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        q_(shared),
        pipeline_(q_ + 2 * kDecodeRows * DimQk + static_cast<uint32_t>(warp_ * kStages * kStageBytes)) {}

  /// Computes one work tile. The copy of Q has been committed. Leaves the states of the warps in `results` and
  /// storage.result.
  __device__ __forceinline__ void run(float* results) {
#pragma unroll
    for (int32_t n = 0; n < DimV / 8; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) acc_[0][n][i] = 0.0f;
    }
    init_row_state<Fp8>(params_, context_, storage_, lane_ / 4, state_);
    if (context_.num_tiles > 0) mainloop();
    ptx::cp_async_wait<0>();
    quad_reduce_row_sum(state_);
    __syncthreads();  // the stages become the place of results
    const int32_t first_row = warp_ * kDecodeRows + lane_ / 4;
    if constexpr (Fp8) {
      store_fp8_acc_to_smem<DimV>(state_, acc_, first_row, lane_ % 4, results, storage_);
    } else {
      store_acc_to_smem<DimV>(state_, acc_, first_row, 2 * (lane_ % 4), results, storage_);
    }
  }

 private:
  __device__ __forceinline__ LaneSource source_of(const void* data, const KvStrides& strides) const {
    return {static_cast<const char*>(data) + element_ * context_.work_tile.kv_head * strides.head,
            element_ * strides.page, element_ * strides.token};
  }

  /// Where this warp's tokens of a KV tile lie.
  struct WarpTokens {
    TokenPlace place;  ///< of the lane's token; where whole, of the first token
    bool whole;        ///< some row sees each token, and they lie one stride apart
  };
  __device__ __forceinline__ WarpTokens look_up(int32_t tile) const {
    const int32_t first = first_ + tile * kKvTile;
    const bool whole = even_ && first >= any_begin_ && first + kWarpTokens <= any_end_;
    const int32_t token = first + (whole ? 0 : lane_ % kWarpTokens);
    if (token < any_begin_ || token >= any_end_) return {{0, -1}, false};
    if (pages_ == nullptr || page_shift_ < 0) return {place_of(context_, token), whole};
    return {{pages_[token >> page_shift_], token & ((1 << page_shift_) - 1)}, whole};
  }

  /// Copies K or V of this warp's tokens, whose places the lanes hold; zeros for tokens that no row sees.
  template <int32_t Dim>
  __device__ __forceinline__ void copy_tokens(uint32_t to, const WarpTokens& share, const LaneSource& from,
                                              int32_t head_dim) const {
    const TokenPlace& place = share.place;
    const bool whole = share.whole;
    constexpr int32_t kChunks = Dim / kChunkElements;
    constexpr int32_t kCopies = kWarpTokens * kChunks / 32;
    const auto target = [&](int32_t i) {
      const int32_t row = (i * 32 + lane_) / kChunks;
      const int32_t chunk = (i * 32 + lane_) % kChunks;
      return to + (Fp8 ? swizzled_offset_fp8(Dim, row, chunk) : swizzled_offset(Dim, row, chunk));
    };
    const char* const token = from.head + place.page * from.page_step + place.in_page * from.token_step;
    if constexpr (32 % kChunks == 0) {
      if (whole && head_dim == Dim && (Fp8 || direct_)) {
        const char* chunk = token + lane_ / kChunks * from.token_step + lane_ % kChunks * 16;
        const int64_t step = 32 / kChunks * from.token_step;
#pragma unroll
        for (int32_t i = 0; i < kCopies; ++i, chunk += step) ptx::cp_async_16(target(i), chunk);
        return;
      }
    }
    const int64_t mine = whole ? (token - from.head) + lane_ % kWarpTokens * from.token_step
                               : (place.in_page < 0 ? kNotVisible : token - from.head);
    if (Fp8 || direct_) {
#pragma unroll
      for (int32_t i = 0; i < kCopies; ++i) {
        const int32_t d = (i * 32 + lane_) % kChunks * kChunkElements;
        const int64_t offset = __shfl_sync(kAll, mine, (i * 32 + lane_) / kChunks);
        const int32_t bytes = offset == kNotVisible ? 0 : min(16, max(0, (head_dim - d) * kBytes));
        ptx::cp_async_16_zfill(target(i), from.head + (bytes > 0 ? offset + d * kBytes : 0), bytes);
      }
      return;
    }
    if constexpr (!Fp8) {
      const ChunkSource source{from.head, context_.segment->dtype, context_.segment->wide};
#pragma unroll 1
      for (int32_t i = 0; i < kCopies; ++i) {
        const int32_t d = (i * 32 + lane_) % kChunks * kChunkElements;
        const int64_t offset = __shfl_sync(kAll, mine, (i * 32 + lane_) / kChunks);
        const bool valid = offset != kNotVisible && d < head_dim;
        copy_any_chunk<T>(target(i), source, valid ? (element_ == 1 ? offset : offset / 2) + d : 0, valid);
      }
    }
  }
  __device__ __forceinline__ void copy_keys(int32_t stage, const WarpTokens& share) const {
    copy_tokens<DimQk>(pipeline_ + stage * kStageBytes, share, keys_, params_.head_dim_qk);
  }
  __device__ __forceinline__ void copy_values(int32_t stage, const WarpTokens& share) const {
    copy_tokens<DimV>(pipeline_ + stage * kStageBytes + kKeyBytes, share, values_, params_.head_dim_v);
  }

  __device__ __forceinline__ void mainloop() {
    const SegmentParams& segment = *context_.segment;
    element_ = is_fp8(segment.dtype) ? 1 : 2;
    keys_ = source_of(segment.k, segment.k_strides);
    values_ = source_of(segment.v, segment.v_strides);
    first_ = context_.first_tile + warp_ * kWarpTokens;
    any_begin_ = context_.visible_range.any_begin;
    any_end_ = context_.visible_range.any_end;
    pages_ = context_.pages;
    page_shift_ = context_.page_shift;
    even_ = context_.even;
    direct_ = segment.wide && !is_fp8(segment.dtype);
    const int32_t num_tiles = context_.num_tiles;
    const bool upper = context_.num_rows > 8;
    const bool custom = context_.custom;
    const bool general = custom || has_bias(params_);
    const int32_t all_begin = context_.visible_range.all_begin;
    const int32_t all_end = context_.visible_range.all_end;
    WarpTokens share = look_up(0);
#pragma unroll 1
    for (int32_t stage = 0; stage < kStages; ++stage) {
      const WarpTokens next = look_up(stage + 1);
      if (stage < num_tiles) copy_keys(stage, share);
      ptx::cp_async_commit();
      if (stage < num_tiles) copy_values(stage, share);
      ptx::cp_async_commit();
      share = next;
    }
    ptx::cp_async_wait<2 * kStages>();
    __syncthreads();  // Q has arrived
    uint32_t q_fragment[kQuerySteps][4];
    const uint32_t q = q_ + swizzled_offset(DimQk, lane_ % 16, lane_ / 16);
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int32_t step = 0; step < kQuerySteps; ++step)
        ptx::ldmatrix_x4(q_fragment[step], advance_swizzled(q, 2 * step));
    }
    int32_t stage = 0;
#pragma unroll 1
    for (int32_t tile = 0; tile < num_tiles; ++tile) {
      const int32_t first = first_ + tile * kKvTile;
      const WarpTokens next = look_up(tile + kStages + 1);
      const bool more = tile + kStages < num_tiles;
      const uint32_t keys = pipeline_ + stage * kStageBytes;
      // cp.async groups complete in the order K, V, K, V: each wait leaves all but the oldest in flight.
      ptx::cp_async_wait<2 * kStages - 1>();
      __syncwarp();
      float s[1][2][4];
      gemm0(keys, q, q_fragment, s);
      __syncwarp();
      if (more) copy_keys(stage, share);
      ptx::cp_async_commit();
      const bool masked = first < all_begin || first + kWarpTokens > all_end;
      scores_to_logits(params_, context_, storage_, state_, lane_ / 4, first + 2 * (lane_ % 4), general, masked, upper,
                       s);
      float factor[1][2];
      if (online_softmax<T>(state_, upper, s, factor)) rescale(acc_, factor);
      ptx::cp_async_wait<2 * kStages - 1>();
      __syncwarp();
      if (custom || (masked && is_mixed(context_.visible_range, first, kWarpTokens)))
        isolate_nonfinite(keys + kKeyBytes, first);
      gemm1(keys + kKeyBytes, s);
      __syncwarp();
      if (more) copy_values(stage, share);
      ptx::cp_async_commit();
      share = next;
      if (++stage == kStages) stage = 0;
    }
  }

  /// S = Q K^T for 16 tokens. Even and odd k-steps have accumulators of their own, so that the chain of MMAs is half as
  /// long.
  __device__ __forceinline__ void gemm0(uint32_t keys, uint32_t q, const uint32_t (&q_fragment)[kQuerySteps][4],
                                        float (&s)[1][2][4]) const {
    float odd[2][4];
#pragma unroll
    for (int32_t n = 0; n < 2; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[0][n][i] = odd[n][i] = 0.0f;
    }
    const auto multiply = [&](int32_t step, float(&to)[2][4], uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
      if constexpr (kQueriesInRegisters) {
        ptx::mma_m16n8k16<T>(to[0], q_fragment[step], b0, b1);
        ptx::mma_m16n8k16<T>(to[1], q_fragment[step], b2, b3);
      } else {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, advance_swizzled(q, 2 * step));
        ptx::mma_m16n8k16<T>(to[0], a, b0, b1);
        ptx::mma_m16n8k16<T>(to[1], a, b2, b3);
      }
    };
    const int32_t token = lane_ % 8 + lane_ / 16 * 8;
    if constexpr (Fp8) {
      const uint32_t k = keys + swizzled_offset_fp8(DimQk, token, lane_ / 8 % 2);
#pragma unroll
      for (int32_t step = 0; step < DimQk / 16; step += 2) {
        uint32_t b[4];
        uint32_t low[4];
        uint32_t high[4];
        ptx::ldmatrix_x4(b, advance_swizzled_fp8<DimQk>(k, step));
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) upcast_e4m3x4(b[i], low[i], high[i]);
        multiply(step, s[0], low[0], high[0], low[2], high[2]);
        multiply(step + 1, odd, low[1], high[1], low[3], high[3]);
      }
    } else {
      const uint32_t k = keys + swizzled_offset(DimQk, token, lane_ / 8 % 2);
#pragma unroll
      for (int32_t step = 0; step < DimQk / 16; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, advance_swizzled(k, 2 * step));
        multiply(step, step % 2 == 0 ? s[0] : odd, b[0], b[1], b[2], b[3]);
      }
    }
#pragma unroll
    for (int32_t n = 0; n < 2; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[0][n][i] = __fadd_rn(s[0][n][i], odd[n][i]);
    }
  }

  /// O += P V.
  __device__ __forceinline__ void gemm1(uint32_t values, const float (&s)[1][2][4]) {
    const uint32_t p[4] = {ptx::pack_two<T>(s[0][0][0], s[0][0][1]), ptx::pack_two<T>(s[0][0][2], s[0][0][3]),
                           ptx::pack_two<T>(s[0][1][0], s[0][1][1]), ptx::pack_two<T>(s[0][1][2], s[0][1][3])};
    if constexpr (Fp8) {
      const uint32_t v = values + swizzled_offset_fp8(DimV, lane_ % 16, lane_ / 16);
#pragma unroll
      for (int32_t j = 0; j < DimV / 16; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, advance_swizzled_fp8<DimV>(v, j));
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          // A word has two components of two tokens; an MMA takes two tokens of one component.
          uint32_t even[2];
          uint32_t odd[2];
          upcast_e4m3x4(__byte_perm(b[2 * i], 0, 0x3120), even[0], odd[0]);
          upcast_e4m3x4(__byte_perm(b[2 * i + 1], 0, 0x3120), even[1], odd[1]);
          ptx::mma_m16n8k16<T>(acc_[0][2 * (j + i)], p, even[0], even[1]);
          ptx::mma_m16n8k16<T>(acc_[0][2 * (j + i) + 1], p, odd[0], odd[1]);
        }
      }
    } else {
      const uint32_t v = values + swizzled_offset(DimV, lane_ % 16, lane_ / 16);
#pragma unroll
      for (int32_t n = 0; n < DimV / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, advance_swizzled(v, 2 * n));
        ptx::mma_m16n8k16<T>(acc_[0][2 * n], p, b[0], b[1]);
        ptx::mma_m16n8k16<T>(acc_[0][2 * n + 1], p, b[2], b[3]);
      }
    }
  }

  /// Keeps NaN and Inf of V out of GEMM1: see nonfinite.cuh.
  __device__ __forceinline__ void isolate_nonfinite(uint32_t values, int32_t first) {
    if constexpr (Fp8) {
      if (!__any_sync(kAll, scan_nan_fp8<DimV>(values, kWarpTokens, lane_, false))) return;
      add_nan_fp8<DimV>(params_, storage_, values, first, kWarpTokens, lane_ / 4, acc_);
      __syncwarp();
      scan_nan_fp8<DimV>(values, kWarpTokens, lane_, true);
    } else {
      if (!__any_sync(kAll, scan_nonfinite<T, DimV>(values, kWarpTokens, lane_, 32, false))) return;
      add_nonfinite<T, DimV>(params_, storage_, values, first, kWarpTokens, lane_ / 4, acc_);
      __syncwarp();
      scan_nonfinite<T, DimV>(values, kWarpTokens, lane_, 32, true);
    }
    __syncwarp();
  }

  const AttentionParams& params_;
  const WorkTileContext& context_;
  SharedStorage<Rows>& storage_;
  const int32_t thread_;
  const int32_t lane_;
  const int32_t warp_;
  const uint32_t q_;
  const uint32_t pipeline_;
  int32_t element_;  ///< bytes of an element in global memory
  LaneSource keys_;
  LaneSource values_;
  int32_t first_;  ///< this warp's first token of the first KV tile
  int32_t any_begin_;
  int32_t any_end_;
  const int32_t* pages_;
  int32_t page_shift_;
  bool even_;
  bool direct_;  ///< cp.async can copy chunks
  RowState<1> state_;
  float acc_[1][DimV / 8][4];
};

}  // namespace folio::inline v0::kernels::cuda::sm80
