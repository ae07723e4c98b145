#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace folio::inline v0::platform {

/// Instruction sets that the CPU has and the OS lets this process use (on x86-64 XCR0, for AMX also the tile
/// permission; on AArch64 what Linux reports).
struct CpuFeatures {
  bool avx = false, avx2 = false, fma = false, f16c = false, bmi1 = false, bmi2 = false, lzcnt = false, movbe = false;
  bool avx512f = false, avx512bw = false, avx512cd = false, avx512dq = false, avx512vl = false, avx512vbmi = false;
  bool avx512_vbmi2 = false, avx512_bf16 = false, avx512_fp16 = false, avx512_vnni = false;
  bool amx_tile = false, amx_bf16 = false, amx_int8 = false;
  /// AArch64, by Linux's names.
  bool asimd = false, asimddp = false, asimdhp = false, bf16 = false, i8mm = false, sve = false, sve2 = false;

  /// x86-64-v3 and -v4: all that gcc's -march of that name may use beyond x86-64-v2.
  bool x86_64_v3() const noexcept { return avx2 && fma && f16c && bmi1 && bmi2 && lzcnt && movbe; }
  bool x86_64_v4() const noexcept { return x86_64_v3() && avx512f && avx512bw && avx512cd && avx512dq && avx512vl; }
};

/// The four registers of a CPUID answer.
struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

/// The CPUID leaves that features are read from; all zero where the CPU has no such leaf.
struct CpuidLeaves {
  CpuidRegisters leaf1;
  CpuidRegisters leaf7_0;
  CpuidRegisters leaf7_1;
  CpuidRegisters extended1;  ///< 0x80000001
};

/// Features from raw answers; pure. `xcr0` is XGETBV(0), 0 where OSXSAVE is off. `amx_granted` says whether the OS gave
/// this process the tile data permission. Bits: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A
/// (CPUID) and volume 1 chapter 13 (XCR0).
CpuFeatures decode(const CpuidLeaves& leaves, uint64_t xcr0, bool amx_granted) noexcept;

/// Features from Linux's auxiliary vector on AArch64 (AT_HWCAP, AT_HWCAP2); pure. Bits: Linux's
/// Documentation/arm64/elf_hwcaps.rst.
CpuFeatures decode_hwcaps(uint64_t hwcap, uint64_t hwcap2) noexcept;

/// The features without those beyond an instruction set: amx, avx512_bf16, avx512, avx2 or generic; on AArch64 bf16 or
/// generic. Empty: all of them. Throws kInvalidArgument for other names.
CpuFeatures limited(const CpuFeatures& features, std::string_view isa);

/// This process's features, limited by the environment variable FOLIO_MAX_CPU_ISA. Detected once, with the request for
/// the AMX tile permission; thread-safe. None off x86-64 and AArch64 Linux. Throws as `limited`.
const CpuFeatures& cpu_features();

/// Names of the features that are present, sorted.
std::vector<std::string> feature_names(const CpuFeatures& features);

}  // namespace folio::inline v0::platform
