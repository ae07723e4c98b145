#include "folio/kv_cache.hpp"

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_scale;
using folio::capi::to_span;
using folio::capi::to_view;

namespace {

using ViewMaker = folio::KvCacheView (*)(const folio::KvCacheShape& shape, void* k, void* v);
using Int8ViewMaker = folio::KvCacheView (*)(const folio::KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                                             float* v_token_scales);

folio_status make_view(ViewMaker maker, const folio_kv_cache_shape* shape, void* k, void* v,
                       folio_kv_cache_view* view) noexcept {
  return guarded([&] {
    deref(view, "view");
    folio::KvCacheShape sizes = folio::capi::to_shape(deref(shape, "shape"));
    // An int8 cache lies in memory like one of fp8, and its scales are not the C view's.
    const bool int8 = sizes.dtype == folio::DType::kInt8;
    if (int8) sizes.dtype = folio::DType::kFloat8E4M3;
    *view = folio::capi::to_c(maker(sizes, k, v)).view;
    if (int8) view->dtype = FOLIO_DTYPE_INT8;
  });
}

folio_status make_cache(ViewMaker maker, Int8ViewMaker int8_maker, const folio_kv_cache_shape* shape, void* k, void* v,
                        float* k_token_scales, float* v_token_scales, folio_kv_cache* cache) noexcept {
  return guarded([&] {
    deref(cache, "cache");
    const folio::KvCacheShape sizes = folio::capi::to_shape(deref(shape, "shape"));
    if (sizes.dtype == folio::DType::kInt8) {
      *cache = folio::capi::to_c(int8_maker(sizes, k, v, k_token_scales, v_token_scales));
    } else {
      folio::core::require(k_token_scales == nullptr && v_token_scales == nullptr,
                           "token scales are given for a cache of ", sizes.dtype, "; only int8 caches have them");
      *cache = folio::capi::to_c(maker(sizes, k, v));
    }
  });
}

folio::KvCacheView to_cache(const folio_kv_cache* cache, const char* name) {
  return folio::capi::to_cache(deref(cache, name), name);
}

folio::PageTableView to_table(const folio_page_table_view* table) {
  return folio::capi::to_table(deref(table, "table"), "table.kind");
}

}  // namespace

folio_status folio_kv_cache_elements(const folio_kv_cache_shape* shape, int64_t* k_elements,
                                     int64_t* v_elements) noexcept {
  return guarded([&] {
    deref(k_elements, "k_elements");
    deref(v_elements, "v_elements");
    const folio::KvCacheShape sizes = folio::capi::to_shape(deref(shape, "shape"));
    const int64_t k = folio::k_elements(sizes);
    *v_elements = folio::v_elements(sizes);
    *k_elements = k;
  });
}

folio_status folio_make_nhd_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                 folio_kv_cache_view* view) noexcept {
  return make_view(folio::make_nhd_view, shape, k, v, view);
}

folio_status folio_make_hnd_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                 folio_kv_cache_view* view) noexcept {
  return make_view(folio::make_hnd_view, shape, k, v, view);
}

folio_status folio_make_cpu_packed_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                        folio_kv_cache_view* view) noexcept {
  return make_view(folio::make_cpu_packed_view, shape, k, v, view);
}

folio_status folio_make_fp8_ds_mla_view(int64_t num_pages, int32_t page_size, void* data,
                                        folio_kv_cache_view* view) noexcept {
  return guarded([&] {
    deref(view, "view");
    *view = folio::capi::to_c(folio::make_fp8_ds_mla_view(num_pages, page_size, data)).view;
  });
}

folio_status folio_write_kv_cache(const folio_context* context, const folio_cache_write_args* args,
                                  void* stream) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::write_kv_cache(device, folio::capi::to_args(folio::capi::read_struct(args, "args")), folio::Stream{stream});
  });
}

folio_status folio_make_nhd_cache(const folio_kv_cache_shape* shape, void* k, void* v, float* k_token_scales,
                                  float* v_token_scales, folio_kv_cache* cache) noexcept {
  return make_cache(folio::make_nhd_view, folio::make_nhd_view, shape, k, v, k_token_scales, v_token_scales, cache);
}

folio_status folio_make_hnd_cache(const folio_kv_cache_shape* shape, void* k, void* v, float* k_token_scales,
                                  float* v_token_scales, folio_kv_cache* cache) noexcept {
  return make_cache(folio::make_hnd_view, folio::make_hnd_view, shape, k, v, k_token_scales, v_token_scales, cache);
}

folio_status folio_make_cpu_packed_cache(const folio_kv_cache_shape* shape, void* k, void* v, float* k_token_scales,
                                         float* v_token_scales, folio_kv_cache* cache) noexcept {
  return make_cache(folio::make_cpu_packed_view, folio::make_cpu_packed_view, shape, k, v, k_token_scales,
                    v_token_scales, cache);
}

folio_status folio_token_scale_elements(const folio_kv_cache_shape* shape, int64_t* elements) noexcept {
  return guarded([&] {
    deref(elements, "elements");
    *elements = folio::token_scale_elements(folio::capi::to_shape(deref(shape, "shape")));
  });
}

folio_status folio_validate_kv_cache(const folio_kv_cache* cache) noexcept {
  return guarded([&] { folio::validate(to_cache(cache, "cache")); });
}

folio_status folio_copy_pages(const folio_context* context, const folio_kv_cache* from, const folio_kv_cache* to,
                              const int32_t* source, const int32_t* destination, int64_t num_pages, void* stream,
                              int32_t* status) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::copy_pages(device, to_cache(from, "from"), to_cache(to, "to"), to_span(source, num_pages, "source"),
                      to_span(destination, num_pages, "destination"), folio::Stream{stream}, status);
  });
}

folio_status folio_convert_pages(const folio_context* context, const folio_kv_cache* from, const folio_kv_cache* to,
                                 const int32_t* source, const int32_t* destination, int64_t num_pages,
                                 const folio_cache_convert_scales* scales, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::CacheConvertScales converted;
    if (scales != nullptr) {
      converted.from_k = to_scale(scales->from_k, "scales.from_k.granularity");
      converted.from_v = to_scale(scales->from_v, "scales.from_v.granularity");
      converted.to_k = to_scale(scales->to_k, "scales.to_k.granularity");
      converted.to_v = to_scale(scales->to_v, "scales.to_v.granularity");
    }
    folio::convert_pages(device, to_cache(from, "from"), to_cache(to, "to"), to_span(source, num_pages, "source"),
                         to_span(destination, num_pages, "destination"), converted, folio::Stream{stream}, status);
  });
}

folio_status folio_gather_kv(const folio_context* context, const folio_kv_cache* cache,
                             const folio_page_table_view* table, const int32_t* kv_len, int32_t num_rows,
                             const folio_tensor_view* k_out, const folio_tensor_view* v_out, const folio_scale* k_scale,
                             const folio_scale* v_scale, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::gather_kv(device, to_cache(cache, "cache"), to_table(table), to_span(kv_len, num_rows, "kv_len"),
                     to_view(deref(k_out, "k_out"), "k_out.dtype"), to_view(deref(v_out, "v_out"), "v_out.dtype"),
                     to_scale(k_scale, "k_scale.granularity"), to_scale(v_scale, "v_scale.granularity"),
                     folio::Stream{stream}, status);
  });
}

folio_status folio_num_dequantized_pages(const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                         int64_t* pages) noexcept {
  return guarded([&] {
    deref(pages, "pages");
    *pages = folio::num_dequantized_pages(to_span(seq_lens, num_requests, "seq_lens"), page_size);
  });
}

folio_status folio_dequantize_pages(const folio_context* context, const folio_kv_cache* from,
                                    const folio_page_table_view* table, int32_t columns, const int32_t* seq_lens,
                                    int32_t num_requests, float k_scale, float v_scale, const folio_kv_cache* to,
                                    int32_t* new_table, void* stream, int32_t* status) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    const auto lens = to_span(seq_lens, num_requests, "seq_lens");
    folio::core::require(columns >= 0, "columns is ", columns);
    folio::dequantize_pages(device, to_cache(from, "from"), to_table(table), columns, lens, k_scale, v_scale,
                            to_cache(to, "to"), to_span(new_table, int64_t{num_requests} * columns, "new_table"),
                            folio::Stream{stream}, status);
  });
}

folio_status folio_concat_mla_k(const folio_context* context, const folio_tensor_view* k,
                                const folio_const_tensor_view* k_nope, const folio_const_tensor_view* k_pe,
                                void* stream) noexcept {
  return guarded([&] {
    folio::concat_mla_k(deref(context, "context").context, to_view(deref(k, "k"), "k.dtype"),
                        to_view(deref(k_nope, "k_nope"), "k_nope.dtype"), to_view(deref(k_pe, "k_pe"), "k_pe.dtype"),
                        folio::Stream{stream});
  });
}
