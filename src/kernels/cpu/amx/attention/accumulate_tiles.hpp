#pragma once

#include "kernels/cpu/amx/attention/tile_scores.hpp"
#include "kernels/cpu/amx/attention/tile_softmax.hpp"
#include "kernels/cpu/amx/attention/tile_values.hpp"
#include "kernels/cpu/amx/attention/tile_work.hpp"
#include "kernels/cpu/amx/attention/widening_ring.hpp"

/// One item, step by step, two strips at a time. `Tiles` is simd::AmxTiles, or a stand-in in tests.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Up to so many rows an item waits for memory rather than arithmetic.
inline constexpr int32_t kFewAmxRows = 2 * kStripRows;

/// What is the same for all of an item.
struct AmxItem {
  const ItemCall& call;
  OwnScratch own;
  int32_t dim_steps;
  bool scaled;     ///< some row has a value scale
  bool transform;  ///< logits are more than scaled scores
};

FOLIO_INLINE AmxItem begin_item(const ItemCall& call) {
  AmxItem item{call, carve_own(call.scratch.own, call.tile_rows, call.head_dim_qk, call.head_dim_v),
               rounded_up(call.head_dim_qk, kDimStep) / kDimStep, false, call.soft_cap != 0.0f || call.alibi};
  const int32_t rows = rounded_up(call.num_rows, kStripRows);
  for (int32_t r = 0; r < rows; ++r) {
    const bool real = r < call.num_rows;
    const float value_scale = real ? call.rows[r].value_scale : 1.0f;
    item.own.logit_scale[r] = real ? call.rows[r].logit_scale : 0.0f;
    item.own.value_scale[r] = value_scale != value_scale ? __builtin_nanf("") : value_scale;  // see pack_bfloat16
    item.scaled |= value_scale != 1.0f;
  }
  return item;
}

template <class A>
FOLIO_INLINE void weigh_strip(const AmxItem& item, const ReadyTokens& ready, const StripSight& sight, int32_t r,
                              const StripReference& reference, const float* scores, uint16_t* weights, A& ahead) {
  const float* const value_scales = item.own.value_scale + r;
  if (sight.masked) {
    make_weights<true, true>(item.call, ready, sight, r, reference, scores, value_scales, weights, ahead);
  } else if (item.scaled) {
    make_weights<false, true>(item.call, ready, sight, r, reference, scores, value_scales, weights, ahead);
  } else {
    make_weights<false, false>(item.call, ready, sight, r, reference, scores, value_scales, weights, ahead);
  }
}

/// What a strip sees, and the references that its rows get, of one tile.
struct StripTile {
  StripSight sight;
  StripReference reference;
};

/// Finishes the scores of kStrips strips and raises their references; true if sums so far are to be rescaled.
template <int kStrips>
FOLIO_INLINE bool refer(const AmxItem& item, const ReadyTokens& ready, int32_t r, float* scores, StripTile* strips) {
  const ItemCall& call = item.call;
  uint32_t raised = 0;
  for (int s = 0; s < kStrips; ++s) {
    const int32_t first = r + s * kStripRows;
    const int32_t rows = smaller(call.num_rows - first, kStripRows);
    float* const strip_scores = scores + s * kTileTokens * kStripRows;
    Vec logit_scale = load<Vec>(item.own.logit_scale + first);
    if (item.transform) {
      finish_logits(call, ready.tile, first, rows, logit_scale, strip_scores);
      logit_scale = splat(1.0f);
    } else {
      logit_scale *= splat(kLog2E);
    }
    strips[s].reference = raise_reference(call, ready, strips[s].sight, first, logit_scale, strip_scores);
    strips[s].reference.raised &= static_cast<__mmask16>(bit_range(0, rows));
    raised |= strips[s].reference.raised;
  }
  return raised != 0;
}

/// What kStrips strips see of a tile; false if nothing.
template <int kStrips>
FOLIO_INLINE bool look(const ItemCall& call, const ReadyTokens& ready, int32_t r, StripTile* strips) {
  bool any = false;
  for (int s = 0; s < kStrips; ++s) {
    const int32_t first = r + s * kStripRows;
    strips[s].sight = sight_of_strip(ready, first, smaller(call.num_rows - first, kStripRows));
    any |= strips[s].sight.any;
  }
  return any;
}

template <int kStrips>
FOLIO_INLINE void rescale(const ItemCall& call, int32_t r, const StripTile* strips) {
  for (int s = 0; s < kStrips; ++s) {
    rescale_sums(call, r + s * kStripRows, strips[s].reference.raised, strips[s].reference.rescale);
  }
}

FOLIO_INLINE const unsigned char* queries_of(const AmxItem& item, int32_t r) {
  return reinterpret_cast<const unsigned char*>(item.call.scratch.q) +
         int64_t{r / kStripRows} * item.dim_steps * kTileBytes;
}

/// One step for kStrips strips from row r on, one thing after the other.
template <class Tiles, int kStrips, class A>
static void accumulate_strips(const AmxItem& item, const Step& step, int32_t r, A& ahead) {
  const ItemCall& call = item.call;
  Pending pending;
  for (int32_t i = 0; i < step.count; ++i) {
    const ReadyTokens& ready = step.tiles[i];
    StripTile strips[kStrips];
    if (!look<kStrips>(call, ready, r, strips)) continue;
    make_tile_scores<Tiles, kStrips>(queries_of(item, r), item.dim_steps, ready, item.own.scores, ahead);
    ahead.scores_made();
    if (refer<kStrips>(item, ready, r, item.own.scores, strips)) {
      add_pending<Tiles, kStrips>(call, r, 0, pending, ahead);
      rescale<kStrips>(call, r, strips);
    }
    uint16_t* const weights = item.own.weights + i * 2 * kStripWeights;
    for (int s = 0; s < kStrips; ++s) {
      weigh_strip(item, ready, strips[s].sight, r + s * kStripRows, strips[s].reference,
                  item.own.scores + s * kTileTokens * kStripRows, weights + s * kStripWeights, ahead);
    }
    pending.tiles[pending.count] = &ready;
    pending.weights[pending.count++] = weights;
  }
  add_pending<Tiles, kStrips>(call, r, 0, pending, ahead);
}

/// One step for the pair of strips from row r on: while a tile's weights are made, the next tile's scores and the last
/// tile's values. The same operations on a row's numbers in the same order as accumulate_strips.
template <class Tiles>
static void accumulate_pair(const AmxItem& item, const Step& step, int32_t r) {
  constexpr int kStrips = 2;
  constexpr int32_t kBuffer = kStrips * kTileTokens * kStripRows;
  const ItemCall& call = item.call;
  const unsigned char* const q = queries_of(item, r);
  float* const acc = call.states.acc + int64_t{r} * call.v_stride;
  const int32_t whole_pairs = call.v_stride / kDimTile / 2 * 2;
  NothingAhead nothing;
  StripTile strips[2][kStrips];
  const auto next_seen = [&](int32_t i, StripTile * seen) __attribute__((always_inline)) {
    while (i < step.count && !look<kStrips>(call, step.tiles[i], r, seen)) ++i;
    return i;
  };
  int32_t i = next_seen(0, strips[0]);
  if (i >= step.count) return;
  make_tile_scores<Tiles, kStrips>(q, item.dim_steps, step.tiles[i], item.own.scores, nothing);
  Pending pending;  // at most the last tile
  for (int turn = 0; i < step.count; turn ^= 1) {
    const ReadyTokens& ready = step.tiles[i];
    float* const scores = item.own.scores + turn * kBuffer;
    TileWork<Tiles> work;
    if (refer<kStrips>(item, ready, r, scores, strips[turn])) {
      add_pending<Tiles, kStrips>(call, r, 0, pending, nothing);
      rescale<kStrips>(call, r, strips[turn]);
    }
    i = next_seen(i + 1, strips[turn ^ 1]);
    if (i < step.count) {
      work.set_scores(q, item.dim_steps, step.tiles[i], item.own.scores + (turn ^ 1) * kBuffer);
    }
    if (pending.count > 0) work.set_values(acc, call.v_stride, *pending.tiles[0], pending.weights[0]);
    uint16_t* const weights = item.own.weights + turn * kStrips * kStripWeights;
    for (int s = 0; s < kStrips; ++s) {
      weigh_strip(item, ready, strips[turn][s].sight, r + s * kStripRows, strips[turn][s].reference,
                  scores + s * kTileTokens * kStripRows, weights + s * kStripWeights, work);
    }
    work.finish();
    add_pending<Tiles, kStrips>(call, r, whole_pairs, pending, nothing);
    pending.tiles[0] = &ready;
    pending.weights[0] = weights;
    pending.count = 1;
  }
  add_pending<Tiles, kStrips>(call, r, 0, pending, nothing);
}

template <class Tiles>
static void accumulate_many(const AmxItem& item, const Step& step) {
  int32_t r = 0;
  for (; r + kStripRows < item.call.num_rows; r += 2 * kStripRows) accumulate_pair<Tiles>(item, step, r);
  NothingAhead nothing;
  if (r < item.call.num_rows) accumulate_strips<Tiles, 1>(item, step, r, nothing);
}

template <class Tiles, class A>
static void accumulate_few(const AmxItem& item, const Step& step, A& ahead) {
  if (item.call.num_rows > kStripRows) {
    accumulate_strips<Tiles, 2>(item, step, 0, ahead);
  } else {
    accumulate_strips<Tiles, 1>(item, step, 0, ahead);
  }
}

static inline void locate_step(const AmxItem& item, Step& step) {
  for (int32_t i = 0; i < step.count; ++i) {
    ReadyTokens& ready = step.tiles[i];
    ready.key_copy = item.own.keys + i * item.own.key_tile_bytes;
    ready.value_copy = item.own.values + i * item.own.value_tile_bytes;
    locate_keys(item.call, ready);
    locate_values(item.call, ready);
  }
}

/// Steps of one tile, each as soon as it is found: for items that wait for memory. `ahead_of(now, next)` says what is
/// to be done beside a step's products; next: null if none comes.
template <class Tiles>
static void accumulate_waiting(const AmxItem& item, const CommonSight& sight, Step* steps) {
  const ItemCall& call = item.call;
  int32_t first = find_step(call, sight, call.keys.kv_begin / kTileTokens * kTileTokens, 1, steps[0]);
  for (int current = 0; steps[current].count > 0; current ^= 1) {
    Step& now = steps[current];
    Step& next = steps[current ^ 1];
    first = find_step(call, sight, first, 1, next);
    locate_step(item, now);
    Ahead ahead = ahead_of(call, now.tiles[0].tile, next.count > 0 ? &next.tiles[0].tile : nullptr);
    accumulate_few<Tiles>(item, now, ahead);
    ahead.finish();
  }
}

/// The same for fp8: what every row sees is widened beside the products.
template <class Tiles, DType kType>
static void accumulate_widening(const AmxItem& item, const CommonSight& sight, Step* steps) {
  const ItemCall& call = item.call;
  int32_t first = find_step(call, sight, call.keys.kv_begin / kTileTokens * kTileTokens, 1, steps[0]);
  WideningRing<kType> ring(call, item.own.keys);
  for (int current = 0; steps[current].count > 0; current ^= 1) {
    Step& now = steps[current];
    Step& next = steps[current ^ 1];
    first = find_step(call, sight, first, 1, next);
    const Tile* const next_tile = next.count > 0 ? &next.tiles[0].tile : nullptr;
    if (is_whole(now.tiles[0])) {
      ring.begin_tile(now.tiles[0], next.count > 0 && is_whole(next.tiles[0]) ? next_tile : nullptr);
      accumulate_strips<Tiles, 1>(item, now, 0, ring);
      ring.end_tile();
    } else {
      locate_step(item, now);
      Ahead ahead = ahead_of(call, now.tiles[0].tile, next_tile);
      accumulate_strips<Tiles, 1>(item, now, 0, ahead);
      ahead.finish();
    }
  }
}

template <class Tiles>
static void accumulate_steps(const AmxItem& item, const CommonSight& sight, Step* steps) {
  int32_t first = item.call.keys.kv_begin / kTileTokens * kTileTokens;
  for (;;) {
    first = find_step(item.call, sight, first, kStepTiles, steps[0]);
    if (steps[0].count == 0) return;
    locate_step(item, steps[0]);
    accumulate_many<Tiles>(item, steps[0]);
  }
}

template <class Tiles>
static void accumulate_amx(const ItemCall& call) noexcept {
  const AmxItem item = begin_item(call);
  const CommonSight sight = common_sight(call);
  Step steps[2];
  for (int32_t i = 0; i < 2 * kStepTiles; ++i) {
    steps[i / kStepTiles].tiles[i % kStepTiles].visible =
        reinterpret_cast<uint64_t*>(item.own.visible + i * item.own.visible_tile_bytes);
  }
  if (call.num_rows > kFewAmxRows) {
    accumulate_steps<Tiles>(item, sight, steps);
  } else if (!can_be_widened(call)) {
    accumulate_waiting<Tiles>(item, sight, steps);
  } else if (call.keys.dtype == DType::kFloat8E4M3) {
    accumulate_widening<Tiles, DType::kFloat8E4M3>(item, sight, steps);
  } else {
    accumulate_widening<Tiles, DType::kFloat8E5M2>(item, sight, steps);
  }
}

static void load_queries_amx(const ItemCall& call) noexcept {
  pack_queries(call, reinterpret_cast<unsigned char*>(call.scratch.q));
}

static size_t own_bytes_amx(int32_t tile_rows, int32_t head_dim_qk, int32_t head_dim_v) noexcept {
  return carve_own(nullptr, tile_rows, head_dim_qk, head_dim_v).bytes;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
