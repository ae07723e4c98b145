#include <utility>

#include "core/error.hpp"
#include "folio/types/nvfp4.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/plain/plain_kernel.hpp"

namespace folio::inline v0::kernels::cuda::plain {
namespace {

constexpr int32_t kMaxHeadDimQk = 576;
constexpr int32_t kMaxHeadDimV = 512;

bool is_wide_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::string refuse_head_dim(const char* name, int32_t given, int32_t most) {
  if (given >= 8 && given <= most && given % 8 == 0) return {};
  return core::message(name, " is ", given, "; cuda-plain takes multiples of 8 up to ", most);
}

}  // namespace

std::string refusal(const AttentionConfig& config) {
  std::string why = refuse_head_dim("head_dim_qk", config.head_dim_qk, kMaxHeadDimQk);
  if (why.empty()) why = refuse_head_dim("head_dim_v", config.head_dim_v, kMaxHeadDimV);
  if (!why.empty()) return why;
  for (const auto& [name, input] : {std::pair{"q", config.q}, {"kv", config.kv}, {"ragged_kv", config.ragged_kv}}) {
    if (is_wide_float(input) || is_fp8(input)) continue;
    return core::message(name, " is ", input, "; cuda-plain takes float32, float16, bfloat16, fp8_e4m3 and fp8_e5m2");
  }
  const bool nvfp4 = config.out == DType::kFloat4E2M1x2;
  if (!is_wide_float(config.out) && !is_fp8(config.out) && !nvfp4) {
    return core::message("out is ", config.out,
                         "; cuda-plain writes float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 and fp4_e2m1x2 (NVFP4)");
  }
  if (nvfp4 && config.head_dim_v % kNvfp4BlockSize != 0) {
    return core::message("head_dim_v is ", config.head_dim_v, " with an NVFP4 output, which takes multiples of ",
                         kNvfp4BlockSize);
  }
  why = refuse_unless_strided_or_ds_mla(config.kv_format);
  if (!why.empty()) return why;
  return {};
}

scheduler::TileShape tile(const AttentionConfig&) {
  return {.rows = 16, .kv_tokens = 32};
}

DType p_dtype(const AttentionConfig&) {
  return DType::kFloat32;
}

}  // namespace folio::inline v0::kernels::cuda::plain
