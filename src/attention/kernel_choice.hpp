#pragma once

#include <span>
#include <vector>

#include "folio/attention.hpp"
#include "kernels/attention_kernel.hpp"
#include "platform/cpu_features.hpp"

/// The choice of a CPU's kernel and of its cache: a function of features, configuration and mix. Nothing is timed.
namespace folio::inline v0::attention {

/// Throws kInvalidArgument for tokens that are negative, infinite or NaN.
void check_mix(const WorkloadMix& mix);

/// The mix that an op's kernels are ranked by: the one given, decode alone where bounds leave nothing else, or zeros.
/// Above kRunToRun a request's kernel, hence its bits, must not depend on whether the op is a graph's.
WorkloadMix mix_of(const PrepareOptions& options, Determinism determinism);

/// What a token of `mix` costs a kernel: see kernels::cpu::CostLine. Infinite where it was never measured.
double cost_of_mix(const kernels::AttentionKernel& kernel, const platform::CpuFeatures& features,
                   const AttentionConfig& config, const WorkloadMix& mix);

/// The kernels, those of the least cost for `mix` first, whether they take `config` (resolved) or not. Where caches
/// cost the same, prefill over ragged segments decides, then the order given.
std::vector<const kernels::AttentionKernel*> ranked(std::span<const kernels::AttentionKernel* const> kernels,
                                                    const platform::CpuFeatures& features,
                                                    const AttentionConfig& config, const WorkloadMix& mix);

/// recommended_kv_format on a CPU with these kernels and features.
KvFormatAdvice fastest_format(std::span<const kernels::AttentionKernel* const> kernels,
                              const platform::CpuFeatures& features, const AttentionConfig& config,
                              const WorkloadMix& mix);

}  // namespace folio::inline v0::attention
