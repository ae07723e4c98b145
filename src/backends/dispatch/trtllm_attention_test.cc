#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

using Lines = std::vector<std::vector<std::string>>;

LogCallback into(Lines& lines) {
  return [&lines](LogLevel level, std::string_view line) {
    const char* const names[] = {"debug", "info", "warning", "error"};
    lines.push_back({names[static_cast<size_t>(level)], std::string(line)});
  };
}

Lines expected_lines(const GoldenCase& c) {
  if (!c.data.contains("log")) return {};
  return {c.at<std::vector<std::string>>("log")};
}

TrtllmAttentionQuery query_of(const nlohmann::json& fields) {
  TrtllmAttentionQuery query;
  query.num_qo_heads = fields.value("q_heads", 64);
  query.num_kv_heads = fields.value("kv_heads", 8);
  query.num_tokens = fields.value("tokens", 128);
  query.max_seq_len = 4096;
  query.dcp_world_size = fields.value("dcp", 1);
  if (fields.contains("kv")) query.kv_cache_dtype = fields.at("kv").get_ref<const std::string&>();
  if (fields.value("q_fp8", false)) query.q_dtype = DType::kFloat8E4M3;
  if (fields.value("q_e5m2", false)) query.q_dtype = DType::kFloat8E5M2;
  query.is_prefill = fields.value("prefill", false);
  if (fields.contains("force")) query.force_use_trtllm = fields.at("force").get<bool>();
  query.has_sinks = fields.value("sinks", false);
  query.has_spec = fields.value("spec", false);
  return query;
}

void check_choice(const GoldenCase& c, DispatchFacts facts) {
  Lines lines;
  facts.log = into(lines);
  const KernelDispatch dispatch(facts);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(dispatch.use_trtllm_attention(query_of(c.data.at("query"))), c.at<bool>("expected"));
  }
  EXPECT_EQ(lines, expected_lines(c)) << "each line once, and no other";
}

class TrtllmTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TrtllmTable, ChoosesByTheFirstRuleThatApplies) {
  DispatchFacts facts;
  facts.profile = BackendProfile::kVllm2026_03;
  facts.has_flashinfer_cubin = true;
  facts.device = {Platform::kCuda, DeviceCapability{GetParam().value("supported", true) ? 10 : 9, 0}};
  check_choice(GetParam(), facts);
}

INSTANTIATE_TEST_SUITE_P(Golden, TrtllmTable, ::testing::ValuesIn(golden_cases("dispatch/trtllm_attention")),
                         folio::testing::golden_case_name);

class NativeTrtllmTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(NativeTrtllmTable, FollowsForceOnEveryDevice) {
  check_choice(GetParam(), {});
  DispatchFacts facts;
  facts.device = {Platform::kCuda, DeviceCapability{8, 0}};
  check_choice(GetParam(), facts);
}

INSTANTIATE_TEST_SUITE_P(Golden, NativeTrtllmTable,
                         ::testing::ValuesIn(golden_cases("dispatch/trtllm_attention", "native")),
                         folio::testing::golden_case_name);

class TrtllmSupportTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TrtllmSupportTable, AsksTheServerOnceAndOnlyWhereItMatters) {
  const GoldenCase& c = GetParam();
  int probes = 0;
  Lines lines;
  DispatchFacts facts;
  facts.profile = BackendProfile::kVllm2026_03;
  facts.batch_invariant = c.value("batch_invariant", false);
  facts.has_flashinfer_cubin = c.value("cubin_flag", false);
  if (c.data.contains("capability")) {
    facts.device = {Platform::kCuda, DeviceCapability{c.ints("capability")[0], c.ints("capability")[1]}};
  }
  const auto modules = c.value("modules", std::vector<std::string>{});
  facts.has_module = [&](std::string_view module) { return std::ranges::count(modules, module) > 0; };
  if (c.data.contains("status") || c.data.contains("throws")) {
    facts.probe_artifactory = [&](int32_t timeout_s) -> int32_t {
      EXPECT_EQ(timeout_s, 5);
      ++probes;
      if (c.data.contains("throws")) throw std::runtime_error(c.at<std::string>("throws"));
      return c.at<int32_t>("status");
    };
  }
  facts.log = [&, log = into(lines)](LogLevel level, std::string_view line) {
    if (line != "flashinfer-cubin package was not found") log(level, line);
  };
  const KernelDispatch dispatch(facts);
  for (int round = 0; round < 3; ++round) EXPECT_EQ(dispatch.supports_trtllm_attention(), c.at<bool>("expected"));
  EXPECT_EQ(probes, c.at<int>("probes"));
  EXPECT_EQ(lines, expected_lines(c));
  EXPECT_NE(dispatch.query(KernelFamily::kTrtllmAttention).reason.empty(), c.at<bool>("expected") == false);
}

INSTANTIATE_TEST_SUITE_P(Golden, TrtllmSupportTable,
                         ::testing::ValuesIn(golden_cases("dispatch/trtllm_attention", "supports")),
                         folio::testing::golden_case_name);

TEST(TrtllmAttention, CanBeUsedUnlessForcedOffOrHeadsDoNotDivide) {
  DispatchFacts facts;
  EXPECT_TRUE(KernelDispatch(facts).can_use_trtllm_attention(64, 8));
  EXPECT_FALSE(KernelDispatch(facts).can_use_trtllm_attention(40, 6));
  EXPECT_EQ(KernelDispatch(facts).force_use_trtllm_attention(), std::nullopt);
  facts.use_block_table_kernels = false;
  EXPECT_FALSE(KernelDispatch(facts).can_use_trtllm_attention(64, 8));
  facts.use_block_table_kernels = true;
  EXPECT_TRUE(KernelDispatch(facts).can_use_trtllm_attention(64, 8));
  EXPECT_EQ(KernelDispatch(facts).force_use_trtllm_attention(), true);
  for (BackendProfile profile : {BackendProfile::kVllm2025_12, BackendProfile::kVllm2025_07}) {
    DispatchFacts blackwell;
    blackwell.profile = profile;
    blackwell.device = {Platform::kCuda, DeviceCapability{10, 0}};
    blackwell.has_flashinfer_cubin = true;
    EXPECT_EQ(KernelDispatch(blackwell).can_use_trtllm_attention(64, 8), profile == BackendProfile::kVllm2025_12);
  }
  facts.profile = BackendProfile::kVllm2026_03;
  EXPECT_FALSE(KernelDispatch(facts).can_use_trtllm_attention(64, 8)) << "forced on does not make it supported";
  EXPECT_THROW(KernelDispatch(facts).can_use_trtllm_attention(64, 0), Error);
  EXPECT_THROW(KernelDispatch(facts).use_trtllm_attention({}), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
