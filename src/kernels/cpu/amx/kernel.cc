#include "kernels/cpu/amx/kernel.hpp"

#include <string_view>

#include "core/error.hpp"
#include "kernels/cpu/amx/collective.hpp"
#include "kernels/cpu/amx/costs.hpp"
#include "kernels/cpu/avx512/collective.hpp"
#include "kernels/cpu/avx512/costs.hpp"
#include "kernels/cpu/common/kernel.hpp"

namespace folio::inline v0::kernels::amx {
namespace {

constexpr int32_t kTileRows = 256;  // K and V come from L2 once for so many rows

std::string unavailable(const platform::CpuFeatures& features) {
  if (!features.x86_64_v4() || !features.avx512vbmi) {
    return "the CPU or the OS lacks x86-64-v4 (AVX-512 F, BW, DQ, VL) or AVX512-VBMI";
  }
  if (!features.amx_tile || !features.amx_bf16) {
    return "the CPU lacks AMX (tile, bf16), or the OS has not granted this process its tile registers";
  }
  return {};
}

std::string refusal(const AttentionConfig& config) {
  if (config.q != DType::kBFloat16 && config.q != DType::kFloat16) {
    return core::message("q is ", config.q, "; the AMX kernel takes bfloat16 and float16");
  }
  for (const auto& [name, dtype] : {std::pair{"kv", config.kv}, {"ragged_kv", config.ragged_kv}}) {
    const bool cache = name == std::string_view("kv");
    const bool bytes = is_fp8(dtype) || (cache && dtype == DType::kInt8);
    if (dtype == config.q || (config.q == DType::kBFloat16 && bytes)) continue;
    return core::message(name, " is ", dtype, "; beside q of ", config.q, " the AMX kernel takes ",
                         config.q != DType::kBFloat16 ? "float16"
                         : cache                      ? "bfloat16, fp8_e4m3, fp8_e5m2 and int8"
                                                      : "bfloat16, fp8_e4m3 and fp8_e5m2");
  }
  return cpu::refusal(config, false);
}

/// Of a row's cost: work tiles of few rows are the AVX-512 kernel's.
double cost(const platform::CpuFeatures&, const AttentionConfig& config, double rows) {
  return rows < min_rows(config) ? cpu::cost(avx512::kCosts, config, rows) : cpu::cost(kCosts, config, rows);
}

scheduler::TileShape tile(const AttentionConfig&) {
  return {.rows = kTileRows,
          .kv_tokens = cpu::kTileTokens,
          .schedule = scheduler::Schedule::kDynamic,
          .order = scheduler::TileOrder::kLpt};
}

size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape) {
  return cpu::carve_scratch(config, shape, nullptr, cpu::collective_scratch_bytes(kCollective, config, shape)).bytes;
}

void run_worker(const AttentionParams& params, int32_t worker) noexcept {
  configure_tiles();
  run_worker_by_rows(kCollective, params, worker);
  release_tiles();
}

void run_combine(const AttentionParams& params, int32_t combine_tile) noexcept {
  cpu::run_combine(kCollective, params, combine_tile);
}

}  // namespace

// Where K or V has to be copied in every tile, few rows may not pay it back: costs say from how many on they do
// (decisions 0073, 0081, 0102). Rows of a work tile may be other requests', and a row's bits must not depend on them.
int32_t min_rows(const AttentionConfig& config) {
  return config.determinism >= Determinism::kBatchInvariant ? 0 : cpu::least_rows(avx512::kCosts, kCosts, config);
}

void run_worker_by_rows(const cpu::Collective& collective, const AttentionParams& params, int32_t worker) noexcept {
  cpu::run_worker(avx512::kCollective, min_rows(*params.config), collective, params, worker);
}

AttentionKernel describe(const char* name, std::string (*is_unavailable)(const platform::CpuFeatures&),
                         size_t (*scratch)(const AttentionConfig&, const scheduler::TileShape&),
                         void (*worker)(const AttentionParams&, int32_t) noexcept,
                         void (*combine)(const AttentionParams&, int32_t) noexcept) {
  return {.name = name,
          .unavailable = is_unavailable,
          .refusal = refusal,
          .tile = tile,
          .scratch_bytes = scratch,
          .run_worker = worker,
          .run_combine = combine,
          .tile_cost = 64,  // a KV tile of a few rows waits for memory as long as so many rows compute
          .row_cost = 1,
          .cost = cost,
          .heads_together =
              [](const AttentionConfig& config) {
                return config.kv_format == KvFormat::kStrided || min_rows(config) > 0 ? cpu::kMaxHeads : 1;
              },
          .p_dtype = [](const AttentionConfig& config) { return config.q; }};
}

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = describe("amx", unavailable, scratch_bytes, run_worker, run_combine);
  return kernel;
}

}  // namespace folio::inline v0::kernels::amx
