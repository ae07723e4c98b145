#pragma once

#include <string>

#include "core/error.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/kv_cache.hpp"
#include "kernels/cuda/attention_kernel.hpp"

/// The element types of MMAs, of keys and values in shared memory, and refusals of types and formats.
namespace folio::inline v0::kernels::cuda {

/// Empty, or why a kernel that takes strided caches alone does not take this format.
inline std::string refuse_unless_strided(KvFormat format) {
  if (format == KvFormat::kStrided) return {};
  return core::message("kv_format is ", to_string(format), "; this kernel takes strided caches");
}
/// The same for one that takes rows of fp8_ds_mla besides.
inline std::string refuse_unless_strided_or_ds_mla(KvFormat format) {
  if (format != KvFormat::kCpuPacked) return {};
  return core::message("kv_format is ", to_string(format), "; this kernel takes strided and fp8_ds_mla caches");
}

constexpr bool is_16_bit(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

/// The 16-bit type of the MMA: that of the inputs, or bfloat16 where all are fp8, which is dequantized. kUnset where
/// the inputs have two 16-bit types, or another type.
constexpr DType compute_type(DType q, DType kv, DType ragged_kv) {
  DType type = DType::kUnset;
  for (const DType input : {q, kv, ragged_kv}) {
    if (is_fp8(input)) continue;
    if (!is_16_bit(input) || (type != DType::kUnset && type != input)) return DType::kUnset;
    type = input;
  }
  return type == DType::kUnset ? DType::kBFloat16 : type;
}

/// Empty, or why `kernel`, whose MMAs are of 16-bit types, does not take the inputs; the output; rotary embeddings.
inline std::string refuse_inputs(const AttentionConfig& config, const char* kernel) {
  if (compute_type(config.q, config.kv, config.ragged_kv) != DType::kUnset) return {};
  return core::message("q is ", config.q, ", kv ", config.kv, ", ragged_kv ", config.ragged_kv, "; ", kernel,
                       " takes fp8 and one of float16 and bfloat16");
}
inline std::string refuse_output(const AttentionConfig& config, const char* kernel) {
  if (is_16_bit(config.out) || is_fp8(config.out) || config.out == DType::kFloat32) return {};
  return core::message("out is ", config.out, "; ", kernel, " writes float16, bfloat16, float32 and fp8");
}
inline std::string refuse_rotary_embedding(const AttentionConfig& config, const char* kernel) {
  if (!config.features.has(Feature::kRopeLlama)) return {};
  return core::message("Feature::kRopeLlama is asked for; ", kernel,
                       " applies no rotary embedding: rotate q and K before the call");
}

/// The fp8 type of all keys and values; kUnset where segments differ. Above kRunToRun it is kUnset, too: a request's
/// bits must not depend on the segments of other requests, so that the configuration alone picks the instantiation.
inline DType common_fp8_type(const AttentionParams& params) {
  if (params.determinism > Determinism::kRunToRun) return DType::kUnset;
  DType common = DType::kUnset;
  for (const SegmentParams& segment : params.segments) {
    if (segment.dtype == DType::kUnset) continue;
    if (!is_fp8(segment.dtype) || (common != DType::kUnset && common != segment.dtype)) return DType::kUnset;
    common = segment.dtype;
  }
  return common;
}

}  // namespace folio::inline v0::kernels::cuda
