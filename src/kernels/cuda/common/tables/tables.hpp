#pragma once

#include <cstdint>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "folio/types/kv_cache.hpp"
#include "kernels/cuda/common/division.hpp"

/// Lists that are made of lengths and page tables on a GPU. All addresses are the device's. Nothing is believed: a
/// length below 0 counts as 0, an entry that a table does not have as 0, what a list has no room for is not written;
/// each of these makes `status`, if given, 1. Every `enqueue` throws Error(kDeviceError) where a launch fails.
namespace folio::inline v0::kernels::cuda {

/// indptr [n + 1] counts units of `unit` tokens; last_unit_len [n], if given, what the last of them holds (0: no unit).
struct IndptrParams {
  const int32_t* lens = nullptr;  ///< [n]
  int32_t n = 0;
  int32_t unit = 1;
  int32_t* indptr = nullptr;
  int32_t* last_unit_len = nullptr;
  int32_t* status = nullptr;
  FastDiv units;  ///< set by enqueue: division by unit
};
void enqueue(const IndptrParams& params, Stream stream);

/// The inverse: lens[i] = (units - 1) * unit + last_unit_len[i], 0 without units.
struct LensParams {
  const int32_t* indptr = nullptr;
  const int32_t* last_unit_len = nullptr;
  int32_t n = 0;
  int32_t unit = 1;
  int32_t* lens = nullptr;
  int32_t* status = nullptr;
};
void enqueue(const LensParams& params, Stream stream);

/// For every row of a table its pages (in out32), or its tokens: token j of row r becomes (j's page) * page_stride + (j
/// in the page) * token_stride. The row's entries begin at indptr[r]; indptr and last_unit_len, in units of a page or a
/// token, are made as IndptrParams says.
struct ListParams {
  PageTableView table;
  const int32_t* lens = nullptr;  ///< [n], tokens
  int32_t n = 0;
  int32_t page_size = 1;
  bool tokens = false;
  int64_t page_stride = 1;  ///< not negative, as the next
  int64_t token_stride = 0;
  int32_t* indptr = nullptr;         ///< [n + 1]
  int32_t* last_unit_len = nullptr;  ///< [n] or null
  int32_t* out32 = nullptr;          ///< this or out64
  int64_t* out64 = nullptr;
  int64_t capacity = 0;
  int32_t* status = nullptr;
  FastDiv pages;                ///< set by enqueue: division by the entries of a page
  uint32_t pages_that_fit = 0;  ///< set by enqueue: how many, from 0 on, have only entries that the list's type holds
};
void enqueue(const ListParams& params, Stream stream);

/// out [n, columns]: the rows' pages, `fill` beyond them.
struct DenseParams {
  PageTableView table;
  const int32_t* lens = nullptr;
  int32_t n = 0;
  int32_t page_size = 1;
  int32_t columns = 0;
  int32_t fill = 0;
  int32_t* out = nullptr;
  int32_t* status = nullptr;
};
void enqueue(const DenseParams& params, Stream stream);

/// Reads every page of every row; writes nothing but `status`: 1 for one that the table does not have or that lies
/// outside [0, num_pages).
struct ValidateParams {
  PageTableView table;
  const int32_t* lens = nullptr;
  int32_t n = 0;
  int32_t page_size = 1;
  int64_t num_pages = 0;
  int32_t* status = nullptr;  ///< never null
};
void enqueue(const ValidateParams& params, Stream stream);

/// As folio::slot_mapping, pages of all ranks together being below 2^31 tokens; a token whose page does not exist gets
/// -1.
struct SlotParams {
  PageTableView table;
  const int32_t* token_row = nullptr;
  const int32_t* positions = nullptr;
  int64_t num_tokens = 0;
  int32_t page_size = 1;
  KvShard shard;
  int64_t* slots = nullptr;
  int32_t* status = nullptr;
  FastDiv span, cycle, interleave;  ///< set by enqueue: tokens of a logical page, of a turn of all ranks, of one's turn
};
void enqueue(const SlotParams& params, Stream stream);

/// out [n * ratio]: page p becomes p * ratio .. p * ratio + ratio - 1; a page whose expansion does not exist -1.
struct ExpandParams {
  const int32_t* pages = nullptr;
  int64_t n = 0;
  int32_t ratio = 1;
  int32_t* out = nullptr;
  int32_t* status = nullptr;
  FastDiv pieces;  ///< set by enqueue: division by ratio
};
void enqueue(const ExpandParams& params, Stream stream);

/// out[i] = the tokens of lens[i] that lie on the shard's rank.
struct ShardLensParams {
  const int32_t* lens = nullptr;
  int64_t n = 0;
  KvShard shard;
  int32_t* out = nullptr;
  int32_t* status = nullptr;
};
void enqueue(const ShardLensParams& params, Stream stream);

/// Parts of a table's rows, as indices of a CSR table: out[indptr[n] + j] = entry (row[n], first_column[n] + j), or 0
/// where the table has none. All addresses are the device's.
struct TableRowsParams {
  PageTableView table;
  const int32_t* row = nullptr;           ///< [num_rows]; those without entries to copy may name none
  const int32_t* first_column = nullptr;  ///< [num_rows]
  const int32_t* indptr = nullptr;        ///< [num_rows + 1]
  int32_t num_rows = 0;
  int32_t* out = nullptr;
};
void enqueue(const TableRowsParams& params, Stream stream);

/// k[t, h] = nope[t, h] and then rope[t, 0]. Sizes and strides are in bytes.
struct ConcatParams {
  unsigned char* k = nullptr;
  const unsigned char* nope = nullptr;
  const unsigned char* rope = nullptr;
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t nope_bytes = 0;
  int32_t rope_bytes = 0;
  int64_t k_token = 0, k_head = 0;
  int64_t nope_token = 0, nope_head = 0;
  int64_t rope_token = 0;
  bool copy_nope = true;  ///< false: it stands there already
  PieceSplit split;       ///< set by enqueue
};
void enqueue(const ConcatParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
