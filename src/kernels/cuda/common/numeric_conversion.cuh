#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "folio/types/dtype.hpp"
#include "folio/types/float_convert.hpp"
#include "ptx/math.cuh"

/// Elements of every type to float and back, singly or eight at a time, with the rounding of
/// folio/types/float_convert.hpp. A NaN stays a NaN; its sign and payload are the hardware's.
namespace folio::inline v0::kernels::cuda {

/// Elements that a thread converts at a time where rows allow: 16 bytes of a 16-bit type.
inline constexpr int32_t kWide = 8;

template <typename Byte>
__device__ inline Byte* element_at(Byte* data, DType dtype, int64_t index) {
  return data + index * size_of(dtype);
}

namespace narrow {

__device__ inline void halves_to_floats(uint32_t pair, float* values) {
  values[0] = ptx::upcast_f16(static_cast<uint16_t>(pair));
  values[1] = ptx::upcast_f16(static_cast<uint16_t>(pair >> 16));
}
__device__ inline void bfloats_to_floats(uint32_t pair, float* values) {
  values[0] = __uint_as_float(pair << 16);
  values[1] = __uint_as_float(pair & 0xffff0000u);
}
/// Four e4m3.
__device__ inline void e4m3_to_floats(uint32_t codes, float* values) {
#if __CUDA_ARCH__ >= 890
  halves_to_floats(ptx::upcast_e4m3x2(static_cast<uint16_t>(codes)), values);
  halves_to_floats(ptx::upcast_e4m3x2(static_cast<uint16_t>(codes >> 16)), values + 2);
#else
  for (int32_t i = 0; i < 4; ++i) values[i] = fp8_e4m3_to_float(static_cast<uint8_t>(codes >> 8 * i));
#endif
}
/// Four e5m2: each is the upper byte of a half.
__device__ inline void e5m2_to_floats(uint32_t codes, float* values) {
  halves_to_floats(__byte_perm(codes, 0, 0x1404), values);
  halves_to_floats(__byte_perm(codes, 0, 0x3424), values + 2);
}

__device__ inline uint32_t floats_to_halves(float low, float high) {
  return ptx::pack_two<__half>(low, high);
}
__device__ inline uint32_t floats_to_bfloats(float low, float high) {
  return ptx::pack_two<__nv_bfloat16>(low, high);
}
__device__ inline uint32_t floats_to_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return ptx::pack_e4m3x2(low, high);
#else
  return static_cast<uint32_t>(float_to_fp8_e4m3(low)) | static_cast<uint32_t>(float_to_fp8_e4m3(high)) << 8;
#endif
}
__device__ inline uint32_t floats_to_e5m2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return ptx::pack_e5m2x2(low, high);
#else
  return static_cast<uint32_t>(float_to_fp8_e5m2(low)) | static_cast<uint32_t>(float_to_fp8_e5m2(high)) << 8;
#endif
}

}  // namespace narrow

/// What eight neighbours, four or one, are in memory. Loads stand apart from conversions, which branch by type: several
/// loads can then be in flight.
template <int32_t kBytes, int32_t kElements>
struct Raw;
template <>
struct Raw<1, 1> {
  uint8_t bits;
};
template <>
struct Raw<2, 1> {
  uint16_t bits;
};
template <>
struct Raw<4, 1> {
  float bits;
};
template <>
struct Raw<1, 4> {
  uint32_t bits;
};
template <>
struct Raw<2, 4> {
  uint2 bits;
};
template <>
struct Raw<1, kWide> {
  uint2 bits;
};
template <>
struct Raw<2, kWide> {
  uint4 bits;
};
template <>
struct Raw<4, kWide> {
  float4 first;
  float4 second;
};

/// `at` is aligned to the elements' bytes, 16 at most.
template <int32_t kBytes, int32_t kElements>
__device__ inline Raw<kBytes, kElements> load_raw(const std::byte* at) {
  Raw<kBytes, kElements> raw;
  if constexpr (kBytes == 4 && kElements == kWide) {
    raw.first = reinterpret_cast<const float4*>(at)[0];
    raw.second = reinterpret_cast<const float4*>(at)[1];
  } else {
    raw.bits = *reinterpret_cast<const decltype(raw.bits)*>(at);
  }
  return raw;
}

__device__ inline void decode(const Raw<1, 1>& raw, DType dtype, float* values) {
  values[0] = dtype == DType::kFloat8E4M3 ? fp8_e4m3_to_float(raw.bits) : fp8_e5m2_to_float(raw.bits);
}
__device__ inline void decode(const Raw<2, 1>& raw, DType dtype, float* values) {
  values[0] = dtype == DType::kFloat16 ? ptx::upcast_f16(raw.bits) : bfloat16_to_float(raw.bits);
}
__device__ inline void decode(const Raw<4, 1>& raw, DType, float* values) {
  values[0] = raw.bits;
}
__device__ inline void decode(const Raw<1, 4>& raw, DType dtype, float* values) {
  if (dtype == DType::kFloat8E4M3) {
    narrow::e4m3_to_floats(raw.bits, values);
  } else {
    narrow::e5m2_to_floats(raw.bits, values);
  }
}
__device__ inline void decode(const Raw<2, 4>& raw, DType dtype, float* values) {
  if (dtype == DType::kFloat16) {
    narrow::halves_to_floats(raw.bits.x, values);
    narrow::halves_to_floats(raw.bits.y, values + 2);
  } else {
    narrow::bfloats_to_floats(raw.bits.x, values);
    narrow::bfloats_to_floats(raw.bits.y, values + 2);
  }
}
__device__ inline void decode(const Raw<1, kWide>& raw, DType dtype, float* values) {
  if (dtype == DType::kFloat8E4M3) {
    narrow::e4m3_to_floats(raw.bits.x, values);
    narrow::e4m3_to_floats(raw.bits.y, values + 4);
  } else {
    narrow::e5m2_to_floats(raw.bits.x, values);
    narrow::e5m2_to_floats(raw.bits.y, values + 4);
  }
}
__device__ inline void decode(const Raw<2, kWide>& raw, DType dtype, float* values) {
  const uint32_t pairs[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
  if (dtype == DType::kFloat16) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) narrow::halves_to_floats(pairs[i], values + 2 * i);
  } else {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) narrow::bfloats_to_floats(pairs[i], values + 2 * i);
  }
}
__device__ inline void decode(const Raw<4, kWide>& raw, DType, float* values) {
  values[0] = raw.first.x, values[1] = raw.first.y, values[2] = raw.first.z, values[3] = raw.first.w;
  values[4] = raw.second.x, values[5] = raw.second.y, values[6] = raw.second.z, values[7] = raw.second.w;
}

__device__ inline void store_one(std::byte* at, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(narrow::floats_to_halves(value, value));
      break;
    case DType::kBFloat16:
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(narrow::floats_to_bfloats(value, value));
      break;
    case DType::kFloat8E4M3:
      *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(narrow::floats_to_e4m3(value, value));
      break;
    case DType::kFloat8E5M2:
      *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(narrow::floats_to_e5m2(value, value));
      break;
    default: *reinterpret_cast<float*>(at) = value; break;
  }
}

/// Eight neighbours; `at` is aligned to 16 bytes, or to 8 for one-byte types.
__device__ inline void store_wide(std::byte* at, DType dtype, const float* v) {
  switch (dtype) {
    case DType::kFloat16:
      *reinterpret_cast<uint4*>(at) =
          make_uint4(narrow::floats_to_halves(v[0], v[1]), narrow::floats_to_halves(v[2], v[3]),
                     narrow::floats_to_halves(v[4], v[5]), narrow::floats_to_halves(v[6], v[7]));
      return;
    case DType::kBFloat16:
      *reinterpret_cast<uint4*>(at) =
          make_uint4(narrow::floats_to_bfloats(v[0], v[1]), narrow::floats_to_bfloats(v[2], v[3]),
                     narrow::floats_to_bfloats(v[4], v[5]), narrow::floats_to_bfloats(v[6], v[7]));
      return;
    case DType::kFloat8E4M3:
      *reinterpret_cast<uint2*>(at) =
          make_uint2(narrow::floats_to_e4m3(v[0], v[1]) | narrow::floats_to_e4m3(v[2], v[3]) << 16,
                     narrow::floats_to_e4m3(v[4], v[5]) | narrow::floats_to_e4m3(v[6], v[7]) << 16);
      return;
    case DType::kFloat8E5M2:
      *reinterpret_cast<uint2*>(at) =
          make_uint2(narrow::floats_to_e5m2(v[0], v[1]) | narrow::floats_to_e5m2(v[2], v[3]) << 16,
                     narrow::floats_to_e5m2(v[4], v[5]) | narrow::floats_to_e5m2(v[6], v[7]) << 16);
      return;
    default:
      reinterpret_cast<float4*>(at)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(at)[1] = make_float4(v[4], v[5], v[6], v[7]);
      return;
  }
}

/// Loads and decodes at once.
template <int32_t kElements>
__device__ inline void load_floats(const std::byte* at, DType dtype, float* values) {
  switch (size_of(dtype)) {
    case 1: decode(load_raw<1, kElements>(at), dtype, values); break;
    case 2: decode(load_raw<2, kElements>(at), dtype, values); break;
    default: decode(load_raw<4, kElements>(at), dtype, values); break;
  }
}
template <int32_t kElements>
__device__ inline void store_floats(std::byte* at, DType dtype, const float* values) {
  if constexpr (kElements == kWide) {
    store_wide(at, dtype, values);
  } else if constexpr (kElements == 4) {  // of 4 bytes each
    *reinterpret_cast<float4*>(at) = make_float4(values[0], values[1], values[2], values[3]);
  } else {
    store_one(at, dtype, values[0]);
  }
}

}  // namespace folio::inline v0::kernels::cuda
