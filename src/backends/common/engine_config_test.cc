#include "folio/backends/engine_config.hpp"

#include <gtest/gtest.h>

#include <string>

#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

TEST(KvCacheLayoutNames, AreNhdAndHnd) {
  EXPECT_EQ(kv_cache_layout_from_name("NHD"), KvCacheLayout::kNhd);
  EXPECT_EQ(kv_cache_layout_from_name("HND"), KvCacheLayout::kHnd);
  EXPECT_EQ(to_string(KvCacheLayout::kHnd), "HND");
  try {
    kv_cache_layout_from_name("nhd");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "Unknown cache layout format nhd.");
  }
}

TEST(KvCacheDtypeNames, ResolveAutoAndFp8) {
  EXPECT_EQ(kv_cache_dtype_from_name("auto", DType::kFloat16), DType::kFloat16);
  EXPECT_EQ(kv_cache_dtype_from_name("bfloat16", DType::kFloat16), DType::kBFloat16);
  EXPECT_EQ(kv_cache_dtype_from_name("float16", DType::kBFloat16), DType::kFloat16);
  EXPECT_EQ(kv_cache_dtype_from_name("float32", DType::kBFloat16), DType::kFloat32);
  EXPECT_EQ(kv_cache_dtype_from_name("fp8", DType::kFloat16), DType::kFloat8E4M3);
  EXPECT_EQ(kv_cache_dtype_from_name("fp8_e4m3", DType::kFloat16), DType::kFloat8E4M3);
  EXPECT_EQ(kv_cache_dtype_from_name("fp8_e5m2", DType::kFloat16), DType::kFloat8E5M2);
  EXPECT_THROW(kv_cache_dtype_from_name("int8", DType::kFloat16), Error);
}

TEST(Profiles, HaveNames) {
  EXPECT_EQ(to_string(BackendProfile::kNative), "native");
  EXPECT_EQ(to_string(BackendProfile::kVllm2025_07), "vllm-2025-07");
  EXPECT_EQ(to_string(BackendProfile::kVllm2025_12), "vllm-2025-12");
  EXPECT_EQ(to_string(BackendProfile::kVllm2026_03), "vllm-2026-03");
}

TEST(ModelConfigHeads, AreDividedOverRanks) {
  ModelConfig model;
  model.num_attention_heads = 32;
  model.num_kv_heads = 8;
  ParallelConfig parallel;
  parallel.tensor_parallel_size = 4;
  EXPECT_EQ(model.get_num_attention_heads(parallel), 8);
  EXPECT_EQ(model.get_num_kv_heads(parallel), 2);
  parallel.tensor_parallel_size = 16;
  EXPECT_EQ(model.get_num_kv_heads(parallel), 1) << "KV heads are replicated";
  parallel.tensor_parallel_size = 3;
  EXPECT_THROW(model.get_num_attention_heads(parallel), Error);
  EXPECT_THROW(model.get_num_kv_heads(parallel), Error);
  parallel.tensor_parallel_size = 0;
  EXPECT_THROW(model.get_num_attention_heads(parallel), Error);
}

TEST(ReorderBatchThreshold, CountsDraftsWhereTheyAreDecodes) {
  EngineConfig config;
  EXPECT_EQ(reorder_batch_threshold(config, 1, true, false), 1);
  config.speculative = SpeculativeConfig{3, false};
  EXPECT_EQ(reorder_batch_threshold(config, 1, true, false), 4);
  EXPECT_EQ(reorder_batch_threshold(config, 1, false, false), 1);
  EXPECT_EQ(reorder_batch_threshold(config, 8, true, false), 8);
  config.speculative->parallel_drafting = true;
  EXPECT_EQ(reorder_batch_threshold(config, 1, true, false), 7);
  config.parallel.decode_context_parallel_size = 2;
  EXPECT_EQ(reorder_batch_threshold(config, 1, true, false), 1);
  EXPECT_EQ(reorder_batch_threshold(config, 1, true, true), 7);
}

}  // namespace
}  // namespace folio::inline v0::backends
