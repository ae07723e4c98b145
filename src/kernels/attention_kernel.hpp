#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "folio/types/attention.hpp"
#include "platform/cpu_features.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::kernels {

/// All that a CPU attention kernel is given. Pointers are valid for the call; `args` has its defaults resolved
/// (sm_scale).
struct AttentionParams {
  const AttentionConfig* config = nullptr;  ///< dtypes resolved
  const AttentionArgs* args = nullptr;
  scheduler::PlanView plan;
  scheduler::TileShape tile;
  int32_t group_size = 1;            ///< num_q_heads / num_kv_heads
  float* partial_acc = nullptr;      ///< [partial rows, head_dim_v]: unnormalised accumulators
  float* partial_row_max = nullptr;  ///< [partial rows]: running maximum, in the kernel's own logarithmic unit
  float* partial_row_sum = nullptr;  ///< [partial rows]: running sum of exponentials
  std::byte* scratch = nullptr;      ///< [num_workers, scratch_stride], 64-byte aligned
  size_t scratch_stride = 0;
};

/// What a CPU attention kernel offers. One per (algorithm, instruction set); listed in inventory.cc.
struct AttentionKernel {
  const char* name;
  /// Empty if this machine can run it, else what is missing.
  std::string (*unavailable)(const platform::CpuFeatures& features);
  /// Empty if it takes the configuration (dtypes resolved), else why not: what was given and what it takes.
  std::string (*refusal)(const AttentionConfig& config);
  scheduler::TileShape (*tile)(const AttentionConfig& config);
  /// Scratch bytes of one worker.
  size_t (*scratch_bytes)(const AttentionConfig& config, const scheduler::TileShape& tile);
  /// Runs one worker's items in order. Different workers may run at once.
  void (*run_worker)(const AttentionParams& params, int32_t worker) noexcept;
  /// Folds one merge item; after all workers are done.
  void (*run_merge)(const AttentionParams& params, int32_t merge) noexcept;
  /// The scheduler's cost of visiting one KV tile with n rows: tile_cost + n * row_cost.
  int32_t tile_cost;
  int32_t row_cost;
  /// The cache that it reads fastest (KvFormatAdvice).
  KvFormat best_format = KvFormat::kStrided;
  int32_t best_page_size = 32;
  /// What softmax weights are rounded to before they multiply values; sums of weights stay float32.
  DType weights = DType::kFloat32;
};

/// Every CPU attention kernel of this build, the preferred first. `prepare` takes the first that is available and does
/// not refuse.
std::span<const AttentionKernel* const> cpu_attention_kernels();

}  // namespace folio::inline v0::kernels
