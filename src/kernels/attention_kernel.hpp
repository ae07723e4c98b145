#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "folio/types/attention.hpp"
#include "platform/cpu_features.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::kernels {

/// What a CPU attention kernel is given. Pointers are valid for the call; `args` has its defaults resolved (sm_scale).
struct AttentionParams {
  const AttentionConfig* config = nullptr;  ///< dtypes resolved
  const AttentionArgs* args = nullptr;
  scheduler::PlanView plan;
  scheduler::TileShape tile;
  int32_t group_size = 1;            ///< num_q_heads / num_kv_heads
  float* partial_acc = nullptr;      ///< [partial rows, head_dim_v]: unnormalized accumulators
  float* partial_row_max = nullptr;  ///< [partial rows]: in the kernel's own logarithmic unit
  float* partial_row_sum = nullptr;  ///< [partial rows]: sum of exponentials relative to row_max
  std::byte* scratch = nullptr;      ///< [num_workers, scratch_stride], 64-byte aligned
  size_t scratch_stride = 0;
  /// The first work tile that no worker has claimed; 0 when a run begins.
  std::atomic<int32_t>* next_work_tile = nullptr;
};

/// What a CPU attention kernel offers. One per (algorithm, instruction set); listed in inventory.cc.
struct AttentionKernel {
  const char* name;
  /// Empty if this machine can run it, else what is missing.
  std::string (*unavailable)(const platform::CpuFeatures& features);
  /// Empty if it takes the configuration (dtypes resolved), else why not: what was given and what it takes.
  std::string (*refusal)(const AttentionConfig& config);
  /// With Schedule::kDynamic.
  scheduler::TileShape (*tile)(const AttentionConfig& config);
  /// Scratch bytes of one worker.
  size_t (*scratch_bytes)(const AttentionConfig& config, const scheduler::TileShape& tile);
  /// Runs the work tiles that a worker claims, until none is left. Different workers may run at once.
  void (*run_worker)(const AttentionParams& params, int32_t worker) noexcept;
  /// Combines the partials of one combine tile (split-KV); after all workers are done.
  void (*run_combine)(const AttentionParams& params, int32_t combine_tile) noexcept;
  /// The scheduler's cost of visiting one KV tile with n rows: tile_cost + n * row_cost.
  int32_t tile_cost;
  int32_t row_cost;
  /// Nanoseconds of the reference core for a key of a KV head and `rows` query rows on a CPU with these features: see
  /// cpu::CostLine. Infinite where it was never measured; such a kernel comes behind those that were.
  double (*cost)(const platform::CpuFeatures& features, const AttentionConfig& config, double rows);
  /// KV heads that a worker computes together, if their rows fit a work tile. Null = one.
  int32_t (*heads_together)(const AttentionConfig& config) = nullptr;
  /// What P is rounded to before GEMM1 (kFloat32: not at all); row_sum stays the float32 sum of the unrounded
  /// exponentials.
  DType (*p_dtype)(const AttentionConfig& config) = [](const AttentionConfig&) { return DType::kFloat32; };
};

/// Every CPU attention kernel of this build. `prepare` takes the one of the least cost that is available and does not
/// refuse (attention/kernel_choice.hpp); where costs are equal, the first.
std::span<const AttentionKernel* const> cpu_attention_kernels();

namespace amx {
/// "amx" (x86 only): bfloat16 MMAs in AMX's tile registers; the AVX-512 kernel for work tiles of few rows, where that
/// is faster. Linked on any machine; `unavailable` says what this one lacks.
const AttentionKernel& attention_kernel();
}  // namespace amx

namespace avx512 {
/// x86 only: "avx512", for every CPU that has AVX-512 with VBMI (servers from Ice Lake and Zen 4 on); "avx512-bf16",
/// whose GEMMs take bfloat16 pairs.
std::span<const AttentionKernel* const> attention_kernels();
}  // namespace avx512

namespace avx2 {
/// "avx2" (x86 only): for every CPU with AVX2, FMA and F16C.
const AttentionKernel& attention_kernel();
}  // namespace avx2

namespace generic {
/// The portable kernel, once per instruction set: "generic-v4", "generic-v3" (x86 only),
/// "generic-bf16" (AArch64 only: GEMM0 of bfloat16 caches by BFMMLA), "generic".
std::span<const AttentionKernel* const> attention_kernels();
}  // namespace generic

}  // namespace folio::inline v0::kernels
