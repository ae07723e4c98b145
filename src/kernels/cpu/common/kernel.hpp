#pragma once

#include <cstddef>
#include <string>

#include "kernels/attention_kernel.hpp"
#include "kernels/cpu/common/config.hpp"
#include "kernels/cpu/common/costs.hpp"
#include "scheduler/plan_view.hpp"

/// The host side that all CPU kernels share. A kernel is a Collective (config.hpp), compiled for one instruction set,
/// under the tile scheduler's loop:
///
///   kernel.cc     what the kernel takes, its tile shape, its scratch memory
///   scheduler.cc  run_worker: a worker's loop over its work tiles
///   epilogue.cc   normalizes and stores finished rows; stores and combines partials
namespace folio::inline v0::kernels::cpu {

/// Empty if the common loop takes the configuration with a collective of these properties.
std::string refusal(const AttentionConfig& config, bool applies_rope, bool decodes_ds_mla = false);
/// AttentionKernel::unavailable of kernels for x86-64-v3.
std::string needs_v3(const platform::CpuFeatures& features);
scheduler::TileShape tile(const AttentionConfig& config);
size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape);

/// Scratch bytes of a collective beyond the common ones.
size_t collective_scratch_bytes(const Collective& collective, const AttentionConfig& config,
                                const scheduler::TileShape& tile);

/// A worker's scratch memory, carved.
struct WorkerScratch {
  TileScratch tile;
  QueryRow* rows = nullptr;  ///< [tile rows]
  SoftmaxState running;      ///< of the output tile
  SoftmaxState split;        ///< of a fixed split, or of kMaxStateTokens, until combined into the running state
  size_t bytes = 0;          ///< of all parts
};

int32_t padded(int32_t value, int32_t to);

/// Carves `memory`; with null, only counts. One function for both, so that they agree.
WorkerScratch carve_scratch(const AttentionConfig& config, const scheduler::TileShape& tile, std::byte* memory,
                            size_t collective_scratch_bytes = 0);

/// Fills WorkTileParams::rope.
void set_rope_frequencies(const RopeArgs& rope, int32_t head_dim, double* frequencies);

/// AttentionKernel::run_worker and run_combine with the given collective.
void run_worker(const Collective& collective, const AttentionParams& params, int32_t worker) noexcept;
/// The same, but work tiles of fewer than `min_rows` rows are computed by `few`. Its row_max has the same unit, and it
/// needs no more scratch memory.
void run_worker(const Collective& few, int32_t min_rows, const Collective& collective, const AttentionParams& params,
                int32_t worker) noexcept;
void run_combine(const Collective& collective, const AttentionParams& params, int32_t combine_tile) noexcept;

/// Makes states empty. row_max and row_sum up to a multiple of `padding` rows: kernels compute with those too, and a
/// denormal number that is left there costs a hundred cycles at every use.
void clear(const SoftmaxState& state, int32_t rows, int32_t padding, int32_t v_stride);

/// The epilogue of a finished work tile: output rows, or partials where other work tiles share the rows.
void run_epilogue(const Collective& collective, const AttentionParams& params, const scheduler::WorkTile& tile,
                  const SoftmaxState& state, int32_t v_stride);

/// `kCosts`: an array of CostLine.
template <const Collective& kCollective, const auto& kCosts>
AttentionKernel attention_kernel(const char* name, std::string (*unavailable)(const platform::CpuFeatures&)) {
  return {.name = name,
          .unavailable = unavailable,
          .refusal =
              [](const AttentionConfig& config) {
                return refusal(config, kCollective.applies_rope, kCollective.decodes_ds_mla);
              },
          .tile = tile,
          .scratch_bytes = scratch_bytes,
          .run_worker = [](const AttentionParams& params,
                           int32_t worker) noexcept { cpu::run_worker(kCollective, params, worker); },
          .run_combine = [](const AttentionParams& params,
                            int32_t combine_tile) noexcept { cpu::run_combine(kCollective, params, combine_tile); },
          .tile_cost = 4,  // a KV tile of a few rows waits for memory as long as four rows compute
          .row_cost = 1,
          .cost = [](const platform::CpuFeatures&, const AttentionConfig& config,
                     double rows) { return cpu::cost(kCosts, config, rows); },
          .heads_together = [](const AttentionConfig&) { return kCollective.min_rows_of_heads > 0 ? kMaxHeads : 1; }};
}

}  // namespace folio::inline v0::kernels::cpu
