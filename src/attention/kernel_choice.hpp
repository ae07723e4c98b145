#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "folio/attention.hpp"
#include "kernels/attention_kernel.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "platform/cpu_features.hpp"

/// The choice of a kernel, and on a CPU of the cache: a function of the machine, the configuration and the mix. Nothing
/// is timed.
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

/// What the choice of a kernel knows of a device. It need not be this machine's.
struct Machine {
  platform::CpuFeatures features{};                                      ///< of a CPU
  int32_t compute_capability = 0;                                        ///< of a GPU: 10 * major + minor; 0: a CPU
  std::span<const kernels::cuda::AttentionKernel* const> gpu_kernels{};  ///< of a GPU, the preferred first
};

/// A kernel of either kind of device, with its answer. One of the pointers is null.
struct Candidate {
  KernelAnswer answer;
  const kernels::AttentionKernel* cpu = nullptr;
  const kernels::cuda::AttentionKernel* gpu = nullptr;
};

/// Every kernel of the machine's device, in order of preference. `config` is resolved.
std::vector<Candidate> candidates(const Machine& machine, const AttentionConfig& config, const WorkloadMix& mix);

/// The one that runs: the first that takes `config` and is preferred there, else the first that takes it. Null: none.
const Candidate* first_choice(std::span<const Candidate> candidates, const AttentionConfig& config);

struct Explanation {
  std::vector<KernelAnswer> answers;  ///< folio::explain's
  std::string chosen;                 ///< the kernel that `prepare` chooses, if none is forced; empty: all refuse
};

/// folio::explain for any machine. `config` need not be resolved.
Explanation explain(const Machine& machine, const AttentionConfig& config, const WorkloadMix& mix);

/// recommended_kv_format on a CPU with these kernels and features.
KvFormatAdvice fastest_format(std::span<const kernels::AttentionKernel* const> kernels,
                              const platform::CpuFeatures& features, const AttentionConfig& config,
                              const WorkloadMix& mix);

}  // namespace folio::inline v0::attention
