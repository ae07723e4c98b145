#include "folio/backends/selection.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "backends/common/capability_golden_test.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/backends/flash_attn/backend.hpp"
#include "folio/backends/flashinfer/backend.hpp"
#include "folio/types/error.hpp"

namespace folio::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

/// The backends of March 2026 on that device; "ANY" is one that takes everything, in Triton's place.
std::vector<BackendCandidate> candidates_of(const std::vector<std::string>& names, const ComputeDevice& device) {
  static constexpr DType kAllDtypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  static constexpr AttentionType kDecoder[] = {AttentionType::kDecoder};
  std::vector<BackendCandidate> candidates;
  for (const std::string& name : names) {
    if (name == "FLASH_ATTN") {
      FlashAttentionFacts facts;
      facts.profile = BackendProfile::kVllm2026_03;
      facts.platform.device = device;
      candidates.push_back({name, FlashAttentionBackend::capability(facts)});
    } else if (name == "FLASHINFER") {
      FlashInferFacts facts;
      facts.profile = BackendProfile::kVllm2026_03;
      facts.device = device;
      candidates.push_back({name, FlashInferBackend::capability(facts)});
    } else {
      BackendCapability any;
      any.dtypes = kAllDtypes;
      any.attn_types = kDecoder;
      candidates.push_back({"TRITON_ATTN", any});
    }
  }
  return candidates;
}

class SelectionTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(SelectionTable, TakesTheFirstBackendThatCan) {
  const GoldenCase& c = GetParam();
  const ComputeDevice device = testing::device_of(c.data);
  const AttentionRequirements asked = testing::requirements_of(c.data.at("ask"), device);
  const auto candidates = candidates_of(c.at<std::vector<std::string>>("have"), device);
  std::optional<std::string> chosen;
  if (c.data.contains("chosen")) chosen = c.at<std::string>("chosen");
  if (c.data.contains("error")) {
    try {
      select_backend(asked, candidates, chosen);
      FAIL() << "selected";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(error.what(), c.at<std::string>("error"));
    }
    return;
  }
  const SelectedBackend selected = select_backend(asked, candidates, chosen);
  EXPECT_EQ(selected.name, c.at<std::string>("selected"));
  EXPECT_EQ(selected.page_size, c.at<int32_t>("page_size"));
  std::optional<KvCacheLayout> layout;
  if (c.data.contains("layout")) layout = kv_cache_layout_from_name(c.at<std::string>("layout"));
  EXPECT_EQ(selected.required_layout, layout);
  const auto& rejected = c.data.value("rejected", nlohmann::json::array());
  ASSERT_EQ(selected.rejected.size(), rejected.size());
  for (size_t i = 0; i < rejected.size(); ++i) {
    EXPECT_EQ(selected.rejected[i].name, rejected[i].at(0).get<std::string>());
    EXPECT_EQ(selected.rejected[i].reasons, rejected[i].at(1).get<std::vector<std::string>>());
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, SelectionTable, ::testing::ValuesIn(golden_cases("backends/selection")),
                         folio::testing::golden_case_name);

TEST(Selection, NativeBackendsServeACpu) {
  const std::vector<BackendCandidate> candidates{{"FLASH_ATTN", FlashAttentionBackend::capability({})},
                                                 {"FLASHINFER", FlashInferBackend::capability({})}};
  AttentionRequirements asked;
  asked.head_size = 80;
  asked.has_sinks = true;
  EXPECT_EQ(select_backend(asked, candidates).name, "FLASH_ATTN");
  EXPECT_EQ(select_backend(asked, candidates, "FLASHINFER").name, "FLASHINFER");
}

// What decides whether FlashInfer takes sinks comes from the dispatcher.
TEST(Selection, SinksOnBlackwellFollowTheKernelsThatTakeBlockTables) {
  const ComputeDevice blackwell{Platform::kCuda, DeviceCapability{10, 0}};
  for (bool cubin : {true, false}) {
    DispatchFacts dispatch;
    dispatch.profile = BackendProfile::kVllm2026_03;
    dispatch.device = blackwell;
    dispatch.has_flashinfer_cubin = cubin;
    FlashInferFacts facts;
    facts.profile = dispatch.profile;
    facts.device = blackwell;
    facts.supports_block_table_kernels = KernelDispatch(dispatch).supports_trtllm_attention();
    AttentionRequirements asked;
    asked.head_size = 128;
    asked.device = blackwell;
    asked.has_sinks = true;
    EXPECT_EQ(FlashInferBackend::validate_configuration(asked, facts).empty(), cubin);
    facts.use_block_table_kernels = false;
    EXPECT_EQ(FlashInferBackend::validate_configuration(asked, facts),
              (std::vector<std::string>{"attention sinks not supported"}));
  }
}

class LayoutTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(LayoutTable, FollowsTheStrongestRequest) {
  const auto layout_of = [&](const char* field) -> std::optional<KvCacheLayout> {
    if (!GetParam().data.contains(field)) return std::nullopt;
    return kv_cache_layout_from_name(GetParam().at<std::string>(field));
  };
  static const std::map<std::string, KvCacheLayoutSource> kSources{{"required", KvCacheLayoutSource::kRequired},
                                                                   {"configured", KvCacheLayoutSource::kConfigured},
                                                                   {"connector", KvCacheLayoutSource::kKvConnector},
                                                                   {"default", KvCacheLayoutSource::kDefault}};
  const KvCacheLayoutRequests requests{layout_of("required"), layout_of("configured"), layout_of("connector")};
  const ResolvedKvCacheLayout resolved = resolve_kv_cache_layout(requests);
  EXPECT_EQ(resolved.layout, *layout_of("layout"));
  EXPECT_EQ(resolved.source, kSources.at(GetParam().at<std::string>("from")));
  EXPECT_EQ(resolved.overrules_configured, GetParam().value("overrules", false));
  // Nothing is remembered: the original keeps the first answer of a process, so that a later request is lost.
  EXPECT_EQ(resolve_kv_cache_layout({}).layout, KvCacheLayout::kNhd);
  EXPECT_EQ(resolve_kv_cache_layout(requests).layout, resolved.layout);
}

INSTANTIATE_TEST_SUITE_P(Golden, LayoutTable, ::testing::ValuesIn(golden_cases("backends/selection", "layouts")),
                         folio::testing::golden_case_name);

}  // namespace
}  // namespace folio::backends
