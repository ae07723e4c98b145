#pragma once

#include <string>
#include <vector>

namespace folio::inline v0::platform {

/// Instruction sets that the CPU has and the OS lets this process use (XCR0; for AMX also the tile permission).
struct CpuFeatures {
  bool avx = false, avx2 = false, fma = false, f16c = false, bmi2 = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512vbmi = false;
  bool avx512_vbmi2 = false, avx512_bf16 = false, avx512_fp16 = false, avx512_vnni = false;
  bool amx_tile = false, amx_bf16 = false, amx_int8 = false;

  /// x86-64-v3 and -v4: what gcc's -march of that name may use, as far as this library's code does.
  bool x86_64_v3() const noexcept { return avx2 && fma && f16c && bmi2; }
  bool x86_64_v4() const noexcept { return x86_64_v3() && avx512f && avx512bw && avx512dq && avx512vl; }
};

/// This process's features. Detected once; thread-safe.
const CpuFeatures& cpu_features();

/// Names of the features that are present, sorted.
std::vector<std::string> feature_names(const CpuFeatures& features);

}  // namespace folio::inline v0::platform
