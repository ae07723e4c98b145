#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/dtype.hpp"

/// What passes between the worker loop, which is compiled once for the oldest CPU, and the arithmetic, which is
/// compiled once per instruction set. Plain data only: an instruction-set object must not instantiate inline functions
/// that the rest of the library shares, so it never sees views, spans or strings.
namespace folio::inline v0::kernels::cpu {

inline constexpr int32_t kTileTokens = 64;  ///< a row's visible tokens of a tile are one 64-bit word
inline constexpr int32_t kMaxHeadDimQk = 576;
inline constexpr int32_t kMaxHeadDimV = 512;
/// Rows and dimensions in scratch memory are padded with zeros to multiples of these, which every vector width divides.
inline constexpr int32_t kRowPadding = 8;
inline constexpr int32_t kMostRowPadding = 16;  ///< memory has rows up to a multiple of it: the rows of a matrix tile
inline constexpr int32_t kDimPadding = 16;
inline constexpr int32_t kConvertedKeys = 16;  ///< keys in scratch memory at a time
/// Kernels may keep queries in an order of their own, padded to this.
inline constexpr int32_t kOrderedPadding = 64;
inline constexpr float kLog2E = 1.44269504088896341f;

/// Where the keys and values of one KV head of one segment row lie.
struct ItemKeys {
  DType dtype = DType::kUnset;
  bool packed_v = false;  ///< values in token pairs (KvFormat::kCpuPacked)
  int32_t kv_begin = 0;   ///< local tokens [kv_begin, kv_end) are the item's
  int32_t kv_end = 0;
  const unsigned char* k = nullptr;  ///< token 0 of page 0, this head; without pages: local token 0
  const unsigned char* v = nullptr;
  const int32_t* pages = nullptr;  ///< page of local tokens [0, page_size), and so on; null: no pages
  int32_t page_size = 1;
  int64_t k_page = 0;  ///< strides in bytes
  int64_t k_token = 0;
  int64_t v_page = 0;
  int64_t v_token = 0;      ///< packed_v: from a pair to the next
  int64_t first_pos = 0;    ///< the sequence position of the segment's first token
  int32_t shard_world = 1;  ///< KvShard
  int32_t shard_rank = 0;
  int32_t shard_interleave = 1;
};

/// One packed row against the item's segment.
struct ItemRow {
  const unsigned char* q = nullptr;  ///< the stored query vector
  int32_t visible_begin = 0;         ///< local tokens that the mask and window leave
  int32_t visible_end = 0;
  const uint8_t* mask = nullptr;  ///< custom mask: the request's block; null = none
  int64_t mask_bit = 0;           ///< local token j stands at bit mask_bit + j,
  int64_t mask_begin = 0;         ///< if j >= mask_begin; earlier tokens are visible
  int64_t position = 0;           ///< of the query, also where the item has no keys
  float logit_scale = 1.0f;       ///< q_scale * k_scale * sm_scale
  float value_scale = 1.0f;       ///< v_scale
  float alibi_slope = 0.0f;
};

/// Running states of softmax(S) V for some rows: maximum of the logits in base-2 units, sum of exponentials relative to
/// it, and the accumulated values, not yet divided by the sum. Empty: max = -infinity, sum and acc 0.
struct RowStates {
  float* max = nullptr;  ///< [rows]
  float* sum = nullptr;  ///< [rows]
  float* acc = nullptr;  ///< [rows, v_stride]
};

/// Memory of one worker; see scratch.hpp.
struct ItemScratch {
  float* q = nullptr;                    ///< [rows, qk_stride]
  float* ordered_q = nullptr;            ///< [rows, ordered_stride]: in the order that suits the kernel
  int32_t ordered_stride = 0;            ///< head_dim_qk, padded to kOrderedPadding
  float* k = nullptr;                    ///< [kConvertedKeys, ordered_stride]
  float* v = nullptr;                    ///< [kTileTokens, v_stride]
  float* p = nullptr;                    ///< [rows, kTileTokens]: scores, then weights
  float* rescale = nullptr;              ///< [rows]
  uint64_t* visible = nullptr;           ///< [2, rows]: of this tile and the next
  const unsigned char** rows = nullptr;  ///< [4, kTileTokens]: keys and values of this tile and the next
  const unsigned char* zeros = nullptr;  ///< a key, value or pair of values that is all zeros
  unsigned char* pairs = nullptr;  ///< [2, 2] pairs of values, v_stride floats each: copies of those at a range's ends
  unsigned char* own = nullptr;    ///< Arithmetic::own_bytes
  double* rope = nullptr;          ///< ItemCall::rope
};

/// One item: rows against keys.
struct ItemCall {
  ItemKeys keys;
  const ItemRow* rows = nullptr;
  int32_t num_rows = 0;
  int32_t tile_rows = 0;  ///< most rows of an item
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  int32_t qk_stride = 0;  ///< head_dim_qk, padded
  int32_t v_stride = 0;
  DType q_dtype = DType::kUnset;
  float soft_cap = 0.0f;  ///< 0 = off
  bool alibi = false;
  /// [head_dim_qk / 2, padded to kDimPadding]: quarter turns by which a position turns components d and d + head_dim_qk
  /// / 2 of queries and keys (Feature::kRopeLlama). Null = no rotary embedding.
  const double* rope = nullptr;
  ItemScratch scratch;
  RowStates states;
};

/// The arithmetic, one set of functions per instruction set. Every result is a function of the row and of the 64-token
/// tiles at absolute local positions alone: not of the other rows, nor of where items begin and end within what a row
/// sees.
struct Arithmetic {
  /// Converts the rows' queries into scratch.q.
  void (*load_queries)(const ItemCall& call) noexcept;
  /// Adds the item's keys to the states.
  void (*accumulate)(const ItemCall& call) noexcept;
  /// Folds a second state into the first: max, sum and acc[n]. An empty second state changes nothing; into an empty
  /// first state the second is copied.
  void (*fold)(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
               int32_t n) noexcept;
  /// Scratch bytes beyond what is common, for items of up to `tile_rows` rows; null = none.
  size_t (*own_bytes)(int32_t tile_rows, int32_t head_dim_qk, int32_t head_dim_v) noexcept = nullptr;
  /// Stores acc[n] * factor, with no -0, as `dtype`; false if it does not know the dtype. Null: knows none.
  bool (*store_row)(const float* acc, float factor, DType dtype, int32_t n, void* to) noexcept = nullptr;
  /// Whether it applies ItemCall::rope.
  bool rotates = false;
};

}  // namespace folio::inline v0::kernels::cpu
