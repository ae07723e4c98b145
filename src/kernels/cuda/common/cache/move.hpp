#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/kv_cache.hpp"
#include "kernels/cuda/common/division.hpp"

/// Keys and values that move between tensors and caches on a GPU. All addresses are the device's. Every `enqueue`
/// returns at once, may be captured and throws Error(kDeviceError) where a launch fails. Indices are read when the
/// kernel runs and checked there: a token or page whose index is out of range stays where it is, and `status`, if
/// given, becomes 1 (nothing sets it back to 0).
namespace folio::inline v0::kernels::cuda {

/// Rows of heads: the row of (page, token, head) begins at element page * page_stride + token * token_stride + head *
/// head_stride. A tensor has one page. In pairs (step 2, a packed V) token_stride leads from a pair of tokens to the
/// next.
struct MoveSide {
  std::byte* data = nullptr;
  DType dtype = DType::kUnset;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int32_t step = 1;     ///< elements from a component to the next
  bool ds_mla = false;  ///< rows of KvFormat::kFp8DsMla; strides are bytes
};

/// The K or the V half of a move: to = from * from_scale / to_scale, a scale counting only on a side that is fp8.
struct MoveHalf {
  MoveSide from;
  MoveSide to;
  int32_t head_dim = 0;
  Scale from_scale;  ///< any granularity in gathers, else per tensor or head
  Scale to_scale;    ///< per tensor or head
  bool bitwise = false;
  int32_t piece = 1;  ///< set by enqueue: elements that a thread moves at a time
  // Set by enqueue: how a token's pieces are counted and shared out, and the bytes from a head, and from a piece of a
  // head, to the next.
  uint32_t pieces = 1;  ///< of a token
  uint32_t lanes = 1;   ///< tokens that a CTA takes at once
  FastDiv columns;      ///< threads of one of them
  FastDiv per_head;
  int64_t from_head_bytes = 0;
  int64_t to_head_bytes = 0;
  int32_t from_piece_bytes = 0;
  int32_t to_piece_bytes = 0;
};

struct MoveParams {
  MoveHalf halves[2];  ///< K, V
  int32_t num_halves = 2;
  int32_t first_half = 0;  ///< set by enqueue
  int32_t num_heads = 0;
  int32_t page_size = 1;
  int32_t tile = 1;  ///< set by enqueue: tokens that a CTA takes at a time
  int32_t* status = nullptr;
};

/// Token i of the tensors goes to slot slots[i]; a slot below 0 is skipped, one at or beyond the limit is out of range.
struct WriteParams {
  MoveParams move;
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;
  int64_t slot_limit = 0;
};
void enqueue(const WriteParams& params, Stream stream);

/// The first kv_len[r] tokens of row r of the table, one row after the other, become the tensors' tokens. Tokens beyond
/// the tensors' are out of range.
struct GatherParams {
  MoveParams move;
  PageTableView table;
  const int32_t* kv_len = nullptr;  ///< [num_rows]
  int32_t num_rows = 0;
  int64_t num_pages = 0;
  int64_t num_tokens = 0;  ///< of the tensors
};
void enqueue(const GatherParams& params, Stream stream);

/// Page source[i] becomes page destination[i].
struct PagesParams {
  MoveParams move;
  const int32_t* source = nullptr;
  const int32_t* destination = nullptr;
  int64_t num_pairs = 0;
  int64_t from_pages = 0;
  int64_t to_pages = 0;
};
void enqueue(const PagesParams& params, Stream stream);

/// Tokens in use of pages that a table names go to pages numbered from 1, row after row. `new_table` [num_rows,
/// columns] gets those numbers, 0 beyond a row's pages.
struct RenumberParams {
  MoveParams move;
  const int32_t* table = nullptr;  ///< [num_rows, columns]
  int64_t table_stride = 0;
  int32_t columns = 0;
  const int32_t* seq_lens = nullptr;  ///< [num_rows]
  int32_t num_rows = 0;
  int64_t from_pages = 0;
  int64_t to_pages = 0;
  int32_t* new_table = nullptr;
};
void enqueue(const RenumberParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
