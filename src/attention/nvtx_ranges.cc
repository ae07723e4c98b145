// NVTX version 3 is headers alone. It finds a profiler at the first range, and without one a range is two calls that do
// nothing.
#include "attention/profiler_range.hpp"

#ifdef FOLIO_HAS_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace folio::inline v0::attention {

#ifdef FOLIO_HAS_NVTX
namespace {

nvtxDomainHandle_t domain() noexcept {
  static nvtxDomainHandle_t only = nvtxDomainCreateA("folio");
  return only;
}

}  // namespace

bool has_nvtx() noexcept {
  return true;
}

void push_range(const char* name, int64_t payload) noexcept {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
  attributes.payload.llValue = payload;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop_range() noexcept {
  nvtxDomainRangePop(domain());
}
#else
bool has_nvtx() noexcept {
  return false;
}
void push_range(const char*, int64_t) noexcept {}
void pop_range() noexcept {}
#endif

}  // namespace folio::inline v0::attention
