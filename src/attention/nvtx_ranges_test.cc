// A profiler of our own: NVTX takes an injection that is linked into the process before it looks for a library.
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

#include "attention/profiler_range.hpp"
#include "folio/log.hpp"

namespace {

std::vector<std::string>& calls() {
  static std::vector<std::string> all;
  return all;
}

nvtxDomainHandle_t NVTX_API create_domain(const char* name) {
  calls().push_back(std::string("domain ") + name);
  static int handle = 0;
  return reinterpret_cast<nvtxDomainHandle_t>(&handle);
}

int NVTX_API push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  calls().push_back(std::string("push ") + attributes->message.ascii + " " +
                    std::to_string(attributes->payload.llValue));
  return 0;
}

int NVTX_API pop(nvtxDomainHandle_t) {
  calls().push_back("pop");
  return 0;
}

template <typename Function>
void set(NvtxFunctionTable table, int id, Function function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

int NVTX_API inject(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr) return 0;
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  set(table, NVTX_CBID_CORE2_DomainCreateA, &create_domain);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, &push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, &pop);
  return 1;
}

// NVTX's own pointer, null where nobody sets it.
const bool kInjected = [] {
  InitializeInjectionNvtx2_fnptr = &inject;
  return true;
}();

}  // namespace

namespace folio::attention {
namespace {

TEST(NvtxRanges, AreOff_UntilTheyAreAskedFor) {
  { const ProfilerRange range("plan", 1); }
  EXPECT_TRUE(kInjected && calls().empty());
  set_nvtx_ranges(true);
  {
    const ProfilerRange plan("plan", 64);
    const ProfilerRange run("run", 65);
    set_nvtx_ranges(false);  // what was begun is ended all the same
  }
  { const ProfilerRange range("run", 2); }
  EXPECT_EQ(calls(), (std::vector<std::string>{"domain folio", "push plan 64", "push run 65", "pop", "pop"}));
}

}  // namespace
}  // namespace folio::attention
