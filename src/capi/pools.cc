#include "folio/pools.hpp"

#include <bit>
#include <cstring>
#include <memory>
#include <optional>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_scale;
using folio::capi::to_span;
using folio::capi::to_view;

struct folio_token_allocator {
  folio::TokenAllocator allocator;
  std::optional<folio::TokenAllocator::FreeGroup> group;  ///< ends before the allocator does
};

struct folio_req_to_token_pool {
  folio::ReqToTokenPool pool;
};

namespace {

folio::KvPoolConfig to_config(const folio_kv_pool_config* config) {
  const folio_kv_pool_config given = folio::capi::read_struct(config, "config");
  folio::core::require(given.reserved == 0, "config.reserved is ", given.reserved, "; it is 0");
  folio::KvPoolConfig converted;
  converted.num_slots = given.num_slots;
  converted.page_size = given.page_size == 0 ? folio::KvPoolConfig{}.page_size : given.page_size;
  converted.num_layers = given.num_layers;
  converted.num_kv_heads = given.num_kv_heads;
  converted.head_dim_qk = given.head_dim_qk;
  converted.head_dim_v = given.head_dim_v;
  converted.dtype = folio::capi::to_dtype(given.dtype, "config.dtype");
  converted.layout = folio::capi::to_enum(given.layout, folio::KvPoolLayout::kCpuPacked, "config.layout");
  return converted;
}

}  // namespace

folio_status folio_kv_pool_bytes_per_layer(const folio_kv_pool_config* config, size_t* k_bytes,
                                           size_t* v_bytes) noexcept {
  return guarded([&] {
    deref(k_bytes, "k_bytes");
    deref(v_bytes, "v_bytes");
    const folio::KvPoolConfig sizes = to_config(config);
    const size_t k = folio::KvPool::k_bytes_per_layer(sizes);
    *v_bytes = folio::KvPool::v_bytes_per_layer(sizes);
    *k_bytes = k;
  });
}

folio_status folio_create_kv_pool(const folio_kv_pool_config* config, folio_kv_pool** pool) noexcept {
  return guarded([&] {
    deref(pool, "pool") = nullptr;
    *pool = new folio_kv_pool{folio::KvPool(to_config(config))};
  });
}

folio_status folio_create_kv_pool_over(const folio_kv_pool_config* config, void* const* k, void* const* v,
                                       folio_kv_pool** pool) noexcept {
  return guarded([&] {
    deref(pool, "pool") = nullptr;
    const folio::KvPoolConfig sizes = to_config(config);
    *pool =
        new folio_kv_pool{folio::KvPool(sizes, to_span(k, sizes.num_layers, "k"), to_span(v, sizes.num_layers, "v"))};
  });
}

void folio_free_kv_pool(folio_kv_pool* pool) noexcept {
  delete pool;
}

folio_status folio_kv_pool_view(const folio_kv_pool* pool, int32_t layer, int32_t page_size,
                                folio_kv_cache_view* view) noexcept {
  return guarded([&] {
    const folio::KvPool& given = deref(pool, "pool").pool;
    deref(view, "view");
    *view = folio::capi::to_c(page_size == 0 ? given.view(layer) : given.view(layer, page_size)).view;
  });
}

folio_status folio_kv_pool_buffers(const folio_kv_pool* pool, int32_t layer, folio_tensor_view* k,
                                   folio_tensor_view* v) noexcept {
  return guarded([&] {
    const folio::KvPool& given = deref(pool, "pool").pool;
    deref(k, "k");
    deref(v, "v") = std::bit_cast<folio_tensor_view>(given.value_buffer(layer));
    *k = std::bit_cast<folio_tensor_view>(given.key_buffer(layer));
  });
}

folio_status folio_kv_pool_set_scales(folio_kv_pool* pool, int32_t layer, const folio_scale* k,
                                      const folio_scale* v) noexcept {
  return guarded([&] {
    folio::KvPool& given = deref(pool, "pool").pool;
    given.set_scales(layer, to_scale(deref(k, "k"), "k.granularity"), to_scale(deref(v, "v"), "v.granularity"));
  });
}

folio_status folio_kv_pool_scales(const folio_kv_pool* pool, int32_t layer, folio_scale* k, folio_scale* v) noexcept {
  return guarded([&] {
    const folio::KvPool& given = deref(pool, "pool").pool;
    deref(k, "k");
    deref(v, "v") = std::bit_cast<folio_scale>(given.v_scale(layer));
    *k = std::bit_cast<folio_scale>(given.k_scale(layer));
  });
}

folio_status folio_kv_pool_write(const folio_kv_pool* pool, const folio_context* context, int32_t layer,
                                 const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                 const int64_t* slots, int64_t num_slots, void* stream) noexcept {
  return guarded([&] {
    const folio::KvPool& given = deref(pool, "pool").pool;
    const folio::Context& device = deref(context, "context").context;
    folio::write_kv_cache(device,
                          given.write_args(layer, to_view(deref(k, "k"), "k.dtype"), to_view(deref(v, "v"), "v.dtype"),
                                           to_span(slots, num_slots, "slots")),
                          folio::Stream{stream});
  });
}

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
  return guarded([&] {
    deref(allocator, "allocator");
    deref(allocated, "allocated");
    *allocated = allocator->allocator.alloc(to_span(slots, num_slots, "slots")) ? 1 : 0;
  });
}

folio_status folio_token_allocator_alloc_extend(folio_token_allocator* allocator, const int32_t* prefix_lens,
                                                const int32_t* seq_lens, const int32_t* last_slots,
                                                int32_t num_requests, int32_t* slots, int64_t num_slots,
                                                int32_t* allocated) noexcept {
  return guarded([&] {
    deref(allocator, "allocator");
    deref(allocated, "allocated");
    const bool done = allocator->allocator.alloc_extend(
        to_span(prefix_lens, num_requests, "prefix_lens"), to_span(seq_lens, num_requests, "seq_lens"),
        to_span(last_slots, num_requests, "last_slots"), to_span(slots, num_slots, "slots"));
    *allocated = done ? 1 : 0;
  });
}

folio_status folio_token_allocator_alloc_decode(folio_token_allocator* allocator, const int32_t* seq_lens,
                                                const int32_t* last_slots, int32_t num_requests, int32_t* slots,
                                                int32_t* allocated) noexcept {
  return guarded([&] {
    deref(allocator, "allocator");
    deref(allocated, "allocated");
    const bool done = allocator->allocator.alloc_decode(to_span(seq_lens, num_requests, "seq_lens"),
                                                        to_span(last_slots, num_requests, "last_slots"),
                                                        to_span(slots, num_requests, "slots"));
    *allocated = done ? 1 : 0;
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
  return guarded([&] {
    deref(pool, "pool");
    deref(allocated, "allocated");
    *allocated = pool->pool.alloc(to_span(rows, num_rows, "rows")) ? 1 : 0;
  });
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
