#include "kernels/cpu/amx/kernel.hpp"

#include <string_view>

#include "core/error.hpp"
#include "kernels/cpu/amx/collective.hpp"
#include "kernels/cpu/avx512/collective.hpp"
#include "kernels/cpu/common/kernel.hpp"

namespace folio::inline v0::kernels::amx {
namespace {

constexpr int32_t kTokensOfVTile = 32;  // in one page, V's tile registers are loaded in place
constexpr int32_t kTileRows = 256;      // K and V come from L2 once for so many rows

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

/// Packed pages are converted too.
bool needs_many_rows(const AttentionConfig& config) {
  return config.kv == DType::kFloat16 || config.kv == DType::kInt8;
}

/// Work tiles of fewer rows are faster in the AVX-512 kernel: where V has to be interleaved in every tile, decode does
/// not pay it back. One thread of a Xeon with AMX, 8 x 4,096 keys, 8 KV heads of 128 (decision 0073): the AVX-512
/// kernel, which walks KV heads together, takes 0.35 of AMX's time for 4 rows over strided pages, 0.44 for 8 and 1.4
/// for 16; over packed pages of 16, 0.6 for 4 and 1.5 for 8. MLA: 1.5 for 8. Float16: 0.8 for 16, 1.1 to 1.4 for 32
/// (decision 0081). int8 is not measured: it takes float16's number, whose tiles cost more of both copies and MMAs
/// while the AVX-512 kernel's multiply-adds are as many (decision 0084).
int32_t least_rows(const AttentionConfig& config) {
  if (is_fp8(config.kv)) return 0;  // not measured
  if (needs_many_rows(config)) return 32;
  if (config.kv_format == KvFormat::kStrided) return config.head_dim_qk + config.head_dim_v > 512 ? 8 : 16;
  return config.page_size % kTokensOfVTile == 0 ? 0 : 8;
}

/// Strided, float16 and int8 caches are converted on the way in, which decode does not pay back: they are for AMX where
/// the AVX-512 kernel takes work tiles of few rows, and where there are none because a token has as many rows.
bool is_faster(const platform::CpuFeatures&, const AttentionConfig& config) {
  if (config.kv_format == KvFormat::kCpuPacked && !needs_many_rows(config)) return true;
  if (is_fp8(config.kv)) return false;
  return min_rows(config) > 0 || config.num_q_heads / config.num_kv_heads >= least_rows(config);
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

// Rows of a work tile may be other requests', and a row's bits must not depend on them.
int32_t min_rows(const AttentionConfig& config) {
  return config.determinism >= Determinism::kBatchInvariant ? 0 : least_rows(config);
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
          .heads_together = [](const AttentionConfig& config) { return min_rows(config) > 0 ? cpu::kMaxHeads : 1; },
          .best_format = KvFormat::kCpuPacked,
          .best_page_size = kTokensOfVTile,
          .p_dtype = [](const AttentionConfig& config) { return config.q; },
          .preferred = is_faster};
}

const AttentionKernel& attention_kernel() {
  static const AttentionKernel kernel = describe("amx", unavailable, scratch_bytes, run_worker, run_combine);
  return kernel;
}

}  // namespace folio::inline v0::kernels::amx
