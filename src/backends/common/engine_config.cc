#include "folio/backends/engine_config.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

void require_tensor_parallel_size(const ParallelConfig& parallel) {
  core::require(parallel.tensor_parallel_size >= 1, "tensor_parallel_size is ", parallel.tensor_parallel_size,
                "; it must be at least 1");
}

}  // namespace

std::string_view to_string(BackendProfile profile) {
  switch (profile) {
    case BackendProfile::kNative: return "native";
    case BackendProfile::kVllm2025_07: return "vllm-2025-07";
    case BackendProfile::kVllm2025_12: return "vllm-2025-12";
    case BackendProfile::kVllm2026_03: return "vllm-2026-03";
  }
  return "invalid";
}

KvCacheLayout kv_cache_layout_from_name(std::string_view name) {
  if (name == "NHD") return KvCacheLayout::kNhd;
  if (name == "HND") return KvCacheLayout::kHnd;
  core::fail(ErrorCode::kInvalidArgument, "Unknown cache layout format ", name, ".");
}

std::string_view to_string(KvCacheLayout layout) {
  return layout == KvCacheLayout::kHnd ? "HND" : "NHD";
}

DType kv_cache_dtype_from_name(std::string_view name, DType model_dtype) {
  if (name == "auto") return model_dtype;
  if (name == "float32") return DType::kFloat32;
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "fp8" || name == "fp8_e4m3") return DType::kFloat8E4M3;
  if (name == "fp8_e5m2") return DType::kFloat8E5M2;
  core::fail(ErrorCode::kInvalidArgument, "cache dtype is '", name,
             "'; offered are auto, float32, float16, bfloat16, fp8, fp8_e4m3 and fp8_e5m2");
}

int32_t ModelConfig::get_num_attention_heads(const ParallelConfig& parallel) const {
  require_tensor_parallel_size(parallel);
  core::require(num_attention_heads % parallel.tensor_parallel_size == 0, "num_attention_heads is ",
                num_attention_heads, ", which tensor_parallel_size ", parallel.tensor_parallel_size,
                " does not divide");
  return num_attention_heads / parallel.tensor_parallel_size;
}

int32_t ModelConfig::get_num_kv_heads(const ParallelConfig& parallel) const {
  require_tensor_parallel_size(parallel);
  const int32_t ranks = parallel.tensor_parallel_size;
  const bool replicated = num_kv_heads < ranks;
  const bool even = num_kv_heads > 0 && (replicated ? ranks % num_kv_heads : num_kv_heads % ranks) == 0;
  core::require(even, "num_kv_heads is ", num_kv_heads, ", tensor_parallel_size ", ranks,
                "; one must be a multiple of the other");
  return std::max(1, num_kv_heads / ranks);
}

int32_t reorder_batch_threshold(const EngineConfig& config, int32_t base, bool supports_spec_as_decode,
                                bool supports_dcp_with_varlen) {
  int32_t threshold = base;
  if (supports_spec_as_decode && config.speculative) {
    const int32_t drafts = config.speculative->num_speculative_tokens;
    threshold = std::max(threshold, 1 + (config.speculative->parallel_drafting ? 2 : 1) * drafts);
  }
  if (config.parallel.decode_context_parallel_size > 1 && !supports_dcp_with_varlen) threshold = 1;
  return threshold;
}

}  // namespace folio::inline v0::backends
