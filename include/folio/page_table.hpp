#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "folio/types/error.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"

namespace folio::inline v0 {

/// ceil(tokens / page_size). Throws kInvalidArgument for negative tokens or page_size < 1.
FOLIO_API int32_t pages_for(int32_t tokens, int32_t page_size);

/// The CSR form of a batch's page tables, as FlashInfer's planners take it.
struct PagedMetadata {
  std::vector<int32_t> indptr;         ///< [R + 1], pages
  std::vector<int32_t> indices;        ///< [indptr[R]]
  std::vector<int32_t> last_page_len;  ///< [R]: 1..page_size, 0 where the length is 0
};

/// indptr and last_page_len from lengths; all outputs sized by the caller. Throws kInvalidArgument naming the request.
FOLIO_API void paged_indptr(std::span<const int32_t> seq_lens, int32_t page_size, std::span<int32_t> indptr,
                            std::span<int32_t> last_page_len);

/// Lengths from the CSR form: (pages - 1) * page_size + last_page_len, 0 where there are no pages (whatever
/// last_page_len in [0, page_size] says there). A slice's indptr need not start at 0.
FOLIO_API void seq_lens_from_paged(std::span<const int32_t> indptr, std::span<const int32_t> last_page_len,
                                   int32_t page_size, std::span<int32_t> seq_lens);

/// CSR metadata from any table and the rows' lengths; the table may have more rows. Page ids are copied, not checked;
/// that they lie in the table's memory is. In a dense table a row may not run into the next one.
FOLIO_API PagedMetadata to_csr(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size);

/// A dense table [R, columns] from CSR; entries beyond a row's pages become `fill`. columns >= the longest row.
FOLIO_API std::vector<int32_t> to_dense(const PageTableView& table, std::span<const int32_t> seq_lens,
                                        int32_t page_size, int32_t columns, int32_t fill = 0);

/// Views over memory that the caller keeps.
FOLIO_API PageTableView csr_table(std::span<const int32_t> indices, std::span<const int32_t> indptr);
FOLIO_API PageTableView dense_table(std::span<const int32_t> entries, int32_t num_rows, int64_t row_stride,
                                    int32_t first_column = 0);

/// Which slot each token is written to: token t of the batch belongs to row token_row[t] at global position
/// positions[t]. Sharded caches hold only their rank's tokens (KvShard; interleave must divide page_size): others get
/// -1. Positions < 0 (padding) get -1, and their token_row is not read. A logical page covers page_size * world tokens.
/// Throws kInvalidArgument naming the token for rows and pages that the table does not have, and for negative page ids;
/// `slots` is then partly written.
FOLIO_API void slot_mapping(const PageTableView& table, std::span<const int32_t> token_row,
                            std::span<const int32_t> positions, int32_t page_size, std::span<int64_t> slots,
                            int32_t shard_world = 1, int32_t shard_rank = 0, int32_t shard_interleave = 1);

/// Expands a manager's pages into kernel pages `ratio` times smaller: id m becomes m*ratio .. m*ratio + ratio - 1.
/// Throws kInvalidArgument for negative ids and for ids whose expansion leaves 32 bits.
FOLIO_API std::vector<int32_t> expand_pages(std::span<const int32_t> pages, int32_t ratio);

/// Throws kInvalidArgument naming the first row and column whose page id is outside [0, num_pages), or that lies beyond
/// the table's memory, among the pages that `seq_lens` needs.
FOLIO_API void validate(const PageTableView& table, std::span<const int32_t> seq_lens, int32_t page_size,
                        int64_t num_pages);

/// Tokens of a length that lie on each rank: the count of p < length with (p / interleave) % world == rank.
FOLIO_API int32_t shard_len(int32_t length, int32_t world, int32_t rank, int32_t interleave);

}  // namespace folio::inline v0
