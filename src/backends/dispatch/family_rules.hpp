#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "folio/backends/dispatch.hpp"

namespace folio::inline v0::backends::dispatch {

/// A function of a module; without a name, the module itself.
struct EntryPoint {
  std::string_view module;
  std::string_view attribute;
  friend bool operator==(const EntryPoint&, const EntryPoint&) = default;
};

/// What a family that is found by looking for modules needs.
struct FamilyRule {
  KernelFamily family;
  std::string_view what;                    ///< in a sentence
  KernelFamily base;                        ///< the family that must be available first
  std::optional<DeviceCapability> only_on;  ///< this device and no other
  std::array<EntryPoint, 4> needs;          ///< the empty ones at the end do not count
};

inline constexpr size_t kNumFamilies = 12;

/// Those families; the others have rules of their own.
std::span<const FamilyRule> family_rules() noexcept;

/// What Folio has of the library's modules and functions.
std::span<const EntryPoint> folio_entry_points() noexcept;

}  // namespace folio::inline v0::backends::dispatch
