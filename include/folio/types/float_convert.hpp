#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0 {

/// Exact conversions between float and the narrow types, by their bits. Narrowing rounds to nearest, ties to even, with
/// gradual underflow. float16 and bfloat16 overflow to infinity; the fp8 types saturate to their largest finite value,
/// infinities included. NaN stays NaN (fp8_e4m3: 0x7f with the sign). e2m1, which has neither, saturates too, and turns
/// NaN into +6, as PTX's cvt does: the NaN of a quantised block is its scale's.
/// Formats: IEEE 754-2019 (binary16); OCP 8-bit Floating Point Specification (OFP8), revision 1.0; OCP Microscaling
/// Formats (MX) Specification, version 1.0 (e2m1).
FOLIO_HOST_DEVICE constexpr float bfloat16_to_float(uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

FOLIO_HOST_DEVICE constexpr uint16_t float_to_bfloat16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);  // keep NaNs quiet
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

namespace detail {

/// Upcasts a sign-exponent-mantissa code to float. Exact for every code of a format narrower than float.
/// The shifted code, read as a float, is the value times 2^(bias - 127): one multiplication puts normals and subnormals
/// right.
template <int kExponentBits, int kMantissaBits>
FOLIO_HOST_DEVICE constexpr float upcast(uint32_t magnitude, bool negative) noexcept {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const float value = std::bit_cast<float>(magnitude << (23 - kMantissaBits)) *
                      std::bit_cast<float>(static_cast<uint32_t>(127 + 127 - kBias) << 23);
  return negative ? -value : value;
}

/// Rounds |value| (finite) to a code of the format, which may come out one above its largest finite code.
template <int kExponentBits, int kMantissaBits>
FOLIO_HOST_DEVICE constexpr uint32_t narrow(uint32_t magnitude_bits) noexcept {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const int exponent = static_cast<int>(magnitude_bits >> 23) - 127;
  if (exponent >= 1 - kBias) {
    const uint32_t rebased = magnitude_bits - (static_cast<uint32_t>(127 - kBias) << 23);
    constexpr int kDrop = 23 - kMantissaBits;
    return (rebased + ((1u << (kDrop - 1)) - 1u) + ((rebased >> kDrop) & 1u)) >> kDrop;
  }
  // Subnormal result: the whole significand, implicit bit included, is shifted to units of 2^(1 - bias - mantissa).
  const int drop = (1 - kBias - exponent) + 23 - kMantissaBits;
  if (drop > 24) return 0;
  const uint32_t significand = (magnitude_bits & 0x7fffffu) | 0x800000u;
  return (significand + ((1u << (drop - 1)) - 1u) + ((significand >> drop) & 1u)) >> drop;
}

}  // namespace detail

FOLIO_HOST_DEVICE constexpr float float16_to_float(uint16_t bits) noexcept {
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>((static_cast<uint32_t>(bits & 0x8000u) << 16) | 0x7f800000u |
                                ((magnitude & 0x3ffu) << 13));
  }
  return detail::upcast<5, 10>(magnitude, (bits & 0x8000u) != 0);
}

FOLIO_HOST_DEVICE constexpr uint16_t float_to_float16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  const uint32_t code = magnitude >= 0x47800000u ? 0x7c00u : detail::narrow<5, 10>(magnitude);  // 2^16 and above
  return static_cast<uint16_t>(sign | code);  // 65520 and above round up into the infinity code by themselves
}

FOLIO_HOST_DEVICE constexpr float fp8_e4m3_to_float(uint8_t bits) noexcept {
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>((static_cast<uint32_t>(bits & 0x80u) << 24) | 0x7fc00000u);
  return detail::upcast<4, 3>(magnitude, (bits & 0x80u) != 0);
}

FOLIO_HOST_DEVICE constexpr uint8_t float_to_fp8_e4m3(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  const uint32_t code = magnitude >= 0x43e00000u ? 0x7eu : detail::narrow<4, 3>(magnitude);  // 448 and above
  return static_cast<uint8_t>(sign | code);
}

FOLIO_HOST_DEVICE constexpr float fp8_e5m2_to_float(uint8_t bits) noexcept {
  return float16_to_float(static_cast<uint16_t>(bits << 8));  // e5m2 is the upper half of a binary16
}

FOLIO_HOST_DEVICE constexpr uint8_t float_to_fp8_e5m2(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  const uint32_t code = magnitude >= 0x47600000u ? 0x7bu : detail::narrow<5, 2>(magnitude);  // 57344 and above
  return static_cast<uint8_t>(sign | code);
}

/// The lower four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. Upper bits are ignored.
FOLIO_HOST_DEVICE constexpr float fp4_e2m1_to_float(uint8_t bits) noexcept {
  return detail::upcast<2, 1>(bits & 0x7u, (bits & 0x8u) != 0);
}

FOLIO_HOST_DEVICE constexpr uint8_t float_to_fp4_e2m1(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7u;
  const uint32_t code = magnitude >= 0x40c00000u ? 0x7u : detail::narrow<2, 1>(magnitude);  // 6 and above
  return static_cast<uint8_t>(((bits >> 28) & 0x8u) | code);
}

/// Value `index` of an array of kFloat4E2M1x2, two a byte, as float.
inline float load_fp4_as_float(const void* data, int64_t index) noexcept {
  const uint8_t pair = static_cast<const uint8_t*>(data)[index / 2];
  return fp4_e2m1_to_float(index % 2 == 0 ? pair : static_cast<uint8_t>(pair >> 4));
}

/// Rounded to the nearest even; beyond -127 and 127, infinities included, those; 0 for NaN.
FOLIO_HOST_DEVICE constexpr int8_t float_to_int8(float value) noexcept {
  if (value != value) return 0;
  const float limited = value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
  const float whole = static_cast<float>(static_cast<int32_t>(limited));  // towards 0
  const float rest = limited < 0.0f ? whole - limited : limited - whole;
  const bool away = rest > 0.5f || (rest == 0.5f && static_cast<int32_t>(limited) % 2 != 0);
  const int32_t step = away ? (limited < 0.0f ? -1 : 1) : 0;
  return static_cast<int8_t>(static_cast<int32_t>(limited) + step);
}

/// Element `index` of an array of `dtype`, as float. For references, tests and tools; kernels have their own loops.
/// Not for kUnset and kFloat4E2M1x2 (0).
inline float load_as_float(const void* data, DType dtype, int64_t index) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint16_t half = 0;
  float value = 0.0f;
  switch (dtype) {
    case DType::kFloat32: std::memcpy(&value, bytes + 4 * index, 4); return value;
    case DType::kFloat16: std::memcpy(&half, bytes + 2 * index, 2); return float16_to_float(half);
    case DType::kBFloat16: std::memcpy(&half, bytes + 2 * index, 2); return bfloat16_to_float(half);
    case DType::kFloat8E4M3: return fp8_e4m3_to_float(bytes[index]);
    case DType::kFloat8E5M2: return fp8_e5m2_to_float(bytes[index]);
    case DType::kInt8: return static_cast<float>(static_cast<int8_t>(bytes[index]));
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
  return 0.0f;
}

/// Stores `value` as element `index`, rounded as above. Nothing for kUnset and kFloat4E2M1x2.
inline void store_from_float(void* data, DType dtype, int64_t index, float value) noexcept {
  auto* bytes = static_cast<unsigned char*>(data);
  uint16_t half = 0;
  switch (dtype) {
    case DType::kFloat32: std::memcpy(bytes + 4 * index, &value, 4); return;
    case DType::kFloat16:
      half = float_to_float16(value);
      std::memcpy(bytes + 2 * index, &half, 2);
      return;
    case DType::kBFloat16:
      half = float_to_bfloat16(value);
      std::memcpy(bytes + 2 * index, &half, 2);
      return;
    case DType::kFloat8E4M3: bytes[index] = float_to_fp8_e4m3(value); return;
    case DType::kFloat8E5M2: bytes[index] = float_to_fp8_e5m2(value); return;
    case DType::kInt8: bytes[index] = static_cast<uint8_t>(float_to_int8(value)); return;
    case DType::kFloat4E2M1x2:
    case DType::kUnset: return;
  }
}

}  // namespace folio::inline v0
