#include "platform/cpu_features.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "core/error.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace folio::inline v0::platform {

namespace {

constexpr bool bit(uint64_t word, int index) {
  return ((word >> index) & 1u) != 0;
}

// State components that the OS must save and restore for a family of registers to be usable (XCR0).
constexpr uint64_t kXcr0Avx = 0x6;      // XMM, upper halves of YMM
constexpr uint64_t kXcr0Avx512 = 0xe6;  // also opmask, upper halves of ZMM0-15, ZMM16-31
constexpr uint64_t kXcr0Amx = 0x60000;  // TILECFG, TILEDATA

struct NamedFeature {
  const char* name;
  bool CpuFeatures::*member;
};

constexpr std::array<NamedFeature, 28> kNames = {{
    {"amx_bf16", &CpuFeatures::amx_bf16},
    {"amx_int8", &CpuFeatures::amx_int8},
    {"amx_tile", &CpuFeatures::amx_tile},
    {"asimd", &CpuFeatures::asimd},
    {"asimddp", &CpuFeatures::asimddp},
    {"asimdhp", &CpuFeatures::asimdhp},
    {"avx", &CpuFeatures::avx},
    {"avx2", &CpuFeatures::avx2},
    {"avx512_bf16", &CpuFeatures::avx512_bf16},
    {"avx512_fp16", &CpuFeatures::avx512_fp16},
    {"avx512_vbmi2", &CpuFeatures::avx512_vbmi2},
    {"avx512_vnni", &CpuFeatures::avx512_vnni},
    {"avx512bw", &CpuFeatures::avx512bw},
    {"avx512cd", &CpuFeatures::avx512cd},
    {"avx512dq", &CpuFeatures::avx512dq},
    {"avx512f", &CpuFeatures::avx512f},
    {"avx512vbmi", &CpuFeatures::avx512vbmi},
    {"avx512vl", &CpuFeatures::avx512vl},
    {"bf16", &CpuFeatures::bf16},
    {"bmi1", &CpuFeatures::bmi1},
    {"bmi2", &CpuFeatures::bmi2},
    {"f16c", &CpuFeatures::f16c},
    {"fma", &CpuFeatures::fma},
    {"i8mm", &CpuFeatures::i8mm},
    {"lzcnt", &CpuFeatures::lzcnt},
    {"movbe", &CpuFeatures::movbe},
    {"sve", &CpuFeatures::sve},
    {"sve2", &CpuFeatures::sve2},
}};

// A member left out would leave a hole in the table or a feature without a name.
static_assert(sizeof(CpuFeatures) == kNames.size() * sizeof(bool));

/// Instruction sets, the newest first, each with the features that older ones lack.
struct InstructionSet {
  std::string_view name;
  std::vector<bool CpuFeatures::*> adds;
};

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = {
#if defined(__aarch64__)
    {"bf16",
     {&CpuFeatures::bf16, &CpuFeatures::i8mm, &CpuFeatures::asimddp, &CpuFeatures::asimdhp, &CpuFeatures::sve,
      &CpuFeatures::sve2}},
#else
    {"amx", {&CpuFeatures::amx_tile, &CpuFeatures::amx_bf16, &CpuFeatures::amx_int8}},
    {"avx512_bf16", {&CpuFeatures::avx512_bf16, &CpuFeatures::avx512_fp16}},
    {"avx512",
     {&CpuFeatures::avx512f, &CpuFeatures::avx512bw, &CpuFeatures::avx512cd, &CpuFeatures::avx512dq,
      &CpuFeatures::avx512vl, &CpuFeatures::avx512vbmi, &CpuFeatures::avx512_vbmi2, &CpuFeatures::avx512_vnni}},
    {"avx2",
     {&CpuFeatures::avx, &CpuFeatures::avx2, &CpuFeatures::fma, &CpuFeatures::f16c, &CpuFeatures::bmi1,
      &CpuFeatures::bmi2, &CpuFeatures::lzcnt, &CpuFeatures::movbe}},
#endif
    {"generic", {}},
  };
  return sets;
}

#if defined(__x86_64__)

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) noexcept {
  CpuidRegisters r;
  // Answers zeros for a leaf beyond the CPU's largest.
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

CpuidLeaves read_leaves() noexcept {
  CpuidLeaves leaves;
  leaves.leaf1 = cpuid(1, 0);
  leaves.leaf7_0 = cpuid(7, 0);
  if (leaves.leaf7_0.eax >= 1) leaves.leaf7_1 = cpuid(7, 1);  // eax: the largest subleaf
  leaves.extended1 = cpuid(0x80000001u, 0);
  return leaves;
}

/// XGETBV, by its bytes' mnemonic: the intrinsic would need this file compiled with -mxsave.
uint64_t read_xcr0(const CpuidLeaves& leaves) noexcept {
  if (!bit(leaves.leaf1.ecx, 27)) return 0;  // without OSXSAVE the instruction faults
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

/// Linux gives tile data only to processes that ask (arch_prctl(2), since 5.16); older kernels answer with an error.
bool request_amx() noexcept {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

CpuFeatures detect() noexcept {
  const CpuidLeaves leaves = read_leaves();
  const uint64_t xcr0 = read_xcr0(leaves);
  const bool amx_possible = decode(leaves, xcr0, true).amx_tile;  // asked for only where it can be had
  return decode(leaves, xcr0, amx_possible && request_amx());
}

#elif defined(__aarch64__) && defined(__linux__)

CpuFeatures detect() noexcept {
  return decode_hwcaps(getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
}

#else

CpuFeatures detect() noexcept {
  return {};
}

#endif

}  // namespace

CpuFeatures decode(const CpuidLeaves& leaves, uint64_t xcr0, bool amx_granted) noexcept {
  CpuFeatures f;
  const uint32_t ecx1 = leaves.leaf1.ecx;
  const uint32_t ebx7 = leaves.leaf7_0.ebx;
  const uint32_t ecx7 = leaves.leaf7_0.ecx;
  const uint32_t edx7 = leaves.leaf7_0.edx;

  // These work on general registers and need no consent.
  f.bmi1 = bit(ebx7, 3);
  f.bmi2 = bit(ebx7, 8);
  f.lzcnt = bit(leaves.extended1.ecx, 5);
  f.movbe = bit(ecx1, 22);

  const bool osxsave = bit(ecx1, 27);
  if (!osxsave || (xcr0 & kXcr0Avx) != kXcr0Avx || !bit(ecx1, 28)) return f;
  f.avx = true;
  f.avx2 = bit(ebx7, 5);
  f.fma = bit(ecx1, 12);
  f.f16c = bit(ecx1, 29);

  if ((xcr0 & kXcr0Avx512) == kXcr0Avx512 && bit(ebx7, 16)) {
    f.avx512f = true;
    f.avx512bw = bit(ebx7, 30);
    f.avx512cd = bit(ebx7, 28);
    f.avx512dq = bit(ebx7, 17);
    f.avx512vl = bit(ebx7, 31);
    f.avx512vbmi = bit(ecx7, 1);
    f.avx512_vbmi2 = bit(ecx7, 6);
    f.avx512_vnni = bit(ecx7, 11);
    f.avx512_fp16 = bit(edx7, 23);
    f.avx512_bf16 = bit(leaves.leaf7_1.eax, 5);
  }
  if ((xcr0 & kXcr0Amx) == kXcr0Amx && amx_granted && bit(edx7, 24)) {
    f.amx_tile = true;
    f.amx_bf16 = bit(edx7, 22);
    f.amx_int8 = bit(edx7, 25);
  }
  return f;
}

CpuFeatures decode_hwcaps(uint64_t hwcap, uint64_t hwcap2) noexcept {
  CpuFeatures f;
  f.asimd = bit(hwcap, 1);
  f.asimdhp = bit(hwcap, 10);
  f.asimddp = bit(hwcap, 20);
  f.sve = bit(hwcap, 22);
  f.sve2 = bit(hwcap2, 1);
  f.i8mm = bit(hwcap2, 13);
  f.bf16 = bit(hwcap2, 14);
  return f;
}

CpuFeatures limited(const CpuFeatures& features, std::string_view isa) {
  CpuFeatures left = features;
  std::string names;
  for (const InstructionSet& set : instruction_sets()) {
    if (isa.empty() || isa == set.name) return left;
    for (bool CpuFeatures::*const feature : set.adds) left.*feature = false;
    names += (names.empty() ? "" : ", ") + std::string(set.name);
  }
  core::fail(ErrorCode::kInvalidArgument, "the environment variable FOLIO_MAX_CPU_ISA is '", isa, "'; it is one of ",
             names);
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = [] {
    const char* const isa = std::getenv("FOLIO_MAX_CPU_ISA");
    return limited(detect(), isa == nullptr ? "" : isa);
  }();
  return features;
}

std::vector<std::string> feature_names(const CpuFeatures& features) {
  std::vector<std::string> names;
  for (const NamedFeature& feature : kNames) {
    if (features.*feature.member) names.emplace_back(feature.name);
  }
  return names;
}

}  // namespace folio::inline v0::platform
