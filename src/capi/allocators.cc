// Who holds which slots, window copies and rows.
#include <bit>
#include <optional>

#include "capi/convert.hpp"
#include "folio/kvcache/window_token_allocator.hpp"
#include "folio/pools.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_span;

struct folio_token_allocator {
  folio::TokenAllocator allocator;
  std::optional<folio::TokenAllocator::FreeGroup> group;  ///< ends before the allocator does
};

struct folio_window_token_allocator {
  folio::WindowTokenAllocator allocator;
};

struct folio_req_to_token_pool {
  folio::ReqToTokenPool pool;
};

namespace {

/// What every allocator has. `name` is the array's, for messages.
template <typename Allocator>
void alloc(Allocator& allocator, int32_t* array, int64_t count, const char* name, int32_t* allocated) {
  deref(allocated, "allocated");
  *allocated = allocator.alloc(to_span(array, count, name)) ? 1 : 0;
}

/// What the allocators of slots have besides: requests that grow.
template <typename Allocator>
void alloc_extend(Allocator& allocator, const int32_t* prefix_lens, const int32_t* seq_lens, const int32_t* last_slots,
                  int32_t num_requests, int32_t* slots, int64_t num_slots, int32_t* allocated) {
  deref(allocated, "allocated");
  const bool done = allocator.alloc_extend(
      to_span(prefix_lens, num_requests, "prefix_lens"), to_span(seq_lens, num_requests, "seq_lens"),
      to_span(last_slots, num_requests, "last_slots"), to_span(slots, num_slots, "slots"));
  *allocated = done ? 1 : 0;
}

template <typename Allocator>
void alloc_decode(Allocator& allocator, const int32_t* seq_lens, const int32_t* last_slots, int32_t num_requests,
                  int32_t* slots, int32_t* allocated) {
  deref(allocated, "allocated");
  const bool done =
      allocator.alloc_decode(to_span(seq_lens, num_requests, "seq_lens"),
                             to_span(last_slots, num_requests, "last_slots"), to_span(slots, num_requests, "slots"));
  *allocated = done ? 1 : 0;
}

}  // namespace

folio_status folio_create_token_allocator(int32_t num_slots, int32_t page_size,
                                          folio_token_allocator** allocator) noexcept {
  return guarded([&] {
    deref(allocator, "allocator") = nullptr;
    *allocator = new folio_token_allocator{folio::TokenAllocator(num_slots, page_size), std::nullopt};
  });
}

void folio_free_token_allocator(folio_token_allocator* allocator) noexcept {
  delete allocator;
}

folio_status folio_token_allocator_available(const folio_token_allocator* allocator, int32_t* slots) noexcept {
  return guarded([&] {
    deref(allocator, "allocator");
    deref(slots, "slots") = allocator->allocator.available();
  });
}

folio_status folio_token_allocator_alloc(folio_token_allocator* allocator, int32_t* slots, int64_t num_slots,
                                         int32_t* allocated) noexcept {
  return guarded([&] { alloc(deref(allocator, "allocator").allocator, slots, num_slots, "slots", allocated); });
}

folio_status folio_token_allocator_alloc_extend(folio_token_allocator* allocator, const int32_t* prefix_lens,
                                                const int32_t* seq_lens, const int32_t* last_slots,
                                                int32_t num_requests, int32_t* slots, int64_t num_slots,
                                                int32_t* allocated) noexcept {
  return guarded([&] {
    alloc_extend(deref(allocator, "allocator").allocator, prefix_lens, seq_lens, last_slots, num_requests, slots,
                 num_slots, allocated);
  });
}

folio_status folio_token_allocator_alloc_decode(folio_token_allocator* allocator, const int32_t* seq_lens,
                                                const int32_t* last_slots, int32_t num_requests, int32_t* slots,
                                                int32_t* allocated) noexcept {
  return guarded([&] {
    alloc_decode(deref(allocator, "allocator").allocator, seq_lens, last_slots, num_requests, slots, allocated);
  });
}

folio_status folio_token_allocator_free(folio_token_allocator* allocator, const int32_t* slots,
                                        int64_t num_slots) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.free(to_span(slots, num_slots, "slots")); });
}

folio_status folio_token_allocator_open_group(folio_token_allocator* allocator) noexcept {
  return guarded([&] { deref(allocator, "allocator").group.emplace(allocator->allocator.free_group()); });
}

folio_status folio_token_allocator_close_group(folio_token_allocator* allocator) noexcept {
  return guarded([&] {
    folio::core::require(deref(allocator, "allocator").group.has_value(), "allocator has no open group");
    allocator->group.reset();
  });
}

folio_status folio_token_allocator_clear(folio_token_allocator* allocator) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.clear(); });
}

folio_status folio_create_window_token_allocator(int32_t num_slots, int32_t num_window_slots, int32_t page_size,
                                                 folio_window_token_allocator** allocator) noexcept {
  return guarded([&] {
    deref(allocator, "allocator") = nullptr;
    *allocator = new folio_window_token_allocator{folio::WindowTokenAllocator(num_slots, num_window_slots, page_size)};
  });
}

void folio_free_window_token_allocator(folio_window_token_allocator* allocator) noexcept {
  delete allocator;
}

folio_status folio_window_token_allocator_available(const folio_window_token_allocator* allocator, int32_t* slots,
                                                    int32_t* window) noexcept {
  return guarded([&] {
    deref(allocator, "allocator");
    deref(slots, "slots");
    deref(window, "window") = allocator->allocator.window_available();
    *slots = allocator->allocator.available();
  });
}

folio_status folio_window_token_allocator_alloc(folio_window_token_allocator* allocator, int32_t* slots,
                                                int64_t num_slots, int32_t* allocated) noexcept {
  return guarded([&] { alloc(deref(allocator, "allocator").allocator, slots, num_slots, "slots", allocated); });
}

folio_status folio_window_token_allocator_alloc_extend(folio_window_token_allocator* allocator,
                                                       const int32_t* prefix_lens, const int32_t* seq_lens,
                                                       const int32_t* last_slots, int32_t num_requests, int32_t* slots,
                                                       int64_t num_slots, int32_t* allocated) noexcept {
  return guarded([&] {
    alloc_extend(deref(allocator, "allocator").allocator, prefix_lens, seq_lens, last_slots, num_requests, slots,
                 num_slots, allocated);
  });
}

folio_status folio_window_token_allocator_alloc_decode(folio_window_token_allocator* allocator, const int32_t* seq_lens,
                                                       const int32_t* last_slots, int32_t num_requests, int32_t* slots,
                                                       int32_t* allocated) noexcept {
  return guarded([&] {
    alloc_decode(deref(allocator, "allocator").allocator, seq_lens, last_slots, num_requests, slots, allocated);
  });
}

folio_status folio_window_token_allocator_free(folio_window_token_allocator* allocator, const int32_t* slots,
                                               int64_t num_slots) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.free(to_span(slots, num_slots, "slots")); });
}

folio_status folio_window_token_allocator_free_window(folio_window_token_allocator* allocator, const int32_t* slots,
                                                      int64_t num_slots) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.free_window(to_span(slots, num_slots, "slots")); });
}

folio_status folio_window_token_allocator_apply(folio_window_token_allocator* allocator,
                                                const folio_slot_changes* changes) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.apply(deref(changes, "changes").changes); });
}

folio_status folio_window_token_allocator_to_window(const folio_window_token_allocator* allocator, const int32_t* slots,
                                                    int64_t num_slots, int32_t* window) noexcept {
  return guarded([&] {
    deref(allocator, "allocator")
        .allocator.to_window(to_span(slots, num_slots, "slots"), to_span(window, num_slots, "window"));
  });
}

folio_status folio_window_token_allocator_clear(folio_window_token_allocator* allocator) noexcept {
  return guarded([&] { deref(allocator, "allocator").allocator.clear(); });
}

folio_status folio_create_req_to_token_pool(int32_t max_reqs, int32_t max_context_len,
                                            folio_req_to_token_pool** pool) noexcept {
  return guarded([&] {
    deref(pool, "pool") = nullptr;
    *pool = new folio_req_to_token_pool{folio::ReqToTokenPool(max_reqs, max_context_len)};
  });
}

void folio_free_req_to_token_pool(folio_req_to_token_pool* pool) noexcept {
  delete pool;
}

folio_status folio_req_to_token_pool_available(const folio_req_to_token_pool* pool, int32_t* rows) noexcept {
  return guarded([&] {
    deref(pool, "pool");
    deref(rows, "rows") = pool->pool.available();
  });
}

folio_status folio_req_to_token_pool_alloc(folio_req_to_token_pool* pool, int32_t* rows, int32_t num_rows,
                                           int32_t* allocated) noexcept {
  return guarded([&] { alloc(deref(pool, "pool").pool, rows, num_rows, "rows", allocated); });
}

folio_status folio_req_to_token_pool_free_row(folio_req_to_token_pool* pool, int32_t row) noexcept {
  return guarded([&] { deref(pool, "pool").pool.free(row); });
}

folio_status folio_req_to_token_pool_write(folio_req_to_token_pool* pool, int32_t row, int32_t first,
                                           const int32_t* slots, int64_t num_slots) noexcept {
  return guarded([&] { deref(pool, "pool").pool.write(row, first, to_span(slots, num_slots, "slots")); });
}

folio_status folio_req_to_token_pool_table(const folio_req_to_token_pool* pool, folio_page_table_view* table) noexcept {
  return guarded([&] {
    deref(pool, "pool");
    deref(table, "table") = std::bit_cast<folio_page_table_view>(pool->pool.table());
  });
}

folio_status folio_req_to_token_pool_clear(folio_req_to_token_pool* pool) noexcept {
  return guarded([&] { deref(pool, "pool").pool.clear(); });
}
