#include "folio/context.hpp"

#include <string>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;

folio_status folio_create_cpu_context(const folio_context_options* options, folio_context** context) noexcept {
  return guarded([&] {
    deref(context, "context") = nullptr;
    *context = new folio_context{folio::Context::cpu(folio::capi::to_options(options))};
  });
}

folio_status folio_create_cuda_context(int32_t index, const folio_context_options* options,
                                       folio_context** context) noexcept {
  return guarded([&] {
    deref(context, "context") = nullptr;
    *context = new folio_context{folio::Context::cuda(index, folio::capi::to_options(options))};
  });
}

void folio_free_context(folio_context* context) noexcept {
  delete context;
}

folio_status folio_get_device(const folio_context* context, folio_device_type* type, int32_t* index) noexcept {
  return guarded([&] {
    const folio::Device device = deref(context, "context").context.device();
    deref(type, "type");
    deref(index, "index") = device.index;
    *type = static_cast<folio_device_type>(device.type);
  });
}

folio_status folio_concurrency(const folio_context* context, int32_t* concurrency) noexcept {
  return guarded([&] {
    deref(context, "context");
    deref(concurrency, "concurrency") = context->context.concurrency();
  });
}

folio_status folio_synchronize(const folio_context* context, void* stream) noexcept {
  return guarded([&] { folio::synchronize(deref(context, "context").context, folio::Stream{stream}); });
}

folio_status folio_map_host_memory(const folio_context* context, void* data, size_t bytes) noexcept {
  return guarded([&] { folio::map_host_memory(deref(context, "context").context, data, bytes); });
}

folio_status folio_unmap_host_memory(const folio_context* context, void* data) noexcept {
  return guarded([&] { folio::unmap_host_memory(deref(context, "context").context, data); });
}

folio_status folio_cpu_features(const char** features) noexcept {
  return guarded([&] {
    static const std::string kJoined = [] {
      std::string joined;
      for (const std::string& feature : folio::cpu_features()) joined += (joined.empty() ? "" : " ") + feature;
      return joined;
    }();
    deref(features, "features") = kJoined.c_str();
  });
}
