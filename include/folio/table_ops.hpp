#pragma once

#include <cstdint>
#include <span>

#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"

/// The lists that are made of lengths and page tables (folio/page_table.hpp), on a context's device and into memory of
/// the caller's. All arrays lie in the context's memory; outputs are sized by the caller and do not overlap inputs.
/// Nothing is allocated on a GPU, where calls are enqueued on `stream` and may be captured.
///
/// Sizes are checked first (kInvalidArgument). Values: a CPU throws, as the functions of page_table.hpp do; outputs may
/// then be partly written. A GPU reads them when the kernel runs: what a function's comment says comes in their place,
/// and `status` (an int32 in device memory; null = not wanted; GPUs only) becomes 1, which nothing sets back.
namespace folio::inline v0 {

/// indptr [R + 1] and last_page_len [R] of lengths [R]. On a GPU a negative length counts as 0, and an indptr ends at
/// 2^31 - 1.
FOLIO_API void paged_indptr(const Context& context, std::span<const int32_t> seq_lens, int32_t page_size,
                            std::span<int32_t> indptr, std::span<int32_t> last_page_len, Stream stream = {},
                            int32_t* status = nullptr);

/// The inverse. On a GPU a request whose entries do not fit together gets length 0.
FOLIO_API void seq_lens_from_paged(const Context& context, std::span<const int32_t> indptr,
                                   std::span<const int32_t> last_page_len, int32_t page_size,
                                   std::span<int32_t> seq_lens, Stream stream = {}, int32_t* status = nullptr);

/// Any table to CSR: indptr [R + 1], last_page_len [R] and indices, which has room for all pages. On a GPU entries that
/// the table does not have are 0, and those without room are not written.
FOLIO_API void to_csr(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                      int32_t page_size, std::span<int32_t> indptr, std::span<int32_t> indices,
                      std::span<int32_t> last_page_len, Stream stream = {}, int32_t* status = nullptr);

/// Any table to a dense one, dense [R * columns], `fill` beyond a row's pages. On a GPU entries that the table does not
/// have are 0, and pages beyond the columns are left out.
FOLIO_API void to_dense(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                        int32_t page_size, int32_t columns, int32_t fill, std::span<int32_t> dense, Stream stream = {},
                        int32_t* status = nullptr);

/// One index a token, page * page_size + place in the page: the table for a cache seen as pages of one token.
/// indptr [R + 1], counted in tokens; indices has room for all tokens. On a GPU a token whose page the table does not
/// have, or whose index leaves 32 bits, gets 0.
FOLIO_API void token_indices(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                             int32_t page_size, std::span<int32_t> indptr, std::span<int32_t> indices,
                             Stream stream = {}, int32_t* status = nullptr);

/// Where each token begins in memory: page * page_stride + place in the page * token_stride, 64-bit. FlashInfer's
/// vector offsets of block-sparse tables, a block being a page. Else as token_indices.
FOLIO_API void token_offsets(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                             int32_t page_size, int64_t page_stride, int64_t token_stride, std::span<int32_t> indptr,
                             std::span<int64_t> offsets, Stream stream = {}, int32_t* status = nullptr);

/// As slot_mapping of page_table.hpp. On a GPU a token whose row or page the table does not have, or whose page is
/// negative, gets -1.
FOLIO_API void slot_mapping(const Context& context, const PageTableView& table, std::span<const int32_t> token_row,
                            std::span<const int32_t> positions, int32_t page_size, std::span<int64_t> slots,
                            const KvShard& shard = {}, Stream stream = {}, int32_t* status = nullptr);

/// As expand_pages, into expanded [pages * ratio]. On a GPU a page that cannot be expanded becomes -1s.
FOLIO_API void expand_pages(const Context& context, std::span<const int32_t> pages, int32_t ratio,
                            std::span<int32_t> expanded, Stream stream = {}, int32_t* status = nullptr);

/// shard_len of every length. On a GPU a negative length counts as 0. `local` may be `lens`.
FOLIO_API void shard_lens(const Context& context, std::span<const int32_t> lens, const KvShard& shard,
                          std::span<int32_t> local, Stream stream = {}, int32_t* status = nullptr);

/// Looks at every page that the lengths need. A CPU throws as `validate` of page_table.hpp does, naming the first row
/// and column that is wrong. A GPU reads them when the kernel runs and says only that one is, in `status`, which must
/// be given there: a page outside [0, num_pages) or beyond the table's memory, or a negative length.
FOLIO_API void validate(const Context& context, const PageTableView& table, std::span<const int32_t> seq_lens,
                        int32_t page_size, int64_t num_pages, Stream stream = {}, int32_t* status = nullptr);

}  // namespace folio::inline v0
