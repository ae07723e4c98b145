#include "attention/config.hpp"

#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr int32_t kMaxHeads = 1 << 16;    // keeps packed row numbers (tokens x heads of a group) far from overflow
constexpr int32_t kMaxHeadDim = 1 << 16;  // likewise for offsets inside a head; kernels offer far less
constexpr int32_t kMaxPageSize = 1 << 24;

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    core::fail(ErrorCode::kInvalidArgument, name, " is ", value, "; it must be from ", low, " to ", high);
  }
}

void check_dtype(const char* name, DType dtype) {
  if (size_of(dtype) == 0)
    core::fail(ErrorCode::kInvalidArgument, name, " is no dtype (value ", static_cast<int32_t>(dtype), ")");
}

}  // namespace

AttentionConfig resolve(const AttentionConfig& config) {
  AttentionConfig out = config;
  check_range("num_kv_heads", config.num_kv_heads, 1, kMaxHeads);
  check_range("num_q_heads", config.num_q_heads, 1, kMaxHeads);
  if (config.num_q_heads % config.num_kv_heads != 0) {
    core::fail(ErrorCode::kInvalidArgument, "num_q_heads is ", config.num_q_heads,
               ", which is no multiple of num_kv_heads (", config.num_kv_heads, ")");
  }
  check_range("head_dim_qk", config.head_dim_qk, 1, kMaxHeadDim);
  check_range("head_dim_v", config.head_dim_v, 1, kMaxHeadDim);
  check_range("page_size", config.page_size, 1, kMaxPageSize);
  check_range("window_left", config.window_left, -1, INT32_MAX);
  check_range("window_right", config.window_right, -1, INT32_MAX);
  check_range("kv_format", static_cast<int64_t>(config.kv_format), 0, static_cast<int64_t>(KvFormat::kCpuPacked));
  check_range("mask", static_cast<int64_t>(config.mask), 0, static_cast<int64_t>(MaskKind::kCustom));
  check_range("determinism", static_cast<int64_t>(config.determinism), 0,
              static_cast<int64_t>(Determinism::kScheduleInvariant));
  const Features known = Feature::kSoftCap | Feature::kAlibi | Features(Feature::kSinks) | Feature::kRopeLlama;
  if ((config.features.bits & ~known.bits) != 0) {
    core::fail(ErrorCode::kInvalidArgument, "features has unknown bits: ", config.features.bits & ~known.bits);
  }
  if (out.ragged_kv == DType::kUnset) out.ragged_kv = is_fp8(config.kv) ? config.q : config.kv;
  if (out.out == DType::kUnset) out.out = is_fp8(config.q) ? DType::kBFloat16 : config.q;
  check_dtype("q", out.q);
  check_dtype("kv", out.kv);
  check_dtype("ragged_kv", out.ragged_kv);
  check_dtype("out", out.out);
  if (out.kv_format == KvFormat::kCpuPacked) {
    const bool packable = out.kv != DType::kFloat32 && out.page_size >= 16 && out.page_size % 2 == 0;
    if (!packable) {
      core::fail(ErrorCode::kUnsupported, "packed pages of ", out.page_size, " tokens in ", out.kv,
                 "; packed pages are even, 16 tokens or more, float16, bfloat16 or fp8. Strided pages take ",
                 "any size and dtype");
    }
  }
  return out;
}

}  // namespace folio::inline v0::attention
