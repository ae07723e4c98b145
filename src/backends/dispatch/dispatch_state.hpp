#pragma once

#include <array>
#include <mutex>
#include <string_view>

#include "backends/dispatch/family_rules.hpp"
#include "folio/backends/dispatch.hpp"

namespace folio::inline v0::backends {

struct KernelDispatch::State {
  explicit State(DispatchFacts given);

  bool native() const { return facts.profile == BackendProfile::kNative; }
  bool has_module(std::string_view module) const;
  bool has_attribute(std::string_view module, std::string_view attribute) const;

  const FamilyAnswer& query(KernelFamily family) const;

  DispatchFacts facts;
  OnceLog log;

 private:
  FamilyAnswer look_up(KernelFamily family) const;
  FamilyAnswer look_up(const dispatch::FamilyRule& rule) const;
  FamilyAnswer cubin() const;
  FamilyAnswer flashinfer() const;
  FamilyAnswer artifactory() const;
  FamilyAnswer trtllm_attention() const;

  // Families depend on each other without cycles, so that one look-up may wait for another.
  mutable std::array<std::once_flag, dispatch::kNumFamilies> looked_up;
  mutable std::array<FamilyAnswer, dispatch::kNumFamilies> answers;
};

}  // namespace folio::inline v0::backends
