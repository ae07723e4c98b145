#pragma once

#include "kernels/cuda/sm90/prefill/row_end.cuh"
#include "kernels/cuda/sm90/prefill/scores.cuh"

/// A math warpgroup: 64 of an item's rows against all its tiles, from the last to the first. Weights stay in registers;
/// the product with a tile's values runs while the next tile's scores become weights.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant>
class MathGroup {
 protected:
  static constexpr HeadDims kDims{DimQk, DimV};
  static constexpr SharedLayout kLayout = shared_layout(kDims);
  static constexpr int32_t kTokens = tile_tokens(kDims);
  static constexpr int32_t kScores = kTokens / 2;  ///< of a lane
  static constexpr int32_t kValues = DimV / 2;
  using Place = RingPlace<stages(kDims)>;

 public:
  __device__ __forceinline__ MathGroup(const PrefillParams& params, unsigned char* memory, SharedState& state)
      : params_(params),
        state_(state),
        group_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / kGroupThreads - 1, 0)),
        cap_(params.attention.soft_cap),
        memory_(ptx::shared_address(memory)),
        keys_ring_(ptx::shared_address(&state.keys)),
        values_ring_(ptx::shared_address(&state.values)),
        queries_(memory_ + static_cast<uint32_t>(kLayout.queries + group_ * query_bytes(DimQk))),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        first_row_(group_ * kGroupRows + static_cast<int32_t>(threadIdx.x) % kGroupThreads / 32 * 16 + lane_ / 4) {}

  __device__ __forceinline__ void run() { run_as(*this); }

 protected:
  /// Where a walk along an item's tiles is.
  struct WalkPlace {
    const ItemContext& context;
    const RowInfo& rows;
    uint64_t q = 0;
    int32_t first = 0;  ///< token of the tile whose weights are the last made
    bool edge = false;  ///< whose values may need more than a product
    bool by_threads = false;
  };
  /// What steps along an item's tiles share.
  struct Walk : WalkPlace {
    uint32_t p[kTokens / 4] = {};
    uint32_t sights[2][kTokens / 32] = {};  ///< kAny: which of the present tile's tokens the lane's rows see
  };

  /// `self`: this, as the class whose open, step and close are to be called.
  template <typename Self>
  __device__ __forceinline__ void run_as(Self& self) {
    RunningState<kValues> running;
    if (group_ == 1) ptx::named_barrier_arrive(kTurns, kMathGroups * kGroupThreads);  // the first begins
    for (int32_t number = 0;; ++number) {
      const int32_t slot = number % kItems;
      ptx::mbarrier_wait_warp(ptx::shared_address(state_.item_full) + 8 * slot, number / kItems & 1);
      const ItemContext& context = state_.contexts[slot];
      if (context.all_done) return;
      const RowInfo& rows = state_.rows[slot];
      const ResultPlace place{
          queries_ + static_cast<uint32_t>(slot % query_places(kDims) * kMathGroups * query_bytes(DimQk)),
          ptx::shared_address(state_.item_empty) + 8 * static_cast<uint32_t>(slot), group_, first_row_, lane_};
      begin_item(context, rows);
      if (context.num_tiles > 0) {
        typename Self::Walk walk{{context, rows}};
        self.open(walk, place.shared);
        walk_tiles(self, walk);
        PiecePlaces<DimV> places;
        const PlainEnd end = self.close(walk, place, places);
        if (context.plain_end) [[likely]] {
          end_plain_item<DimV>(context, end, places, o_, place);
          continue;
        }
      }
      end_item<DimV>(params_, context, rows, state_row_, o_, place, running);
    }
  }

  __device__ __forceinline__ void begin_item(const ItemContext& context, const RowInfo& rows) {
    if (!context.queries_by_boxes) ptx::fence_view_async_shared();
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      state_row_.top[h] = -INFINITY;
      state_row_.sum[h] = 0.0f;
      state_row_.scale[h] = 1.0f;
      state_row_.slope[h] = 0.0f;
      state_row_.most_sum[h] = 0xffffffffu;
      state_row_.logit_slope[h] = 0.0f;
      state_row_.position[h] = 0;
      const int32_t row = first_row_ + 8 * h;
      if (row >= context.num_rows) continue;
      state_row_.most_sum[h] = __float_as_uint(kMostSum<T>);
      const float scale = rows.scale[row];
      state_row_.scale[h] = !has_scale(kVariant) ? scale : (fabsf(scale) >= kLeastScale ? fabsf(scale) : 1.0f);
      if constexpr (has_fixed_top<T>(kVariant)) {
        state_row_.top[h] = fixed_top(cap_, rows.visible_begin[row] < rows.visible_end[row]);
      }
      if constexpr (kVariant == Variant::kAny) state_row_.slope[h] = rows.slope[row];
      if constexpr (kVariant == Variant::kAlibi) {
        state_row_.slope[h] = __fmul_rn(rows.slope[row], ptx::rcp_approx(state_row_.scale[h]));
        state_row_.logit_slope[h] = rows.slope[row];
        state_row_.position[h] = static_cast<int32_t>(rows.position[row] - context.first_pos) - 2 * (lane_ % 4);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kValues; ++i) o_[i] = 0.0f;
  }

  /// To an item's last tile.
  __device__ __forceinline__ static void begin_walk(WalkPlace& walk) {
    const ItemContext& context = walk.context;
    walk.first = (context.first_tile + context.num_tiles - 1) * kTokens;
    walk.edge = is_edge(context, walk.first);
    walk.by_threads = context.by_threads;
  }

  /// The first product and its weights.
  __device__ __forceinline__ void open(Walk& walk, uint32_t queries) {
    keep_uniform(keys_);
    keep_uniform(values_);
    begin_walk(walk);
    walk.q = ptx::make_smem_desc<span(DimQk)>(queries, 0, span_step(DimQk));
    float s[kScores];
    float factor[2];
    const uint32_t keys = await(keys_ring_, keys_);
    if (walk.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    multiply_keys(walk.q, keys, s);
    ptx::wgmma_wait<0>(s);
    release_keys(walk, keys);
    if constexpr (kVariant == Variant::kPlain) {
      if (walk.context.turned) [[unlikely]]
        turn(walk.rows, s);
      const int32_t column = walk.first + 2 * (lane_ % 4);
      if (walk.context.sight.all_begin <= walk.first) {
        mask_ends(walk.rows, first_row_, column, s);
      } else {
        mask_scores(walk.rows, first_row_, column, -INFINITY, s);
      }
      constexpr float kNone[2] = {0.0f, 0.0f};
      take_in<T, kVariant>(state_row_, cap_, kNone, s, factor);
    } else {
      to_weights<true>(walk, walk.first, s, factor);
    }
    pack(s, walk.p);
  }

  /// From an item's last tile to its first. Between tiles there is no time to look anything up, and between a product's
  /// begin and its end nothing may branch, or the compiler waits for it first: so tiles that are masked and those that
  /// are not have loops of their own, and where they begin is known before.
  template <typename Self>
  __device__ __forceinline__ void walk_tiles(Self& self, typename Self::Walk& walk) {
    const ItemContext& context = walk.context;
    const int32_t begin = context.first_tile;
    int32_t tile = begin + context.num_tiles - 1;
    int32_t whole_begin = begin;  // tiles [whole_begin, whole_end) are not masked
    int32_t whole_end = begin;
    if (!masks_all(context)) {
      whole_begin = max(begin, (context.sight.all_begin + kTokens - 1) / kTokens);
      whole_end = max(begin, (kVariant == Variant::kAlibi ? context.whole_end : context.sight.all_end) / kTokens);
    }
#pragma unroll 1
    for (int32_t until = whole_end;; until = begin) {
#pragma unroll 1
      for (; tile > until; --tile) self.template step<true>(walk);
      if (tile == begin) return;
      if (tile <= whole_begin) continue;
      if (walk.edge) self.set_special_apart(walk.rows, walk.first);
      walk.edge = false;
#pragma unroll 1
      for (; tile > whole_begin; --tile) self.template step<false>(walk);
    }
  }

  /// The last product, begun alone.
  __device__ __forceinline__ PlainEnd close(Walk& walk, const ResultPlace& place, PiecePlaces<DimV>& places) {
    if (walk.edge) set_special_apart(walk.rows, walk.first);
    const uint32_t values = await(values_ring_, values_);
    if (walk.by_threads) [[unlikely]]
      ptx::fence_view_async_shared();
    multiply_values(values, walk.p);
    const PlainEnd end = prepare_plain_end(walk.rows, state_row_, place);
    places = find_places<DimV>(walk.context, walk.rows, place);
    ptx::named_barrier_sync(kGroupMeeting + group_, kGroupThreads);  // see write_pieces
    ptx::wgmma_wait<0>(o_);
    release(values_ring_, values);
    return end;
  }

  /// The next tile's scores become weights while the last one's values are multiplied. The two warpgroups take turns to
  /// begin products, so that one's softmax runs beside the other's products.
  template <bool Masked>
  __device__ __forceinline__ void step(Walk& walk) {
    float s[kScores];
    const uint32_t keys = await(keys_ring_, keys_);
    if constexpr (Masked) {
      if (walk.edge) [[unlikely]]
        set_special_apart(walk.rows, walk.first);
      walk.edge = is_edge(walk.context, walk.first - kTokens);
    }
    if (walk.by_threads) [[unlikely]] {
      ptx::mbarrier_wait_warp(values_ring_ + 8 * values_.stage, values_.parity);
      ptx::fence_view_async_shared();
    }
    walk.first -= kTokens;
    ptx::named_barrier_sync(kTurns + group_, kMathGroups * kGroupThreads);
    multiply_keys(walk.q, keys, s);
    const uint32_t values = await(values_ring_, values_);
    multiply_values(values, walk.p);
    // A turn ends when its scores are there; where weights take longer than products, as soon as these are begun: the
    // compiler would put an arrival that comes behind the wait behind all weights.
    constexpr bool kLongTurns = has_scale(kVariant);
    if constexpr (!kLongTurns) ptx::named_barrier_arrive(kTurns + 1 - group_, kMathGroups * kGroupThreads);
    ptx::wgmma_wait<1>(s);
    if constexpr (kLongTurns) ptx::named_barrier_arrive(kTurns + 1 - group_, kMathGroups * kGroupThreads);
    release_keys(walk, keys);
    if constexpr (!Masked && keeps_top(kVariant)) {
      float bias[2] = {0.0f, 0.0f};
      to_logits<false>(walk, walk.first, s, bias);
      to_weights_of_tops(walk, bias, s, values);
    } else {
      float factor[2];
      to_weights<Masked>(walk, walk.first, s, factor);
      ptx::wgmma_wait<0>(o_);
      release(values_ring_, values);
      pack(s, walk.p);
      if constexpr (!has_fixed_top<T>(kVariant)) rescale(factor);
    }
  }

  /// Sums of values, when tops have changed.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int32_t i = 0; i < kValues; ++i) o_[i] = __fmul_rn(o_[i], factor[i / 2 % 2]);
  }

  /// Scores become weights by their rows' tops as they are: with keeps_top they nearly always stay, and no maximum is
  /// found and nothing multiplied. Scores are kept: where sums say that a top may have to follow, or there is none yet,
  /// the warp goes the long way, which comes to the same bits where tops stay. Gives the tile of values back as soon
  /// as the product with them is through.
  __device__ __forceinline__ void to_weights_of_tops(Walk& walk, const float (&bias)[2], float (&s)[kScores],
                                                     uint32_t values) {
    constexpr int32_t kEarly = kScores / 4;  // weights made while the product still reads the last ones
    const float add[2] = {added<kVariant>(bias[0], state_row_.top[0]), added<kVariant>(bias[1], state_row_.top[1])};
    const auto weight = [&](int32_t i) {
      const int32_t h = i / 2 % 2;
      return ptx::ex2_approx(logit_and<kVariant>(add[h], s[i], state_row_.scale[h], cap_));
    };
    float early[kEarly];
    float sums[4];
#pragma unroll
    for (int32_t i = 0; i < kEarly; ++i) {
      early[i] = weight(i);
      sums[i % 4] = i < 4 ? early[i] : __fadd_rn(sums[i % 4], early[i]);
    }
    // As ptx::order_wait_after, which the compiler sees through here. No weight is -0.
    if (__float_as_uint(early[kEarly - 1]) == __float_as_uint(-0.0f)) ptx::mbarrier_arrive(values_ring_ + kToEmpty);
    ptx::wgmma_wait<0>(o_);
    release(values_ring_, values);
#pragma unroll
    for (int32_t i = 0; i < kEarly; i += 2) walk.p[i / 2] = ptx::pack_two<T>(early[i], early[i + 1]);
#pragma unroll
    for (int32_t i = kEarly; i < kScores; i += 2) {
      const float low = weight(i);
      const float high = weight(i + 1);
      sums[i % 4] = __fadd_rn(sums[i % 4], low);
      sums[i % 4 + 1] = __fadd_rn(sums[i % 4 + 1], high);
      walk.p[i / 2] = ptx::pack_two<T>(low, high);
    }
    const float sum[2] = {__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])};
    const bool grows =  // as bits: NaN is more, too
        __float_as_uint(sum[0]) > state_row_.most_sum[0] || __float_as_uint(sum[1]) > state_row_.most_sum[1];
    if (__any_sync(kAllLanes, grows)) [[unlikely]] {
      float factor[2];
      take_in<T, kVariant>(state_row_, cap_, bias, s, factor);
      pack(s, walk.p);
      rescale(factor);
    } else {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) state_row_.sum[h] = __fadd_rn(state_row_.sum[h], sum[h]);
    }
  }

  /// Whether the tile's values may hold what must not be multiplied.
  __device__ __forceinline__ static bool is_edge(const ItemContext& context, int32_t first) {
    return context.custom || needs_mask(context.sight, first, kTokens);
  }
  /// Whether all of an item's tiles go the way of those that are masked.
  __device__ __forceinline__ static bool masks_all(const ItemContext& context) {
    if constexpr (kVariant == Variant::kAny) return true;
    if (has_scale(kVariant) && context.turned) return true;
    return kVariant == Variant::kAlibi && context.shard.world != 1;
  }

  /// Tells the compiler that all lanes have the same, so that what is made of it takes no registers of theirs: what
  /// lies between items makes it forget.
  template <int32_t Stages>
  __device__ __forceinline__ static void keep_uniform(RingPlace<Stages>& place) {
    place.stage = __shfl_sync(kAllLanes, place.stage, 0);
    place.parity = __shfl_sync(kAllLanes, place.parity, 0);
  }
  /// Number in its ring of the next tile, which is there then.
  template <int32_t Stages>
  __device__ __forceinline__ static uint32_t await(uint32_t ring, RingPlace<Stages>& place) {
    const uint32_t stage = place.stage;
    ptx::mbarrier_wait_warp(ring + 8 * stage, place.parity);
    place.step();
    return stage;
  }
  /// This warp has done with the tile.
  __device__ __forceinline__ void release(uint32_t ring, uint32_t stage) const {
    if (lane_ == 0) ptx::mbarrier_arrive(ring + kToEmpty + 8 * stage);
  }

  /// The same of keys, once what is known of their tile is read too: by every lane, which arrives for itself then.
  __device__ __forceinline__ void release_keys(Walk& walk, uint32_t stage) const {
    if constexpr (kVariant == Variant::kAny) {
      constexpr uint32_t kWords = kTokens / 32;
      const uint32_t first = memory_ + static_cast<uint32_t>(kLayout.sights) +
                             4 * kWords * (stage * kRows + static_cast<uint32_t>(first_row_));
#pragma unroll
      for (uint32_t w = 0; w < kWords; ++w) {
        walk.sights[0][w] = ptx::ld_shared_4(first + 4 * w);
        walk.sights[1][w] = ptx::ld_shared_4(first + 4 * (8 * kWords + w));
      }
      ptx::mbarrier_arrive(keys_ring_ + kToEmpty + 8 * stage);
    } else {
      release(keys_ring_, stage);
    }
  }

  __device__ __forceinline__ uint32_t keys_address(uint32_t stage) const {
    return memory_ + static_cast<uint32_t>(kLayout.keys) + stage * static_cast<uint32_t>(tile_bytes(kDims, DimQk));
  }
  __device__ __forceinline__ uint32_t values_address(uint32_t stage) const {
    return memory_ + static_cast<uint32_t>(kLayout.values) + stage * static_cast<uint32_t>(tile_bytes(kDims, DimV));
  }

  /// Begins the product of the queries with a tile of keys.
  __device__ __forceinline__ void multiply_keys(uint64_t q, uint32_t stage, float (&s)[kScores]) const {
    constexpr uint32_t kSteps = span(DimQk) / 32;  // of 16 components, of a span
    const uint64_t k = ptx::make_smem_desc<span(DimQk)>(keys_address(stage), 0, eight_bytes(DimQk));
    ptx::wgmma_fence();
    ptx::wgmma_ss<T, ptx::ScaleOut::kZero>(s, q, k);
#pragma unroll
    for (uint32_t step = 1; step < DimQk / 16; ++step) {
      ptx::wgmma_ss<T, ptx::ScaleOut::kOne>(
          s, ptx::advance_desc(q, step / kSteps * query_step(DimQk) + step % kSteps * 32),
          ptx::advance_desc(k, step / kSteps * span_step(DimQk) + step % kSteps * 32));
    }
    ptx::wgmma_commit();
  }

  /// Begins the product of weights with a tile of values.
  __device__ __forceinline__ void multiply_values(uint32_t stage, const uint32_t (&p)[kScores / 2]) {
    const uint64_t v = ptx::make_smem_desc<span(DimV)>(values_address(stage), span_step(DimV), eight_bytes(DimV));
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t step = 0; step < kTokens / 16; ++step) {
      const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
      ptx::wgmma_rs<T>(o_, a, ptx::advance_desc(v, step * 2 * eight_bytes(DimV)));
    }
    ptx::wgmma_commit();
  }

  /// Scores of the tile that begins at `first` become weights.
  template <bool Masked>
  __device__ __forceinline__ void to_weights(const Walk& walk, int32_t first, float (&s)[kScores], float (&factor)[2]) {
    if constexpr (has_fixed_top<T>(kVariant)) {
      take_in_capped<Masked>(state_row_, cap_, walk.rows, first_row_, first + 2 * (lane_ % 4), s);
      ptx::order_wait_after(state_row_.sum[1], memory_);
    } else {
      float bias[2] = {0.0f, 0.0f};
      to_logits<Masked>(walk, first, s, bias);
      take_in<T, kVariant>(state_row_, cap_, bias, s, factor);
    }
  }

  /// Scores become what `take_in` wants, masked; kAlibi: their logits lack `bias`.
  template <bool Masked>
  __device__ __forceinline__ void to_logits(const Walk& walk, int32_t first, float (&s)[kScores], float (&bias)[2]) {
    const int32_t column = first + 2 * (lane_ % 4);
    const ItemContext& context = walk.context;
    const RowInfo& rows = walk.rows;
    if constexpr (Masked && kVariant == Variant::kPlain) turn(rows, s);
    if constexpr (Masked && kVariant == Variant::kAlibi) {
      if (context.turned) [[unlikely]]
        turn(rows, s);
    }
    if constexpr (kVariant == Variant::kCap) {
      if constexpr (Masked) mask_scores(rows, first_row_, column, 0.0f, s);  // see above
      cap_scores<Masked>(cap_, state_row_.scale, s);
    } else if constexpr (kVariant == Variant::kAlibi) {
      if (Masked && context.shard.world != 1) {
        constexpr float kAsTheyAre[2] = {1.0f, 1.0f};
        add_bias_of_shard(context, rows, first_row_, column, kAsTheyAre, state_row_.slope, s);
      } else {
        const int32_t apart[2] = {state_row_.position[0] - first, state_row_.position[1] - first};
        add_bias<Masked>(state_row_.slope, state_row_.logit_slope, apart, s, bias);
      }
    } else if constexpr (kVariant == Variant::kAny) {
      to_any_logits(params_.attention, cap_, context, rows, first_row_, column, state_row_.scale, state_row_.slope, s);
      mask_by_bits(walk.sights, lane_, s);
    }
    if constexpr (Masked && kVariant != Variant::kAny) {
      if (kVariant == Variant::kAlibi && context.sight.all_begin <= first) {
        mask_ends(rows, first_row_, column, s);
      } else {
        mask_scores(rows, first_row_, column, kVariant == Variant::kCap ? INFINITY : -INFINITY, s);
      }
    }
  }

  /// Rows whose scale is negative: scores change their sign; is next to nothing, 0 or NaN: they are scaled here.
  __device__ __forceinline__ void turn(const RowInfo& rows, float (&s)[kScores]) const {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const float scale = rows.scale[first_row_ + 8 * h];
      const float by = scale >= kLeastScale ? 1.0f : (scale <= -kLeastScale ? -1.0f : scale);
#pragma unroll
      for (int32_t i = 0; i < kScores; i += 4) {
        s[i + 2 * h] = __fmul_rn(s[i + 2 * h], by);
        s[i + 2 * h + 1] = __fmul_rn(s[i + 2 * h + 1], by);
      }
    }
  }

  /// Weights as the product with values wants them.
  __device__ __forceinline__ static void pack(const float (&s)[kScores], uint32_t (&p)[kScores / 2]) {
#pragma unroll
    for (int32_t i = 0; i < kScores / 2; ++i) p[i] = ptx::pack_two<T>(s[2 * i], s[2 * i + 1]);
  }

  /// Before the values of the tile that begins at `first`, the next of the ring, are multiplied.
  __device__ __forceinline__ void set_special_apart(const RowInfo& rows, int32_t first) {
    ptx::mbarrier_wait_warp(values_ring_ + 8 * values_.stage, values_.parity);
    // The lane that gives the tile back is the one that reads.
    const uint32_t flags = lane_ == 0 ? *reinterpret_cast<const uint32_t*>(state_.special[values_.stage]) : 0;
    if (__shfl_sync(kAllLanes, flags, 0) == 0) [[likely]]
      return;
    const uint32_t tile = values_address(values_.stage);
    add_special<T, DimV, kTokens>(params_.attention, rows, tile, first, first_row_, o_);
    ptx::named_barrier_sync(kMathMeeting, kMathGroups * kGroupThreads);
    clear_special<T, DimV, kTokens>(tile, static_cast<int32_t>(threadIdx.x) - kGroupThreads);
    ptx::fence_view_async_shared();
    ptx::named_barrier_sync(kMathMeeting, kMathGroups * kGroupThreads);
    ptx::fence_view_async_shared();
  }

  const PrefillParams& params_;
  SharedState& state_;
  const int32_t group_;
  const Cap cap_;
  const uint32_t memory_;
  /// Addresses of barriers, see Ring: short enough for a warp not to branch around arrivals.
  const uint32_t keys_ring_;
  const uint32_t values_ring_;
  const uint32_t queries_;  ///< of the group, of the first slot
  const int32_t lane_;
  const int32_t first_row_;  ///< of the lane; the other is 8 further
  Place keys_;               ///< of the next tile
  Place values_;
  RowState state_row_;
  float o_[kValues];
};

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
