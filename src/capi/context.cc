#include <utility>

#include "capi/convert.hpp"
#include "capi/guard.hpp"
#include "folio/c/folio.h"
#include "folio/version.hpp"

using folio::capi::deref;
using folio::capi::guarded;

const char* folio_version(void) noexcept {
  return folio::version();
}

const char* folio_last_error(void) noexcept {
  return folio::capi::last_error();
}

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
