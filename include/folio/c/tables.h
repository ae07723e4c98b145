/* Page tables and slots; see folio/table_ops.hpp.
 *
 * Arrays lie in the context's memory and are as long as their comments say; outputs do not overlap inputs. On a GPU
 * calls are enqueued on `stream`; what is wrong there gets the value that table_ops.hpp says, and *status becomes 1
 * (NULL = not wanted). On a CPU stream and status are NULL; after a refusal outputs may be partly written. R =
 * num_requests. */
#ifndef FOLIO_C_TABLES_H_
#define FOLIO_C_TABLES_H_

#include "folio/c/context.h"

FOLIO_C_BEGIN

/* ceil(tokens / page_size). */
FOLIO_C_API folio_status folio_pages_for(int32_t tokens, int32_t page_size, int32_t* pages) FOLIO_C_NOEXCEPT;

/* indptr [R + 1] and last_page_len [R] of seq_lens [R]; and the inverse. */
FOLIO_C_API folio_status folio_paged_indptr(const folio_context* context, const int32_t* seq_lens, int32_t num_requests,
                                            int32_t page_size, int32_t* indptr, int32_t* last_page_len, void* stream,
                                            int32_t* status) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_seq_lens_from_paged(const folio_context* context, const int32_t* indptr,
                                                   const int32_t* last_page_len, int32_t num_requests,
                                                   int32_t page_size, int32_t* seq_lens, void* stream,
                                                   int32_t* status) FOLIO_C_NOEXCEPT;
/* Any table to CSR: indptr [R + 1], indices [num_indices], which has room for all pages, last_page_len [R]. */
FOLIO_C_API folio_status folio_table_to_csr(const folio_context* context, const folio_page_table_view* table,
                                            const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                            int32_t* indptr, int32_t* indices, int64_t num_indices,
                                            int32_t* last_page_len, void* stream, int32_t* status) FOLIO_C_NOEXCEPT;
/* Any table to a dense one, dense [R * columns]; `fill` beyond a row's pages. */
FOLIO_C_API folio_status folio_table_to_dense(const folio_context* context, const folio_page_table_view* table,
                                              const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                              int32_t columns, int32_t fill, int32_t* dense, void* stream,
                                              int32_t* status) FOLIO_C_NOEXCEPT;
/* One index a token, page * page_size + place in the page: indptr [R + 1] in tokens, indices [num_indices]. */
FOLIO_C_API folio_status folio_token_indices(const folio_context* context, const folio_page_table_view* table,
                                             const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                             int32_t* indptr, int32_t* indices, int64_t num_indices, void* stream,
                                             int32_t* status) FOLIO_C_NOEXCEPT;
/* Where each token begins, page * page_stride + place in the page * token_stride: offsets [num_offsets]. */
FOLIO_C_API folio_status folio_token_offsets(const folio_context* context, const folio_page_table_view* table,
                                             const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                             int64_t page_stride, int64_t token_stride, int32_t* indptr,
                                             int64_t* offsets, int64_t num_offsets, void* stream,
                                             int32_t* status) FOLIO_C_NOEXCEPT;
/* The slot of each token: token t belongs to row token_row[t] at position positions[t]; slots [num_tokens]. A position
 * below 0, or one of another rank's (shard; NULL: not divided), gets -1. */
FOLIO_C_API folio_status folio_slot_mapping(const folio_context* context, const folio_page_table_view* table,
                                            const int32_t* token_row, const int32_t* positions, int64_t num_tokens,
                                            int32_t page_size, const folio_kv_shard* shard, int64_t* slots,
                                            void* stream, int32_t* status) FOLIO_C_NOEXCEPT;
/* Pages `ratio` times smaller: id m becomes m * ratio to m * ratio + ratio - 1; expanded [num_pages * ratio]. */
FOLIO_C_API folio_status folio_expand_pages(const folio_context* context, const int32_t* pages, int64_t num_pages,
                                            int32_t ratio, int32_t* expanded, void* stream,
                                            int32_t* status) FOLIO_C_NOEXCEPT;
/* Tokens of each length that lie on the shard's rank; local [R] may be lens. */
FOLIO_C_API folio_status folio_shard_lens(const folio_context* context, const int32_t* lens, int32_t num_requests,
                                          const folio_kv_shard* shard, int32_t* local, void* stream,
                                          int32_t* status) FOLIO_C_NOEXCEPT;
/* Looks at every page that the lengths need. A CPU names the first wrong row and column; a GPU needs status. */
FOLIO_C_API folio_status folio_validate_page_table(const folio_context* context, const folio_page_table_view* table,
                                                   const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                                   int64_t num_pages, void* stream, int32_t* status) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_TABLES_H_ */
