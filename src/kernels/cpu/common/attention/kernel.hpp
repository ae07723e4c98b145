#pragma once

#include <string>

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/attention/worker.hpp"

/// A kernel from an Arithmetic: what is the same for all that run under the shared worker loop.
namespace folio::inline v0::kernels::cpu {

/// What the worker loop and the formats that it binds take. `rotates`: Arithmetic::rotates.
std::string refusal(const AttentionConfig& config, bool rotates);
scheduler::TileShape tile(const AttentionConfig& config);
size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape);

template <const Arithmetic& kArithmetic>
AttentionKernel attention_kernel(const char* name, std::string (*unavailable)(const platform::CpuFeatures&),
                                 KvFormat best_format) {
  return {.name = name,
          .unavailable = unavailable,
          .refusal = [](const AttentionConfig& config) { return refusal(config, kArithmetic.rotates); },
          .tile = tile,
          .scratch_bytes = scratch_bytes,
          .run_worker = [](const AttentionParams& params,
                           int32_t worker) noexcept { cpu::run_worker(kArithmetic, params, worker); },
          .run_merge = [](const AttentionParams& params,
                          int32_t merge) noexcept { cpu::run_merge(kArithmetic, params, merge); },
          .tile_cost = 4,  // a tile of a few rows waits for memory as long as four rows compute
          .row_cost = 1,
          .best_format = best_format};
}

}  // namespace folio::inline v0::kernels::cpu
