#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

bool ask(const KernelDispatch& dispatch, const std::string& family) {
  static const std::map<std::string, bool (KernelDispatch::*)() const> kQuestions{
      {"flashinfer", &KernelDispatch::has_flashinfer},
      {"cubin", &KernelDispatch::has_flashinfer_cubin},
      {"comm", &KernelDispatch::has_flashinfer_comm},
      {"all2all", &KernelDispatch::has_flashinfer_all2all},
      {"moe", &KernelDispatch::has_flashinfer_moe},
      {"cutlass_fused_moe", &KernelDispatch::has_flashinfer_cutlass_fused_moe},
      {"trtllm_fused_moe", &KernelDispatch::has_flashinfer_trtllm_fused_moe},
      {"cutedsl", &KernelDispatch::has_flashinfer_cutedsl},
      {"cutedsl_grouped_gemm", &KernelDispatch::has_flashinfer_cutedsl_grouped_gemm_nt_masked},
      {"fp8_blockscale_gemm", &KernelDispatch::has_flashinfer_fp8_blockscale_gemm},
      {"fp8_blockscale_gemm_supported", &KernelDispatch::is_flashinfer_fp8_blockscale_gemm_supported},
      {"artifactory", &KernelDispatch::has_nvidia_artifactory},
      {"trtllm_attention", &KernelDispatch::supports_trtllm_attention},
  };
  return (dispatch.*kQuestions.at(family))();
}

class FamilyTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FamilyTable, FollowsTheOriginalsRules) {
  const auto modules = GetParam().at<std::set<std::string>>("modules");
  const auto attributes = GetParam().at<std::set<std::string>>("attributes");
  DispatchFacts facts;
  facts.profile = BackendProfile::kVllm2026_03;
  facts.has_flashinfer_cubin = GetParam().value("cubin_flag", false);
  facts.use_flashinfer_fp8_blockscale_gemm = GetParam().value("fp8_gemm_flag", true);
  if (GetParam().data.contains("capability")) {
    const auto capability = GetParam().ints("capability");
    facts.device = {Platform::kCuda, DeviceCapability{capability[0], capability[1]}};
  }
  facts.has_module = [&](std::string_view module) { return modules.contains(std::string(module)); };
  facts.has_attribute = [&](std::string_view module, std::string_view attribute) {
    return attributes.contains(std::string(module) + ":" + std::string(attribute));
  };
  facts.has_nvcc = [&] { return GetParam().value("nvcc", false); };
  const KernelDispatch dispatch(facts);
  for (const auto& family : GetParam().at<std::vector<std::string>>("available")) {
    EXPECT_TRUE(ask(dispatch, family)) << family;
  }
  for (const auto& family : GetParam().at<std::vector<std::string>>("missing")) {
    EXPECT_FALSE(ask(dispatch, family)) << family;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FamilyTable, ::testing::ValuesIn(golden_cases("dispatch/families")),
                         folio::testing::golden_case_name);

struct Counted {
  int modules = 0;
  int attributes = 0;
  int compilers = 0;
  std::vector<std::string> log;
};

DispatchFacts counting(Counted& counted) {
  DispatchFacts facts;
  facts.profile = BackendProfile::kVllm2026_03;
  facts.has_module = [&](std::string_view module) {
    ++counted.modules;
    return module != "flashinfer_cubin";
  };
  facts.has_attribute = [&](std::string_view, std::string_view) { return ++counted.attributes > 0; };
  facts.has_nvcc = [&] { return ++counted.compilers > 0; };
  facts.log = [&](LogLevel level, std::string_view line) {
    counted.log.push_back(std::to_string(static_cast<int>(level)) + " " + std::string(line));
  };
  return facts;
}

TEST(KernelDispatchTest, AsksEachProbeOnceAndSharesAnswersWithCopies) {
  Counted counted;
  const KernelDispatch dispatch(counting(counted));
  EXPECT_EQ(counted.modules, 0) << "nothing is looked up before it is asked for";
  EXPECT_TRUE(dispatch.has_flashinfer_cutlass_fused_moe());
  const Counted before = counted;
  EXPECT_EQ(before.compilers, 1);
  const KernelDispatch copy = dispatch;
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(copy.has_flashinfer_cutlass_fused_moe());
    EXPECT_TRUE(copy.has_flashinfer());
    EXPECT_TRUE(copy.has_flashinfer_moe());
  }
  EXPECT_EQ(counted.modules, before.modules);
  EXPECT_EQ(counted.attributes, before.attributes);
  EXPECT_EQ(counted.compilers, 1);
  EXPECT_EQ(counted.log, (std::vector<std::string>{"0 flashinfer-cubin package was not found"}));
}

TEST(KernelDispatchTest, SaysWhyALibraryIsNotThere) {
  Counted counted;
  DispatchFacts facts = counting(counted);
  facts.has_nvcc = {};
  EXPECT_EQ(KernelDispatch(facts).query(KernelFamily::kMoe).reason,
            "FlashInfer unavailable since nvcc was not found and not using pre-downloaded cubins");
  EXPECT_EQ(counted.log.back(),
            "0 FlashInfer unavailable since nvcc was not found and not using pre-downloaded cubins");
  facts.has_module = {};
  EXPECT_EQ(KernelDispatch(facts).query(KernelFamily::kComm).reason,
            "FlashInfer unavailable since package was not found");
  EXPECT_EQ(counted.log.back(), "0 FlashInfer unavailable since package was not found");
}

TEST(KernelDispatchTest, NamesWhatAFamilyLacks) {
  Counted counted;
  DispatchFacts facts = counting(counted);
  facts.has_attribute = [](std::string_view, std::string_view attribute) { return attribute != "fp4_quantize"; };
  const KernelDispatch dispatch(facts);
  EXPECT_EQ(dispatch.query(KernelFamily::kCutlassFusedMoe).reason, "flashinfer.fp4_quantize was not found");
  EXPECT_EQ(dispatch.query(KernelFamily::kCutlassFusedMoe).available, false);
  EXPECT_EQ(dispatch.query(KernelFamily::kTrtllmFusedMoe).reason, "");
  EXPECT_THROW(dispatch.query(static_cast<KernelFamily>(99)), Error);
}

TEST(KernelDispatchTest, NativeAnswersFromFoliosOwnRegistry) {
  const KernelDispatch dispatch;
  for (const char* family : {"flashinfer", "cubin", "artifactory", "trtllm_attention"}) {
    EXPECT_TRUE(ask(dispatch, family)) << family;
  }
  for (KernelFamily family : {KernelFamily::kComm, KernelFamily::kAllToAll, KernelFamily::kMoe,
                              KernelFamily::kCutlassFusedMoe, KernelFamily::kTrtllmFusedMoe, KernelFamily::kCuteDsl,
                              KernelFamily::kCuteDslGroupedGemm, KernelFamily::kFp8BlockscaleGemm}) {
    EXPECT_FALSE(dispatch.query(family).available);
    EXPECT_EQ(dispatch.query(family).reason.find("Folio has no "), 0u) << dispatch.query(family).reason;
  }
  EXPECT_TRUE(dispatch.has_submodule("flashinfer.concat_ops"));
  EXPECT_FALSE(dispatch.has_submodule("flashinfer.fused_moe"));
  EXPECT_TRUE(dispatch.has_entry_point("flashinfer.concat_ops", "concat_mla_k"));
  EXPECT_FALSE(dispatch.has_entry_point("flashinfer.concat_ops", "other"));
}

// An engine and its dispatch are told the same facts, each by itself.
TEST(KernelDispatchTest, Facts_OtherThanTheBuilders_AreRefusedWithBothValues) {
  const auto refusal = [](BackendProfile profile, Determinism determinism, bool told) {
    DispatchFacts facts;
    facts.profile = BackendProfile::kVllm2025_12;
    facts.batch_invariant = told;
    EngineConfig config;
    config.determinism = determinism;
    return folio::testing::message_of([&] { KernelDispatch(facts).check_agrees(profile, config); });
  };
  const BackendProfile december = BackendProfile::kVllm2025_12;
  EXPECT_EQ(refusal(december, Determinism::kBatchInvariant, false),
            "the engine's configuration is batch-invariant; the dispatch is not batch-invariant");
  EXPECT_EQ(refusal(december, Determinism::kRunToRun, true),
            "the engine's configuration is not batch-invariant; the dispatch is batch-invariant");
  EXPECT_EQ(refusal(BackendProfile::kNative, Determinism::kRunToRun, false),
            "the dispatch was made for the profile vllm-2025-12; the builder's is native");
  EngineConfig invariant;
  invariant.determinism = Determinism::kScheduleInvariant;
  DispatchFacts facts;
  facts.profile = december;
  facts.batch_invariant = true;
  EXPECT_NO_THROW(KernelDispatch(facts).check_agrees(december, invariant));
  EXPECT_NO_THROW(KernelDispatch().check_agrees(BackendProfile::kNative, invariant)) << "native reads no such fact";
}

TEST(KernelDispatchTest, NativeTakesNoProbes) {
  DispatchFacts facts;
  facts.has_nvcc = [] { return true; };
  EXPECT_THROW(KernelDispatch{facts}, Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
