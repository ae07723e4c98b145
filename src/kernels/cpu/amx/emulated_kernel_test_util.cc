#include "kernels/cpu/amx/emulated_kernel_test_util.hpp"

#include "kernels/cpu/amx/collective.hpp"
#include "kernels/cpu/amx/kernel.hpp"
#include "kernels/cpu/common/kernel.hpp"

namespace folio::inline v0::kernels::amx {
namespace {

std::string unavailable(const platform::CpuFeatures& features) {
  return features.x86_64_v4() && features.avx512vbmi ? "" : "the CPU or the OS lacks x86-64-v4 or AVX512-VBMI";
}

bool has_amx() {
  static const bool has = attention_kernel().unavailable(platform::cpu_features()).empty();
  return has;
}

std::string unavailable_or_amx(const platform::CpuFeatures& features) {
  return has_amx() ? "amx itself runs here, the same in hardware" : unavailable(features);
}

size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape) {
  return cpu::carve_scratch(config, shape, nullptr, cpu::collective_scratch_bytes(kEmulatedCollective, config, shape))
      .bytes;
}

void run_worker_in_tiles(const AttentionParams& params, int32_t worker) noexcept {
  if (!has_amx()) return cpu::run_worker(kEmulatedCollective, params, worker);
  configure_tiles();
  cpu::run_worker(kCollective, params, worker);
  release_tiles();
}

void run_worker_of_both(const AttentionParams& params, int32_t worker) noexcept {
  run_worker_by_rows(kEmulatedCollective, params, worker);
}

void run_combine(const AttentionParams& params, int32_t combine_tile) noexcept {
  cpu::run_combine(kEmulatedCollective, params, combine_tile);
}

}  // namespace

const AttentionKernel& emulated_kernel() {
  static const AttentionKernel kernel =
      describe("amx-all-rows", unavailable, scratch_bytes, run_worker_in_tiles, run_combine);
  return kernel;
}

const AttentionKernel& emulated_kernel_with_few_rows() {
  static const AttentionKernel kernel =
      describe("amx-emulated-and-avx512", unavailable_or_amx, scratch_bytes, run_worker_of_both, run_combine);
  return kernel;
}

}  // namespace folio::inline v0::kernels::amx
