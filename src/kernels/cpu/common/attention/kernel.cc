#include "kernels/cpu/common/attention/kernel.hpp"

#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"
#include "kernels/cpu/common/attention/scratch.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

bool is_wide_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refuse_head_dim(const char* name, int32_t given, int32_t most) {
  if (given >= 8 && given <= most && given % 8 == 0) return {};
  return core::message(name, " is ", given, "; kernels here take multiples of 8 up to ", most);
}

}  // namespace

std::string refusal(const AttentionConfig& config, bool rotates) {
  std::string why = refuse_head_dim("head_dim_qk", config.head_dim_qk, kMaxHeadDimQk);
  if (why.empty()) why = refuse_head_dim("head_dim_v", config.head_dim_v, kMaxHeadDimV);
  if (!why.empty()) return why;
  if (!is_wide_float(config.q) && config.q != DType::kFloat8E4M3) {
    return core::message("q is ", config.q, "; kernels here take float32, float16, bfloat16 and fp8_e4m3");
  }
  for (const DType kv : {config.kv, config.ragged_kv}) {
    if (!is_wide_float(kv) && !is_fp8(kv)) {
      return core::message(kv == config.kv ? "kv" : "ragged_kv", " is ", kv,
                           "; kernels here take float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2");
    }
  }
  if (!is_wide_float(config.out) && !is_fp8(config.out) && config.out != DType::kFloat4E2M1x2) {
    return core::message("out is ", config.out,
                         "; kernels here write float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 and fp4_e2m1x2 (NVFP4)");
  }
  if (config.out == DType::kFloat4E2M1x2 && config.head_dim_v % kNvfp4BlockSize != 0) {
    return core::message("head_dim_v is ", config.head_dim_v, " with an NVFP4 output, which takes multiples of ",
                         kNvfp4BlockSize);
  }
  if (config.features.has(Feature::kRopeLlama) && !rotates) {
    return "Feature::kRopeLlama is asked for; this kernel applies no rotary embedding: rotate q and K before the call, "
           "or "
           "use the generic kernels";
  }
  if (config.kv_format == KvFormat::kCpuPacked && config.kv == DType::kFloat32) {
    return "kv_format is kCpuPacked with float32; packed caches are 16-bit or fp8";
  }
  if (config.kv_format == KvFormat::kCpuPacked && (config.page_size < 16 || config.page_size % 2 != 0)) {
    return core::message("kv_format is kCpuPacked with page_size ", config.page_size,
                         "; packed pages have an even number of tokens, 16 or more");
  }
  return {};
}

/// Rows such that queries, accumulators and a converted tile stay within a megabyte of cache.
scheduler::TileShape tile(const AttentionConfig& config) {
  return {.rows = config.head_dim_qk + config.head_dim_v <= 512 ? 64 : 32, .kv_tokens = kTileTokens};
}

size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape) {
  return carve_scratch(config, shape, nullptr).bytes;
}

}  // namespace folio::inline v0::kernels::cpu
