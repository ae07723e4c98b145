#pragma once

#include "kernels/cpu/amx/epilogue.hpp"
#include "kernels/cpu/amx/gemm_overlap.hpp"
#include "kernels/cpu/amx/softmax.hpp"

/// The mainloop of the AMX kernel. `Tiles` is simd::AmxTiles, or its software twin in tests. One thread is producer and
/// consumer: the producer's work stands between the consumer's instructions.
///
///   tile registers (palette 1: 8 TMM of 16 rows x 64 bytes; MMA = TDPBF16PS)
///
///               | one row block (16 rows)        | two row blocks (32 rows)
///     GEMM0     | TMM0-3  S^T, 4 x 16 keys       | TMM0-3  S^T, 2 x 16 keys x 2 row blocks
///     S^T = KQ^T| TMM5    Q step                 | TMM6-7  Q step of each row block
///               | TMM4,6,7  K, 16 keys x 32 dims | TMM4-5  K, 16 keys x 32 dims
///     GEMM1     | TMM0-3  O, 4 x 16 dims         | TMM0-3  O, 2 x 16 dims x 2 row blocks
///     O += PV   | TMM4    P, 16 rows x 32 tokens | TMM4-5  P of each row block
///               | TMM6-7  V, 16 pairs x 16 dims  | TMM6-7  V, 16 pairs x 16 dims
///
///   memory, for each KV tile of 64 tokens
///
///     cache pages --(in place, or packed: producer.hpp)--> K operands --GEMM0--> scores [64][16] float32
///        |                                                                           | mask, update_row_max; of int8:
///        |                                                                           | scores by K's token scales,
///        |                                                                           | P by V's
///        |                                                                           v
///        |                                          acc [rows][dims] float32      exponentiate: P bfloat16, row_sum
///        |                                                   ^                       |
///        +-----(in place, or packed)--> V operands --GEMM1---+<----------------------+
///
///   pipelines (kv_pipeline.hpp)
///
///     up to 32 rows     PrefetchPipeline: V of this tile during GEMM0, K of the next one during GEMM1, to L1
///       strided         RowPrefetchPipeline: K and V of the next head, or tile, to L2
///     up to 16 rows,    DequantizationPipeline: 2 stages of 8 KB, 64 tokens x 64 dims in bfloat16
///     fp8 or int8
///                       chunk   0 1 2 3 ...  (K chunks, V chunks, next tile's K chunks)
///                       stage   0 1 0 1 ...  MMAs consume one, the producer dequantizes into the other
///     more rows         gemm_overlap.hpp: softmax of tile i beside GEMM0 of tile i + 1, and beside a share of GEMM1 of
///                       the pair of row blocks before, of four tiles at once; two buffers of scores, two of P
///
///                         row block 0 of tile i        row block 1 of tile i
///                         softmax: vector units        softmax: vector units
///                         GEMM0 of tile i + 1: TMUL    GEMM1 of the pair before, 32 components: TMUL
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// What is the same for all of a work tile.
struct AmxWork {
  const WorkTileParams* tile;
  AmxScratch scratch;
  QkSteps steps;   ///< of GEMM0
  int32_t terms;   ///< of an element (num_terms)
  bool scaled;     ///< some row has a value scale
  bool transform;  ///< soft cap or ALiBi: logits are more than scaled scores
  FOLIO_INLINE_MEMBER const WorkTileParams& work() const { return *tile; }
};

/// `head`: of those walked together, whose factors stand one after the other.
FOLIO_INLINE AmxWork begin_work(const WorkTileParams& work, int32_t head) {
  const int32_t terms = num_terms(work.q_dtype);
  AmxWork amx{&work,
              carve_amx_scratch(work.scratch.collective, work.tile_rows, work.head_dim_qk, work.head_dim_v, terms),
              qk_steps(work),
              terms,
              false,
              work.soft_cap != 0.0f || work.alibi};
  const int32_t rows = rounded_up(work.num_rows, kRowBlock);
  amx.scratch.logit_scale += head * rows;
  amx.scratch.value_scale += head * rows;
  for (int32_t r = 0; r < rows; ++r) {
    const bool real = r < work.num_rows;
    const float value_scale = real ? work.rows[r].value_scale : 1.0f;
    amx.scratch.logit_scale[r] = real ? work.rows[r].logit_scale : 0.0f;
    amx.scratch.value_scale[r] = value_scale != value_scale ? __builtin_nanf("") : value_scale;  // see pack_bfloat16
    amx.scaled |= value_scale != 1.0f;
  }
  return amx;
}

/// A row block in a KV tile.
struct RowBlockState {
  RowBlockMask mask;
  RowBlockMax max;
  int32_t first;      ///< its first row
  __mmask16 rows;     ///< that the work tile has
  bool max_is_known;  ///< `max` counts the tile's scores
};

template <class Pipeline>
FOLIO_INLINE Vec exponentiate_row_block(const AmxWork& amx, const TileOperands& operands, const RowBlockState& block,
                                        const float* scores, uint16_t* p, Pipeline& pipeline) {
  const float* const value_scales = amx.scratch.value_scale + block.first;
  const auto run = [&]<bool kMasked, ValueScales kScales, int kTerms>() __attribute__((always_inline)) {
    return exponentiate<kMasked, kScales, kTerms>(operands, block.mask, block.max, scores, value_scales, p, pipeline);
  };
  using enum ValueScales;
  if constexpr (Pipeline::kTakesFloat16) {
    if (amx.terms == 2) {
      return block.mask.masked ? run.template operator()<true, kOfRows, 2>()
                               : run.template operator()<false, kOfRows, 2>();
    }
  }
  if (operands.scales.v != nullptr) {
    return block.mask.masked ? run.template operator()<true, kOfRowsAndTokens, 1>()
                             : run.template operator()<false, kOfRowsAndTokens, 1>();
  }
  if (block.mask.masked) return run.template operator()<true, kOfRows, 1>();
  return amx.scaled ? run.template operator()<false, kOfRows, 1>() : run.template operator()<false, kNone, 1>();
}

/// Makes logits of scores but for a factor, which it returns. Before, those of int8 keys become scores of the keys.
FOLIO_INLINE Vec finish_scores(const AmxWork& amx, const TileOperands& operands, const RowBlockState& block,
                               float* scores) {
  const Vec logit_scale = load<Vec>(amx.scratch.logit_scale + block.first);
  const int32_t rows = smaller(amx.work().num_rows - block.first, kRowBlock);
  if (operands.scales.k != nullptr) scale_token_scores(operands, scores);
  if (operands.non_finite_keys != 0) rescore_non_finite(amx.work(), operands, block.first, rows, scores);
  if (!amx.transform) return logit_scale * splat(kLog2E);
  finish_logits(amx.work(), operands.tile, block.first, rows, logit_scale, scores);
  return splat(1.0f);
}

/// row_max after the tile; true if acc must be rescaled.
FOLIO_INLINE bool update_row_max(const AmxWork& amx, const TileOperands& operands, Vec logit_scale, float* scores,
                                 RowBlockState& block) {
  block.max = update_block_row_max(amx.work(), operands, block.mask, block.first, logit_scale, scores);
  round_large_logits(block.max, scores);
  block.max.raised &= block.rows;
  block.max_is_known = true;
  return block.max.raised != 0;
}

/// Masks kRowBlocks row blocks; false if nothing is visible to them.
template <int kRowBlocks>
FOLIO_INLINE bool mask_row_blocks(const WorkTileParams& work, const TileOperands& operands, int32_t r,
                                  RowBlockState* blocks) {
  bool any = false;
  for (int s = 0; s < kRowBlocks; ++s) {
    const int32_t first = r + s * kRowBlock;
    const int32_t rows = smaller(work.num_rows - first, kRowBlock);
    blocks[s].mask = row_block_mask(operands, first, rows);
    blocks[s].first = first;
    blocks[s].rows = static_cast<__mmask16>(bit_range(0, rows));
    any |= blocks[s].mask.any;
  }
  return any;
}

FOLIO_INLINE const unsigned char* packed_q(const AmxWork& amx, int32_t r) {
  return reinterpret_cast<const unsigned char*>(amx.work().scratch.reordered_q) +
         int64_t{r / kRowBlock} * amx.steps.q_tiles() * kTileBytes;
}

FOLIO_INLINE float* scores_buffer(const AmxWork& amx, int32_t buffer) {
  return amx.scratch.scores + buffer * 2 * kBlockScores;
}

FOLIO_INLINE uint16_t* p_buffer(const AmxWork& amx, int32_t buffer, int32_t tile) {
  return amx.scratch.p + (buffer * kBatchTiles + tile) * amx.terms * kTermP;
}

/// One batch for kRowBlocks row blocks from row r on: GEMM0, softmax, GEMM1, one after the other.
template <class Tiles, int kRowBlocks, class Pipeline>
static void consume_row_blocks(const AmxWork& amx, const TileBatch& batch, int32_t r, Pipeline& pipeline) {
  const WorkTileParams& work = amx.work();
  float* const all_scores = scores_buffer(amx, kScoreBuffers - 1);
  PendingPv pending;
  for (int32_t i = 0; i < batch.count; ++i) {
    const TileOperands& operands = batch.tiles[i];
    RowBlockState blocks[kRowBlocks];
    if (!mask_row_blocks<kRowBlocks>(work, operands, r, blocks)) continue;
    gemm_qk<Tiles, kRowBlocks>(packed_q(amx, r), amx.steps, operands, all_scores, pipeline);
    pipeline.consumer_release_k();
    uint16_t* const p = p_buffer(amx, kPBuffers - 1, i);
    for (int s = 0; s < kRowBlocks; ++s) {
      float* const scores = all_scores + s * kBlockScores;
      const Vec logit_scale = finish_scores(amx, operands, blocks[s], scores);
      if (update_row_max(amx, operands, logit_scale, scores, blocks[s])) {
        gemm_pv<Tiles, kRowBlocks>(work, r, pending, pipeline);
        rescale_acc_rows(work, blocks[s].first, blocks[s].max.raised, blocks[s].max.rescale);
      }
    }
    for (int s = 0; s < kRowBlocks; ++s) {
      const Vec sum =
          exponentiate_row_block(amx, operands, blocks[s], all_scores + s * kBlockScores, p + s * kRowBlockP, pipeline);
      add_to_row_sum(work, blocks[s].first, blocks[s].max, sum);
    }
    pending.tiles[pending.count] = &operands;
    pending.p[pending.count++] = p;
  }
  gemm_pv<Tiles, kRowBlocks>(work, r, pending, pipeline);
}

template <class Tiles, class Pipeline>
static void consume_few_rows(const AmxWork& amx, const TileBatch& batch, Pipeline& pipeline) {
  if (amx.work().num_rows > kRowBlock) {
    consume_row_blocks<Tiles, 2>(amx, batch, 0, pipeline);
  } else {
    consume_row_blocks<Tiles, 1>(amx, batch, 0, pipeline);
  }
}

static inline void produce_batch(const AmxWork& amx, TileBatch& batch) {
  const WorkTileParams& work = amx.work();
  TileRows rows(work, 0);
  for (int32_t i = 0; i < batch.count; ++i) {
    rows.locate(batch.tiles[i].tile);
    produce_k(work, rows.of(work), batch.tiles[i]);
    produce_v(work, rows.of(work), batch.tiles[i]);
  }
}

/// find_batch, and the token scales of its tiles.
static inline int32_t locate_batch(const WorkTileParams& work, const VisibleRange& range, int32_t first, int32_t most,
                                   TileBatch& batch) {
  first = find_batch(work, range, first, most, batch);
  for (int32_t i = 0; work.kv.k_scales != nullptr && i < batch.count; ++i) {
    produce_token_scales(work.kv, batch.tiles[i]);
  }
  return first;
}

/// Few rows (decode, verification), bound by memory: batches of one KV tile, the next one prefetched beside the MMAs.
template <class Tiles>
static void mainloop_decode(const AmxWork& amx, const VisibleRange& range, TileBatch* batches) {
  const WorkTileParams& work = amx.work();
  int32_t first = locate_batch(work, range, work.kv.kv_begin / kTileTokens * kTileTokens, 1, batches[0]);
  for (int current = 0; batches[current].count > 0; current ^= 1) {
    TileBatch& now = batches[current];
    TileBatch& next = batches[current ^ 1];
    first = locate_batch(work, range, first, 1, next);
    produce_batch(amx, now);
    PrefetchPipeline pipeline =
        prefetch_pipeline(work, now.tiles[0].tile, next.count > 0 ? &next.tiles[0].tile : nullptr);
    consume_few_rows<Tiles>(amx, now, pipeline);
    pipeline.drain();
  }
}

/// The same for fp8 and int8: full tiles are dequantized beside the MMAs.
template <class Tiles, DType kType>
static void mainloop_decode_bytes(const AmxWork& amx, const VisibleRange& range, TileBatch* batches) {
  const WorkTileParams& work = amx.work();
  int32_t first = locate_batch(work, range, work.kv.kv_begin / kTileTokens * kTileTokens, 1, batches[0]);
  DequantizationPipeline<kType> dequantize(work, amx.scratch.keys);
  for (int current = 0; batches[current].count > 0; current ^= 1) {
    TileBatch& now = batches[current];
    TileBatch& next = batches[current ^ 1];
    first = locate_batch(work, range, first, 1, next);
    const KvTile* const next_tile = next.count > 0 ? &next.tiles[0].tile : nullptr;
    if (is_full_tile(now.tiles[0])) {
      dequantize.begin_tile(now.tiles[0], next.count > 0 && is_full_tile(next.tiles[0]) ? next_tile : nullptr);
      consume_row_blocks<Tiles, 1>(amx, now, 0, dequantize);
      dequantize.end_tile();
    } else {
      produce_batch(amx, now);
      PrefetchPipeline pipeline = prefetch_pipeline(work, now.tiles[0].tile, next_tile);
      consume_row_blocks<Tiles, 1>(amx, now, 0, pipeline);
      pipeline.drain();
    }
  }
}

/// The same for strided caches, of one KV head or several: a KV tile of all heads, one after the other, then the next
/// one. So memory is read about in its order, in which a token's heads are neighbours.
template <class Tiles>
static void mainloop_decode_strided(const WorkTileParams* heads, int32_t num_heads, TileBatch* batches) {
  const WorkTileParams& work = heads[0];
  AmxWork amx[kMaxHeads];
  for (int32_t h = 0; h < num_heads; ++h) amx[h] = begin_work(heads[h], h);
  const VisibleRange range = common_visible_range(work);
  TileRows rows[2] = {TileRows(work, 0), TileRows(work, 1)};
  const auto find = [&](int32_t first, int i) __attribute__((always_inline)) {
    batches[i].count = find_tile(work, range, first, batches[i].tiles[0]) ? 1 : 0;
    if (batches[i].count != 0) rows[i].locate(batches[i].tiles[0].tile);
  };
  RowPrefetchPipeline pipeline(heads, num_heads);
  find(work.kv.kv_begin / kTileTokens * kTileTokens, 0);
  if (pipeline.by_token() && batches[0].count != 0) pipeline.begin(rows[0].of(work));
  pipeline.drain();
  for (int now = 0; batches[now].count != 0; now ^= 1) {
    TileOperands& operands = batches[now].tiles[0];
    find(operands.tile.first + kTileTokens, now ^ 1);
    const bool has_next = batches[now ^ 1].count != 0;
    for (int32_t h = 0; h < num_heads; ++h) {
      if (pipeline.by_token() && has_next) {
        pipeline.begin(rows[now ^ 1].of(work), h, num_heads);
      } else if (!pipeline.by_token() && h + 1 < num_heads) {
        pipeline.begin(rows[now].of(heads[h + 1]));
      } else if (!pipeline.by_token() && has_next) {
        pipeline.begin(rows[now ^ 1].of(work));
      }
      operands.non_finite = operands.non_finite_keys = 0;
      if (work.kv.k_scales != nullptr) produce_token_scales(heads[h].kv, operands);
      produce_k(heads[h], rows[now].of(heads[h]), operands);
      produce_v(heads[h], rows[now].of(heads[h]), operands);
      consume_few_rows<Tiles>(amx[h], batches[now], pipeline);
      pipeline.drain();
    }
  }
}

/// A KV tile of a batch and a pair of row blocks that sees some of it.
struct PairTile {
  TileBatch* batch;
  int32_t r;     ///< the pair's first row
  int32_t tile;  ///< of the batch
  RowBlockState blocks[2];
};

/// The first one of its batch from (at.r, at.tile) on; false if there is none. The tiles of a pair come in turn, then
/// the next pair's.
FOLIO_INLINE bool find_pair_tile(const WorkTileParams& work, PairTile& at) {
  for (; at.r + kRowBlock < work.num_rows; at.r += 2 * kRowBlock, at.tile = 0) {
    for (; at.tile < at.batch->count; ++at.tile) {
      if (mask_row_blocks<2>(work, at.batch->tiles[at.tile], at.r, at.blocks)) return true;
    }
  }
  return false;
}

/// Many rows (prefill, MLA): batches of KV tiles, which all pairs of row blocks take in turn. Beside a tile's softmax
/// stand GEMM0 of the next one and GEMM1 of the pair before, whose P is complete. A tile that all rows of a row block
/// see is exponentiated before its maximum is known. Where row_max turns out to rise, it is exponentiated again. A
/// row's numbers go through the same operations in the same order as in consume_row_blocks.
template <class Tiles>
static void mainloop_prefill(const AmxWork& amx, const VisibleRange& range, TileBatch* batches) {
  constexpr int kRowBlocks = 2;
  const WorkTileParams& work = amx.work();
  const int32_t most = batch_tiles(work.head_dim_qk, work.head_dim_v, amx.terms);
  const int32_t single = (work.num_rows + kRowBlock - 1) / (2 * kRowBlock) * (2 * kRowBlock);  // after all pairs
  NoPrefetch no_prefetch;
  QkOverlap<Tiles> qk;
  PvOverlap<Tiles> pv(work);
  int32_t first = work.kv.kv_begin / kTileTokens * kTileTokens;
  const auto find_tile_of_pair = [&](PairTile & at) __attribute__((always_inline)) {
    while (!find_pair_tile(work, at)) {
      at.batch = &batches[at.batch == batches ? 1 : 0];
      if (pv.reads(*at.batch)) pv.drain();
      first = locate_batch(work, range, first, most, *at.batch);
      if (at.batch->count == 0) return false;
      produce_batch(amx, *at.batch);
      if (single < work.num_rows) consume_row_blocks<Tiles, 1>(amx, *at.batch, single, no_prefetch);
      at.r = at.tile = 0;
    }
    return true;
  };

  PairTile tiles[2];
  tiles[0].batch = batches;
  tiles[0].r = tiles[0].tile = 0;
  if (!find_tile_of_pair(tiles[0])) return;
  gemm_qk<Tiles, kRowBlocks>(packed_q(amx, tiles[0].r), amx.steps, tiles[0].batch->tiles[tiles[0].tile],
                             scores_buffer(amx, 0), no_prefetch);
  PendingPv pending[2];  // of this pair, and of the pair before
  int pair = 0;
  bool has_next = true;
  for (int now = 0; has_next; now ^= 1) {
    PairTile& at = tiles[now];
    PairTile& next = tiles[now ^ 1];
    const TileOperands& operands = at.batch->tiles[at.tile];
    uint16_t* const p = p_buffer(amx, pair, at.tile);
    float* const scores = scores_buffer(amx, now);
    if (pv.adds_to(at.r)) pv.drain();
    const auto find_row_max = [&](int s, Vec logit_scale) __attribute__((always_inline)) {
      RowBlockState& block = at.blocks[s];
      if (!update_row_max(amx, operands, logit_scale, scores + s * kBlockScores, block)) return false;
      gemm_pv<Tiles, kRowBlocks>(work, at.r, pending[pair], no_prefetch);
      rescale_acc_rows(work, block.first, block.max.raised, block.max.rescale);
      return true;
    };
    for (int s = 0; s < kRowBlocks; ++s) {
      RowBlockState& block = at.blocks[s];
      const Vec logit_scale = finish_scores(amx, operands, block, scores + s * kBlockScores);
      const float* const row_max = work.state.row_max + block.first;
      block.max_is_known = block.mask.masked || !has_row_max(row_max, block.rows);
      if (block.max_is_known) {
        find_row_max(s, logit_scale);
      } else {
        block.max = keep_row_max(row_max, logit_scale);
      }
    }
    next.batch = at.batch;
    next.r = at.r;
    next.tile = at.tile + 1;
    has_next = find_tile_of_pair(next);
    if (has_next) {
      qk.begin(packed_q(amx, next.r), amx.steps, next.batch->tiles[next.tile], scores_buffer(amx, now ^ 1));
    }
    Vec sums[kRowBlocks];
    sums[0] = exponentiate_row_block(amx, operands, at.blocks[0], scores, p, qk);
    qk.drain();
    pv.begin_tile();
    sums[1] = exponentiate_row_block(amx, operands, at.blocks[1], scores + kBlockScores, p + kRowBlockP, pv);
    pv.end_tile();
    for (int s = 0; s < kRowBlocks; ++s) {
      const RowBlockState& block = at.blocks[s];
      if (!block.max_is_known && !keeps_row_max(sums[s], block.rows) && find_row_max(s, block.max.logit_scale)) {
        sums[s] =
            exponentiate_row_block(amx, operands, block, scores + s * kBlockScores, p + s * kRowBlockP, no_prefetch);
      }
      add_to_row_sum(work, block.first, block.max, sums[s]);
    }
    pending[pair].tiles[pending[pair].count] = &operands;
    pending[pair].p[pending[pair].count++] = p;
    if (has_next && next.batch == at.batch && next.r == at.r) continue;
    pv.drain();
    pv.begin(at.r, pending[pair]);
    pair ^= 1;
  }
  pv.drain();
}

/// Two batches with their memory.
FOLIO_INLINE void carve_batches(const AmxWork& amx, TileBatch* batches) {
  const WorkTileParams& work = amx.work();
  const int32_t most = batch_tiles(work.head_dim_qk, work.head_dim_v, amx.terms);
  for (int32_t i = 0; i < 2 * kBatchTiles; ++i) {
    const int32_t set = i / kBatchTiles;
    const int32_t tile = i % kBatchTiles;
    TileOperands& operands = batches[set].tiles[tile];
    const int32_t copy = smaller(tile, most - 1) + set * most;
    operands.k_buffer = amx.scratch.keys + copy * amx.scratch.key_tile_bytes;
    operands.v_buffer = amx.scratch.values + copy * amx.scratch.value_tile_bytes;
    operands.visible = reinterpret_cast<uint64_t*>(amx.scratch.visible + i * amx.scratch.visible_tile_bytes);
    float* const scales = amx.scratch.token_scales + i * 2 * kTileTokens;
    operands.scales = work.kv.k_scales == nullptr ? TileScales{} : TileScales{scales, scales + kTileTokens};
  }
}

template <class Tiles>
FOLIO_INLINE void mainloop_of_head(const WorkTileParams& work, const AmxWork& amx, TileBatch* batches) {
  const VisibleRange range = common_visible_range(work);
  if (work.num_rows > kMaxDecodeRows) {
    mainloop_prefill<Tiles>(amx, range, batches);
  } else if (!can_pipeline_bytes(work)) {
    mainloop_decode<Tiles>(amx, range, batches);
  } else if (work.kv.dtype == DType::kFloat8E4M3) {
    mainloop_decode_bytes<Tiles, DType::kFloat8E4M3>(amx, range, batches);
  } else if (work.kv.dtype == DType::kFloat8E5M2) {
    mainloop_decode_bytes<Tiles, DType::kFloat8E5M2>(amx, range, batches);
  } else {
    mainloop_decode_bytes<Tiles, DType::kInt8>(amx, range, batches);
  }
}

template <class Tiles>
static void mainloop_amx(const WorkTileParams* heads, int32_t num_heads) noexcept {
  TileBatch batches[2];
  const AmxWork amx = begin_work(heads[0], 0);
  carve_batches(amx, batches);
  if (heads[0].num_rows <= kMaxDecodeRows && !heads[0].kv.packed_v) {
    return mainloop_decode_strided<Tiles>(heads, num_heads, batches);
  }
  for (int32_t h = 0; h < num_heads; ++h) {
    mainloop_of_head<Tiles>(heads[h], h == 0 ? amx : begin_work(heads[h], 0), batches);
  }
}

static void load_q_amx(const WorkTileParams& work) noexcept {
  pack_q(work, reinterpret_cast<unsigned char*>(work.scratch.reordered_q));
}

static size_t scratch_bytes_amx(int32_t tile_rows, int32_t head_dim_qk, int32_t head_dim_v, DType q) noexcept {
  return carve_amx_scratch(nullptr, tile_rows, head_dim_qk, head_dim_v, num_terms(q)).bytes;
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
