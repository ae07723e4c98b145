#include "folio/pools.hpp"

#include <bit>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_scale;
using folio::capi::to_span;
using folio::capi::to_view;

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
