#include "platform/cpu_features.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "folio/types/error.hpp"

namespace folio::platform {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Answers as machines of these families give them, reduced to the leaves that count.
constexpr CpuidLeaves kSapphireRapids = {
    .leaf1 = {0x000806f8, 0x00100800, 0x7ffefbff, 0xbfebfbff},
    .leaf7_0 = {0x00000001, 0xf1bf2ffb, 0x1b415f6e, 0xffd14412},
    .leaf7_1 = {0x00001c30, 0, 0, 0},
    .extended1 = {0, 0, 0x00000121, 0x2c100800},
};
constexpr CpuidLeaves kZen4 = {
    .leaf1 = {0x00a10f11, 0x00100800, 0x7efa320b, 0x178bfbff},
    .leaf7_0 = {0x00000001, 0xf1bf97a9, 0x00405fce, 0x10000010},
    .leaf7_1 = {0x00000020, 0, 0, 0},
    .extended1 = {0x00a10f11, 0, 0x75c237ff, 0x2fd3fbff},
};
constexpr CpuidLeaves kHaswell = {
    .leaf1 = {0x000306c3, 0x00100800, 0x7ffafbff, 0xbfebfbff},
    .leaf7_0 = {0x00000000, 0x000027ab, 0x00000000, 0x9c000600},
    .leaf7_1 = {},
    .extended1 = {0, 0, 0x00000021, 0x2c100800},
};
constexpr CpuidLeaves kNehalem = {
    // SSE4.2, no XSAVE, no leaf 7
    .leaf1 = {0x000106a5, 0x00100800, 0x009ce3bd, 0xbfebfbff},
    .leaf7_0 = {},
    .leaf7_1 = {},
    .extended1 = {0, 0, 0x00000001, 0x28100800},
};

constexpr uint64_t kXcr0Sse = 0x3;
constexpr uint64_t kXcr0Avx = 0x7;
constexpr uint64_t kXcr0Avx512 = 0xe7;
constexpr uint64_t kXcr0Amx = 0x602e7;

TEST(DecodeCpuFeatures, SapphireRapidsWithEverythingGranted) {
  const CpuFeatures f = decode(kSapphireRapids, kXcr0Amx, true);
  EXPECT_THAT(feature_names(f),
              ElementsAre("amx_bf16", "amx_int8", "amx_tile", "avx", "avx2", "avx512_bf16", "avx512_fp16",
                          "avx512_vbmi2", "avx512_vnni", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vbmi",
                          "avx512vl", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe"));
  EXPECT_TRUE(f.x86_64_v4());
}

TEST(DecodeCpuFeatures, AmxNeedsTheProcessPermission) {
  const CpuFeatures f = decode(kSapphireRapids, kXcr0Amx, false);
  EXPECT_FALSE(f.amx_tile || f.amx_bf16 || f.amx_int8);
  EXPECT_TRUE(f.avx512_fp16);
}

TEST(DecodeCpuFeatures, AmxNeedsBothStateComponents) {
  for (const uint64_t missing : {uint64_t{1} << 17, uint64_t{1} << 18}) {
    const CpuFeatures f = decode(kSapphireRapids, kXcr0Amx & ~missing, true);
    EXPECT_FALSE(f.amx_tile || f.amx_bf16 || f.amx_int8) << missing;
    EXPECT_TRUE(f.x86_64_v4());
  }
}

TEST(DecodeCpuFeatures, Zen4HasNoAmxEvenWhenGranted) {
  const CpuFeatures f = decode(kZen4, kXcr0Amx, true);
  EXPECT_THAT(feature_names(f), ElementsAre("avx", "avx2", "avx512_bf16", "avx512_vbmi2", "avx512_vnni", "avx512bw",
                                            "avx512cd", "avx512dq", "avx512f", "avx512vbmi", "avx512vl", "bmi1", "bmi2",
                                            "f16c", "fma", "lzcnt", "movbe"));
  EXPECT_TRUE(f.x86_64_v4());
}

TEST(DecodeCpuFeatures, Avx512NeedsAllThreeStateComponents) {
  for (const int component : {5, 6, 7}) {
    const CpuFeatures f = decode(kZen4, kXcr0Avx512 & ~(uint64_t{1} << component), false);
    EXPECT_THAT(feature_names(f), ElementsAre("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe"))
        << component;
    EXPECT_TRUE(f.x86_64_v3());
    EXPECT_FALSE(f.x86_64_v4());
  }
}

TEST(DecodeCpuFeatures, AvxNeedsTheOs) {
  for (const uint64_t xcr0 : {uint64_t{0}, uint64_t{1}, kXcr0Sse, uint64_t{0x5}, uint64_t{0xe5}}) {
    const CpuFeatures f = decode(kHaswell, xcr0, true);
    EXPECT_THAT(feature_names(f), ElementsAre("bmi1", "bmi2", "lzcnt", "movbe")) << xcr0;
    EXPECT_FALSE(f.x86_64_v3());
  }
  CpuidLeaves no_osxsave = kHaswell;
  no_osxsave.leaf1.ecx &= ~(1u << 27);
  EXPECT_FALSE(decode(no_osxsave, kXcr0Avx, true).avx);
}

TEST(DecodeCpuFeatures, HaswellIsV3) {
  const CpuFeatures f = decode(kHaswell, kXcr0Avx, false);
  EXPECT_TRUE(f.x86_64_v3());
  EXPECT_FALSE(f.x86_64_v4());
}

TEST(DecodeCpuFeatures, OldCpuHasNothing) {
  EXPECT_THAT(feature_names(decode(kNehalem, 0, false)), IsEmpty());
  EXPECT_THAT(feature_names(decode(kNehalem, kXcr0Amx, true)), IsEmpty());
}

TEST(DecodeCpuFeatures, LevelsNeedEachOfTheirFeatures) {
  const CpuFeatures all = decode(kZen4, kXcr0Avx512, false);
  for (bool CpuFeatures::*member : {&CpuFeatures::avx2, &CpuFeatures::fma, &CpuFeatures::f16c, &CpuFeatures::bmi1,
                                    &CpuFeatures::bmi2, &CpuFeatures::lzcnt, &CpuFeatures::movbe}) {
    CpuFeatures f = all;
    f.*member = false;
    EXPECT_FALSE(f.x86_64_v3());
    EXPECT_FALSE(f.x86_64_v4());
  }
  for (bool CpuFeatures::*member : {&CpuFeatures::avx512f, &CpuFeatures::avx512bw, &CpuFeatures::avx512cd,
                                    &CpuFeatures::avx512dq, &CpuFeatures::avx512vl}) {
    CpuFeatures f = all;
    f.*member = false;
    EXPECT_TRUE(f.x86_64_v3());
    EXPECT_FALSE(f.x86_64_v4());
  }
}

#if defined(__x86_64__)
TEST(LimitedCpuFeatures, ASetHidesWhatIsNewer) {
  const CpuFeatures all = decode(kSapphireRapids, kXcr0Amx, true);
  EXPECT_EQ(feature_names(limited(all, "")), feature_names(all));
  EXPECT_EQ(feature_names(limited(all, "amx")), feature_names(all));
  const CpuFeatures bf16 = limited(all, "avx512_bf16");
  EXPECT_TRUE(bf16.avx512_bf16 && bf16.x86_64_v4());
  EXPECT_FALSE(bf16.amx_tile || bf16.amx_bf16 || bf16.amx_int8);
  const CpuFeatures avx512 = limited(all, "avx512");
  EXPECT_TRUE(avx512.x86_64_v4() && avx512.avx512vbmi);
  EXPECT_FALSE(avx512.avx512_bf16 || avx512.avx512_fp16 || avx512.amx_tile);
  EXPECT_THAT(feature_names(limited(all, "avx2")),
              ElementsAre("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe"));
  EXPECT_THAT(feature_names(limited(all, "generic")), IsEmpty());
}

TEST(LimitedCpuFeatures, ASetBeyondTheMachineHidesNothing) {
  const CpuFeatures haswell = decode(kHaswell, kXcr0Avx, false);
  EXPECT_EQ(feature_names(limited(haswell, "avx512")), feature_names(haswell));
}
#endif

TEST(LimitedCpuFeatures, OtherNamesAreRefused) {
  try {
    limited({}, "avx3");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("FOLIO_MAX_CPU_ISA is 'avx3'; it is one of "));
  }
}

TEST(DecodeHwcaps, EachBitIsOneFeature) {
  EXPECT_THAT(feature_names(decode_hwcaps(0, 0)), IsEmpty());
  EXPECT_THAT(feature_names(decode_hwcaps(0x3, 0)), ElementsAre("asimd"));  // Cortex-A53: fp asimd
  // Neoverse V1: fp, asimd, fphp, asimdhp, asimddp, sve; i8mm, bf16.
  EXPECT_THAT(feature_names(decode_hwcaps(0x500603, 0x6000)),
              ElementsAre("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve"));
  EXPECT_THAT(feature_names(decode_hwcaps(0, 0x2)), ElementsAre("sve2"));
  EXPECT_FALSE(decode_hwcaps(~uint64_t{0}, ~uint64_t{0}).x86_64_v3());
}

TEST(CpuFeatures, OfThisMachineAreStableAndConsistent) {
  const CpuFeatures& f = cpu_features();
  EXPECT_EQ(&f, &cpu_features());
  const std::vector<std::string> names = feature_names(f);
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_TRUE(!f.avx2 || f.avx);
  EXPECT_TRUE(!f.amx_bf16 || f.amx_tile);
#if defined(__x86_64__)
  // The compiler's own detection knows these and checks XCR0 as well.
  __builtin_cpu_init();
  EXPECT_EQ(f.avx, __builtin_cpu_supports("avx") != 0);
  EXPECT_EQ(f.avx2, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(f.fma, __builtin_cpu_supports("fma") != 0);
  EXPECT_EQ(f.bmi2, __builtin_cpu_supports("bmi2") != 0);
  EXPECT_EQ(f.avx512f, __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(f.avx512vl, __builtin_cpu_supports("avx512vl") != 0);
  EXPECT_EQ(f.avx512vbmi, __builtin_cpu_supports("avx512vbmi") != 0);
#elif defined(__aarch64__)
  EXPECT_TRUE(f.asimd);  // the baseline
  EXPECT_FALSE(f.avx || f.bmi1);
#endif
}

}  // namespace
}  // namespace folio::platform
