#include "folio/backends/capability.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "folio/backends/once_log.hpp"

namespace folio::inline v0::backends {
namespace {

TEST(DeviceCapabilityTest, ComparesByMajorThenMinor) {
  EXPECT_LT((DeviceCapability{8, 9}), (DeviceCapability{9, 0}));
  EXPECT_LT((DeviceCapability{12, 0}), (DeviceCapability{12, 1}));
  EXPECT_GT((DeviceCapability{12, 0}), (DeviceCapability{9, 9})) << "12.0 is not text";
  EXPECT_EQ((DeviceCapability{10, 3}).to_int(), 103);
  EXPECT_TRUE((DeviceCapability{10, 3}).is_family(100));
  EXPECT_FALSE((DeviceCapability{11, 0}).is_family(100));
  EXPECT_FALSE((DeviceCapability{9, 0}).is_family(100));
}

TEST(ValidateConfiguration, DefaultsAreThoseOfTheAbstractBackend) {
  BackendCapability backend;
  EXPECT_TRUE(backend.supports_head_size(100)) << "no list is any size";
  EXPECT_TRUE(backend.supports_kv_cache_dtype("int4"));
  EXPECT_TRUE(backend.supports_kv_cache_dtype(std::nullopt));
  EXPECT_TRUE(backend.supports_page_size(7));
  EXPECT_TRUE(backend.supports_page_size(std::nullopt));
  EXPECT_FALSE(backend.supports_page_size(0));
  EXPECT_TRUE(backend.supports_compute_capability({}));
  EXPECT_TRUE(backend.supports_kv_connector);
  EXPECT_EQ(backend.get_preferred_page_size(7), 7);
  for (bool other : {backend.is_mla, backend.is_sparse, backend.is_ssm, backend.supports_sink,
                     backend.supports_alibi_sqrt, backend.supports_mm_prefix, backend.supports_per_head_quant_scales,
                     backend.supports_non_causal, backend.supports_batch_invariance}) {
    EXPECT_FALSE(other);
  }
}

TEST(ValidateConfiguration, CollectsEveryReasonInOrder) {
  constexpr std::array<int32_t, 1> head_sizes{64};
  constexpr std::array<std::string_view, 1> kv_cache_dtypes{"auto"};
  constexpr std::array<PageSizeRule, 2> page_sizes{PageSizeRule{32}, PageSizeRule{16, true}};
  BackendCapability backend;
  backend.head_sizes = head_sizes;
  backend.kv_cache_dtypes = kv_cache_dtypes;
  backend.page_sizes = page_sizes;
  backend.min_capability = DeviceCapability{8, 0};
  backend.min_capability_for_sinks = DeviceCapability{9, 0};
  backend.supports_kv_connector = false;
  EXPECT_EQ(backend.get_preferred_page_size(8), 16) << "the smallest of the list, wherever it stands";

  AttentionRequirements asked;
  asked.head_size = 65;
  asked.kv_cache_dtype = "fp8";
  asked.page_size = 24;
  asked.use_mla = asked.has_sinks = asked.use_sparse = asked.use_mm_prefix = asked.use_per_head_quant_scales = true;
  asked.device = {Platform::kCuda, DeviceCapability{7, 5}};
  asked.attn_type = AttentionType::kEncoder;
  asked.use_non_causal = asked.use_batch_invariant = asked.use_kv_connector = true;
  EXPECT_EQ(
      validate_configuration(backend, asked),
      (std::vector<std::string>{"head_size not supported", "dtype not supported", "kv_cache_dtype not supported",
                                "block_size not supported", "partial multimodal token full attention not supported",
                                "MLA not supported", "attention sinks not supported", "sparse not supported",
                                "per-head quant scales not supported", "compute capability not supported",
                                "attention type encoder not supported", "non-causal attention not supported",
                                "batch invariance not supported", "KV connector not supported",
                                "sink not supported on compute capability < 9.0"}));
}

TEST(ValidateConfiguration, CapabilityLimitsAreInclusive) {
  BackendCapability backend;
  backend.min_capability = DeviceCapability{7, 5};
  backend.max_capability = DeviceCapability{12, 1};
  const auto takes = [&](int32_t major, int32_t minor) {
    return backend.supports_compute_capability({Platform::kCuda, DeviceCapability{major, minor}});
  };
  EXPECT_FALSE(takes(7, 4));
  EXPECT_TRUE(takes(7, 5));
  EXPECT_TRUE(takes(8, 0));
  EXPECT_TRUE(takes(12, 1));
  EXPECT_FALSE(takes(12, 2));
  EXPECT_FALSE(backend.supports_compute_capability({})) << "a CPU has no capability";
}

TEST(ValidateConfiguration, BackendsForLatentOrSparseAttentionRefuseAllOther) {
  BackendCapability backend;
  backend.is_mla = backend.is_sparse = true;
  AttentionRequirements asked;
  const std::vector<std::string> reasons = validate_configuration(backend, asked);
  EXPECT_EQ(std::ranges::count(reasons, "non-MLA not supported"), 1);
  EXPECT_EQ(std::ranges::count(reasons, "non-sparse not supported"), 1);
}

TEST(KvCachePageDim, IsFoundByAskingForManyPages) {
  EXPECT_EQ(kv_cache_page_dim(
                [](int64_t n, int32_t p, int32_t h, int32_t d) {
                  return std::array{n, int64_t{p * h * d}};
                },
                16, 2, 64),
            0);
  EXPECT_EQ(kv_cache_page_dim(
                [](int64_t n, int32_t p, int32_t h, int32_t d) {
                  return std::array{int64_t{p * h * d}, n};
                },
                16, 2, 64),
            1);
  EXPECT_EQ(kv_cache_page_dim([](int64_t, int32_t p, int32_t h, int32_t d) { return std::array{int64_t{p * h * d}}; },
                              16, 2, 64),
            -1);
  EXPECT_TRUE(indexes_kv_by_page_stride(std::array{1, 0, 2}));
  EXPECT_FALSE(indexes_kv_by_page_stride(std::array{0, 1, 2})) << "layers outermost";
  EXPECT_FALSE(indexes_kv_by_page_stride({}));
}

TEST(GraphSupportTest, LevelsAreOrdered) {
  EXPECT_LT(GraphSupport::kNever, GraphSupport::kUniformSingleTokenDecode);
  EXPECT_LT(GraphSupport::kUniformSingleTokenDecode, GraphSupport::kUniformBatch);
  EXPECT_LT(GraphSupport::kUniformBatch, GraphSupport::kAlways);
  EXPECT_EQ(static_cast<int>(GraphSupport::kAlways), 3);
}

TEST(OnceLogTest, SaysEachLineOnceAtEachLevel) {
  std::vector<std::string> lines;
  const OnceLog log([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  const OnceLog copy = log;
  log(LogLevel::kInfo, "a");
  copy(LogLevel::kInfo, "a");
  copy(LogLevel::kWarning, "a");
  log(LogLevel::kInfo, "b");
  EXPECT_EQ(lines, (std::vector<std::string>{"a", "a", "b"}));
  OnceLog()(LogLevel::kInfo, "nobody listens");
}

}  // namespace
}  // namespace folio::inline v0::backends
