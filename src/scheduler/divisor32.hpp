#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "folio/types/export.hpp"

namespace folio::inline v0::scheduler {

/// A number of 32 bits to divide by more than once: a multiplication and a correction, where a GPU's division is twenty
/// instructions, one waiting for the other. With r = floor((2^32 - 1) / d) >= 2^32 / d - 1, n * r / 2^32 > n / d - 1
/// for every n below 2^32: its whole split is the quotient or one less.
class FastDivisor {
 public:
  FastDivisor() = default;
  /// Implicit, as the number is one: what divides in 64 bits has plain numbers in its place (DivisorOf). 0 divides
  /// nothing.
  FOLIO_HOST_DEVICE constexpr FastDivisor(uint32_t value)  // NOLINT(google-explicit-constructor)
      : value_(value), reciprocal_(value == 0 ? 0 : 0xffffffffu / value) {}
  FOLIO_HOST_DEVICE constexpr operator uint32_t() const { return value_; }  // NOLINT(google-explicit-constructor)
  FOLIO_HOST_DEVICE friend constexpr uint32_t operator/(uint32_t number, const FastDivisor& divisor) {
    const auto near = static_cast<uint32_t>(uint64_t{number} * divisor.reciprocal_ >> 32);
    return number - near * divisor.value_ >= divisor.value_ ? near + 1 : near;
  }

 private:
  uint32_t value_ = 1;
  uint32_t reciprocal_ = 0xffffffffu;
};

/// A divisor of numbers of type Int.
template <typename Int>
using DivisorOf = std::conditional_t<std::is_same_v<Int, uint32_t>, FastDivisor, Int>;

/// ceil_div of numbers whose sum fits.
FOLIO_HOST_DEVICE constexpr uint32_t ceil_div(uint32_t value, const FastDivisor& divisor) {
  return (value + static_cast<uint32_t>(divisor) - 1) / divisor;
}

}  // namespace folio::inline v0::scheduler
