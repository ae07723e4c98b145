#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/dtype.hpp"

/// Tile shapes, scratch memory, and what passes between the scheduler's loop and a Collective.
///
/// The loop is compiled once, for the oldest CPU. A Collective (CUTLASS's word: mainloop and epilogue) is compiled once
/// per instruction set. Plain data only: an object of a newer instruction set must not instantiate inline functions
/// that the rest of the library shares. So it never sees views, spans or strings.
namespace folio::inline v0::kernels::cpu {

inline constexpr int32_t kTileTokens = 64;  ///< of a KV tile: a row's mask of a tile is one 64-bit word
/// Most keys that one state takes; states of more keys are combined. A power of two of KV tiles.
inline constexpr int32_t kMaxStateTokens = 16384;
inline constexpr int32_t kMaxHeadDimQk = 576;
inline constexpr int32_t kMaxHeadDimV = 512;
/// Rows and dimensions in scratch memory are padded with zeros to multiples of these, which every vector width divides.
inline constexpr int32_t kRowPadding = 8;
inline constexpr int32_t kMaxHeads = 8;        ///< KV heads that a mainloop walks together
inline constexpr int32_t kMaxRowPadding = 16;  ///< scratch memory has rows up to a multiple of it: those of an AMX tile
inline constexpr int32_t kDimPadding = 16;
inline constexpr int32_t kUpcastKeys = 16;  ///< upcast keys in scratch memory at a time
/// A collective may reorder the components of Q; each row is padded to a multiple of this.
inline constexpr int32_t kReorderPadding = 64;
inline constexpr float kLog2E = 1.44269504088896341f;

/// The K and V of one KV head of one segment row.
struct KvOperand {
  DType dtype = DType::kUnset;
  bool packed_v = false;  ///< V in token pairs (KvFormat::kCpuPacked)
  bool ds_mla = false;    ///< rows of KvFormat::kFp8DsMla
  int32_t kv_begin = 0;   ///< local tokens [kv_begin, kv_end) are the work tile's
  int32_t kv_end = 0;
  const unsigned char* k = nullptr;  ///< token 0 of page 0, this head; without pages: local token 0
  const unsigned char* v = nullptr;
  const int32_t* pages = nullptr;  ///< page of local tokens [0, page_size), and so on; null: no pages
  int32_t page_size = 1;
  int64_t k_page = 0;  ///< strides in bytes
  int64_t k_token = 0;
  int64_t v_page = 0;
  int64_t v_token = 0;  ///< packed_v: from a pair to the next
  /// int8: the scale of token 0 of page 0, this head; null: no scales.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;
  int64_t k_scale_page = 0;  ///< strides of the scales in elements
  int64_t k_scale_token = 0;
  int64_t v_scale_page = 0;
  int64_t v_scale_token = 0;
  int64_t first_pos = 0;    ///< sequence position of the segment's first token
  int32_t shard_world = 1;  ///< KvShard
  int32_t shard_rank = 0;
  int32_t shard_interleave = 1;
};

/// One packed row of Q, and what of the work tile's segment is visible to it.
struct QueryRow {
  const unsigned char* q = nullptr;  ///< the stored query vector
  int32_t visible_begin = 0;         ///< local tokens that causal mask and window leave visible
  int32_t visible_end = 0;
  const uint8_t* mask = nullptr;  ///< custom mask: the request's block; null = none
  int64_t mask_bit = 0;           ///< local token j stands at bit mask_bit + j,
  int64_t mask_begin = 0;         ///< if j >= mask_begin; earlier tokens are visible
  int64_t position = 0;           ///< of the query; set also where the work tile has no KV
  float logit_scale = 1.0f;       ///< q_scale * k_scale * sm_scale
  float value_scale = 1.0f;       ///< v_scale
  float alibi_slope = 0.0f;
};

/// Online-softmax state of some rows. Empty: row_max = -infinity, row_sum and acc 0.
struct SoftmaxState {
  float* row_max = nullptr;  ///< [rows]: maximum of the logits, in base-2 units
  float* row_sum = nullptr;  ///< [rows]: sum of exponentials relative to row_max
  float* acc = nullptr;      ///< [rows, v_stride]: unnormalized output
};

/// Scratch memory for a work tile; carve_scratch (kernel.hpp) lays it out.
struct TileScratch {
  float* q = nullptr;            ///< [rows, qk_stride]
  float* reordered_q = nullptr;  ///< [rows, reordered_stride]: components in the order and the type of its K loads
  int32_t reordered_stride = 0;  ///< head_dim_qk, padded to kReorderPadding
  float* k = nullptr;            ///< [kUpcastKeys, reordered_stride]
  float* v = nullptr;            ///< [kTileTokens, v_stride]
  float* p = nullptr;            ///< [rows, kTileTokens]: S, then P
  float* rescale = nullptr;      ///< [rows]: factor of acc
  uint64_t* visible = nullptr;   ///< [2, rows]: of this KV tile and the next
  const unsigned char** rows = nullptr;  ///< [4, kTileTokens]: K and V rows of this KV tile and the next
  const unsigned char* zeros = nullptr;  ///< a row of K, of V, or a pair of V rows that is all zeros
  unsigned char* pairs = nullptr;        ///< [2, 2] pairs of V rows, v_stride floats each: copies at a range's ends
  float* decoded = nullptr;              ///< [kTileTokens, qk_stride]: rows of KvFormat::kFp8DsMla as floats
  float* token_scales = nullptr;         ///< [4, kTileTokens]: int8: of K and V of this KV tile and the next
  unsigned char* collective = nullptr;   ///< Collective::scratch_bytes
  double* rope = nullptr;                ///< WorkTileParams::rope
};

/// One work tile: rows of Q against a range of KV.
struct WorkTileParams {
  KvOperand kv;
  const QueryRow* rows = nullptr;
  int32_t num_rows = 0;
  int32_t tile_rows = 0;  ///< most rows of a work tile
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  int32_t qk_stride = 0;  ///< head_dim_qk, padded
  int32_t v_stride = 0;
  DType q_dtype = DType::kUnset;
  float soft_cap = 0.0f;  ///< 0 = off
  bool alibi = false;
  /// [head_dim_qk / 2, padded to kDimPadding]: rotary frequencies in quarter turns a position, of components d and
  /// d + head_dim_qk / 2 of Q and K (Feature::kRopeLlama). Null = no rotary embedding.
  const double* rope = nullptr;
  TileScratch scratch;
  SoftmaxState state;
};

/// The functions of one instruction set. A row's results depend on the row and on the 64-token KV tiles at absolute
/// local positions. They do not depend on other rows, nor on where work tiles begin and end within the row's visible
/// range.
struct Collective {
  /// Loads Q into scratch.q.
  void (*load_q)(const WorkTileParams& work) noexcept;
  /// Adds the KV of work tiles to their states. heads[i] are the same rows and tokens of several KV heads: they differ
  /// in K, V, the queries' memory and the state alone. More than one only as the fields below say.
  void (*mainloop)(const WorkTileParams* heads, int32_t num_heads) noexcept;
  /// Combines a second state of a row into the first: row_max, row_sum and acc[n]. An empty second state changes
  /// nothing; into an empty first state the second is copied.
  void (*combine_states)(float* row_max, float* row_sum, float* acc, float other_max, float other_sum,
                         const float* other_acc, int32_t n) noexcept;
  /// Scratch bytes beyond the common ones, for work tiles of up to `tile_rows` rows; null = none.
  size_t (*scratch_bytes)(int32_t tile_rows, int32_t head_dim_qk, int32_t head_dim_v, DType q) noexcept = nullptr;
  /// Epilogue of a row: stores acc[n] * factor, with no -0, as `dtype`; false if it does not know the dtype. Null:
  /// knows none.
  bool (*store_row)(const float* acc, float factor, DType dtype, int32_t n, void* to) noexcept = nullptr;
  /// Whether it applies WorkTileParams::rope.
  bool applies_rope = false;
  /// Whether it takes KvOperand::ds_mla.
  bool decodes_ds_mla = false;
  /// The mainloop takes several heads, KV tile by KV tile, one head after the other. That is faster for work tiles of
  /// at least so many rows; 0 = it takes one. And for at most so many.
  int32_t min_rows_of_heads = 0;
  int32_t max_rows_of_heads = 0x7fffffff;
  /// It walks several heads of packed caches too.
  bool takes_packed_heads = true;
  /// One head's rows in scratch memory begin at a multiple of it.
  int32_t row_padding = kRowPadding;
};

}  // namespace folio::inline v0::kernels::cpu
