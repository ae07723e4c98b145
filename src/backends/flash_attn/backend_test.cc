#include "folio/backends/flash_attn/backend.hpp"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <vector>

#include "backends/common/capability_golden_test.hpp"
#include "core/error_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using folio::testing::message_of;

constexpr BackendProfile kNative = BackendProfile::kNative;
constexpr BackendProfile k2026_03 = BackendProfile::kVllm2026_03;

FlashAttentionFacts facts_of(const nlohmann::json& given) {
  FlashAttentionFacts facts;
  facts.profile = testing::profile_of(given);
  facts.platform.device = testing::device_of(given);
  if (given.contains("fa_version")) facts.platform.flash_attn_version = given.at("fa_version").get<int32_t>();
  facts.is_varlen_func_available = given.value("varlen", true);
  facts.is_hybrid_model = given.value("hybrid", false);
  facts.mamba_cache_dtype = given.value("mamba_cache", "auto");
  facts.mamba_ssm_cache_dtype = given.value("mamba_ssm", "auto");
  return facts;
}

class FlashAttentionValidation : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashAttentionValidation, GivesEveryReason) {
  const FlashAttentionFacts facts = facts_of(GetParam().data.at("facts"));
  const AttentionRequirements asked = testing::requirements_of(GetParam().data.at("ask"), facts.platform.device);
  EXPECT_EQ(FlashAttentionBackend::validate_configuration(asked, facts),
            GetParam().at<std::vector<std::string>>("reasons"));
  // The single questions say the same.
  EXPECT_EQ(FlashAttentionBackend::supports_kv_cache_dtype(asked.kv_cache_dtype, facts),
            FlashAttentionBackend::capability(facts).supports_kv_cache_dtype(asked.kv_cache_dtype));
  EXPECT_EQ(FlashAttentionBackend::supports_head_size(asked.head_size),
            FlashAttentionBackend::capability(facts).supports_head_size(asked.head_size));
  EXPECT_EQ(FlashAttentionBackend::supports_compute_capability(asked.device, facts.profile),
            FlashAttentionBackend::capability(facts).supports_compute_capability(asked.device));
  EXPECT_EQ(FlashAttentionBackend::supports_combination(asked.has_sinks, asked.device, facts.profile),
            FlashAttentionBackend::capability(facts).combination_refusal(asked.has_sinks, asked.device));
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashAttentionValidation,
                         ::testing::ValuesIn(golden_cases("backends/flash_attn_capability", "validation")),
                         folio::testing::golden_case_name);

class FlashAttentionQueries : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashAttentionQueries, AnswerForTheFacts) {
  const FlashAttentionFacts facts = facts_of(GetParam().data.at("facts"));
  EXPECT_EQ(to_string(FlashAttentionBackend::get_cudagraph_support(facts)), GetParam().at<std::string>("graph"));
  EXPECT_EQ(FlashAttentionBackend::supports_sink(facts), GetParam().at<bool>("sink"));
  EXPECT_EQ(FlashAttentionBackend::supports_per_head_quant_scales(facts), GetParam().at<bool>("per_head"));
  std::vector<PageSizeRule> rules;
  for (const auto& rule : GetParam().data.at("page_sizes")) rules.push_back({rule.at(0), rule.at(1)});
  const auto sizes = FlashAttentionBackend::get_supported_kernel_page_sizes(facts);
  EXPECT_EQ(std::vector<PageSizeRule>(sizes.begin(), sizes.end()), rules);
  for (const auto& pair : GetParam().data.at("preferred")) {
    EXPECT_EQ(FlashAttentionBackend::get_preferred_page_size(pair.at(0), facts), pair.at(1).get<int32_t>());
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashAttentionQueries,
                         ::testing::ValuesIn(golden_cases("backends/flash_attn_capability", "queries")),
                         folio::testing::golden_case_name);

class FlashAttentionVersion : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashAttentionVersion, IsResolvedWithWarnings) {
  const GoldenCase& c = GetParam();
  FlashAttentionPlatform platform;
  platform.device = testing::device_of(c.data);
  if (c.data.contains("override")) platform.flash_attn_version = c.at<int32_t>("override");
  for (int32_t version : c.value("without", std::vector<int32_t>{})) {
    (version == 2 ? platform.has_version_2 : version == 3 ? platform.has_version_3 : platform.has_version_4) = false;
  }
  std::optional<int32_t> head_size;
  if (c.data.contains("head_size")) head_size = c.at<int32_t>("head_size");
  std::optional<int32_t> expected;
  if (!c.data.at("version").is_null()) expected = c.at<int32_t>("version");
  std::vector<std::string> lines;
  const OnceLog log([&](LogLevel level, std::string_view line) {
    EXPECT_EQ(level, expected ? LogLevel::kWarning : LogLevel::kError);
    lines.emplace_back(line);
  });
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(get_flash_attn_version(platform, c.value("alibi", false), head_size, log), expected);
  }
  EXPECT_EQ(lines, c.at<std::vector<std::string>>("log")) << "each once";
  if (expected && platform.device.platform == Platform::kCuda) {
    EXPECT_TRUE(is_fa_version_supported(*expected, platform));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashAttentionVersion,
                         ::testing::ValuesIn(golden_cases("backends/flash_attn_version")),
                         folio::testing::golden_case_name);

TEST(FlashAttentionBackendTest, SaysWhatItIs) {
  EXPECT_EQ(FlashAttentionBackend::get_name(), "FLASH_ATTN");
  EXPECT_TRUE(FlashAttentionBackend::accept_output_buffer);
  EXPECT_FALSE(FlashAttentionBackend::forward_includes_kv_cache_update);
  EXPECT_TRUE(FlashAttentionBackend::supports_non_causal());
  for (AttentionType type : {AttentionType::kDecoder, AttentionType::kEncoder, AttentionType::kEncoderOnly,
                             AttentionType::kEncoderDecoder}) {
    EXPECT_TRUE(FlashAttentionBackend::supports_attn_type(type));
  }
  EXPECT_FALSE(FlashAttentionBackend::supports_attn_type(static_cast<AttentionType>(4)));
  EXPECT_EQ(FlashAttentionBackend::supported_dtypes(k2026_03).size(), 2u);
  EXPECT_EQ(FlashAttentionBackend::supported_dtypes(kNative).back(), DType::kFloat32);
  EXPECT_EQ(FlashAttentionBackend::supported_kv_cache_dtypes(k2026_03).back(), "bfloat16");
  for (std::string_view name : FlashAttentionBackend::supported_kv_cache_dtypes(kNative)) {
    EXPECT_NE(kv_cache_dtype_from_name(name, DType::kFloat16), DType::kUnset) << name;
  }
}

TEST(FlashAttentionBackendTest, NamesItsClasses) {
  EXPECT_TRUE((std::is_same_v<FlashAttentionBackend::Impl, FlashAttentionImpl>));
  EXPECT_TRUE((std::is_same_v<FlashAttentionBackend::Builder, FlashAttentionMetadataBuilder>));
}

TEST(FlashAttentionBackendTest, HasTheProfilesOfItsDocument) {
  for (BackendProfile profile : {BackendProfile::kVllm2025_07, BackendProfile::kVllm2025_12}) {
    EXPECT_NE(message_of([&] { FlashAttentionBackend::supported_dtypes(profile); }, ErrorCode::kUnsupported)
                  .find("offers native and vllm-2026-03"),
              std::string::npos);
  }
}

// What validation takes and the conversion refuses is the original's contradiction; native means what it says.
TEST(FlashAttentionBackendTest, NamesFp8Types) {
  const auto dtype_of = FlashAttentionBackend::get_fp8_dtype_for_flashattn;
  EXPECT_EQ(dtype_of("fp8", k2026_03), DType::kFloat8E4M3);
  EXPECT_EQ(dtype_of("fp8_e4m3", k2026_03), DType::kFloat8E4M3);
  EXPECT_EQ(dtype_of("fp8_e5m2", kNative), DType::kFloat8E5M2);
  EXPECT_EQ(message_of([&] { dtype_of("fp8_e5m2", k2026_03); }, ErrorCode::kInvalidArgument),
            "Unrecognized FP8 dtype: fp8_e5m2");
  EXPECT_EQ(message_of([&] { dtype_of("auto", kNative); }, ErrorCode::kInvalidArgument),
            "Unrecognized FP8 dtype: auto");
}

TEST(FlashAttentionKvCache, HasKAndVOutermost) {
  const auto shape = FlashAttentionBackend::get_kv_cache_shape(9, 16, 4, 64, k2026_03);
  EXPECT_EQ(shape, (std::array<int64_t, 5>{2, 9, 16, 4, 64}));
  EXPECT_EQ(FlashAttentionBackend::get_kv_cache_page_dim(), 1);
  EXPECT_EQ(message_of([] { FlashAttentionBackend::get_kv_cache_shape(9, 24, 4, 64, k2026_03); },
                       ErrorCode::kInvalidArgument),
            "Block size must be a multiple of 16.");
  EXPECT_EQ(FlashAttentionBackend::get_kv_cache_shape(9, 1, 4, 64)[2], 1) << "native takes any page";
  EXPECT_THROW(FlashAttentionBackend::get_kv_cache_shape(9, 0, 4, 64), Error);
}

TEST(FlashAttentionKvCache, LiesInTwoLayouts) {
  constexpr KvCacheLayout kNhd = KvCacheLayout::kNhd;
  constexpr KvCacheLayout kHnd = KvCacheLayout::kHnd;
  using Order5 = std::array<int32_t, 5>;
  using Order6 = std::array<int32_t, 6>;
  EXPECT_EQ(FlashAttentionBackend::get_kv_cache_stride_order(kNhd), (Order5{0, 1, 2, 3, 4}));
  EXPECT_EQ(FlashAttentionBackend::get_kv_cache_stride_order(kHnd), (Order5{0, 1, 3, 2, 4}));
  EXPECT_EQ(FlashAttentionBackend::get_layered_kv_cache_stride_order(kNhd), (Order6{2, 0, 1, 3, 4, 5}));
  EXPECT_EQ(FlashAttentionBackend::get_layered_kv_cache_stride_order(kHnd), (Order6{2, 4, 0, 1, 3, 5}));
  for (KvCacheLayout layout : {kNhd, kHnd}) {
    EXPECT_TRUE(indexes_kv_by_page_stride(FlashAttentionBackend::get_layered_kv_cache_stride_order(layout)));
  }
  EXPECT_EQ(message_of([] { FlashAttentionBackend::get_kv_cache_stride_order(static_cast<KvCacheLayout>(7)); },
                       ErrorCode::kInvalidArgument),
            "Unknown cache layout format 7.");

  std::vector<uint16_t> memory(2 * 9 * 16 * 4 * 8);
  const auto shape = FlashAttentionBackend::get_kv_cache_shape(9, 16, 4, 8);
  const TensorView tensor = FlashAttentionBackend::kv_cache_tensor(memory.data(), DType::kUnset, shape, kHnd);
  EXPECT_EQ(tensor.shape, shape) << "the logical shape does not depend on the layout";
  const KvCacheView view = FlashAttentionBackend::kv_cache_view(tensor, DType::kBFloat16);
  EXPECT_EQ(view.k, memory.data());
  EXPECT_EQ(view.v, memory.data() + 9 * 16 * 4 * 8) << "V is the second half";
  EXPECT_EQ(view.num_pages, 9);
  EXPECT_EQ(view.page_size, 16);
  EXPECT_EQ(view.num_kv_heads, 4);
  EXPECT_EQ(view.head_dim_v, 8);
  for (const KvStrides& strides : {view.k_strides, view.v_strides}) {
    EXPECT_EQ(strides.page, 16 * 4 * 8);
    EXPECT_EQ(strides.token, 8);
    EXPECT_EQ(strides.head, 16 * 8);
  }
}

TEST(FlashAttentionKvCache, RefusesTensorsThatAreNot) {
  char memory = 0;
  const auto shape = FlashAttentionBackend::get_kv_cache_shape(9, 16, 4, 8);
  const TensorView good = FlashAttentionBackend::kv_cache_tensor(&memory, DType::kUnset, shape, KvCacheLayout::kNhd);
  const auto refused = [&](auto&& change) {
    TensorView tensor = good;
    change(tensor);
    return message_of([&] { FlashAttentionBackend::kv_cache_view(tensor, DType::kFloat16); },
                      ErrorCode::kInvalidArgument);
  };
  EXPECT_NE(refused([](TensorView& t) { t.rank = 4; }).find("[2, num_pages"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.shape[0] = 3; }).find("dimension 0 of kv_cache has 3"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.dtype = DType::kBFloat16; }).find("bfloat16"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.strides[4] = 2; }).find("stride 2"), std::string::npos);
}

}  // namespace
}  // namespace folio::inline v0::backends
