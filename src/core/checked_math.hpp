#pragma once

#include <concepts>
#include <cstdint>
#include <limits>

#include "core/error.hpp"

/// Integer arithmetic on sizes that callers give: overflow is an Error(kInvalidArgument), never a wrapped number.
namespace folio::inline v0::core {

/// The largest page id, length and offset that tables of 32 bits hold.
inline constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

template <std::integral Int>
Int checked_add(Int a, Int b) {
  Int sum;
  if (__builtin_add_overflow(a, b, &sum)) fail(ErrorCode::kInvalidArgument, a, " + ", b, " overflows");
  return sum;
}

template <std::integral Int>
Int checked_sub(Int a, Int b) {
  Int difference;
  if (__builtin_sub_overflow(a, b, &difference)) fail(ErrorCode::kInvalidArgument, a, " - ", b, " overflows");
  return difference;
}

/// The product of one or more factors of one type.
template <std::integral Int>
Int checked_mul(Int a, Int b) {
  Int product;
  if (__builtin_mul_overflow(a, b, &product)) fail(ErrorCode::kInvalidArgument, a, " * ", b, " overflows");
  return product;
}
template <std::integral Int, std::same_as<Int>... Rest>
Int checked_mul(Int a, Int b, Int c, Rest... rest) {
  return checked_mul(checked_mul(a, b), c, rest...);
}

/// `value` as another integer type, if it fits.
template <std::integral To, std::integral From>
To checked_cast(From value) {
  To result;
  // Adding zero in infinite precision: the builtin's operands and result may have different types.
  if (__builtin_add_overflow(value, From{0}, &result)) {
    fail(ErrorCode::kInvalidArgument, value, " is outside [", std::numeric_limits<To>::min(), ", ",
         std::numeric_limits<To>::max(), "]");
  }
  return result;
}

/// ceil(value / divisor) for value >= 0, divisor >= 1.
template <std::integral Int>
constexpr Int ceil_div(Int value, Int divisor) noexcept {
  return value / divisor + (value % divisor != 0 ? Int{1} : Int{0});
}

/// The smallest multiple of `multiple` (>= 1) that is not below value (>= 0).
template <std::integral Int>
constexpr Int checked_round_up(Int value, Int multiple) {
  return checked_mul(ceil_div(value, multiple), multiple);
}

}  // namespace folio::inline v0::core
