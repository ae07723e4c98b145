#pragma once

#include <cstdint>
#include <string_view>

#include "folio/types/export.hpp"

namespace folio::inline v0 {

/// Element types. The values are those of the C API and never change.
enum class DType : int32_t {
  kUnset = 0,         ///< not given; where a default exists, the field's comment names it
  kFloat32 = 1,       ///< IEEE binary32
  kFloat16 = 2,       ///< IEEE binary16
  kBFloat16 = 3,      ///< the upper half of a binary32
  kFloat8E4M3 = 4,    ///< OCP 8-bit, "fn" flavour: no infinity, NaN = 0x7f and 0xff, largest finite 448
  kFloat8E5M2 = 5,    ///< OCP 8-bit, IEEE-like: infinities and NaNs, largest finite 57344
  kFloat4E2M1x2 = 6,  ///< two 4-bit values a byte, element 2i in the low nibble: NVFP4 outputs only
  kInt8 = 7,          ///< signed, -127 to 127: paged KV caches with a scale a token and KV head only (TokenScales)
};

/// Bytes of one element; kFloat4E2M1x2 counts as one byte (two values). 0 for kUnset.
FOLIO_HOST_DEVICE constexpr int32_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFloat4E2M1x2:
    case DType::kInt8: return 1;
    case DType::kUnset: break;
  }
  return 0;
}

/// True for the two 8-bit float types.
FOLIO_HOST_DEVICE constexpr bool is_fp8(DType dtype) noexcept {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

/// "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1x2", "int8", "unset"; "invalid" for any other
/// value.
constexpr std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUnset: return "unset";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat8E4M3: return "fp8_e4m3";
    case DType::kFloat8E5M2: return "fp8_e5m2";
    case DType::kFloat4E2M1x2: return "fp4_e2m1x2";
    case DType::kInt8: return "int8";
  }
  return "invalid";
}

}  // namespace folio::inline v0
