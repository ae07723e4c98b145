#pragma once

#include "kernels/cuda/sm90/prefill/epilogue.cuh"
#include "kernels/cuda/sm90/prefill/mask.cuh"

/// The consumer warpgroups: the mainloop over KV tiles, from the last to the first. S = Q K^T takes both operands from
/// shared memory (GEMM0); P stays in registers, and O += P V takes it from there (GEMM1). GEMM1 of a tile overlaps the
/// softmax of the next.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// One consumer warpgroup: 64 rows of a work tile against all of its KV tiles.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant>
class ConsumerWarpgroup {
 protected:
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SmemLayout kLayout = smem_layout(kDims);
  static constexpr int32_t kBlockN = block_n(kDims);
  static constexpr int32_t kScores = kBlockN / 2;  ///< of S and P, of a lane
  static constexpr int32_t kOutputs = DimV / 2;    ///< of O, of a lane
  using State = PipelineState<stages(kDims)>;

 public:
  __device__ __forceinline__ ConsumerWarpgroup(const PrefillParams& params, unsigned char* memory,
                                               SharedStorage& storage)
      : params_(params),
        storage_(storage),
        warpgroup_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1, 0)),
        cap_(params.attention.soft_cap),
        memory_(ptx::shared_address(memory)),
        k_pipeline_(ptx::shared_address(&storage.k_pipeline)),
        v_pipeline_(ptx::shared_address(&storage.v_pipeline)),
        q_smem_(memory_ + static_cast<uint32_t>(kLayout.q + warpgroup_ * q_bytes(DimQk))),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        first_row_(warpgroup_ * kWarpgroupRows + static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads / 32 * 16 +
                   lane_ / 4) {}

  __device__ __forceinline__ void run() { run_as(*this); }

 protected:
  /// Position in the mainloop.
  struct MainloopPosition {
    const TileContext& context;
    const RowInfo& rows;
    uint64_t q = 0;
    int32_t first = 0;  ///< token of the last KV tile whose p is computed
    bool edge = false;  ///< its V may hold NaN or Inf of masked tokens
    bool by_threads = false;
  };
  /// What the steps of the mainloop share.
  struct MainloopState : MainloopPosition {
    uint32_t p[kBlockN / 4] = {};
    uint32_t visible_bits[2][kBlockN / 32] =
        {};  ///< has_visible_bits: tokens of a masked tile that the lane's rows see
  };

  /// `self`: this, as the class whose prologue, step and tail are called.
  template <typename Self>
  __device__ __forceinline__ void run_as(Self& self) {
    CarriedState<kOutputs> carried;
    if (warpgroup_ == 1)
      ptx::named_barrier_arrive(kPingPongBarrier,
                                kConsumerWarpgroups * kWarpgroupThreads);  // warpgroup 0 issues first
    for (int32_t number = 0;; ++number) {
      const int32_t tile_buffer = number % kTileBuffers;
      ptx::mbarrier_wait_warp(ptx::shared_address(storage_.tile_full) + 8 * tile_buffer, number / kTileBuffers & 1);
      const TileContext& context = storage_.contexts[tile_buffer];
      if (context.all_done) return;
      const RowInfo& rows = storage_.rows[tile_buffer];
      const EpilogueContext ctx{
          q_smem_ + static_cast<uint32_t>(tile_buffer % q_buffers(kDims) * kConsumerWarpgroups * q_bytes(DimQk)),
          ptx::shared_address(storage_.tile_empty) + 8 * static_cast<uint32_t>(tile_buffer), warpgroup_, first_row_,
          lane_};
      begin_tile(context, rows);
      if (context.num_tiles > 0) {
        typename Self::MainloopState loop{{context, rows}};
        self.prologue(loop, ctx.out_smem);
        mainloop(self, loop);
        ChunkOffsets<DimV> chunks;
        const FastEpilogue end = self.tail(loop, ctx, chunks);
        if (context.fast_epilogue) [[likely]] {
          fast_epilogue<DimV>(context, end, chunks, o_, ctx);
          continue;
        }
      }
      epilogue<DimV>(params_, context, rows, softmax_, o_, ctx, carried);
    }
  }

  __device__ __forceinline__ void begin_tile(const TileContext& context, const RowInfo& rows) {
    if (!context.q_by_tma) ptx::fence_view_async_shared();
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      softmax_.row_max[h] = -INFINITY;
      softmax_.row_sum[h] = 0.0f;
      softmax_.scale[h] = 1.0f;
      softmax_.slope[h] = 0.0f;
      softmax_.max_tile_sum[h] = 0xffffffffu;
      softmax_.logit_slope[h] = 0.0f;
      softmax_.position[h] = 0;
      const int32_t row = first_row_ + 8 * h;
      if (row >= context.num_rows) continue;
      softmax_.max_tile_sum[h] = __float_as_uint(kMaxTileSum<T>);
      const float scale = rows.scale[row];
      softmax_.scale[h] = !has_scale(kVariant) ? scale : (fabsf(scale) >= kMinScale ? fabsf(scale) : 1.0f);
      if constexpr (has_fixed_row_max<T>(kVariant)) {
        softmax_.row_max[h] = fixed_row_max(cap_, rows.visible_begin[row] < rows.visible_end[row]);
      }
      if constexpr (kVariant == Variant::kAny) softmax_.slope[h] = rows.slope[row];
      if constexpr (kVariant == Variant::kAlibi) {
        softmax_.slope[h] = __fmul_rn(rows.slope[row], ptx::rcp_approx(softmax_.scale[h]));
        softmax_.logit_slope[h] = rows.slope[row];
        softmax_.position[h] = static_cast<int32_t>(rows.position[row] - context.first_pos) - 2 * (lane_ % 4);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kOutputs; ++i) o_[i] = 0.0f;
  }

  /// At the last KV tile.
  __device__ __forceinline__ static void begin_mainloop(MainloopPosition& loop) {
    const TileContext& context = loop.context;
    loop.first = (context.first_tile + context.num_tiles - 1) * kBlockN;
    loop.edge = is_edge(context, loop.first);
    loop.by_threads = context.by_threads;
  }

  /// GEMM0 and softmax of the first KV tile.
  __device__ __forceinline__ void prologue(MainloopState& loop, uint32_t q_smem) {
    make_uniform(k_state_);
    make_uniform(v_state_);
    begin_mainloop(loop);
    loop.q = ptx::make_smem_desc<swizzle_bytes(DimQk)>(q_smem, 0, atom_bytes(DimQk));
    float s[kScores];
    float factor[2];
    const uint32_t k_stage = consumer_wait(k_pipeline_, k_state_);
    if (loop.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    gemm0(loop.q, k_stage, s);
    ptx::wgmma_wait<0>(s);
    release_k<true>(loop, k_stage);
    if constexpr (kVariant == Variant::kPlain) {
      if (loop.context.negate_scores) [[unlikely]]
        negate_scores(loop.rows, s);
      const int32_t column = loop.first + 2 * (lane_ % 4);
      if (loop.context.visible.all_begin <= loop.first) {
        mask_ends(loop.rows, first_row_, column, s);
      } else {
        mask_scores(loop.rows, first_row_, column, -INFINITY, s);
      }
      constexpr float kNone[2] = {0.0f, 0.0f};
      online_softmax<T, kVariant>(softmax_, cap_, kNone, s, factor);
    } else {
      softmax<true>(loop, loop.first, s, factor);
    }
    pack_p(s, loop.p);
  }

  /// From the last KV tile to the first. Between tiles there is no time to look anything up. Between the issue of an
  /// MMA and its wait nothing may branch, or the compiler waits for the MMA first. So masked tiles and others have
  /// loops of their own, and where these begin is known before.
  template <typename Self>
  __device__ __forceinline__ void mainloop(Self& self, typename Self::MainloopState& loop) {
    const TileContext& context = loop.context;
    const int32_t begin = context.first_tile;
    int32_t tile = begin + context.num_tiles - 1;
    int32_t unmasked_begin = begin;  // tiles [unmasked_begin, unmasked_end) are not masked
    int32_t unmasked_end = begin;
    if (!always_masks(context)) {
      unmasked_begin = max(begin, (context.visible.all_begin + kBlockN - 1) / kBlockN);
      unmasked_end = max(begin, Self::unmasked_end(context) / kBlockN);
    }
#pragma unroll 1
    for (int32_t until = unmasked_end;; until = begin) {
#pragma unroll 1
      for (; tile > until; --tile) self.template step<true>(loop);
      if (tile == begin) return;
      if (tile <= unmasked_begin) continue;
      if (loop.edge) self.isolate_nonfinite(loop.rows, loop.first);
      loop.edge = false;
#pragma unroll 1
      for (; tile > unmasked_begin; --tile) self.template step<false>(loop);
    }
  }

  /// GEMM1 of the last KV tile.
  __device__ __forceinline__ FastEpilogue tail(MainloopState& loop, const EpilogueContext& ctx,
                                               ChunkOffsets<DimV>& chunks) {
    if (loop.edge) isolate_nonfinite(loop.rows, loop.first);
    const uint32_t v_stage = consumer_wait(v_pipeline_, v_state_);
    if (loop.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    gemm1(v_stage, loop.p);
    const FastEpilogue end = prepare_fast_epilogue(loop.rows, softmax_, ctx);
    chunks = find_chunks<DimV>(loop.context, loop.rows, ctx);
    ptx::named_barrier_sync(kConsumerWarpgroupBarrier + warpgroup_, kWarpgroupThreads);  // see store_chunks
    ptx::wgmma_wait<0>(o_);
    consumer_release(v_pipeline_, v_stage, lane_);
    return end;
  }

  /// GEMM0 and softmax of the next KV tile; GEMM1 of the one before overlaps the softmax. Ping-pong
  /// scheduling: only one warpgroup issues MMAs at a time, and its MMAs overlap the other's softmax.
  template <bool Masked>
  __device__ __forceinline__ void step(MainloopState& loop) {
    float s[kScores];
    const uint32_t k_stage = consumer_wait(k_pipeline_, k_state_);
    if constexpr (Masked) {
      if (loop.edge) [[unlikely]]
        isolate_nonfinite(loop.rows, loop.first);
      loop.edge = is_edge(loop.context, loop.first - kBlockN);
    }
    if (loop.by_threads) [[unlikely]] {
      ptx::mbarrier_wait_warp(v_pipeline_ + 8 * v_state_.stage, v_state_.parity);
      ptx::fence_view_async_shared();
    }
    loop.first -= kBlockN;
    ptx::named_barrier_sync(kPingPongBarrier + warpgroup_, kConsumerWarpgroups * kWarpgroupThreads);
    gemm0(loop.q, k_stage, s);
    const uint32_t v_stage = consumer_wait(v_pipeline_, v_state_);
    gemm1(v_stage, loop.p);
    // kPlain, kAlibi: the other warpgroup may issue when S is complete. In the other variants softmax takes longer than
    // the MMAs, so it may issue as soon as these are issued: behind the wait, the compiler would schedule the arrival
    // after the whole softmax.
    constexpr bool kWaitsForScores = has_scale(kVariant);
    if constexpr (!kWaitsForScores)
      ptx::named_barrier_arrive(kPingPongBarrier + 1 - warpgroup_, kConsumerWarpgroups * kWarpgroupThreads);
    ptx::wgmma_wait<1>(s);
    if constexpr (kWaitsForScores)
      ptx::named_barrier_arrive(kPingPongBarrier + 1 - warpgroup_, kConsumerWarpgroups * kWarpgroupThreads);
    release_k<Masked>(loop, k_stage);
    if constexpr (!Masked && rescales_lazily(kVariant)) {
      float bias[2] = {0.0f, 0.0f};
      to_logits<false>(loop, loop.first, s, bias);
      lazy_softmax(loop, bias, s, v_stage);
    } else {
      float factor[2];
      softmax<Masked>(loop, loop.first, s, factor);
      ptx::wgmma_wait<0>(o_);
      consumer_release(v_pipeline_, v_stage, lane_);
      pack_p(s, loop.p);
      if constexpr (!has_fixed_row_max<T>(kVariant)) rescale(factor);
    }
  }

  /// Rescales O, when row_max has changed.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int32_t i = 0; i < kOutputs; ++i) o_[i] = __fmul_rn(o_[i], factor[i / 2 % 2]);
  }

  /// Online softmax with row_max as it is: with lazy rescaling it nearly always stays, so that no maximum is computed
  /// and nothing rescaled. Scores are kept: where a sum of p says that row_max may have to grow, or there is none yet,
  /// the warp computes online_softmax, whose bits are the same where row_max stays. Releases the V stage as soon as
  /// GEMM1 is complete.
  __device__ __forceinline__ void lazy_softmax(MainloopState& loop, const float (&bias)[2], float (&s)[kScores],
                                               uint32_t v_stage) {
    constexpr int32_t kEarly = kScores / 4;  // p computed while GEMM1 still reads the last ones
    const float add[2] = {addend<kVariant>(bias[0], softmax_.row_max[0]),
                          addend<kVariant>(bias[1], softmax_.row_max[1])};
    const auto p_of = [&](int32_t i) {
      const int32_t h = i / 2 % 2;
      return ptx::ex2_approx(logit_plus<kVariant>(add[h], s[i], softmax_.scale[h], cap_));
    };
    float early[kEarly];
    float sums[4];
#pragma unroll
    for (int32_t i = 0; i < kEarly; ++i) {
      early[i] = p_of(i);
      sums[i % 4] = i < 4 ? early[i] : __fadd_rn(sums[i % 4], early[i]);
    }
    // As ptx::order_wait_after, which the compiler sees through here. No p is -0.
    if (__float_as_uint(early[kEarly - 1]) == __float_as_uint(-0.0f)) ptx::mbarrier_arrive(v_pipeline_ + kToEmpty);
    ptx::wgmma_wait<0>(o_);
    consumer_release(v_pipeline_, v_stage, lane_);
#pragma unroll
    for (int32_t i = 0; i < kEarly; i += 2) loop.p[i / 2] = ptx::pack_two<T>(early[i], early[i + 1]);
#pragma unroll
    for (int32_t i = kEarly; i < kScores; i += 2) {
      const float low = p_of(i);
      const float high = p_of(i + 1);
      sums[i % 4] = __fadd_rn(sums[i % 4], low);
      sums[i % 4 + 1] = __fadd_rn(sums[i % 4 + 1], high);
      loop.p[i / 2] = ptx::pack_two<T>(low, high);
    }
    const float sum[2] = {__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])};
    const bool grows =  // as bits: NaN counts as more
        __float_as_uint(sum[0]) > softmax_.max_tile_sum[0] || __float_as_uint(sum[1]) > softmax_.max_tile_sum[1];
    if (__any_sync(kAllLanes, grows)) [[unlikely]] {
      float factor[2];
      online_softmax<T, kVariant>(softmax_, cap_, bias, s, factor);
      pack_p(s, loop.p);
      rescale(factor);
    } else {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) softmax_.row_sum[h] = __fadd_rn(softmax_.row_sum[h], sum[h]);
    }
  }

  /// Whether V of the tile may hold NaN or Inf of masked tokens.
  __device__ __forceinline__ static bool is_edge(const TileContext& context, int32_t first) {
    return needs_mask(context.visible, first, kBlockN);
  }
  /// The token at which unmasked tiles end.
  __device__ __forceinline__ static int32_t unmasked_end(const TileContext& context) {
    return kVariant == Variant::kAlibi ? context.unmasked_end : context.visible.all_end;
  }
  /// Whether all KV tiles take the path of masked ones.
  __device__ __forceinline__ static bool always_masks(const TileContext& context) {
    if constexpr (kVariant == Variant::kAny) return true;
    if (has_scale(kVariant) && context.negate_scores) return true;
    return kVariant == Variant::kAlibi && context.shard.world != 1;
  }

  /// Releases a K stage. has_visible_bits: reads the bits of a masked tile first; every lane arrives for itself.
  template <bool Masked>
  __device__ __forceinline__ void release_k(MainloopState& loop, uint32_t stage) const {
    if constexpr (has_visible_bits(kVariant) && Masked) {
      constexpr uint32_t kWords = kBlockN / 32;
      const uint32_t first = memory_ + static_cast<uint32_t>(kLayout.visible_bits) +
                             4 * kWords * (stage * kBlockM + static_cast<uint32_t>(first_row_));
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        loop.visible_bits[0][w] = ptx::ld_shared_4(first + 4 * w);
        loop.visible_bits[1][w] = ptx::ld_shared_4(first + 4 * (8 * kWords + w));
      }
      ptx::mbarrier_arrive(k_pipeline_ + kToEmpty + 8 * stage);
    } else {
      consumer_release<has_visible_bits(kVariant) ? 32 : 1>(k_pipeline_, stage, lane_);
    }
  }

  __device__ __forceinline__ uint32_t k_tile(uint32_t stage) const {
    return memory_ + static_cast<uint32_t>(kLayout.k) + stage * static_cast<uint32_t>(tile_bytes(kDims, DimQk));
  }
  __device__ __forceinline__ uint32_t v_tile(uint32_t stage) const {
    return memory_ + static_cast<uint32_t>(kLayout.v) + stage * static_cast<uint32_t>(tile_bytes(kDims, DimV));
  }

  /// Issues S = Q K^T.
  __device__ __forceinline__ void gemm0(uint64_t q, uint32_t stage, float (&s)[kScores]) const {
    constexpr uint32_t kSteps = swizzle_bytes(DimQk) / 32;  // of 16 components, in an atom's row
    const uint64_t k = ptx::make_smem_desc<swizzle_bytes(DimQk)>(k_tile(stage), 0, atom_row_bytes(DimQk));
    ptx::wgmma_fence();
    ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, q, k);
#pragma unroll
    for (uint32_t step = 1; step < DimQk / 16; ++step) {
      ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(
          s, ptx::advance_desc(q, step / kSteps * query_column_bytes(DimQk) + step % kSteps * 32),
          ptx::advance_desc(k, step / kSteps * atom_bytes(DimQk) + step % kSteps * 32));
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V.
  __device__ __forceinline__ void gemm1(uint32_t stage, const uint32_t (&p)[kScores / 2]) {
    const uint64_t v = ptx::make_smem_desc<swizzle_bytes(DimV)>(v_tile(stage), atom_bytes(DimV), atom_row_bytes(DimV));
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kBlockN / 16; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
      ptx::wgmma_rs<T>(o_, a, ptx::advance_desc(v, step * 2 * atom_row_bytes(DimV)));
    }
    ptx::wgmma_commit();
  }

  /// Softmax of the tile that begins at `first`: replaces scores by p.
  template <bool Masked>
  __device__ __forceinline__ void softmax(const MainloopState& loop, int32_t first, float (&s)[kScores],
                                          float (&factor)[2]) {
    if constexpr (has_fixed_row_max<T>(kVariant)) {
      capped_softmax<Masked>(softmax_, cap_, loop.rows, first_row_, first + 2 * (lane_ % 4), s);
      ptx::order_wait_after(softmax_.row_sum[1], memory_);
    } else {
      float bias[2] = {0.0f, 0.0f};
      to_logits<Masked>(loop, first, s, bias);
      online_softmax<T, kVariant>(softmax_, cap_, bias, s, factor);
    }
  }

  /// Replaces scores by what online_softmax takes, masked. kAlibi: their logits lack `bias`.
  template <bool Masked>
  __device__ __forceinline__ void to_logits(const MainloopState& loop, int32_t first, float (&s)[kScores],
                                            float (&bias)[2]) {
    const int32_t column = first + 2 * (lane_ % 4);
    const TileContext& context = loop.context;
    const RowInfo& rows = loop.rows;
    if constexpr (Masked && (kVariant == Variant::kPlain || kVariant == Variant::kMask)) negate_scores(rows, s);
    if constexpr (Masked && kVariant == Variant::kAlibi) {
      if (context.negate_scores) [[unlikely]]
        negate_scores(rows, s);
    }
    if constexpr (kVariant == Variant::kCap) {
      if constexpr (Masked) mask_scores(rows, first_row_, column, 0.0f, s);  // or the shared reciprocal would be NaN
      cap_scores<Masked>(cap_, softmax_.scale, s);
    } else if constexpr (kVariant == Variant::kAlibi) {
      if (Masked && context.shard.world != 1) {
        constexpr float kAsTheyAre[2] = {1.0f, 1.0f};
        add_bias_of_shard(context, rows, first_row_, column, kAsTheyAre, softmax_.slope, s);
      } else {
        const int32_t apart[2] = {softmax_.position[0] - first, softmax_.position[1] - first};
        add_bias<Masked>(softmax_.slope, softmax_.logit_slope, apart, s, bias);
      }
    } else if constexpr (kVariant == Variant::kAny) {
      to_any_logits(params_.attention, cap_, context, rows, first_row_, column, softmax_.scale, softmax_.slope, s);
    }
    if constexpr (Masked && has_visible_bits(kVariant)) {
      mask_by_bits(loop.visible_bits, lane_, s);
    } else if constexpr (Masked) {
      if (kVariant == Variant::kAlibi && context.visible.all_begin <= first) {
        mask_ends(rows, first_row_, column, s);
      } else {
        mask_scores(rows, first_row_, column, kVariant == Variant::kCap ? INFINITY : -INFINITY, s);
      }
    }
  }

  /// What scores are multiplied by before a positive scale (see begin_tile). A scale that is next to nothing, 0 or NaN
  /// is that itself.
  __device__ __forceinline__ static float sign_of_scale(float scale) {
    return scale >= kMinScale ? 1.0f : (scale <= -kMinScale ? -1.0f : scale);
  }
  /// Scores of rows with a negative scale change their sign.
  __device__ __forceinline__ void negate_scores(const RowInfo& rows, float (&s)[kScores]) const {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float by = sign_of_scale(rows.scale[first_row_ + 8 * h]);
#pragma unroll
      for (int32_t i = 0; i < kScores; i += 4) {
        s[i + 2 * h] = __fmul_rn(s[i + 2 * h], by);
        s[i + 2 * h + 1] = __fmul_rn(s[i + 2 * h + 1], by);
      }
    }
  }

  /// p as GEMM1 takes it.
  __device__ __forceinline__ static void pack_p(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; ++i) p[i] = ptx::pack_two<T>(s[2 * i], s[2 * i + 1]);
  }

  /// Before GEMM1 of the tile that begins at `first`, the pipeline's next: adds flagged NaN and Inf to O and removes
  /// them from V.
  __device__ __forceinline__ void isolate_nonfinite(const RowInfo& rows, int32_t first) {
    ptx::mbarrier_wait_warp(v_pipeline_ + 8 * v_state_.stage, v_state_.parity);
    // The lane that releases the stage is the one that reads.
    const uint32_t flags = lane_ == 0 ? *reinterpret_cast<const uint32_t*>(storage_.nonfinite[v_state_.stage]) : 0;
    if (__shfl_sync(kAllLanes, flags, 0) == 0) [[likely]]
      return;
    const uint32_t tile = v_tile(v_state_.stage);
    add_nonfinite<T, DimV, kBlockN>(params_.attention, rows, tile, first, first_row_, o_);
    ptx::named_barrier_sync(kConsumersBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    zero_nonfinite<T, kBlockN * DimV / 2, kConsumerWarpgroups * kWarpgroupThreads>(
        tile, static_cast<int32_t>(threadIdx.x) - kWarpgroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kConsumersBarrier, kConsumerWarpgroups * kWarpgroupThreads);
    ptx::fence_view_async_shared();
  }

  const PrefillParams& params_;
  SharedStorage& storage_;
  const int32_t warpgroup_;
  const SoftCap cap_;
  const uint32_t memory_;
  /// Addresses of the pipelines: arrivals are so short that a warp does not branch around them.
  const uint32_t k_pipeline_;
  const uint32_t v_pipeline_;
  const uint32_t q_smem_;  ///< of the warpgroup, first buffer
  const int32_t lane_;
  const int32_t first_row_;  ///< of the lane; its other row is 8 further
  State k_state_;
  State v_state_;
  SoftmaxState softmax_;
  float o_[kOutputs];
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
