#pragma once

#include "kernels/cpu/amx/producer.hpp"

/// Producers that run beside the MMAs of the calling thread: prefetch, and dequantization of fp8 and int8.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// The interface of all pipelines. The consumer calls at_mma() with every MMA and at_softmax_step() with every pair of
/// tokens: there a pipeline does a share of its work. consumer_wait_* and consumer_release_k say how far the MMAs have
/// come; k_operand and v_operand say where the next operand lies. kTakesFloat16: operands may be terms of float16.
/// Here: where TileOperands says.
struct InPlaceOperands {
  static constexpr bool kTakesFloat16 = true;
  FOLIO_INLINE_MEMBER void consumer_wait_k(int32_t /*step*/) {}
  FOLIO_INLINE_MEMBER void consumer_release_k() {}
  FOLIO_INLINE_MEMBER void consumer_wait_v(int32_t /*dim_tile*/) {}
  /// 16 keys, 32 of their components: the left operand of GEMM0.
  FOLIO_INLINE_MEMBER const unsigned char* k_operand(const TileSource* keys, int32_t group, int32_t step) const {
    return keys[group].at + step * keys[group].step;
  }
  /// 16 pairs of V rows, 16 components: the right operand of GEMM1.
  FOLIO_INLINE_MEMBER const unsigned char* v_operand(const TileSource* values, int32_t half, int32_t dim_tile) const {
    return values[half].at + dim_tile * values[half].step;
  }
};

/// Prefetches to L1: a KV tile's V during its GEMM0, then the next tile's K, evenly spread over MMAs and softmax steps.
/// Two lines of four groups at a time; a group is the K or V of 16 tokens. In this order L1 holds at most one tile: its
/// K is no longer needed when its V is, and the other way round.
struct PrefetchPipeline : InPlaceOperands {
  static constexpr int32_t kGroups = kTileTokens / kGroupTokens;
  static constexpr int32_t kLine = 64;
  static constexpr int32_t kAtOnce = 2;     ///< lines of each group at a time
  const unsigned char* groups[2][kGroups];  ///< of V, of K
  int32_t ends[2] = {};                     ///< bytes of a group
  int32_t phase = 0;                        ///< 0: V, 1: K
  int32_t at = 0;

  FOLIO_INLINE_MEMBER void prefetch() {
    if (at >= ends[phase]) {
      if (phase == 1) return;
      phase = 1;
      at = 0;
      if (ends[1] == 0) return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kGroups; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) __builtin_prefetch(groups[phase][i] + at + j * kLine, 0, 3);
    }
    at += kAtOnce * kLine;
  }
  FOLIO_INLINE_MEMBER void at_mma() {
    prefetch();
  }
  FOLIO_INLINE_MEMBER void at_softmax_step(int32_t /*pair*/) {
    prefetch();
  }
  FOLIO_INLINE_MEMBER void drain() {
    while (phase == 0 || at < ends[1]) prefetch();
  }
};

/// V inside K: V's rows come with K's.
FOLIO_INLINE bool holds_v_in_k(const WorkTileParams& work) {
  const KvOperand& kv = work.kv;
  return kv.v >= kv.k && kv.v + work.head_dim_v * element_bytes(kv) <= kv.k + work.head_dim_qk * element_bytes(kv);
}

/// Prefetches strided K and V to L2, beside a KV tile of one head of several. The next head's rows, or the first head's
/// of the next tile. Where a token's heads are neighbours in memory and their rows short, rather some tokens of the
/// next tile, with all their heads: pieces of 128 bytes, far apart, are read slowly.
class RowPrefetchPipeline : public InPlaceOperands {
 public:
  FOLIO_INLINE_MEMBER RowPrefetchPipeline(const WorkTileParams* heads, int32_t num_heads)
      : k_bytes_(heads[0].head_dim_qk * element_bytes(heads[0].kv)),
        v_bytes_(holds_v_in_k(heads[0]) ? 0 : heads[0].head_dim_v * element_bytes(heads[0].kv)) {
    const int64_t last = num_heads - 1;
    by_token_ = num_heads > 1 && k_bytes_ <= 2 * kLine && heads[last].kv.k - heads[0].kv.k == last * k_bytes_ &&
                heads[last].kv.v - heads[0].kv.v == last * v_bytes_;
    if (!by_token_) return;
    k_bytes_ *= num_heads;
    v_bytes_ *= num_heads;
  }

  /// Whether it takes tokens with all their heads.
  FOLIO_INLINE_MEMBER bool by_token() const { return by_token_; }
  /// Begins the rows of one head.
  FOLIO_INLINE_MEMBER void begin(const HeadRows& rows) { begin(rows, 0, 1); }
  /// Begins share `i` of `count`. By token: `rows` are the first head's.
  FOLIO_INLINE_MEMBER void begin(const HeadRows& rows, int32_t i, int32_t count) {
    rows_ = rows;
    token_ = kTileTokens * i / count;
    end_ = kTileTokens * (i + 1) / count;
    at_ = 0;
  }
  FOLIO_INLINE_MEMBER void at_mma() { prefetch(); }
  FOLIO_INLINE_MEMBER void at_softmax_step(int32_t /*pair*/) { prefetch(); }
  FOLIO_INLINE_MEMBER void drain() {
    while (token_ < end_) prefetch();
  }

 private:
  static constexpr int32_t kLine = 64;
  static constexpr int32_t kLines = 4;  ///< of K and of V at a time, by token

  FOLIO_INLINE_MEMBER void prefetch() {
    if (token_ == end_) return;
    const unsigned char* const k = rows_.k(token_);
    const unsigned char* const v = rows_.v(token_);
    if (!by_token_) {
      ++token_;
      for (int32_t at = 0; at < k_bytes_; at += kLine) __builtin_prefetch(k + at, 0, 2);
      for (int32_t at = 0; at < v_bytes_; at += kLine) __builtin_prefetch(v + at, 0, 2);
      return;
    }
    const int32_t end = at_ + kLines * kLine;
    for (int32_t at = at_; at < end; at += kLine) {
      if (at < k_bytes_) __builtin_prefetch(k + at, 0, 2);
      if (at < v_bytes_) __builtin_prefetch(v + at, 0, 2);
    }
    at_ = end;
    if (at_ < larger(k_bytes_, v_bytes_)) return;
    at_ = 0;
    ++token_;
  }

  int32_t k_bytes_;
  int32_t v_bytes_;
  bool by_token_;
  HeadRows rows_{};
  int32_t token_ = 0;  ///< the next one
  int32_t end_ = 0;
  int32_t at_ = 0;  ///< by token: bytes of it that have been prefetched
};

/// Work tiles of many rows are bound by arithmetic: prefetching costs more there than it gains.
struct NoPrefetch : InPlaceOperands {
  FOLIO_INLINE_MEMBER void at_mma() {}
  FOLIO_INLINE_MEMBER void at_softmax_step(int32_t /*pair*/) {}
};

/// A token of group g, or the nearest, that is visible to some row: its address finds the group.
FOLIO_INLINE int32_t group_token(const KvTile& tile, int32_t g) {
  return tile.first + larger(smaller(g * kGroupTokens, tile.end - 1), tile.begin);
}

/// Prefetches the V of `tile` and the K of `next` (null: no tile follows), of packed pages. fp8 and int8 are
/// dequantized, float16 split and V of small pages put together before their tile begins: then both K and V are the
/// next tile's.
static inline PrefetchPipeline prefetch_pipeline(const WorkTileParams& work, const KvTile& tile, const KvTile* next) {
  PrefetchPipeline pipeline;
  const bool copied = work.kv.dtype != DType::kBFloat16 || work.kv.page_size % kHalfTokens != 0;
  const KvTile* const values = copied ? next : &tile;
  for (int32_t g = 0; g < PrefetchPipeline::kGroups; ++g) {
    if (values != nullptr) pipeline.groups[0][g] = value_at(work.kv, group_token(*values, g));
    if (next != nullptr) pipeline.groups[1][g] = key_at(work.kv, group_token(*next, g));
  }
  const int32_t group_bytes = kGroupTokens * element_bytes(work.kv);
  pipeline.ends[0] = values == nullptr ? 0 : group_bytes * work.head_dim_v;
  pipeline.ends[1] = next == nullptr ? 0 : group_bytes * work.head_dim_qk;
  return pipeline;
}

inline constexpr int32_t kChunkDims = 64;
inline constexpr int32_t kStageBytes = kTileTokens * kChunkDims * kBf16Bytes;  ///< 8 KB
inline constexpr int32_t kStages = 2;

/// At most one row block, pages that hold groups of 16 tokens, head dims in whole chunks.
FOLIO_INLINE bool can_pipeline_bytes(const WorkTileParams& work) {
  const KvOperand& kv = work.kv;
  return holds_bytes(kv) && work.num_rows <= kRowBlock && kv.pages != nullptr && kv.packed_v &&
         kv.page_size % kGroupTokens == 0 && work.head_dim_qk % kChunkDims == 0 && work.head_dim_v % kChunkDims == 0;
}

/// A share of a pipeline's work, by a call: inlined beside every MMA it would be more code than the instruction cache
/// holds.
template <class Pipeline>
__attribute__((noinline)) static void advance(Pipeline& pipeline, int32_t batches) {
  pipeline.prefetch();
  for (int32_t i = 0; i < batches; ++i) pipeline.produce();
}

/// Dequantizes fp8 or int8 K and V to bfloat16 in small batches, between the MMAs on earlier data.
///
/// A chunk is 64 components of all 64 tokens: [token][component] of K, [pair][component][2] of V (VNNI layout). A KV
/// tile is its K chunks, then its V chunks. A stage holds one chunk. There are kStages = 2: while the MMAs consume one
/// stage, the producer fills the other. Chunks are numbered across tiles. The cache is prefetched to L2 one tile before
/// it is dequantized.
///
/// A tile dequantized as a whole would wait three times: for memory, for the conversion, and for stores that tile loads
/// cannot be forwarded from. And its copies, 32 KB at head_dim 128, would push everything else out of L1.
template <DType kType>
class DequantizationPipeline {
 public:
  static constexpr bool kTakesFloat16 = false;
  /// `stages`: memory for kStages chunks.
  FOLIO_INLINE_MEMBER DequantizationPipeline(const WorkTileParams& work, unsigned char* stages)
      : work_(work),
        stages_(stages),
        k_chunks_(work.head_dim_qk / kChunkDims),
        chunks_(k_chunks_ + work.head_dim_v / kChunkDims) {}

  /// To be called for full tiles. `next`: the full tile that the next call is for; null if none follows, or another
  /// tile.
  FOLIO_INLINE_MEMBER void begin_tile(TileOperands& operands, const KvTile* next) {
    if (has_next_) {
      for (int32_t i = 0; i < 2 * kGroups; ++i) groups_[0][i] = groups_[1][i];
    } else {
      find_groups(operands.tile, groups_[0]);
      producer_chunk_ = consumer_chunk_;
      batch_ = 0;
    }
    first_ = consumer_chunk_;
    has_next_ = next != nullptr;
    num_prefetch_ = prefetch_group_ = prefetch_at_ = 0;
    if (has_next_) {
      find_groups(*next, groups_[1]);
      find_prefetch_groups(next->first + kTileTokens);
    }
    set_producer_end();
    set_producer_source();
    for (TileSource& group : operands.keys) group = {stages_, kKeyStride, kTileRowBytes};
    for (TileSource& half : operands.values) half = {stages_, kPairStride, kTileRowBytes};
  }
  FOLIO_INLINE_MEMBER void end_tile() {
    while (prefetch_group_ < num_prefetch_) prefetch();
    consumer_chunk_ = first_ + chunks_;
  }

  FOLIO_INLINE_MEMBER void consumer_wait_k(int32_t step) {
    if (step % kKeySteps == 0) consumer_wait(step / kKeySteps);
  }
  FOLIO_INLINE_MEMBER void consumer_release_k() {
    consumer_chunk_ = first_ + k_chunks_;
    set_producer_end();
  }
  FOLIO_INLINE_MEMBER void consumer_wait_v(int32_t dim_tile) {
    if (dim_tile % kValueTiles == 0) consumer_wait(k_chunks_ + dim_tile / kValueTiles);
  }
  FOLIO_INLINE_MEMBER const unsigned char* k_operand(const TileSource*, int32_t group, int32_t step) const {
    return stage_ + group * kGroupTokens * kKeyStride + step % kKeySteps * kTileRowBytes;
  }
  FOLIO_INLINE_MEMBER const unsigned char* v_operand(const TileSource*, int32_t half, int32_t dim_tile) const {
    return stage_ + half * (kHalfTokens / 2) * kPairStride + dim_tile % kValueTiles * kTileRowBytes;
  }
  FOLIO_INLINE_MEMBER void at_mma() { advance(*this, 2); }
  FOLIO_INLINE_MEMBER void at_softmax_step(int32_t /*pair*/) { advance(*this, 1); }

  /// Of a few lines of the next tile, to L2.
  FOLIO_INLINE_MEMBER void prefetch() {
    if (prefetch_group_ >= num_prefetch_) return;
#pragma GCC unroll 4
    for (int i = 0; i < kBatchLines; ++i)
      __builtin_prefetch(prefetch_groups_[prefetch_group_] + prefetch_at_ + i * kLine, 0, 2);
    prefetch_at_ += kBatchLines * kLine;
    if (prefetch_at_ < kGroupTokens * (prefetch_group_ < kGroups ? work_.head_dim_v : work_.head_dim_qk)) return;
    prefetch_at_ = 0;
    ++prefetch_group_;
  }
  /// Dequantizes a few lines, if a stage is free.
  FOLIO_INLINE_MEMBER void produce() {
    if (producer_chunk_ >= producer_end_) return;
    const ByteUpcast<kType> upcast;
    const unsigned char* const from =
        group_[batch_ / kGroupBatches] + offset_ + batch_ % kGroupBatches * (kBatchLines / 2) * two_lines_;
    unsigned char* const to = stage(producer_chunk_) + batch_ * kBatchLines * 2 * kLine;
#pragma GCC unroll 4
    for (int i = 0; i < kBatchLines; ++i) {
      __m512i first;
      __m512i second;
      upcast.in_order(_mm512_loadu_si512(from + i / 2 * two_lines_ + i % 2 * one_line_), first, second);
      store(to + 2 * kLine * i, first);
      store(to + 2 * kLine * i + kLine, second);
    }
    if (++batch_ < kChunkBatches) return;
    batch_ = 0;
    ++producer_chunk_;
    set_producer_source();
  }

 private:
  static constexpr int32_t kGroups = kTileTokens / kGroupTokens;
  static constexpr int32_t kLine = 64;
  static constexpr int32_t kBatchLines = 4;  ///< of the cache, dequantized at a time
  static constexpr int32_t kGroupBatches = kGroupTokens * kChunkDims / (kBatchLines * kLine);
  static constexpr int32_t kChunkBatches = kGroups * kGroupBatches;
  static constexpr int32_t kKeySteps = kChunkDims / kMmaDims;
  static constexpr int32_t kValueTiles = kChunkDims / kDimTile;
  static constexpr int64_t kKeyStride = kChunkDims * kBf16Bytes;
  static constexpr int64_t kPairStride = 2 * kChunkDims * kBf16Bytes;

  FOLIO_INLINE_MEMBER void find_groups(const KvTile& tile, const unsigned char** groups) const {
    for (int32_t g = 0; g < kGroups; ++g) {
      groups[g] = key_at(work_.kv, tile.first + g * kGroupTokens);
      groups[kGroups + g] = value_at(work_.kv, tile.first + g * kGroupTokens);
    }
  }
  /// The next tile's V, and K from token `after` on: the K in between has been prefetched.
  FOLIO_INLINE_MEMBER void find_prefetch_groups(int32_t after) {
    for (int32_t g = 0; g < kGroups; ++g) prefetch_groups_[num_prefetch_++] = groups_[1][kGroups + g];
    const int32_t end = smaller(after + kTileTokens, work_.kv.kv_end - kGroupTokens + 1);
    for (int32_t t = after; t < end; t += kGroupTokens) prefetch_groups_[num_prefetch_++] = key_at(work_.kv, t);
  }

  /// Makes chunk `chunk` of the tile full and releases those before it.
  FOLIO_INLINE_MEMBER void consumer_wait(int32_t chunk) {
    consumer_chunk_ = first_ + chunk;
    set_producer_end();
    while (producer_chunk_ <= consumer_chunk_) advance(*this, 1);
    stage_ = stage(consumer_chunk_);
  }
  FOLIO_INLINE_MEMBER unsigned char* stage(int32_t number) const {
    return stages_ + number % kStages * kStageBytes;
  }
  FOLIO_INLINE_MEMBER void set_producer_end() {
    producer_end_ = smaller(consumer_chunk_ + kStages, first_ + (has_next_ ? 2 : 1) * chunks_);
  }
  /// Where producer_chunk_ lies in the cache: two rows of K, or one row of V pairs, are two lines of it.
  FOLIO_INLINE_MEMBER void set_producer_source() {
    const bool of_next = producer_chunk_ - first_ >= chunks_;
    const int32_t chunk = producer_chunk_ - first_ - (of_next ? chunks_ : 0);
    const bool keys = chunk < k_chunks_;
    group_ = groups_[of_next ? 1 : 0] + (keys ? 0 : kGroups);
    offset_ = keys ? chunk * kChunkDims : (chunk - k_chunks_) * 2 * kChunkDims;
    two_lines_ = keys ? 2 * work_.kv.k_token : work_.kv.v_token;
    one_line_ = keys ? work_.kv.k_token : kLine;
  }

  const WorkTileParams& work_;
  unsigned char* const stages_;
  const int32_t k_chunks_;
  const int32_t chunks_;                               ///< of a tile
  const unsigned char* groups_[2][2 * kGroups];        ///< K, then V, of 16 tokens each: of the tile, of the next
  const unsigned char* prefetch_groups_[2 * kGroups];  ///< to be prefetched
  const unsigned char* const* group_ = nullptr;        ///< of producer_chunk_
  const unsigned char* stage_ = nullptr;               ///< of consumer_chunk_
  int64_t offset_ = 0;                                 ///< of the chunk in a row
  int64_t two_lines_ = 0;                              ///< bytes to the line after the next
  int64_t one_line_ = 0;                               ///< bytes from an even line to the next
  bool has_next_ = false;
  int32_t first_ = 0;           ///< number of the tile's first chunk
  int32_t consumer_chunk_ = 0;  ///< that MMAs read
  int32_t producer_chunk_ = 0;  ///< that is being dequantized
  int32_t batch_ = 0;           ///< its next lines
  int32_t producer_end_ = 0;    ///< the first chunk whose stage is not free
  int32_t num_prefetch_ = 0;
  int32_t prefetch_group_ = 0;
  int32_t prefetch_at_ = 0;
};

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
