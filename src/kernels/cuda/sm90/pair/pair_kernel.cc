#include "kernels/cuda/sm90/pair/pair_kernel.hpp"

#include "core/error.hpp"
#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {
namespace {

constexpr const AttentionKernel* kMany = &sm80::kSm80Kernel;
constexpr const AttentionKernel* kFew = &kSm90DecodeKernel;

std::string refusal(const AttentionConfig& config) {
  for (const AttentionKernel* kernel : {kMany, kFew}) {
    std::string reason = kernel->refusal(config);
    if (!reason.empty()) return reason;
  }
  const DType many = kMany->weights(config);
  const DType few = kFew->weights(config);
  if (many == few) return {};
  return core::message("weights would be rounded to ", many, " in prefill and to ", few,
                       " in decode; cuda-sm90 takes configurations where both are the same");
}

planner::TileShape tile(const AttentionConfig& config) {
  return kMany->tile(config);
}

DType weights(const AttentionConfig& config) {
  return kMany->weights(config);
}

}  // namespace

const AttentionKernel kSm90Kernel{.name = "cuda-sm90",
                                  .min_compute_capability = 90,
                                  .max_compute_capability = 90,
                                  .refusal = refusal,
                                  .tile = tile,
                                  .weights = weights,
                                  .few_rows = kFew,
                                  .many_rows = kMany};

}  // namespace folio::inline v0::kernels::cuda::sm90
