#include "folio/backends/flashinfer/backend.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/common/capability_golden_test.hpp"
#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;

constexpr BackendProfile kNative = BackendProfile::kNative;
constexpr BackendProfile k2025_07 = BackendProfile::kVllm2025_07;
constexpr BackendProfile k2025_12 = BackendProfile::kVllm2025_12;
constexpr BackendProfile k2026_03 = BackendProfile::kVllm2026_03;

FlashInferFacts facts_of(const nlohmann::json& given) {
  FlashInferFacts facts;
  facts.profile = testing::profile_of(given);
  facts.device = testing::device_of(given);
  facts.supports_block_table_kernels = given.value("block_tables", false);
  if (given.contains("force")) facts.use_block_table_kernels = given.at("force").get<bool>();
  return facts;
}

class FlashInferValidation : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashInferValidation, GivesEveryReason) {
  const FlashInferFacts facts = facts_of(GetParam().data.at("facts"));
  const AttentionRequirements asked = testing::requirements_of(GetParam().data.at("ask"), facts.device);
  EXPECT_EQ(FlashInferBackend::validate_configuration(asked, facts),
            GetParam().at<std::vector<std::string>>("reasons"));
  // The single questions say the same.
  const BackendCapability capability = FlashInferBackend::capability(facts);
  EXPECT_EQ(FlashInferBackend::supports_head_size(asked.head_size, facts.profile),
            capability.supports_head_size(asked.head_size));
  EXPECT_EQ(FlashInferBackend::supports_compute_capability(asked.device, facts.profile),
            capability.supports_compute_capability(asked.device));
  EXPECT_EQ(FlashInferBackend::supports_attn_type(asked.attn_type), capability.supports_attn_type(asked.attn_type));
  if (asked.page_size) {
    EXPECT_EQ(FlashInferBackend::supports_page_size(*asked.page_size, facts.profile),
              capability.supports_page_size(asked.page_size));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashInferValidation,
                         ::testing::ValuesIn(golden_cases("backends/flashinfer_capability", "validation")),
                         folio::testing::golden_case_name);

class FlashInferQueries : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashInferQueries, AnswerForTheFacts) {
  const GoldenCase& c = GetParam();
  const FlashInferFacts facts = facts_of(c.data.at("facts"));
  EXPECT_EQ(FlashInferBackend::get_name(facts.profile), c.at<std::string>("backend"));
  EXPECT_EQ(FlashInferBackend::supports_sink(facts), c.at<bool>("sink"));
  std::optional<KvCacheLayout> layout;
  if (!c.data.at("layout").is_null()) layout = kv_cache_layout_from_name(c.at<std::string>("layout"));
  EXPECT_EQ(FlashInferBackend::get_required_kv_cache_layout(facts), layout);
  EXPECT_EQ(FlashInferBackend::capability(facts).required_layout, layout);
  for (const auto& pair : c.data.at("preferred")) {
    EXPECT_EQ(FlashInferBackend::get_preferred_page_size(pair.at(0), facts.profile), pair.at(1).get<int32_t>());
  }
  for (const auto& row : c.data.at("graph")) {
    const auto kv_heads = row.at(1).get<std::vector<int32_t>>();
    EXPECT_EQ(to_string(FlashInferBackend::get_cudagraph_support(facts, row.at(0), kv_heads)),
              row.at(2).get<std::string>())
        << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashInferQueries,
                         ::testing::ValuesIn(golden_cases("backends/flashinfer_capability", "queries")),
                         folio::testing::golden_case_name);

TEST(FlashInferBackendTest, WritesTheCacheInsideForwardUntil2026) {
  EXPECT_TRUE(FlashInferBackend::forward_includes_kv_cache_update());
  EXPECT_TRUE(FlashInferBackend::forward_includes_kv_cache_update(k2025_12));
  EXPECT_FALSE(FlashInferBackend::forward_includes_kv_cache_update(k2026_03));
  EXPECT_EQ(FlashInferBackend::get_kv_cache_page_dim(), 0);
  const std::vector<int32_t> none{0};
  EXPECT_EQ(testing::message_of([&] { FlashInferBackend::get_cudagraph_support({}, 8, none); }),
            "num_kv_heads is 0; it must be at least 1");
}

TEST(FlashInferBackendTest, IsCalledAsItsVersionIs) {
  EXPECT_EQ(FlashInferBackend::get_name(), "FLASHINFER");
  EXPECT_EQ(FlashInferBackend::get_name(k2025_12), "FLASHINFER");
  EXPECT_EQ(FlashInferBackend::get_name(k2025_07), "FLASHINFER_VLLM_V1");
  EXPECT_TRUE(FlashInferBackend::accept_output_buffer);
}

TEST(FlashInferBackendTest, NamesItsClasses) {
  EXPECT_TRUE((std::is_same_v<FlashInferBackend::Impl, FlashInferImpl>));
  EXPECT_TRUE((std::is_same_v<FlashInferBackend::Builder, FlashInferMetadataBuilder>));
}

TEST(FlashInferBackendTest, AnswersForItsProfile) {
  const auto sizes = FlashInferBackend::get_supported_head_sizes(k2025_12);
  EXPECT_EQ(std::vector<int32_t>(sizes.begin(), sizes.end()), (std::vector<int32_t>{64, 128, 256}));
  EXPECT_EQ(FlashInferBackend::get_supported_head_sizes().size(), 32u);
  EXPECT_TRUE(FlashInferBackend::supports_head_size(80, kNative));
  EXPECT_FALSE(FlashInferBackend::supports_head_size(80, k2025_12));
  EXPECT_FALSE(FlashInferBackend::supports_head_size(100, kNative));
  EXPECT_FALSE(FlashInferBackend::supports_head_size(264, kNative));

  EXPECT_TRUE(FlashInferBackend::supports_page_size(48, k2025_12)) << "48 is three kernel pages of 16";
  EXPECT_FALSE(FlashInferBackend::supports_page_size(8, k2025_12));
  EXPECT_TRUE(FlashInferBackend::supports_page_size(8, k2025_07));
  EXPECT_TRUE(FlashInferBackend::supports_page_size(1, kNative));
  EXPECT_FALSE(FlashInferBackend::supports_page_size(0, kNative));
  EXPECT_EQ(FlashInferBackend::get_supported_kernel_page_sizes(k2025_12).size(), 3u);
  EXPECT_EQ(FlashInferBackend::get_supported_kernel_page_sizes(kNative)[0], (PageSizeRule{1, true}));

  EXPECT_EQ(FlashInferBackend::supported_dtypes(k2025_12).size(), 2u);
  EXPECT_EQ(FlashInferBackend::supported_dtypes(kNative).back(), DType::kFloat32);
  EXPECT_EQ(FlashInferBackend::supported_kv_cache_dtypes(k2025_12).back(), "fp8_e5m2");
  for (std::string_view name : FlashInferBackend::supported_kv_cache_dtypes(kNative)) {
    EXPECT_NE(kv_cache_dtype_from_name(name, DType::kFloat16), DType::kUnset) << name;
  }
}

TEST(FlashInferBackendTest, RefusesHeadSizesInTheOldWords) {
  FlashInferBackend::validate_head_size(128, k2025_07);
  EXPECT_EQ(testing::message_of([] { FlashInferBackend::validate_head_size(80, k2025_07); }),
            "Head size 80 is not supported by FlashInfer. Supported head sizes are: [64, 128, 256]. Set "
            "VLLM_ATTENTION_BACKEND=FLEX_ATTENTION to use FlexAttention backend which supports all head sizes.");
}

TEST(FlashInferBackendTest, NamesFp8Types) {
  EXPECT_EQ(FlashInferBackend::get_fp8_dtype_for_flashinfer("fp8"), DType::kFloat8E4M3);
  EXPECT_EQ(FlashInferBackend::get_fp8_dtype_for_flashinfer("fp8_e4m3"), DType::kFloat8E4M3);
  EXPECT_EQ(FlashInferBackend::get_fp8_dtype_for_flashinfer("fp8_e5m2"), DType::kFloat8E5M2);
  EXPECT_EQ(testing::message_of([] { FlashInferBackend::get_fp8_dtype_for_flashinfer("auto"); }),
            "Unrecognized FP8 dtype: auto");
}

TEST(FlashInferKvCache, HasOneLogicalShapeAndTwoLayouts) {
  const auto shape = FlashInferBackend::get_kv_cache_shape(9, 16, 4, 64);
  EXPECT_EQ(shape, (std::array<int64_t, 5>{9, 2, 16, 4, 64}));
  EXPECT_EQ(FlashInferBackend::get_kv_cache_stride_order(KvCacheLayout::kNhd), (std::array<int32_t, 5>{0, 1, 2, 3, 4}));
  EXPECT_EQ(FlashInferBackend::get_kv_cache_stride_order(KvCacheLayout::kHnd), (std::array<int32_t, 5>{0, 1, 3, 2, 4}));
  EXPECT_EQ(FlashInferBackend::get_layered_kv_cache_stride_order(KvCacheLayout::kNhd),
            (std::array<int32_t, 6>{1, 0, 2, 3, 4, 5}));
  EXPECT_EQ(FlashInferBackend::get_layered_kv_cache_stride_order(KvCacheLayout::kHnd),
            (std::array<int32_t, 6>{1, 2, 4, 0, 3, 5}));

  char memory = 0;
  const TensorView nhd = FlashInferBackend::kv_cache_tensor(&memory, DType::kBFloat16, shape, KvCacheLayout::kNhd);
  EXPECT_EQ(nhd.shape, shape);
  EXPECT_EQ(nhd.strides, (std::array<int64_t, 5>{2 * 16 * 4 * 64, 16 * 4 * 64, 4 * 64, 64, 1}));
  const TensorView hnd = FlashInferBackend::kv_cache_tensor(&memory, DType::kBFloat16, shape, KvCacheLayout::kHnd);
  EXPECT_EQ(hnd.shape, shape) << "the logical shape does not depend on the layout";
  EXPECT_EQ(hnd.strides, (std::array<int64_t, 5>{2 * 16 * 4 * 64, 16 * 4 * 64, 64, 16 * 64, 1}));
}

TEST(FlashInferKvCache, BecomesAStridedView) {
  std::vector<uint16_t> memory(9 * 2 * 16 * 4 * 8);
  const auto shape = FlashInferBackend::get_kv_cache_shape(9, 16, 4, 8);
  const TensorView tensor =
      FlashInferBackend::kv_cache_tensor(memory.data(), DType::kUnset, shape, KvCacheLayout::kHnd);
  const KvCacheView view = FlashInferBackend::kv_cache_view(tensor, DType::kFloat16);
  EXPECT_EQ(view.format, KvFormat::kStrided);
  EXPECT_EQ(view.dtype, DType::kFloat16);
  EXPECT_EQ(view.k, memory.data());
  EXPECT_EQ(view.v, memory.data() + 16 * 4 * 8) << "V is index 1 of the second dimension";
  EXPECT_EQ(view.num_pages, 9);
  EXPECT_EQ(view.page_size, 16);
  EXPECT_EQ(view.num_kv_heads, 4);
  EXPECT_EQ(view.head_dim_qk, 8);
  EXPECT_EQ(view.head_dim_v, 8);
  for (const KvStrides& strides : {view.k_strides, view.v_strides}) {
    EXPECT_EQ(strides.page, 2 * 16 * 4 * 8);
    EXPECT_EQ(strides.token, 8);
    EXPECT_EQ(strides.head, 16 * 8);
  }
}

TEST(FlashInferKvCache, RefusesTensorsThatAreNot) {
  char memory = 0;
  const auto shape = FlashInferBackend::get_kv_cache_shape(9, 16, 4, 8);
  const TensorView good = FlashInferBackend::kv_cache_tensor(&memory, DType::kUnset, shape, KvCacheLayout::kNhd);
  const auto refused = [&](auto&& change) {
    TensorView tensor = good;
    change(tensor);
    return testing::message_of([&] { FlashInferBackend::kv_cache_view(tensor, DType::kFloat16); });
  };
  EXPECT_NE(refused([](TensorView& t) { t.rank = 4; }).find("rank 4"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.shape[1] = 3; }).find("3 entries"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.dtype = DType::kBFloat16; }).find("bfloat16"), std::string::npos);
  EXPECT_NE(refused([](TensorView& t) { t.strides[4] = 2; }).find("stride 2"), std::string::npos);
}

}  // namespace
}  // namespace folio::inline v0::backends
