#include "folio/kv_cache.hpp"

#include "capi/convert.hpp"
#include "capi/guard.hpp"
#include "folio/attention.hpp"

using folio::capi::deref;
using folio::capi::guarded;

namespace {

using ViewMaker = folio::KvCacheView (*)(const folio::KvCacheShape& shape, void* k, void* v);

folio_status make_view(ViewMaker maker, const folio_kv_cache_shape* shape, void* k, void* v,
                       folio_kv_cache_view* view) noexcept {
  return guarded([&] {
    deref(view, "view");
    folio::KvCacheShape sizes = folio::capi::to_shape(deref(shape, "shape"));
    // An int8 cache lies in memory like one of fp8, and its scales are not the C view's.
    const bool int8 = sizes.dtype == folio::DType::kInt8;
    if (int8) sizes.dtype = folio::DType::kFloat8E4M3;
    *view = folio::capi::to_c(maker(sizes, k, v));
    if (int8) view->dtype = FOLIO_DTYPE_INT8;
  });
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
    *view = folio::capi::to_c(folio::make_fp8_ds_mla_view(num_pages, page_size, data));
  });
}

folio_status folio_recommended_kv_format(const folio_attention_config* config, const folio_context* context,
                                         folio_kv_format* format, int32_t* page_size) noexcept {
  const folio_workload_mix unknown = {0, 0};
  return folio_recommended_kv_format_for_mix(config, context, &unknown, format, page_size);
}

folio_status folio_recommended_kv_format_for_mix(const folio_attention_config* config, const folio_context* context,
                                                 const folio_workload_mix* mix, folio_kv_format* format,
                                                 int32_t* page_size) noexcept {
  return guarded([&] {
    deref(format, "format");
    deref(page_size, "page_size");
    const folio::Context& device = deref(context, "context").context;
    const folio::KvFormatAdvice advice = folio::recommended_kv_format(folio::capi::to_config(config, "config"), device,
                                                                      folio::capi::to_mix(deref(mix, "mix")));
    *format = static_cast<folio_kv_format>(advice.format);
    *page_size = advice.page_size;
  });
}

folio_status folio_write_kv_cache(const folio_context* context, const folio_cache_write_args* args,
                                  void* stream) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::write_kv_cache(device, folio::capi::to_args(folio::capi::read_struct(args, "args")), folio::Stream{stream});
  });
}
