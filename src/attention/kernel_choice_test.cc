#include "attention/kernel_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "core/error_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using kernels::AttentionKernel;
using platform::CpuFeatures;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kNeverMeasured = std::numeric_limits<double>::infinity();
constexpr WorkloadMix kDecode{.decode_tokens = 1, .prefill_tokens = 0};
constexpr WorkloadMix kPrefill{.decode_tokens = 0, .prefill_tokens = 1};

AttentionConfig config_of(int32_t rows, DType kv = DType::kBFloat16, KvFormat format = KvFormat::kStrided,
                          int32_t page_size = 16) {
  AttentionConfig config;
  config.num_kv_heads = 2;
  config.num_q_heads = 2 * rows;
  config.head_dim_qk = config.head_dim_v = 128;
  config.kv = kv;
  config.q = kv == DType::kFloat16 ? kv : DType::kBFloat16;
  config.ragged_kv = config.out = config.q;
  config.kv_format = format;
  config.page_size = page_size;
  return config;
}

using Cost = double (*)(const CpuFeatures& features, const AttentionConfig& config, double rows);

AttentionKernel kernel_of(const char* name, Cost cost) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.unavailable = [](const CpuFeatures&) { return std::string(); };
  kernel.refusal = [](const AttentionConfig&) { return std::string(); };
  kernel.cost = cost;
  return kernel;
}

std::vector<std::string> names_of(const std::vector<const AttentionKernel*>& kernels) {
  std::vector<std::string> names;
  for (const AttentionKernel* kernel : kernels) names.emplace_back(kernel->name);
  return names;
}

/// Few rows cost "rows" little, and "keys" costs the same for any number of rows.
const AttentionKernel kRows =
    kernel_of("rows", [](const CpuFeatures&, const AttentionConfig&, double rows) { return 10 * rows; });
const AttentionKernel kKeys =
    kernel_of("keys", [](const CpuFeatures&, const AttentionConfig&, double) { return 256.0; });
const AttentionKernel kUnmeasured =
    kernel_of("unmeasured", [](const CpuFeatures&, const AttentionConfig&, double) { return kNeverMeasured; });
const AttentionKernel* const kAll[] = {&kUnmeasured, &kKeys, &kRows};

TEST(KernelChoice, CostOfAMix_IsThatOfAToken) {
  const AttentionConfig config = config_of(4);
  const auto cost = [&](const AttentionKernel& kernel, const WorkloadMix& mix) {
    return cost_of_mix(kernel, {}, config, mix);
  };
  EXPECT_DOUBLE_EQ(cost(kKeys, kDecode), 256.0);
  EXPECT_DOUBLE_EQ(cost(kKeys, kPrefill), 4.0);  // 64 tokens share the keys
  EXPECT_DOUBLE_EQ(cost(kKeys, {.decode_tokens = 30, .prefill_tokens = 10}), 193.0);
  EXPECT_DOUBLE_EQ(cost(kKeys, {.decode_tokens = 1e308, .prefill_tokens = 1e308}), 130.0);
  EXPECT_DOUBLE_EQ(cost(kKeys, {}), cost(kKeys, {.decode_tokens = 1, .prefill_tokens = 4}));
  EXPECT_DOUBLE_EQ(cost(kRows, kPrefill), 40.0);
  EXPECT_DOUBLE_EQ(cost_of_mix(kKeys, {}, config_of(512), kPrefill), 256.0);  // a token has more rows
}

TEST(KernelChoice, Ranks_ByTheCostOfTheMix) {
  EXPECT_THAT(names_of(ranked(kAll, {}, config_of(4), kDecode)), ElementsAre("rows", "keys", "unmeasured"));
  EXPECT_THAT(names_of(ranked(kAll, {}, config_of(4), kPrefill)), ElementsAre("keys", "rows", "unmeasured"));
  EXPECT_THAT(names_of(ranked(kAll, {}, config_of(32), kDecode)), ElementsAre("keys", "rows", "unmeasured"));
  // 256 D + 4 P = 40 (D + P) where P = 6 D.
  EXPECT_THAT(names_of(ranked(kAll, {}, config_of(4), {.decode_tokens = 1, .prefill_tokens = 5.9})),
              ElementsAre("rows", "keys", "unmeasured"));
  EXPECT_THAT(names_of(ranked(kAll, {}, config_of(4), {.decode_tokens = 1, .prefill_tokens = 6.1})),
              ElementsAre("keys", "rows", "unmeasured"));
}

TEST(KernelChoice, EqualCosts_AreDecidedByRaggedSegmentsAndThenByTheOrderGiven) {
  const Cost by_ragged = [](const CpuFeatures&, const AttentionConfig& config, double) {
    return config.kv == DType::kFloat32 ? 1.0 : 7.0;
  };
  const AttentionKernel same =
      kernel_of("same", [](const CpuFeatures&, const AttentionConfig&, double) { return 7.0; });
  const AttentionKernel ragged = kernel_of("ragged", by_ragged);
  const AttentionKernel* const both[] = {&same, &ragged};
  AttentionConfig config = config_of(4, DType::kInt8);
  EXPECT_THAT(names_of(ranked(both, {}, config, {})), ElementsAre("same", "ragged"));
  config.ragged_kv = DType::kFloat32;
  EXPECT_THAT(names_of(ranked(both, {}, config, {})), ElementsAre("ragged", "same"));
}

TEST(KernelChoice, PackedPages_AreAdvisedWhereTheyGainATwentieth) {
  static double packed_cost = 0.0;
  const AttentionKernel kernel = kernel_of("k", [](const CpuFeatures&, const AttentionConfig& config, double) {
    return config.kv_format == KvFormat::kCpuPacked ? packed_cost : 100.0;
  });
  AttentionKernel refusing =
      kernel_of("refuses", [](const CpuFeatures&, const AttentionConfig&, double) { return 1.0; });
  refusing.refusal = [](const AttentionConfig&) { return std::string("never"); };
  AttentionKernel missing = refusing;
  missing.refusal = kernel.refusal;
  missing.unavailable = [](const CpuFeatures& features) { return std::string(features.sve ? "" : "no SVE"); };
  const AttentionKernel* const all[] = {&refusing, &missing, &kernel};
  const auto format = [&](double cost, const CpuFeatures& features = {}) {
    packed_cost = cost;
    return fastest_format(all, features, config_of(4), {}).format;
  };
  EXPECT_EQ(format(94), KvFormat::kCpuPacked);
  EXPECT_EQ(format(96), KvFormat::kStrided);
  EXPECT_EQ(format(kNeverMeasured), KvFormat::kStrided);
  CpuFeatures sve;
  sve.sve = true;
  EXPECT_EQ(format(94, sve), KvFormat::kStrided);  // where both cost 1
  EXPECT_EQ(fastest_format(all, {}, config_of(4), {}).page_size, 32);
}

TEST(KernelChoice, MixesThatAreNone_AreRefused) {
  for (const double wrong : {-1.0, -0.001, std::nan(""), kNeverMeasured, -kNeverMeasured}) {
    EXPECT_THAT(folio::testing::message_of([&] { check_mix({.decode_tokens = wrong, .prefill_tokens = 1}); }),
                HasSubstr("mix.decode_tokens is "));
    EXPECT_THAT(folio::testing::message_of([&] { check_mix({.decode_tokens = 1, .prefill_tokens = wrong}); }),
                HasSubstr("mix.prefill_tokens is "));
  }
  check_mix({});
  check_mix({.decode_tokens = 1e300, .prefill_tokens = 1e-300});
  const SmallDecode small;
  const WorkloadMix wrong{.decode_tokens = -1, .prefill_tokens = 0};
  PrepareOptions options;
  options.mix = wrong;
  EXPECT_THAT(folio::testing::message_of([&] { prepare(small.context, small.config, options); }),
              HasSubstr("mix.decode_tokens is -1; it is 0 or a positive number"));
  EXPECT_THAT(folio::testing::message_of([&] { explain(small.context, small.config, wrong); }),
              HasSubstr("mix.decode_tokens is -1"));
  EXPECT_THAT(folio::testing::message_of([&] { recommended_kv_format(small.config, small.context, wrong); }),
              HasSubstr("mix.decode_tokens is -1"));
}

TEST(KernelChoice, BoundsOfOneQuery_AreDecodeAloneUnlessBitsMustNotDependOnThem) {
  PrepareOptions options;
  EXPECT_EQ(mix_of(options, Determinism::kRunToRun), WorkloadMix{});
  options.bounds = GraphBounds{.max_requests = 4, .max_tokens = 4, .max_q_len = 1, .max_kv_len = 100};
  for (const Determinism level : {Determinism::kNone, Determinism::kRunToRun}) {
    EXPECT_EQ(mix_of(options, level), kDecode);
  }
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    EXPECT_EQ(mix_of(options, level), WorkloadMix{});
  }
  options.mix = kPrefill;
  EXPECT_EQ(mix_of(options, Determinism::kRunToRun), kPrefill);
  options.mix = {};
  options.bounds->max_q_len = 2;
  EXPECT_EQ(mix_of(options, Determinism::kRunToRun), WorkloadMix{});
}

// ---- GPUs that need not be there ----

using GpuKernel = kernels::cuda::AttentionKernel;

std::string takes_all(const AttentionConfig&) {
  return {};
}
std::string takes_no_int8(const AttentionConfig& config) {
  return config.kv == DType::kInt8 ? "kv is int8" : "";
}

constexpr GpuKernel kOwn{.name = "own",
                         .min_compute_capability = 90,
                         .max_compute_capability = 90,
                         .refusal = takes_no_int8,
                         .tile = nullptr,
                         .p_dtype = nullptr,
                         .preferred = [](const AttentionConfig& config) { return config.page_size == 16; }};
constexpr GpuKernel kFast{.name = "fast",
                          .min_compute_capability = 80,
                          .refusal = takes_no_int8,
                          .tile = nullptr,
                          .p_dtype = nullptr,
                          .preferred = [](const AttentionConfig& config) { return config.page_size < 64; }};
constexpr GpuKernel kSlow{.name = "slow",
                          .min_compute_capability = 80,
                          .refusal = takes_all,
                          .tile = nullptr,
                          .p_dtype = nullptr,
                          .preferred = [](const AttentionConfig& config) { return config.page_size < 64; }};
constexpr const GpuKernel* kGpuKernels[] = {&kOwn, &kFast, &kSlow};

Explanation explained_on(int32_t compute_capability, const AttentionConfig& config) {
  return explain(Machine{.compute_capability = compute_capability, .gpu_kernels = kGpuKernels}, config, {});
}

TEST(KernelChoice, AGpuThatIsNotThere_IsExplainedByItsComputeCapability) {
  const AttentionConfig config = config_of(4);
  EXPECT_EQ(explained_on(90, config).chosen, "own");
  EXPECT_EQ(explained_on(80, config).chosen, "fast");
  EXPECT_EQ(explained_on(100, config).chosen, "fast");
  EXPECT_EQ(explained_on(75, config).chosen, "");
  const std::vector<KernelAnswer> older = explained_on(80, config).answers;
  ASSERT_EQ(older.size(), 3u);
  EXPECT_FALSE(older[0].available);
  EXPECT_THAT(older[0].refusal, HasSubstr("is 80; the kernel needs 90 or newer"));
  EXPECT_THAT(explained_on(100, config).answers[0].refusal, HasSubstr("is 100; the kernel needs 90 or older"));
  EXPECT_TRUE(older[1].available && older[1].refusal.empty());
}

TEST(KernelChoice, OfKernelsThatTakeAConfiguration_ThePreferredOneIsChosen) {
  EXPECT_EQ(explained_on(90, config_of(4, DType::kBFloat16, KvFormat::kStrided, 32)).chosen, "fast");
  EXPECT_EQ(explained_on(90, config_of(4, DType::kBFloat16, KvFormat::kStrided, 64)).chosen,
            "own");  // none is: the first
  const Explanation int8 = explained_on(90, config_of(4, DType::kInt8));
  EXPECT_EQ(int8.chosen, "slow");
  EXPECT_EQ(int8.answers[0].refusal, "kv is int8");
}

TEST(KernelChoice, ExplanationsOfThisMachine_AreThoseOfItsContext) {
  const AttentionConfig config = config_of(4);
  const Explanation here = explain(Machine{.features = platform::cpu_features()}, config, kDecode);
  const std::vector<KernelAnswer> answers = folio::explain(Context::cpu(), config, kDecode);
  ASSERT_EQ(here.answers.size(), answers.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(here.answers[i].name, answers[i].name);
    EXPECT_EQ(here.answers[i].available, answers[i].available);
    EXPECT_EQ(here.answers[i].refusal, answers[i].refusal);
  }
  PrepareOptions options;
  options.mix = kDecode;
  EXPECT_EQ(here.chosen, prepare(Context::cpu(), config, options).kernel_name());
  EXPECT_THAT(folio::testing::message_of([] { explain(Machine{}, AttentionConfig{}, {}); }),
              HasSubstr("num_kv_heads is 0"));
}

// ---- The inventory's kernels on CPUs that this machine need not be ----

CpuFeatures avx2_cpu() {
  CpuFeatures features;
  features.avx = features.avx2 = features.fma = features.f16c = features.bmi1 = features.bmi2 = features.lzcnt =
      features.movbe = true;
  return features;
}
CpuFeatures avx512_cpu() {
  CpuFeatures features = avx2_cpu();
  features.avx512f = features.avx512bw = features.avx512cd = features.avx512dq = features.avx512vl =
      features.avx512vbmi = true;
  return features;
}
CpuFeatures zen4() {
  CpuFeatures features = avx512_cpu();
  features.avx512_bf16 = true;
  return features;
}
CpuFeatures sapphire_rapids() {
  CpuFeatures features = zen4();
  features.avx512_fp16 = features.amx_tile = features.amx_bf16 = true;
  return features;
}

const AttentionKernel* kernel_named(std::string_view name) {
  for (const AttentionKernel* kernel : kernels::cpu_attention_kernels()) {
    if (kernel->name == name) return kernel;
  }
  return nullptr;
}

/// The first kernel that the CPU has and that takes the configuration.
std::string first_kernel(const CpuFeatures& features, const AttentionConfig& config, const WorkloadMix& mix) {
  for (const AttentionKernel* kernel : ranked(kernels::cpu_attention_kernels(), features, config, mix)) {
    if (kernel->unavailable(features).empty() && kernel->refusal(config).empty()) return kernel->name;
  }
  return "none";
}

constexpr KvFormat kStrided = KvFormat::kStrided;
constexpr KvFormat kPacked = KvFormat::kCpuPacked;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;

AttentionConfig mla(int32_t rows, DType dtype = kBf16) {
  AttentionConfig config = config_of(rows, dtype, kStrided, 64);
  config.head_dim_qk = 576;
  config.head_dim_v = 512;
  return config;
}

AttentionConfig at_level(AttentionConfig config, Determinism determinism) {
  config.determinism = determinism;
  return config;
}

/// Two kernels that were measured beside each other: docs/decisions 0071 to 0073, 0079, 0081, docs/kernels and the
/// pages of docs/archive that they name.
struct Measured {
  const char* faster;
  const char* slower;
  CpuFeatures features;
  AttentionConfig config;
  WorkloadMix mix;
};

TEST(KernelChoice, Costs_AgreeWithEveryRecordedMeasurement) {
  const CpuFeatures xeon = sapphire_rapids();
  const CpuFeatures epyc = zen4();
  const CpuFeatures epyc3 = avx2_cpu();
  const auto batch_invariant = [](AttentionConfig config) { return at_level(config, Determinism::kBatchInvariant); };
  std::vector<Measured> all = {
      // Decisions 0101 and 0102, AMX in its own tiles for all rows: that is the batch-invariant cost.
      {"avx512", "amx", xeon, batch_invariant(config_of(1)), kDecode},
      {"avx512", "amx", xeon, batch_invariant(config_of(4)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(8)), kDecode},
      {"avx512", "amx", xeon, batch_invariant(config_of(4, kE4M3)), kDecode},
      {"avx512", "amx", xeon, batch_invariant(config_of(1, kE4M3, kPacked)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(4, kE4M3, kPacked)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(8, kE4M3, kPacked)), kDecode},
      {"avx512", "amx", xeon, batch_invariant(config_of(4, DType::kInt8)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(8, DType::kInt8)), kDecode},
      // Decision 0073.
      {"amx", "avx512", xeon, batch_invariant(config_of(16)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(4)), kPrefill},
      {"avx512", "amx", xeon, batch_invariant(config_of(4, kBf16, kPacked)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(8, kBf16, kPacked)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(16, kBf16, kPacked)), kDecode},
      {"amx", "avx512", xeon, config_of(4, kBf16, kPacked), kPrefill},
      {"amx", "avx512", xeon, config_of(4, kBf16, kPacked, 32), kDecode},
      {"amx", "avx512", xeon, config_of(4, kE4M3, kPacked, 32), kDecode},
      // Decision 0081 and the page on MLA and float16.
      {"avx512", "amx", xeon, batch_invariant(config_of(8, kFp16)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(16, kFp16)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(32, kFp16)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(64, kFp16)), kDecode},
      {"amx", "avx512", xeon, config_of(4, kFp16), kPrefill},
      {"amx", "avx512", xeon, mla(128, kFp16), kDecode},
      {"amx", "avx512", xeon, mla(128), kPrefill},
      {"avx512", "avx512-bf16", xeon, mla(128), kPrefill},
      // Decision 0072 and docs/kernels/avx512.md.
      {"avx512-bf16", "avx512", epyc, config_of(4), kPrefill},
      {"avx512-bf16", "avx512", epyc, config_of(4, kBf16, kPacked), kPrefill},
      {"avx512-bf16", "avx512", epyc, config_of(4, kE4M3), kPrefill},
      // One core of a Xeon: 16 x 2,048 keys.
      {"avx512", "generic-v3", xeon, config_of(4, kBf16, kPacked), kDecode},
      {"avx512", "generic-v3", xeon, config_of(4, kE4M3, kPacked), kDecode},
      {"avx512", "generic-v3", xeon, config_of(4, kBf16, kPacked), kPrefill},
      {"generic-v3", "generic", xeon, config_of(4), kDecode},
      {"generic-v3", "generic", xeon, config_of(4), kPrefill},
      // The page of the costs.
      {"amx", "avx512", xeon, batch_invariant(config_of(16, kE4M3)), kDecode},
      {"amx", "avx512", xeon, batch_invariant(config_of(8, kE4M3)), kDecode},
      {"amx", "avx512", xeon, config_of(4, kE4M3), kPrefill},
      {"amx", "avx512", xeon, config_of(4, DType::kFloat8E5M2), kPrefill},
      {"amx", "avx512", xeon, config_of(4, DType::kInt8), kPrefill},
      {"generic-v4", "avx512", xeon, config_of(16), kDecode},
      // docs/kernels/avx2.md, where both differ by more than a hundredth of the read.
      {"avx2", "generic-v3", epyc3, config_of(1), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(4), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(8), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(4, kFp16), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(1, kE4M3, kPacked), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(4, kE4M3, kPacked), kDecode},
      {"avx2", "generic-v3", epyc3, config_of(4), kPrefill},
      {"avx2", "generic-v3", epyc3, config_of(4, kBf16, kPacked), kPrefill},
      {"avx2", "generic-v3", epyc3, config_of(4, kE4M3), kPrefill},
  };
  for (const int32_t rows : {8, 16, 32, 128}) {
    all.push_back({"amx", "avx512", xeon, batch_invariant(mla(rows)), kDecode});
    all.push_back({"avx512", "avx512-bf16", xeon, mla(rows), kDecode});
  }
  for (const KvFormat format : {kStrided, kPacked}) {
    for (const int32_t rows : {4, 8, 16}) {
      all.push_back({"avx512", "avx512-bf16", xeon, config_of(rows, kBf16, format), kDecode});
    }
    for (const int32_t rows : {1, 4, 8}) {
      all.push_back({"avx512-bf16", "avx512", epyc, config_of(rows, kBf16, format), kDecode});
      all.push_back({"avx512-bf16", "generic-v4", epyc, config_of(rows, kBf16, format), kDecode});
      all.push_back({"avx512-bf16", "generic-v3", epyc, config_of(rows, kBf16, format), kDecode});
    }
  }
  for (const int32_t rows : {1, 4, 8}) {
    all.push_back({"avx512-bf16", "avx512", epyc, config_of(rows, kE4M3, kPacked), kDecode});
    all.push_back({"avx512", "generic-v4", epyc, config_of(rows, kE4M3, kPacked), kDecode});
    all.push_back({"avx512", "generic-v4", epyc, config_of(rows, kBf16, kPacked), kDecode});
  }
  for (const Measured& one : all) {
    const AttentionKernel* faster = kernel_named(one.faster);
    const AttentionKernel* slower = kernel_named(one.slower);
    if (faster == nullptr || slower == nullptr) continue;  // of another architecture
    EXPECT_LT(cost_of_mix(*faster, one.features, one.config, one.mix),
              cost_of_mix(*slower, one.features, one.config, one.mix))
        << one.faster << " " << one.slower << " " << to_string(one.config.kv) << " " << to_string(one.config.kv_format)
        << " " << one.config.num_q_heads / one.config.num_kv_heads << " " << one.mix.decode_tokens;
  }
}

TEST(KernelChoice, FirstKernel_IsTheFastestOfTheCpu) {
  if (kernel_named("amx") == nullptr) GTEST_SKIP() << "the kernels are x86's";
  const CpuFeatures xeon = sapphire_rapids();
  const AttentionConfig strided = config_of(4);
  const AttentionConfig packed = config_of(4, kBf16, kPacked, 32);
  for (const WorkloadMix& mix : {WorkloadMix{}, kDecode, kPrefill}) {
    EXPECT_EQ(first_kernel(xeon, packed, mix), "amx");
    EXPECT_EQ(first_kernel(xeon, strided, mix), "amx") << "its few rows are avx512's";
    EXPECT_EQ(first_kernel(xeon, config_of(4, kE4M3, kPacked, 32), mix), "amx");
    EXPECT_EQ(first_kernel(xeon, config_of(4, kFp16), mix), "amx");
    EXPECT_EQ(first_kernel(xeon, mla(16), mix), "amx");
    EXPECT_EQ(first_kernel(xeon, config_of(4, kE4M3), mix), "amx");
    EXPECT_EQ(first_kernel(zen4(), strided, mix), "avx512-bf16");
    EXPECT_EQ(first_kernel(zen4(), packed, mix), "avx512-bf16");
    EXPECT_EQ(first_kernel(zen4(), config_of(4, kE4M3), mix), "avx512-bf16");
    EXPECT_EQ(first_kernel(avx512_cpu(), strided, mix), "avx512");
    EXPECT_EQ(first_kernel(avx2_cpu(), strided, mix), "avx2");
    EXPECT_EQ(first_kernel(avx2_cpu(), packed, mix), "avx2");
    EXPECT_EQ(first_kernel({}, strided, mix), "generic");
  }
  EXPECT_EQ(first_kernel(avx512_cpu(), mla(16), kPrefill), "avx512");
  EXPECT_EQ(first_kernel(avx512_cpu(), config_of(16), kDecode), "generic-v4");
  AttentionConfig rope = strided;
  rope.features = Feature::kRopeLlama;
  EXPECT_EQ(first_kernel(avx2_cpu(), rope, {}), "generic-v3");
}

/// Where bits may not depend on the rows beside them, AMX keeps all rows: decode of few rows may lose what prefill
/// gains.
TEST(KernelChoice, BatchInvariantRowsOfAmx_AreWorthItForPrefill) {
  if (kernel_named("amx") == nullptr) GTEST_SKIP() << "the kernels are x86's";
  const CpuFeatures xeon = sapphire_rapids();
  const AttentionConfig int8 = at_level(config_of(4, DType::kInt8), Determinism::kBatchInvariant);
  EXPECT_EQ(first_kernel(xeon, int8, kDecode), "avx512");
  EXPECT_EQ(first_kernel(xeon, int8, kPrefill), "amx");
  EXPECT_EQ(first_kernel(xeon, at_level(config_of(4), Determinism::kBatchInvariant), kDecode), "avx512");
  EXPECT_EQ(first_kernel(xeon, at_level(config_of(8), Determinism::kBatchInvariant), kDecode), "amx");
  EXPECT_EQ(first_kernel(xeon, at_level(mla(4), Determinism::kBatchInvariant), kDecode), "avx512");
  EXPECT_EQ(first_kernel(xeon, at_level(mla(4), Determinism::kBatchInvariant), kPrefill), "amx");
}

TEST(KernelChoice, Formats_AreThoseOfTheMix) {
  if (kernel_named("amx") == nullptr) GTEST_SKIP() << "the kernels are x86's";
  const auto advised = [](const CpuFeatures& features, const AttentionConfig& config, const WorkloadMix& mix) {
    return fastest_format(kernels::cpu_attention_kernels(), features, config, mix).format;
  };
  for (const WorkloadMix& mix : {WorkloadMix{}, kDecode, kPrefill}) {
    EXPECT_EQ(advised(sapphire_rapids(), config_of(4), mix), kPacked);
    EXPECT_EQ(advised(avx2_cpu(), config_of(4, DType::kFloat32), mix), kStrided);
  }
  // Decision 0102: packed pages take 0.8 of the time in e4m3 decode, on 16 threads.
  for (const WorkloadMix& mix : {WorkloadMix{}, kDecode, kPrefill}) {
    EXPECT_EQ(advised(sapphire_rapids(), config_of(4, kE4M3), mix), kPacked);
  }
  // Measured on Zen 4: packed pages take 0.82 of the time with four rows, with eight the same, in prefill the same.
  EXPECT_EQ(advised(zen4(), config_of(4), kDecode), kPacked);
  EXPECT_EQ(advised(zen4(), config_of(4), {}), kPacked);
  EXPECT_EQ(advised(zen4(), config_of(4), kPrefill), kStrided);
  EXPECT_EQ(advised(zen4(), config_of(8), kDecode), kStrided);
  EXPECT_EQ(advised(avx2_cpu(), config_of(4), kDecode), kPacked);
}

/// On CPUs with AVX2 alone, generic-v3 decodes int8 caches faster and avx2 prefills them faster.
TEST(Prepare, RanksForItsMix) {
  const SmallDecode small;
  const AttentionConfig config = config_of(4, DType::kInt8);
  const auto first = [&](const WorkloadMix& mix) {
    const std::vector<KernelAnswer> answers = explain(small.context, config, mix);
    return std::find_if(answers.begin(), answers.end(), [](const KernelAnswer& a) { return a.refusal.empty(); })->name;
  };
  for (const WorkloadMix& mix : {WorkloadMix{}, kDecode, kPrefill}) {
    PrepareOptions options;
    options.mix = mix;
    EXPECT_EQ(prepare(small.context, config, options).kernel_name(), first(mix));
  }
}

}  // namespace
}  // namespace folio::inline v0::attention
