#include "folio/table_ops.hpp"

#include "capi/convert.hpp"
#include "folio/page_table.hpp"

using folio::Stream;
using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_shard;
using folio::capi::to_span;

namespace {

const folio::Context& device_of(const folio_context* context) {
  return deref(context, "context").context;
}

folio::PageTableView table_of(const folio_page_table_view* table) {
  return folio::capi::to_table(deref(table, "table"), "table.kind");
}

int64_t rows_and_one(int32_t num_requests) {
  return int64_t{num_requests} + 1;
}

/// num_requests * columns, which may be wrong either way.
int64_t elements(int64_t rows, int64_t columns, const char* name) {
  folio::core::require(rows >= 0 && columns >= 0, name, " has ", rows, " x ", columns, " elements");
  int64_t count = 0;
  folio::core::require(!__builtin_mul_overflow(rows, columns, &count), name, " has ", rows, " x ", columns,
                       " elements");
  return count;
}

}  // namespace

folio_status folio_pages_for(int32_t tokens, int32_t page_size, int32_t* pages) noexcept {
  return guarded([&] {
    deref(pages, "pages");
    *pages = folio::pages_for(tokens, page_size);
  });
}

folio_status folio_paged_indptr(const folio_context* context, const int32_t* seq_lens, int32_t num_requests,
                                int32_t page_size, int32_t* indptr, int32_t* last_page_len, void* stream,
                                int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::paged_indptr(device_of(context), lens, page_size, to_span(indptr, rows_and_one(num_requests), "indptr"),
                        to_span(last_page_len, num_requests, "last_page_len"), Stream{stream}, status);
  });
}

folio_status folio_seq_lens_from_paged(const folio_context* context, const int32_t* indptr,
                                       const int32_t* last_page_len, int32_t num_requests, int32_t page_size,
                                       int32_t* seq_lens, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::seq_lens_from_paged(device_of(context), to_span(indptr, rows_and_one(num_requests), "indptr"),
                               to_span(last_page_len, num_requests, "last_page_len"), page_size, lens, Stream{stream},
                               status);
  });
}

folio_status folio_table_to_csr(const folio_context* context, const folio_page_table_view* table,
                                const int32_t* seq_lens, int32_t num_requests, int32_t page_size, int32_t* indptr,
                                int32_t* indices, int64_t num_indices, int32_t* last_page_len, void* stream,
                                int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::to_csr(device_of(context), table_of(table), lens, page_size,
                  to_span(indptr, rows_and_one(num_requests), "indptr"), to_span(indices, num_indices, "indices"),
                  to_span(last_page_len, num_requests, "last_page_len"), Stream{stream}, status);
  });
}

folio_status folio_table_to_dense(const folio_context* context, const folio_page_table_view* table,
                                  const int32_t* seq_lens, int32_t num_requests, int32_t page_size, int32_t columns,
                                  int32_t fill, int32_t* dense, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::to_dense(device_of(context), table_of(table), lens, page_size, columns, fill,
                    to_span(dense, elements(num_requests, columns, "dense"), "dense"), Stream{stream}, status);
  });
}

folio_status folio_token_indices(const folio_context* context, const folio_page_table_view* table,
                                 const int32_t* seq_lens, int32_t num_requests, int32_t page_size, int32_t* indptr,
                                 int32_t* indices, int64_t num_indices, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::token_indices(device_of(context), table_of(table), lens, page_size,
                         to_span(indptr, rows_and_one(num_requests), "indptr"),
                         to_span(indices, num_indices, "indices"), Stream{stream}, status);
  });
}

folio_status folio_token_offsets(const folio_context* context, const folio_page_table_view* table,
                                 const int32_t* seq_lens, int32_t num_requests, int32_t page_size, int64_t page_stride,
                                 int64_t token_stride, int32_t* indptr, int64_t* offsets, int64_t num_offsets,
                                 void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::token_offsets(device_of(context), table_of(table), lens, page_size, page_stride, token_stride,
                         to_span(indptr, rows_and_one(num_requests), "indptr"),
                         to_span(offsets, num_offsets, "offsets"), Stream{stream}, status);
  });
}

folio_status folio_slot_mapping(const folio_context* context, const folio_page_table_view* table,
                                const int32_t* token_row, const int32_t* positions, int64_t num_tokens,
                                int32_t page_size, const folio_kv_shard* shard, int64_t* slots, void* stream,
                                int32_t* status) noexcept {
  return guarded([&] {
    folio::slot_mapping(device_of(context), table_of(table), to_span(token_row, num_tokens, "token_row"),
                        to_span(positions, num_tokens, "positions"), page_size, to_span(slots, num_tokens, "slots"),
                        to_shard(shard), Stream{stream}, status);
  });
}

folio_status folio_expand_pages(const folio_context* context, const int32_t* pages, int64_t num_pages, int32_t ratio,
                                int32_t* expanded, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    folio::expand_pages(device_of(context), to_span(pages, num_pages, "pages"), ratio,
                        to_span(expanded, elements(num_pages, ratio, "expanded"), "expanded"), Stream{stream}, status);
  });
}

folio_status folio_shard_lens(const folio_context* context, const int32_t* lens, int32_t num_requests,
                              const folio_kv_shard* shard, int32_t* local, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const auto given = to_span(lens, num_requests, "lens");
    folio::shard_lens(device_of(context), given, to_shard(&deref(shard, "shard")),
                      to_span(local, num_requests, "local"), Stream{stream}, status);
  });
}

folio_status folio_validate_page_table(const folio_context* context, const folio_page_table_view* table,
                                       const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                       int64_t num_pages, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    folio::validate(device_of(context), table_of(table), to_span(seq_lens, num_requests, "seq_lens"), page_size,
                    num_pages, Stream{stream}, status);
  });
}
