#pragma once

#include <bit>
#include <cstdint>

#include "folio/types/dtype.hpp"

/// Conversions between float and the cache's element types, bit for bit those of folio/types/float_convert.hpp, but
/// without branches and without table look-ups, so that compilers vectorise loops over them for the oldest instruction
/// sets. Every path of a select is computed; comparisons are of signed 32-bit magnitudes, which SSE2 has. Subnormals go
/// through an addition whose rounding is the format's (the trick is widely known; the sums are normal numbers, so that
/// flush-to-zero modes do not matter). Assumes the default rounding mode.
namespace folio::inline v0::kernels::generic {

template <DType kDType>
struct Codec;

namespace codec_detail {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;

/// condition ? a : b by masks. A conditional expression would let the compiler move the floating-point addition of one
/// side under a branch, and then it does not vectorise.
inline int32_t select(bool condition, int32_t a, int32_t b) noexcept {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// Rounds |x| to kExponentBits and kMantissaBits; the result may be one above the format's largest finite code.
template <int kExponentBits, int kMantissaBits>
inline int32_t narrow_magnitude(int32_t magnitude) noexcept {
  constexpr int32_t kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int32_t kDrop = 23 - kMantissaBits;
  constexpr int32_t kMinNormal = (127 + 1 - kBias) << 23;
  // The float whose last place is the format's smallest subnormal: 2^(1 - bias - mantissa + 23).
  constexpr int32_t kAligner = (127 + 1 - kBias - kMantissaBits + 23) << 23;
  const int32_t normal =
      (magnitude - ((127 - kBias) << 23) + ((1 << (kDrop - 1)) - 1) + ((magnitude >> kDrop) & 1)) >> kDrop;
  const int32_t subnormal =
      std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kAligner)) - kAligner;
  return select(magnitude < kMinNormal, subnormal, normal);
}

/// Upcasts a finite encoding.
template <int kExponentBits, int kMantissaBits>
inline int32_t upcast_magnitude(int32_t code) noexcept {
  constexpr int32_t kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int32_t kMinNormal = (127 + 1 - kBias) << 23;
  const int32_t shifted = code << (23 - kMantissaBits);
  const int32_t normal = shifted + ((127 - kBias) << 23);
  const int32_t subnormal =
      std::bit_cast<int32_t>(std::bit_cast<float>(shifted + kMinNormal) - std::bit_cast<float>(kMinNormal));
  return select(code < (1 << kMantissaBits), subnormal, normal);
}

/// Shared by the fp8 types: saturation at kMax (a code and the float of that value), NaN to 0x7f.
template <int kExponentBits, int kMantissaBits, int32_t kMaxCode, int32_t kMaxFloat>
inline uint8_t narrow_fp8(float value) noexcept {
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & kMagnitude;
  const int32_t finite = narrow_magnitude<kExponentBits, kMantissaBits>(magnitude);
  const int32_t saturated = select(magnitude >= kMaxFloat, kMaxCode, finite);
  const int32_t code = select(magnitude > kInfinity, 0x7f, saturated);
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80));
}

inline float upcast_float16(int32_t code) noexcept {
  const int32_t magnitude = code & 0x7fff;
  const int32_t finite = upcast_magnitude<5, 10>(magnitude);
  const int32_t special = kInfinity | (magnitude << 13);  // the exponent's bits fall inside infinity's
  const int32_t wide = select(magnitude >= 0x7c00, special, finite);
  return std::bit_cast<float>(wide | static_cast<int32_t>((static_cast<uint32_t>(code) & 0x8000u) << 16));
}

}  // namespace codec_detail

template <>
struct Codec<DType::kFloat32> {
  using Storage = float;
  static float decode(float value) noexcept { return value; }
  static float encode(float value) noexcept { return value; }
};

template <>
struct Codec<DType::kBFloat16> {
  using Storage = uint16_t;
  static float decode(uint16_t code) noexcept { return std::bit_cast<float>(static_cast<uint32_t>(code) << 16); }
  static uint16_t encode(float value) noexcept {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x0040u;
    const auto magnitude = static_cast<int32_t>(bits & 0x7fffffffu);
    return static_cast<uint16_t>(magnitude > codec_detail::kInfinity ? nan : rounded);
  }
};

template <>
struct Codec<DType::kFloat16> {
  using Storage = uint16_t;
  static float decode(uint16_t code) noexcept { return codec_detail::upcast_float16(code); }
  static uint16_t encode(float value) noexcept {
    const auto bits = std::bit_cast<int32_t>(value);
    const int32_t magnitude = bits & codec_detail::kMagnitude;
    const int32_t finite = codec_detail::narrow_magnitude<5, 10>(magnitude);
    const int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const int32_t special = codec_detail::select(magnitude > codec_detail::kInfinity, nan, 0x7c00);
    const int32_t code = codec_detail::select(magnitude >= 0x47800000, special, finite);  // 2^16 and above
    return static_cast<uint16_t>(code | ((bits >> 16) & 0x8000));
  }
};

template <>
struct Codec<DType::kFloat8E4M3> {
  using Storage = uint8_t;
  static float decode(uint8_t code) noexcept {
    const int32_t magnitude = code & 0x7f;
    const int32_t finite = codec_detail::upcast_magnitude<4, 3>(magnitude);
    const int32_t wide = codec_detail::select(magnitude == 0x7f, 0x7fc00000, finite);
    return std::bit_cast<float>(wide | static_cast<int32_t>((static_cast<uint32_t>(code) & 0x80u) << 24));
  }
  static uint8_t encode(float value) noexcept {
    return codec_detail::narrow_fp8<4, 3, 0x7e, 0x43e00000>(value);
  }  // 448
};

template <>
struct Codec<DType::kFloat8E5M2> {
  using Storage = uint8_t;
  static float decode(uint8_t code) noexcept { return codec_detail::upcast_float16(code << 8); }
  static uint8_t encode(float value) noexcept {
    return codec_detail::narrow_fp8<5, 2, 0x7b, 0x47600000>(value);  // 57344
  }
};

template <>
struct Codec<DType::kInt8> {
  using Storage = int8_t;
  static float decode(int8_t code) noexcept { return static_cast<float>(code); }
  static int8_t encode(float value) noexcept {
    constexpr int32_t kMost = 0x42fe0000;     // 127
    constexpr int32_t kAligner = 0x4b000000;  // 2^23, whose last place is 1
    const auto bits = std::bit_cast<int32_t>(value);
    const int32_t magnitude = bits & codec_detail::kMagnitude;
    const int32_t limited = codec_detail::select(magnitude > kMost, kMost, magnitude);
    const int32_t number = codec_detail::select(magnitude > codec_detail::kInfinity, 0, limited);
    const int32_t rounded =
        std::bit_cast<int32_t>(std::bit_cast<float>(number) + std::bit_cast<float>(kAligner)) - kAligner;
    const int32_t sign = bits >> 31;
    return static_cast<int8_t>((rounded ^ sign) - sign);
  }
};

}  // namespace folio::inline v0::kernels::generic
