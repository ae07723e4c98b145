#include "kernels/cpu/generic/combine/row_convert.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace folio::inline v0::kernels::generic {

namespace {

// Magnitudes are below 2^31, so signed integers hold them; signed compares are what every vector unit has.
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;

int32_t float_bits(float value) noexcept {
  return std::bit_cast<int32_t>(value);
}
float bits_float(int32_t bits) noexcept {
  return std::bit_cast<float>(bits);
}

/// condition ? a : b with masks: given the choice, the compiler moves a's floating-point addition under a branch.
int32_t select(bool condition, int32_t a, int32_t b) noexcept {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

float upcast_float16(uint16_t code) noexcept {
  constexpr int32_t kRebias = (127 - 15) << 23;
  const int32_t magnitude = (code & 0x7fff) << 13;
  const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(code & 0x8000) << 16);
  const int32_t normal = magnitude + kRebias;
  // A subnormal is its mantissa in units of 2^-24: under the exponent of 2^-14 it stands as an addend to 2^-14.
  const float smallest_normal = bits_float(kRebias + (1 << 23));
  const int32_t subnormal = float_bits(bits_float(magnitude + kRebias + (1 << 23)) - smallest_normal);
  const int32_t special = magnitude | kInfinity;
  const int32_t finite = select(magnitude < (1 << 23), subnormal, normal);
  return bits_float(sign | select(magnitude >= (31 << 23), special, finite));
}

float upcast_bfloat16(uint16_t code) noexcept {
  return bits_float(static_cast<int32_t>(static_cast<uint32_t>(code) << 16));
}

/// The code of a magnitude that is no NaN; `clamp` bounds the magnitude first: the largest finite value for saturation,
/// or the power of two above it for overflow to infinity.
template <int kExponentBits, int kMantissaBits>
int32_t narrow(int32_t magnitude, int32_t clamp) noexcept {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kDrop = 23 - kMantissaBits;
  const int32_t clamped = std::min(magnitude, clamp);
  const int32_t rebased = clamped - ((127 - kBias) << 23);
  const int32_t normal = (rebased + ((1 << (kDrop - 1)) - 1) + ((rebased >> kDrop) & 1)) >> kDrop;
  // The last bit of this power of two is the format's smallest subnormal: adding rounds there, in hardware.
  constexpr int32_t kUnit = (127 + 1 - kBias - kMantissaBits + 23) << 23;
  const int32_t subnormal = float_bits(bits_float(clamped) + bits_float(kUnit)) - kUnit;
  return select(clamped >= ((127 + 1 - kBias) << 23), normal, subnormal);
}

uint16_t narrow_float16(float value) noexcept {
  const int32_t bits = float_bits(value);
  const int32_t magnitude = bits & kMagnitude;
  const int32_t code = narrow<5, 10>(magnitude, 0x47800000);  // 2^16
  const int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | select(magnitude > kInfinity, nan, code));
}

uint16_t narrow_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(static_cast<int32_t>(bits & 0x7fffffffu) > kInfinity ? nan : rounded);
}

template <int kExponentBits, int kMantissaBits>
uint8_t narrow_fp8(float value, int32_t largest) noexcept {
  const int32_t bits = float_bits(value);
  const int32_t magnitude = bits & kMagnitude;
  const int32_t code = narrow<kExponentBits, kMantissaBits>(magnitude, largest);
  return static_cast<uint8_t>(((bits >> 24) & 0x80) | select(magnitude > kInfinity, 0x7f, code));
}

}  // namespace

void load_row(const void* data, DType dtype, int32_t n, float* out) noexcept {
  const auto* codes = static_cast<const uint16_t*>(data);
  switch (dtype) {
    case DType::kFloat32: std::memcpy(out, data, static_cast<size_t>(n) * sizeof(float)); return;
    case DType::kFloat16:
      for (int32_t i = 0; i < n; ++i) out[i] = upcast_float16(codes[i]);
      return;
    case DType::kBFloat16:
      for (int32_t i = 0; i < n; ++i) out[i] = upcast_bfloat16(codes[i]);
      return;
    default: return;
  }
}

void store_row(const float* values, float scale, DType dtype, int32_t n, void* data) noexcept {
  auto* codes = static_cast<uint16_t*>(data);
  auto* bytes = static_cast<uint8_t*>(data);
  switch (dtype) {
    case DType::kFloat32: std::memcpy(data, values, static_cast<size_t>(n) * sizeof(float)); return;
    case DType::kFloat16:
      for (int32_t i = 0; i < n; ++i) codes[i] = narrow_float16(values[i]);
      return;
    case DType::kBFloat16:
      for (int32_t i = 0; i < n; ++i) codes[i] = narrow_bfloat16(values[i]);
      return;
    case DType::kFloat8E4M3:
      for (int32_t i = 0; i < n; ++i) bytes[i] = narrow_fp8<4, 3>(values[i] / scale, 0x43e00000);  // 448
      return;
    case DType::kFloat8E5M2:
      for (int32_t i = 0; i < n; ++i) bytes[i] = narrow_fp8<5, 2>(values[i] / scale, 0x47600000);  // 57344
      return;
    default: return;
  }
}

}  // namespace folio::inline v0::kernels::generic
