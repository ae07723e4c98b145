#pragma once

#include "kernels/cuda/sm90/mla/epilogue_swap_ab.cuh"
#include "kernels/cuda/sm90/mla/softmax_swap_ab.cuh"

/// A consumer warpgroup where work tiles have few packed rows. MMAs have 64 rows, so their operands are swapped:
///
///   GEMM0  S^T = K Q^T    64 tokens x 16 packed rows
///   GEMM1  O^T = V^T P^T  64 components x 16 packed rows, four such blocks for a half of V
///
/// That takes a quarter of the MMAs that packed rows as MMA rows take, of which most would be empty. fp8 data
/// stays fp8 in shared memory: the A operands, K and V^T, come from registers, dequantized on the way.
///
/// As in consumer.cuh, a consumer has one half of V, and P of even KV tiles is the first consumer's, of odd ones the
/// second's. Where keys are fp8, roles are split: a third warpgroup computes P of all KV tiles and has no V. P and
/// row_max go through shared memory.
///
/// Rows of fp8_ds_mla: a token has a scale s_b for each block b of 128 components. S^T is the sum over b of s_b K_b
/// Q_b^T, and of the RoPE part's product, which is bfloat16's. V_b^T is multiplied by p s_b / v_unit.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// `ComputesP`: of its own KV tiles; where roles are split, of all, and it multiplies nothing by V.
template <typename Traits, bool ComputesP>
class SwapAbConsumer {
  static constexpr bool kSplitsRoles = Traits::kSplitsRoles;
  static constexpr bool kMultiplies = !(kSplitsRoles && ComputesP);
  using T = typename Traits::T;
  using L = typename Traits::L;
  using Lane = SwapAbLane<Traits>;
  static constexpr Fp8 kFp8 = Traits::kFp8;
  static constexpr bool kDsMla = Traits::kDsMla;
  static constexpr int32_t kRows = Lane::kRows;
  static constexpr uint32_t kSlots = L::kStages;  ///< KV tiles that have stats and a barrier of their own
  static constexpr int32_t kScores = Lane::kScores;

 public:
  __device__ __forceinline__ SwapAbConsumer(const MlaParams& params, unsigned char* smem,
                                            typename Traits::Storage& storage)
      : params_(params.attention),
        storage_(storage),
        consumer_(static_cast<int32_t>(threadIdx.x) / kWarpgroupThreads - 1),
        smem_(ptx::shared_address(smem)),
        kv_full_(ptx::shared_address(storage.kv_full)),
        kv_empty_(ptx::shared_address(storage.kv_empty)),
        p_full_(ptx::shared_address(storage.swap_ab_p_full)),
        lane_(static_cast<int32_t>(threadIdx.x)),
        general_(params_.soft_cap != 0.0f || params_.alibi_slopes != nullptr ||
                 params_.mask.kind == MaskKind::kCustom) {}

  __device__ __forceinline__ void run() {
    SwapAbOutputTileState<Traits> output_tile;
    for (int32_t number = 0;; ++number) {
      const int32_t slot = number % kWorkTileSlots;
      ptx::mbarrier_wait(ptx::shared_address(storage_.work_tile_full) + 8 * slot, number / kWorkTileSlots & 1);
      const WorkTileContext& context = storage_.contexts[slot];
      if (context.done) return;
      const RowInfo& rows = storage_.rows[slot];
      init(context, rows);
      mainloop(context, rows);
      reduce_row_sum(number);
      if constexpr (kMultiplies) {
        epilogue(params_, context, rows, lane_, consumer_, row_max_, row_sum_, o_, output_tile);
      }
      num_kv_tiles_ += static_cast<uint32_t>(context.num_kv_tiles);
      ptx::mbarrier_arrive(ptx::shared_address(storage_.work_tile_empty) + 8 * slot);
    }
  }

 private:
  __device__ __forceinline__ void init(const WorkTileContext& context, const RowInfo& rows) {
    ptx::fence_view_async_shared();  // threads have copied Q
    v_unit_ = 0.0f;
#pragma unroll
    for (int32_t b = 0; b < kSwapAbOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kScores; ++i) o_[b][i] = 0.0f;
    }
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      row_max_[r] = -INFINITY;
      row_sum_[r] = 0.0f;
      scale_[r] = 1.0f;
      max_tile_sum_[r] = UINT32_MAX;
      const int32_t row = lane_.row(r);
      if (row >= context.num_rows) continue;
      max_tile_sum_[r] = __float_as_uint(kMaxTileSum<T>);
      if (general_) continue;
      const float scale = rows.scale[row];
      scale_[r] = fabsf(scale) > 0.0f ? fabsf(scale) : 1.0f;
    }
  }

  /// A KV tile: its number among the CTA's KV tiles, and the pipeline stages of its keys and values.
  struct KvTile {
    uint32_t number;
    int32_t first;  ///< local token
    PipelineState k;
    PipelineState v;
  };
  __device__ __forceinline__ KvTile kv_tile(const WorkTileContext& context, int32_t i) const {
    const uint32_t number = num_kv_tiles_ + static_cast<uint32_t>(i);
    const int32_t first = (context.last_kv_tile - i) * kBlockN;
    if (context.v_in_k) {
      const PipelineState state = pipeline_state<L>(num_stages_used_ + static_cast<uint32_t>(i));
      return {number, first, state, state};
    }
    const uint32_t k = num_stages_used_ + 2 * static_cast<uint32_t>(i);
    return {number, first, pipeline_state<L>(k), pipeline_state<L>(k + 1)};
  }
  /// Whether this consumer computes P of the KV tile.
  __device__ __forceinline__ bool is_mine(uint32_t number) const {
    return kSplitsRoles ? ComputesP : static_cast<int32_t>(number % 2) == consumer_;
  }

  /// The second consumer takes an even KV tile together with the odd one behind it: GEMM0 of the odd one comes first
  /// and runs beside the first consumer's.
  __device__ __forceinline__ void mainloop(const WorkTileContext& context, const RowInfo& rows) {
    const int32_t count = context.num_kv_tiles;
    int32_t last_mine = count - 1;
    if (last_mine >= 0 && !is_mine(num_kv_tiles_ + static_cast<uint32_t>(last_mine))) --last_mine;
    if (ComputesP && last_mine < 0) release_q();
#pragma unroll 1
    for (int32_t i = 0; i < count;) {
      const KvTile tile = kv_tile(context, i);
      const bool even = tile.number % 2 == 0;
      const bool pair = !kSplitsRoles && consumer_ == 1 && even && context.v_in_k && i + 1 < count;
      const int32_t last = pair ? i + 1 : i;  // of this step
      const bool has_p = ComputesP && (pair || is_mine(tile.number));
      float s[kScores];
      if (has_p) compute_logits(context, rows, kv_tile(context, last), last == last_mine, s);
#pragma unroll 1
      for (; i <= last; ++i) {  // one copy of this code: ptxas serializes MMAs of two
        const KvTile now = kv_tile(context, i);
        if (has_p && i == last) {
          softmax(now, s);
        } else {
          load_stats(now);
        }
        if constexpr (kMultiplies) multiply_v(context, rows, now);
      }
    }
    num_stages_used_ += static_cast<uint32_t>(context.v_in_k ? count : 2 * count);
  }

  /// GEMM0 of one of this consumer's KV tiles, features and masks.
  __device__ __forceinline__ void compute_logits(const WorkTileContext& context, const RowInfo& rows,
                                                 const KvTile& tile, bool last_mine, float (&s)[kScores]) {
    if constexpr (kFp8 == Fp8::kNone) {
      gemm0(context.by_threads, tile.k, s);
    } else {
      gemm0_fp8(tile.k, s);
    }
    if (last_mine) release_q();
    if (!context.v_in_k) {
      consumer_release(tile.k, kVLeft);
      consumer_release(tile.k, kVRight);
    }
    const int32_t first = tile.first + lane_.token();
    if (general_) {
      to_general_logits(params_, context, rows, lane_, first, s);
    } else if (context.negate_scores) {
      negate_scores(rows, lane_, s);
    }
    if (needs_mask(context.visible, tile.first, kBlockN)) mask_scores(rows, lane_, first, s);
    if constexpr (kDsMla) find_max_scale(context, first);
  }

  /// fp8_ds_mla: the largest block scale of the lane's tokens. Those that no row sees may have any.
  __device__ __forceinline__ void find_max_scale(const WorkTileContext& context, int32_t first) {
    max_scale_ = 0.0f;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float(&of_token)[kDsMlaBlocks] = block_scales_[i];
      const float most =
          fmaxf(fmaxf(fabsf(of_token[0]), fabsf(of_token[1])), fmaxf(fabsf(of_token[2]), fabsf(of_token[3])));
      const bool counts =
          first + 8 * i >= context.visible.any_begin && first + 8 * i < context.visible.any_end && most < INFINITY;
      max_scale_ = counts ? fmaxf(max_scale_, most) : max_scale_;
    }
  }

  /// S^T = K Q^T.
  __device__ __forceinline__ void gemm0(bool by_threads, const PipelineState& at, float (&s)[kScores]) const {
    const uint64_t k = ptx::make_smem_desc<128>(tile_address(at), 0, 1024);
    const uint64_t q = ptx::make_smem_desc<128>(smem_ + L::kQOffset, 0, 1024);
    if (by_threads) {
      for (int32_t part = 0; part < kKvParts; ++part) consumer_wait(at, part);
      ptx::fence_view_async_shared();
    }
#pragma unroll
    for (int32_t part = 0; part < kKvParts; ++part) {
      consumer_wait(at, part);
      ptx::wgmma_fence();
#pragma unroll
      for (int32_t i = 4 * L::part_begin(part);
           i < min(4 * (L::part_begin(part) + L::part_size(part)), Traits::kDimQk / 16); ++i) {
        const uint64_t a = ptx::advance_desc(k, static_cast<uint32_t>(i / 4 * kColumnBlockBytes + i % 4 * 32));
        const uint64_t b = ptx::advance_desc(q, static_cast<uint32_t>(i / 4 * L::kQBlockBytes + i % 4 * 32));
        if (i == 0) {
          ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, a, b);
        } else {
          ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(s, a, b);
        }
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(s);
  }

  /// The same for fp8 keys, by mma.sync: a wgmma of 16 columns takes the tensor cores as long as one of many more. 64
  /// components at a time become a lane's A operands of four MMAs: the sixteen from 16t on (t = lane % 4), four a step.
  /// The lane's B operands are the same components of Q.
  __device__ __forceinline__ void gemm0_fp8(const PipelineState& at, float (&s)[kScores]) {
    constexpr int32_t kGroups = (kDsMla ? kHeadDimV : Traits::kDimQk) / 64;
    const int32_t token = lane_.token();
    const int32_t t = lane_.lane % 4;
    const uint32_t row = tile_address(at) + static_cast<uint32_t>(token * 128);
    // Of the lane's chunk of the first and the second 64 components of a column block.
    const uint32_t chunks[2] = {static_cast<uint32_t>((t ^ token) & 7) * 16,
                                static_cast<uint32_t>(((4 + t) ^ token) & 7) * 16};
    constexpr int32_t kAhead = kDsMla ? 1 : 2;  // groups; measured
    uint4 lows[kAhead];
    uint4 highs[kAhead];
    const auto load = [&](int32_t group) {
      if (group % (2 * L::kHalfColumnBlocks) == 0) consumer_wait(at, group / 2 / L::kHalfColumnBlocks);
      const uint32_t from = row + static_cast<uint32_t>(group / 2 * kColumnBlockBytes) + chunks[group % 2];
      lows[group % kAhead] = ptx::ld_shared_16(from);
      highs[group % kAhead] = ptx::ld_shared_16(from + 8 * 128);
    };
    float odd[kScores];     // sums of every second step: chains of dependent MMAs are half as long
    float scaled[kScores];  // fp8_ds_mla: of blocks, times their scales
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) s[i] = odd[i] = scaled[i] = 0.0f;
#pragma unroll
    for (int32_t group = 0; group < kAhead; ++group) load(group);
    if constexpr (kDsMla) load_block_scales(at, token);
#pragma unroll
    for (int32_t group = 0; group < kGroups; ++group) {
      const uint4& low = lows[group % kAhead];
      const uint4& high = highs[group % kAhead];
      uint32_t a[4][4];
      upcast_rows(low.x, high.x, a[0]);
      upcast_rows(low.y, high.y, a[1]);
      upcast_rows(low.z, high.z, a[2]);
      upcast_rows(low.w, high.w, a[3]);
      if (group + kAhead < kGroups) load(group + kAhead);  // on its way during these MMAs
#pragma unroll
      for (int32_t j = 0; j < kScores / 4; ++j) {  // eight packed rows
        const int32_t q_row = 8 * j + lane_.g();
        const uint4 q[2] = {
            ptx::ld_shared_16(smem_ + static_cast<uint32_t>(L::q_offset(q_row, 8 * group + 2 * t))),
            ptx::ld_shared_16(smem_ + static_cast<uint32_t>(L::q_offset(q_row, 8 * group + 2 * t + 1)))};
        mma_eight(s, j, a[0], q[0].x, q[0].y);
        mma_eight(odd, j, a[1], q[0].z, q[0].w);
        mma_eight(s, j, a[2], q[1].x, q[1].y);
        mma_eight(odd, j, a[3], q[1].z, q[1].w);
      }
      if constexpr (kDsMla) {
        if (group % 2 == 0) continue;
#pragma unroll
        for (int32_t i = 0; i < kScores; ++i) {
          scaled[i] = __fmaf_rn(__fadd_rn(s[i], odd[i]), block_scales_[lane_.token_of(i) / 8][group / 2], scaled[i]);
          s[i] = odd[i] = 0.0f;
        }
      }
    }
    if constexpr (kDsMla) {
      gemm0_rope(at, token, s, odd);
#pragma unroll
      for (int32_t i = 0; i < kScores; ++i) s[i] = __fadd_rn(s[i], scaled[i]);
    }
    if constexpr (!Traits::kHasRope) consumer_wait(at, kRope);  // it is empty: waited for so that no phase is missed
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) s[i] = __fadd_rn(s[i], odd[i]);
  }
  __device__ __forceinline__ void load_block_scales(const PipelineState& at, int32_t token) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const uint4 words = ptx::ld_shared_16(block_scales_of<Traits>(storage_, at.stage, token + 8 * i));
      const uint32_t all[kDsMlaBlocks] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int32_t block = 0; block < kDsMlaBlocks; ++block) block_scales_[i][block] = __uint_as_float(all[block]);
    }
  }
  /// The RoPE part of rows of fp8_ds_mla and of Q, bfloat16 both. A lane's components are those of gemm0_fp8.
  __device__ __forceinline__ void gemm0_rope(const PipelineState& at, int32_t token, float (&even)[kScores],
                                             float (&odd)[kScores]) const {
    consumer_wait(at, kRope);
    const uint32_t row = tile_address(at) + static_cast<uint32_t>(L::kPOffset + token * 128);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t chunk = lane_.lane % 4 * 2 + half;
      const uint32_t from = row + static_cast<uint32_t>(((chunk ^ token) & 7) * 16);
      const uint4 low = ptx::ld_shared_16(from);
      const uint4 high = ptx::ld_shared_16(from + 8 * 128);
      const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int32_t j = 0; j < kScores / 4; ++j) {
        const int32_t q_row = 8 * j + lane_.g();
        const uint4 q =
            ptx::ld_shared_16(smem_ + static_cast<uint32_t>(L::q_offset(q_row, kHeadDimV / kElementsPer16B + chunk)));
        mma_eight<__nv_bfloat16>(even, j, a[0], q.x, q.y);
        mma_eight<__nv_bfloat16>(odd, j, a[1], q.z, q.w);
      }
    }
  }
  /// Four neighbours of two rows, eight apart, as an A operand.
  static __device__ __forceinline__ void upcast_rows(uint32_t row, uint32_t other, uint32_t (&a)[4]) {
    upcast_fp8x4<kFp8>(row, a[0], a[2]);
    upcast_fp8x4<kFp8>(other, a[1], a[3]);
  }

  /// acc += A B^T by this warp, 16 rows, for packed rows 8j to 8j + 7.
  template <typename U = T>
  static __device__ __forceinline__ void mma_eight(float (&acc)[kScores], int32_t j, const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    float four[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) four[i] = acc[4 * j + i];
    ptx::mma_m16n8k16<U>(four, a, b0, b1);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) acc[4 * j + i] = four[i];
  }

  /// B operands of GEMM1's step of 16 tokens, for 16 packed rows a matrix: P is in the 128-byte swizzle.
  using POperands = uint32_t[kScores / 8][4];
  __device__ __forceinline__ void load_p(uint32_t p, uint32_t step, POperands& words) const {
    const uint32_t matrix = static_cast<uint32_t>(lane_.lane) / 8;  // whose rows' addresses this lane gives
#pragma unroll
    for (uint32_t j = 0; j < kScores / 8; ++j) {
      const uint32_t row = 16 * j + matrix / 2 * 8 + static_cast<uint32_t>(lane_.lane) % 8;
      ptx::ldmatrix_x4(words[j], p + row * 128 + ((2 * step + matrix % 2) ^ (row & 7)) * 16);
    }
  }

  /// Logits of one of this consumer's KV tiles become P, in shared memory over the tile's RoPE part, with TileStats.
  /// row_max nearly always stays as it is (lazy rescaling, decision 0040), so p is computed with it first. Where a sum
  /// of p says that row_max may have to grow, or there is none yet, the warpgroup begins again from the scores. Both
  /// ways come to the same bits.
  __device__ __forceinline__ void softmax(const KvTile& tile, float (&s)[kScores]) {
    float p[kScores];
    float sums[kRows] = {};
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) {
      const int32_t r = lane_.row_of(i);
      p[i] = ptx::ex2_approx(__fmaf_rn(s[i], scale_[r], -row_max_[r]));
      sums[r] = __fadd_rn(sums[r], p[i]);
    }
    bool grows = false;
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      grows = grows || __float_as_uint(sums[r]) > max_tile_sum_[r];  // NaN counts as more
    }
    if constexpr (kDsMla) grows = grows || max_scale_ > v_unit_;
    // The barrier also says that every warp has finished its GEMM0.
    rescales_ = ptx::named_barrier_any(kConsumerBarrier + consumer_, kWarpgroupThreads, grows);
    SwapAbStorage::TileStats& stats = storage_.swap_ab_stats[tile.number % kSlots];
    const bool writes_stats = lane_.warp == 0 && lane_.g() == 0;
    if (rescales_) [[unlikely]] {
      grow_row_max(s, sums);
#pragma unroll
      for (int32_t i = 0; i < kScores; ++i) p[i] = s[i];
      if (writes_stats) {
#pragma unroll
        for (int32_t r = 0; r < kRows; ++r)
          stats.rows[lane_.row(r)] = float2{row_max_[r], kDsMla ? factor_[r] * unit_factor_ : factor_[r]};
      }
    }
    if (writes_stats && lane_.lane == 0) stats.rescales = rescales_ ? 1 : 0;
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) row_sum_[r] = __fadd_rn(row_sum_[r], sums[r]);
    store_p(tile, p);
  }

  /// Finds a new row_max from the warpgroup's largest scores, which become p. `sums`: of the lane's p.
  __device__ __forceinline__ void grow_row_max(float (&s)[kScores], float (&sums)[kRows]) {
    float max[kRows];
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      const int32_t i = r / 2 * 4 + r % 2;
      max[r] = fmaxf(s[i], s[i + 2]);
#pragma unroll
      for (int32_t lanes = 4; lanes < 32; lanes *= 2) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(kAllLanes, max[r], lanes));
      }
      if (lane_.g() == 0) storage_.tile_max[kSplitsRoles ? 0 : consumer_][lane_.warp][lane_.row(r)] = max[r];
    }
    if constexpr (kDsMla) {
#pragma unroll
      for (int32_t lanes = 4; lanes < 32; lanes *= 2) {
        max_scale_ = fmaxf(max_scale_, __shfl_xor_sync(kAllLanes, max_scale_, lanes));
      }
      if (lane_.lane == 0) storage_.tile_scale[lane_.warp] = max_scale_;
    }
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    if constexpr (kDsMla) grow_v_unit();
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
#pragma unroll
      for (const auto& of_warp : storage_.tile_max[kSplitsRoles ? 0 : consumer_]) {
        max[r] = fmaxf(max[r], of_warp[lane_.row(r)]);
      }
      const float most = __fmaf_rn(max[r], scale_[r], -kPExponentBias<T>);
      const float before = row_max_[r];
      row_max_[r] = most > __fadd_rn(before, kRescaleThreshold<T>) ? most : before;
      factor_[r] = row_max_[r] == before ? 1.0f : ptx::ex2_approx(__fadd_rn(before, -row_max_[r]));
      row_sum_[r] = __fmul_rn(row_sum_[r], factor_[r]);
      sums[r] = 0.0f;
    }
#pragma unroll
    for (int32_t i = 0; i < kScores; ++i) {
      const int32_t r = lane_.row_of(i);
      s[i] = ptx::ex2_approx(__fmaf_rn(s[i], scale_[r], -finite_row_max(row_max_[r])));
      sums[r] = __fadd_rn(sums[r], s[i]);
    }
  }

  /// v_unit grows by more than it must, so that it seldom grows.
  __device__ __forceinline__ void grow_v_unit() {
    constexpr int32_t kMoreBits = 3;
    constexpr int32_t kMaxBits = 126;  // so that its reciprocal is a normal number
    float most = 0.0f;
#pragma unroll
    for (const float scale : storage_.tile_scale) most = fmaxf(most, scale);
    unit_factor_ = 1.0f;
    if (!(most > v_unit_)) return;
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(most) >> 23) - 127 + kMoreBits;
    const float before = v_unit_;
    v_unit_ = power_of_two(min(max(exponent, -kMaxBits), kMaxBits));
    unit_factor_ = before / v_unit_;
  }

  /// P^T to shared memory: packed rows are rows of 64 tokens, in the 128-byte swizzle.
  __device__ __forceinline__ void store_p(const KvTile& tile, const float (&p)[kScores]) const {
    const int32_t matrix = lane_.lane / 8;  // whose rows' addresses this lane gives
#pragma unroll
    for (int32_t i = 0; i < kScores; i += 8) {
      const uint32_t words[4] = {ptx::pack_two<T>(p[i], p[i + 1]), ptx::pack_two<T>(p[i + 2], p[i + 3]),
                                 ptx::pack_two<T>(p[i + 4], p[i + 5]), ptx::pack_two<T>(p[i + 6], p[i + 7])};
      const int32_t row = 2 * i + matrix / 2 * 8 + lane_.lane % 8;
      const int32_t chunk = 2 * lane_.warp + matrix % 2;
      ptx::stmatrix_x4_trans(p_address(tile) + static_cast<uint32_t>(row * 128 + ((chunk ^ row) & 7) * 16), words);
    }
    if constexpr (kDsMla) store_v_scales(tile);
    ptx::fence_view_async_shared();
    ptx::mbarrier_arrive(p_barrier(tile));
  }
  /// The four lanes of a token have a block each. Any scale of a token that no row sees becomes a finite one: its p is
  /// 0. A row that sees a token with a scale that is not finite has no finite logit.
  __device__ __forceinline__ void store_v_scales(const KvTile& tile) const {
    constexpr float kMost = 65504.0f;  // of float16
    const float per_unit = v_unit_ > 0.0f ? 1.0f / v_unit_ : 1.0f;
    const int32_t block = lane_.lane % kDsMlaBlocks;
    __half* const to = &storage_.v_scales[tile.number % kSlots][block][16 * lane_.warp + lane_.g()];
    const uint32_t from =
        block_scales_of<Traits>(storage_, tile.k.stage, lane_.token()) + 4 * static_cast<uint32_t>(block);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float scale = __uint_as_float(ptx::ld_shared_4(from + static_cast<uint32_t>(8 * i * kTokenScaleBytes)));
      to[8 * i] = __float2half_rn(fminf(fmaxf(scale * per_unit, -kMost), kMost));
    }
  }

  /// Waits for P of the other consumer's KV tile. Takes over the row_max that it has chosen.
  __device__ __forceinline__ void load_stats(const KvTile& tile) {
    ptx::mbarrier_wait_warp(p_barrier(tile), tile.number / kSlots & 1);
    const SwapAbStorage::TileStats& stats = storage_.swap_ab_stats[tile.number % kSlots];
    other_rescales_ = __any_sync(kAllLanes, stats.rescales != 0);
    if (!other_rescales_) return;
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r) {
      const float2 row = stats.rows[lane_.row(r)];
      row_max_[r] = row.x;
      other_factor_[r] = row.y;
      row_sum_[r] = __fmul_rn(row_sum_[r], row.y);
    }
  }

  /// O^T += V^T P^T of a KV tile, with this consumer's half of V.
  __device__ __forceinline__ void multiply_v(const WorkTileContext& context, const RowInfo& rows, const KvTile& tile) {
    const bool mine = !kSplitsRoles && is_mine(tile.number);
    if (mine) {
      ptx::mbarrier_wait_warp(p_barrier(tile), tile.number / kSlots & 1);  // all warps' P
      if (rescales_) rescale_o(factor_);
    } else if (other_rescales_) {
      rescale_o(other_factor_);
    }
    consumer_wait(tile.v, consumer_);
    if (!context.v_in_k) consumer_wait(tile.v, kRope);  // it is empty: waited for so that no phase is missed
    if (!context.v_in_k) consumer_release(tile.v, kRope);
    const uint32_t half = half_address(tile.v);
    if (context.custom_mask || is_mixed(context.visible, tile.first, kBlockN)) take_out_nonfinite(rows, tile, half);
    if (lane_.lane > 0) consumer_release(tile.k, kRope);  // lane 0 releases it once GEMM1 is complete
    if constexpr (kFp8 == Fp8::kNone) {
      if (context.by_threads) ptx::fence_view_async_shared();
      if (lane_.lane > 0) consumer_release(tile.v, consumer_);
      issue_gemm1(half, p_address(tile));
      wait_gemm1();
      if (lane_.lane == 0) consumer_release(tile.v, consumer_);
    } else {
      gemm1_fp8(half, tile);
      consumer_release(tile.v, consumer_);
    }
    if (lane_.lane == 0) consumer_release(tile.k, kRope);
  }

  __device__ __forceinline__ void issue_gemm1(uint32_t half, uint32_t p) {
    const uint64_t v = ptx::make_smem_desc<128>(half, kColumnBlockBytes, 1024);
    const uint64_t b = ptx::make_smem_desc<128>(__shfl_sync(kAllLanes, p, 0), 0, 1024);  // uniform
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
      for (int32_t block = 0; block < kSwapAbOBlocks; ++block) {
        ptx::wgmma_ss_transposed_a<T>(
            o_[block], ptx::advance_desc(v, static_cast<uint32_t>(block * kColumnBlockBytes) + step * 2048),
            ptx::advance_desc(b, step * 32));
      }
    }
    ptx::wgmma_commit();
  }

  /// The same for fp8 values. A lane reads eight neighbours of each of its four tokens of a step: two components of
  /// each block.
  __device__ __forceinline__ void gemm1_fp8(uint32_t half, const KvTile& tile) {
    const uint32_t p = p_address(tile);
    const int32_t first = lane_.component(0, 0);  // in fp8 data, the byte
    const int32_t tokens[2] = {fp8_token(2 * (lane_.lane % 4)), fp8_token(2 * (lane_.lane % 4) + 1)};
    uint32_t from[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      from[i] = half + static_cast<uint32_t>(tile_offset(tokens[i], first / 16) + first % 16);
    }
    uint2 two[2][2];  // tokens, eight apart; neighbours of GEMM1's K
    const auto load = [&](uint32_t step) {
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) two[k][i] = ptx::ld_shared_8(from[i] + step * 2048 + k * 1024);
      }
    };
    load(0);
#pragma unroll
    for (uint32_t step = 0; step < kBlockN / 16; ++step) {
      uint32_t a[kSwapAbOBlocks][4];
#pragma unroll
      for (int32_t k = 0; k < 2; ++k) {
        const uint2& x = two[k][0];
        const uint2& y = two[k][1];
        upcast_fp8x4<kFp8>(__byte_perm(x.x, y.x, 0x5140), a[0][2 * k], a[0][2 * k + 1]);
        upcast_fp8x4<kFp8>(__byte_perm(x.x, y.x, 0x7362), a[1][2 * k], a[1][2 * k + 1]);
        upcast_fp8x4<kFp8>(__byte_perm(x.y, y.y, 0x5140), a[2][2 * k], a[2][2 * k + 1]);
        upcast_fp8x4<kFp8>(__byte_perm(x.y, y.y, 0x7362), a[3][2 * k], a[3][2 * k + 1]);
      }
      if (step + 1 < kBlockN / 16) load(step + 1);  // on its way during these MMAs
      POperands b;
      load_p(p, step, b);
      if constexpr (kDsMla) scale_p(tile, step, b);
#pragma unroll
      for (int32_t block = 0; block < kSwapAbOBlocks; ++block) {
#pragma unroll
        for (int32_t j = 0; j < kScores / 4; ++j) {
          mma_eight(o_[block], j, a[block], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  /// Multiplies P by the scales of this warp's block: it has 64 components of the half of V.
  __device__ __forceinline__ void scale_p(const KvTile& tile, uint32_t step, POperands& words) const {
    const int32_t block = kDsMlaBlocks / kConsumers * consumer_ + lane_.component(0, 0) / kDsMlaBlockDim;
    const __half* const scales = storage_.v_scales[tile.number % kSlots][block] + 16 * step + 2 * (lane_.lane % 4);
#pragma unroll
    for (int32_t matrix = 0; matrix < 2; ++matrix) {
      const __half2 scale = *reinterpret_cast<const __half2*>(scales + 8 * matrix);
#pragma unroll
      for (auto& of_rows : words) {
        of_rows[matrix] = multiply_halves(of_rows[matrix], scale);
        of_rows[2 + matrix] = multiply_halves(of_rows[2 + matrix], scale);
      }
    }
  }

  __device__ __forceinline__ void wait_gemm1() {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& block : o_) ptx::warpgroup_fence_operand(block);
  }

  __device__ __forceinline__ void rescale_o(const float (&factor)[kRows]) {
#pragma unroll
    for (auto& block : o_) {
#pragma unroll
      for (int32_t i = 0; i < kScores; ++i) block[i] = __fmul_rn(block[i], factor[lane_.row_of(i)]);
      ptx::warpgroup_fence_operand(block);  // complete before the wgmma_fence that follows
    }
  }

  __device__ __forceinline__ void multiply_o(float by) {
#pragma unroll
    for (auto& block : o_) {
#pragma unroll
      for (float& value : block) value = __fmul_rn(value, by);
    }
  }

  /// Moves the NaN and Inf of this consumer's half of V to the accumulators of the rows that see them. P of the tile is
  /// complete here, so nobody reads the tile as keys any more.
  __device__ __forceinline__ void take_out_nonfinite(const RowInfo& rows, const KvTile& tile, uint32_t half) {
    if (*reinterpret_cast<const uint32_t*>(storage_.nonfinite[tile.v.stage][consumer_]) == 0) return;
    add_nonfinite(params_, rows, lane_, half, tile.first, o_);
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    constexpr int32_t kWords = L::kHalfColumnBlocks * kColumnBlockBytes / 4;
    zero_nonfinite<T, kWords, kWarpgroupThreads, kFp8>(half, static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kConsumerBarrier + consumer_, kWarpgroupThreads);
    ptx::fence_view_async_shared();
  }

  /// Adds row_sum over lanes, warps and the consumers that have computed P. Those that have not learn row_max too.
  __device__ __forceinline__ void reduce_row_sum(int32_t number) {
    const int32_t slot = number % kWorkTileSlots;
    auto& shared = storage_.warp_row_sum[slot];
    const uint32_t full = ptx::shared_address(&storage_.swap_ab_row_sum_full[slot]);
    if constexpr (ComputesP) {
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (int32_t lanes = 4; lanes < 32; lanes *= 2) {
          row_sum_[r] = __fadd_rn(row_sum_[r], __shfl_xor_sync(kAllLanes, row_sum_[r], lanes));
        }
        if (lane_.g() != 0) continue;
        const int32_t row = lane_.row(r);
        shared[(kSplitsRoles ? 0 : consumer_ * kWarpgroupWarps) + lane_.warp][row] = row_sum_[r];
        if (kSplitsRoles && lane_.warp == 0) storage_.row_max[slot][row] = row_max_[r];
      }
      if constexpr (kDsMla) {
        if (lane_.warp == 0 && lane_.lane == 0) storage_.v_unit[slot] = v_unit_;
      }
      ptx::mbarrier_arrive(full);
    }
    if constexpr (kMultiplies) {
      ptx::mbarrier_wait(full, number / kWorkTileSlots & 1);
      constexpr int32_t kCount = (kSplitsRoles ? 1 : kConsumers) * kWarpgroupWarps;
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
        const int32_t row = lane_.row(r);
        row_sum_[r] = 0.0f;
#pragma unroll
        for (int32_t i = 0; i < kCount; ++i) {
          row_sum_[r] = __fadd_rn(row_sum_[r], shared[i][row]);
        }
        if (kSplitsRoles) row_max_[r] = storage_.row_max[slot][row];
      }
      if constexpr (kDsMla) multiply_o(storage_.v_unit[slot]);
    }
  }

  __device__ __forceinline__ void release_q() const {
    if (lane_.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.q_empty), 32);
  }
  __device__ __forceinline__ void consumer_wait(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_wait_warp(kv_full_ + kv_barrier_offset(at, part), at.parity);
  }
  /// Releases a part by this lane.
  __device__ __forceinline__ void consumer_release(const PipelineState& at, int32_t part) const {
    ptx::mbarrier_arrive(kv_empty_ + kv_barrier_offset(at, part));
  }
  __device__ __forceinline__ uint32_t tile_address(const PipelineState& at) const {
    return smem_ + at.stage * static_cast<uint32_t>(L::kTileBytes);
  }
  __device__ __forceinline__ uint32_t half_address(const PipelineState& at) const {
    return tile_address(at) + static_cast<uint32_t>(consumer_ * L::kHalfColumnBlocks * kColumnBlockBytes);
  }
  __device__ __forceinline__ uint32_t p_address(const KvTile& tile) const {
    return tile_address(tile.k) + static_cast<uint32_t>(L::kPOffset);
  }
  /// The barrier in p_full of a KV tile's P, which both consumers wait for.
  __device__ __forceinline__ uint32_t p_barrier(const KvTile& tile) const {
    return p_full_ + 8 * (tile.number % kSlots);
  }

  const AttentionParams& params_;
  typename Traits::Storage& storage_;
  const int32_t consumer_;
  const uint32_t smem_;
  const uint32_t kv_full_;
  const uint32_t kv_empty_;
  const uint32_t p_full_;
  const SwapAbLane<Traits> lane_;
  const bool general_;            ///< there is a soft cap, ALiBi or a custom mask
  bool rescales_ = false;         ///< whether factor_ is not 1
  bool other_rescales_ = false;   ///< of the other consumer's last KV tile
  uint32_t num_kv_tiles_ = 0;     ///< of earlier work tiles
  uint32_t num_stages_used_ = 0;  ///< tiles that they have had in the KV pipeline
  float row_max_[kRows];          ///< what the exponents of the lane's rows subtract
  float row_sum_[kRows];          ///< of this consumer's tiles, this lane's share, relative to row_max_
  float factor_[kRows];           ///< that row_sum and accumulators take before this consumer's KV tile is added
  float other_factor_[kRows];     ///< the same for the other consumer's
  uint32_t max_tile_sum_[kRows];  ///< bits of kMaxTileSum; rows beyond the work tile's request nothing
  float scale_[kRows];            ///< of scores, to base-2 logits; positive
  float o_[kSwapAbOBlocks][kScores];
  // fp8_ds_mla:
  float block_scales_[2][kDsMlaBlocks];  ///< of the lane's two tokens of the KV tile
  float max_scale_;                      ///< the largest of them that count
  float unit_factor_;                    ///< that accumulators take because v_unit has grown
  /// Values are multiplied in this unit, a power of two, so that p times a block scale keeps to float16's range. 0: no
  /// key yet.
  float v_unit_ = 0.0f;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
