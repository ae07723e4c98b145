#include "kernels/cuda/sm90/pair/pair_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

constexpr const AttentionKernel* kFew = &decode::kSm90DecodeKernel;
/// The preferred first.
constexpr const AttentionKernel* kMany[] = {&prefill::kSm90PrefillKernel, &sm80::kSm80Kernel};

/// Why a kernel for many rows cannot stand beside that for few; empty if it can.
std::string refusal_of(const AttentionKernel& many, const AttentionConfig& config) {
  std::string reason = many.refusal(config);
  if (!reason.empty() || many.p_dtype(config) == kFew->p_dtype(config)) return reason;
  return core::message(many.name, " would round weights to ", many.p_dtype(config), ", ", kFew->name, " to ",
                       kFew->p_dtype(config), "; cuda-sm90 takes configurations where both are the same");
}

/// Null where there is none.
const AttentionKernel* many_rows(const AttentionConfig& config) {
  for (const AttentionKernel* kernel : kMany) {
    if (refusal_of(*kernel, config).empty()) return kernel;
  }
  return nullptr;
}

std::string refusal(const AttentionConfig& config) {
  std::string reason = kFew->refusal(config);
  if (!reason.empty() || many_rows(config) != nullptr) return reason;
  for (const AttentionKernel* kernel : kMany) reason += (reason.empty() ? "" : "; ") + refusal_of(*kernel, config);
  return reason;
}

scheduler::TileShape tile(const AttentionConfig& config) {
  return many_rows(config)->tile(config);
}

DType p_dtype(const AttentionConfig& config) {
  return kFew->p_dtype(config);
}

/// Where both were measured to be faster than cuda-sm80: with fp8 caches, where both take codes as they are.
bool preferred(const AttentionConfig& config) {
  if (size_of(config.kv) == 2 && size_of(config.q) == 2) return true;
  return is_fp8(config.kv) && config.head_dim_qk == 128 && config.head_dim_v == 128 && config.page_size % 8 == 0 &&
         config.determinism <= Determinism::kRunToRun;
}

}  // namespace

const AttentionKernel kSm90Kernel{.name = "cuda-sm90",
                                  .min_compute_capability = 90,
                                  .max_compute_capability = 90,
                                  .refusal = refusal,
                                  .tile = tile,
                                  .p_dtype = p_dtype,
                                  .preferred = preferred,
                                  .few_rows = kFew,
                                  .many_rows = many_rows};

}  // namespace folio::inline v0::kernels::cuda::sm90
