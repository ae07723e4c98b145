#include "attention/kernel_choice.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr double kPrefillRows = 256;
/// Pages of a CPU's caches: the AMX kernel loads pairs of 32 tokens in place, and none loses by them.
constexpr int32_t kPageSize = 32;
/// Packed pages must gain so much: strided ones can be shared with other programs.
constexpr double kMostOfStrided = 0.95;

struct Shares {
  double decode;
  double prefill;
};

Shares shares_of(const WorkloadMix& mix) {
  const double larger = std::max(mix.decode_tokens, mix.prefill_tokens);
  if (larger == 0.0) return {.decode = 0.2, .prefill = 0.8};
  const double decode = mix.decode_tokens / larger;
  const double prefill = mix.prefill_tokens / larger;
  return {.decode = decode / (decode + prefill), .prefill = prefill / (decode + prefill)};
}

int32_t group_size(const AttentionConfig& config) {
  return config.num_q_heads / config.num_kv_heads;
}

/// Of a token, which shares its keys with others.
double prefill_cost(const kernels::AttentionKernel& kernel, const platform::CpuFeatures& features,
                    const AttentionConfig& config) {
  const double rows = std::max<double>(kPrefillRows, group_size(config));
  return kernel.cost(features, config, rows) * group_size(config) / rows;
}

double ragged_cost(const kernels::AttentionKernel& kernel, const platform::CpuFeatures& features,
                   AttentionConfig config) {
  config.kv = config.ragged_kv;
  config.kv_format = KvFormat::kStrided;
  return prefill_cost(kernel, features, config);
}

template <typename Kernel>
KernelAnswer ask(const Kernel& kernel, const std::string& missing, const AttentionConfig& config) {
  KernelAnswer answer;
  answer.name = kernel.name;
  answer.available = missing.empty();
  answer.refusal = answer.available ? kernel.refusal(config) : missing;
  return answer;
}

std::string missing_on(int32_t compute_capability, const kernels::cuda::AttentionKernel& kernel) {
  const bool newer = compute_capability > kernel.max_compute_capability;
  if (compute_capability >= kernel.min_compute_capability && !newer) return {};
  return core::message("the GPU's compute capability (times 10) is ", compute_capability, "; the kernel needs ",
                       newer ? kernel.max_compute_capability : kernel.min_compute_capability,
                       newer ? " or older" : " or newer");
}

/// Whether a candidate that takes the configuration comes before those behind it.
bool is_preferred(const Candidate& candidate, const AttentionConfig& config) {
  return candidate.gpu == nullptr || candidate.gpu->preferred == nullptr || candidate.gpu->preferred(config);
}

}  // namespace

void check_mix(const WorkloadMix& mix) {
  for (const auto& [name, tokens] :
       {std::pair{"mix.decode_tokens", mix.decode_tokens}, {"mix.prefill_tokens", mix.prefill_tokens}}) {
    core::require(std::isfinite(tokens) && tokens >= 0.0, name, " is ", tokens, "; it is 0 or a positive number");
  }
}

WorkloadMix mix_of(const PrepareOptions& options, Determinism determinism) {
  const bool decodes_alone = options.bounds && options.bounds->max_q_len == 1 && determinism <= Determinism::kRunToRun;
  if (options.mix == WorkloadMix{} && decodes_alone) return {.decode_tokens = 1.0, .prefill_tokens = 0.0};
  return options.mix;
}

double cost_of_mix(const kernels::AttentionKernel& kernel, const platform::CpuFeatures& features,
                   const AttentionConfig& config, const WorkloadMix& mix) {
  const Shares shares = shares_of(mix);
  double cost = 0.0;  // what has no share may be infinite
  if (shares.decode > 0.0) cost += shares.decode * kernel.cost(features, config, group_size(config));
  if (shares.prefill > 0.0) cost += shares.prefill * prefill_cost(kernel, features, config);
  return cost;
}

std::vector<const kernels::AttentionKernel*> ranked(std::span<const kernels::AttentionKernel* const> kernels,
                                                    const platform::CpuFeatures& features,
                                                    const AttentionConfig& config, const WorkloadMix& mix) {
  using Ranked = std::tuple<double, double, const kernels::AttentionKernel*>;
  std::vector<Ranked> all;
  all.reserve(kernels.size());
  for (const kernels::AttentionKernel* kernel : kernels) {
    all.emplace_back(cost_of_mix(*kernel, features, config, mix), ragged_cost(*kernel, features, config), kernel);
  }
  std::stable_sort(all.begin(), all.end(), [](const Ranked& a, const Ranked& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  std::vector<const kernels::AttentionKernel*> order;
  order.reserve(all.size());
  for (const Ranked& one : all) order.push_back(std::get<2>(one));
  return order;
}

std::vector<Candidate> candidates(const Machine& machine, const AttentionConfig& config, const WorkloadMix& mix) {
  std::vector<Candidate> all;
  if (machine.compute_capability != 0) {
    for (const kernels::cuda::AttentionKernel* kernel : machine.gpu_kernels) {
      const std::string missing = missing_on(machine.compute_capability, *kernel);
      all.push_back({.answer = ask(*kernel, missing, config), .cpu = nullptr, .gpu = kernel});
    }
    return all;
  }
  for (const kernels::AttentionKernel* kernel :
       ranked(kernels::cpu_attention_kernels(), machine.features, config, mix)) {
    const std::string missing = kernel->unavailable(machine.features);
    all.push_back({.answer = ask(*kernel, missing, config), .cpu = kernel, .gpu = nullptr});
  }
  return all;
}

const Candidate* first_choice(std::span<const Candidate> candidates, const AttentionConfig& config) {
  const Candidate* second_choice = nullptr;
  for (const Candidate& candidate : candidates) {
    if (!candidate.answer.refusal.empty()) continue;
    if (is_preferred(candidate, config)) return &candidate;
    if (second_choice == nullptr) second_choice = &candidate;
  }
  return second_choice;
}

KvFormatAdvice fastest_format(std::span<const kernels::AttentionKernel* const> kernels,
                              const platform::CpuFeatures& features, const AttentionConfig& config,
                              const WorkloadMix& mix) {
  const auto least_cost = [&](KvFormat format) {
    AttentionConfig asked = config;
    asked.kv_format = format;
    asked.page_size = kPageSize;
    double least = std::numeric_limits<double>::infinity();
    for (const kernels::AttentionKernel* kernel : kernels) {
      if (!kernel->unavailable(features).empty() || !kernel->refusal(asked).empty()) continue;
      least = std::min(least, cost_of_mix(*kernel, features, asked, mix));
    }
    return least;
  };
  const bool packed = least_cost(KvFormat::kCpuPacked) < kMostOfStrided * least_cost(KvFormat::kStrided);
  return {packed ? KvFormat::kCpuPacked : KvFormat::kStrided, kPageSize};
}

}  // namespace folio::inline v0::attention
