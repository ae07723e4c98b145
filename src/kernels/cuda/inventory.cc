#include <array>

#include "core/error.hpp"
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

constexpr const AttentionKernel* kDecode = &sm90::decode::kSm90DecodeKernel;

/// What may be the prefill pass, the preferred first; each with the passes of such an op.
constexpr std::array<std::array<const AttentionKernel*, 2>, 2> kPasses{
    {{&sm90::prefill::kSm90PrefillKernel, kDecode}, {&sm80::kSm80Kernel, kDecode}}};

/// Why a kernel cannot be the prefill pass beside the decode pass; empty if it can.
std::string prefill_refusal(const AttentionKernel& prefill, const AttentionConfig& config) {
  std::string reason = prefill.refusal(config);
  if (!reason.empty() || prefill.p_dtype(config) == kDecode->p_dtype(config)) return reason;
  return core::message(prefill.name, " would round p to ", prefill.p_dtype(config), ", ", kDecode->name, " to ",
                       kDecode->p_dtype(config), "; cuda-sm90 takes configurations where both are the same");
}

/// Empty where no kernel can be the prefill pass.
std::span<const AttentionKernel* const> passes(const AttentionConfig& config) {
  for (const auto& of_op : kPasses) {
    if (prefill_refusal(*of_op.front(), config).empty()) return of_op;
  }
  return {};
}

std::string refusal(const AttentionConfig& config) {
  std::string reason = kDecode->refusal(config);
  if (!reason.empty() || !passes(config).empty()) return reason;
  for (const auto& of_op : kPasses) reason += (reason.empty() ? "" : "; ") + prefill_refusal(*of_op.front(), config);
  return reason;
}

scheduler::TileShape tile(const AttentionConfig& config) {
  return passes(config).front()->tile(config);
}

DType p_dtype(const AttentionConfig& config) {
  return kDecode->p_dtype(config);
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
