#include <array>

#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/plain/plain_kernel.hpp"
#include "kernels/cuda/sm80/sm80_kernel.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/mla/launch.hpp"
#include "kernels/cuda/sm90/prefill/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

/// "cuda-sm90": a prefill pass and a decode pass, of one op; docs/decisions/0032-an-op-is-a-list-of-passes.md.
namespace two_passes {

constexpr std::array<const AttentionKernel*, 2> kPasses{&sm90::prefill::kSm90PrefillKernel,
                                                        &sm90::decode::kSm90DecodeKernel};

std::span<const AttentionKernel* const> passes(const AttentionConfig&) {
  return kPasses;
}

std::string refusal(const AttentionConfig& config) {
  std::string reason = kPasses.back()->refusal(config);
  return reason.empty() ? kPasses.front()->refusal(config) : reason;
}

scheduler::TileShape tile(const AttentionConfig& config) {
  return kPasses.front()->tile(config);
}

DType p_dtype(const AttentionConfig& config) {
  return kPasses.back()->p_dtype(config);
}

/// Where both passes were measured to be faster than cuda-sm80: with fp8 caches, where both read fp8 data as they are.
bool preferred(const AttentionConfig& config) {
  if (size_of(config.kv) == 2 && size_of(config.q) == 2) return true;
  return is_fp8(config.kv) && config.head_dim_qk == 128 && config.head_dim_v == 128 && config.page_size % 8 == 0 &&
         config.determinism <= Determinism::kRunToRun;
}

constexpr AttentionKernel kSm90Kernel{.name = "cuda-sm90",
                                      .min_compute_capability = 90,
                                      .max_compute_capability = 90,
                                      .refusal = refusal,
                                      .tile = tile,
                                      .p_dtype = p_dtype,
                                      .preferred = preferred,
                                      .passes = passes};

}  // namespace two_passes
}  // namespace

std::span<const AttentionKernel* const> attention_kernels() {
  // The kernels of cuda-sm90's passes come last, to be asked for by name.
  static constexpr std::array<const AttentionKernel*, 6> kAll{
      &two_passes::kSm90Kernel, &sm90::mla::kSm90MlaKernel,       &sm80::kSm80Kernel,
      &plain::kPlainKernel,     &sm90::decode::kSm90DecodeKernel, &sm90::prefill::kSm90PrefillKernel};
  return kAll;
}

}  // namespace folio::inline v0::kernels::cuda
