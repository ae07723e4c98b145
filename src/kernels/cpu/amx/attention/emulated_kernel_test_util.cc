#include "kernels/cpu/amx/attention/emulated_kernel_test_util.hpp"

#include "kernels/cpu/amx/attention/amx_kernel.hpp"
#include "kernels/cpu/common/attention/scratch.hpp"
#include "kernels/cpu/common/attention/worker.hpp"

namespace folio::inline v0::kernels::amx {
namespace {

std::string unavailable(const platform::CpuFeatures& features) {
  return features.x86_64_v4() && features.avx512vbmi ? "" : "the CPU or the OS lacks x86-64-v4 or AVX512-VBMI";
}

size_t scratch_bytes(const AttentionConfig& config, const scheduler::TileShape& shape) {
  return cpu::carve_scratch(config, shape, nullptr, cpu::own_bytes(kEmulatedArithmetic, config, shape)).bytes;
}

void run_worker(const AttentionParams& params, int32_t worker) noexcept {
  cpu::run_worker(kEmulatedArithmetic, params, worker);
}

void run_merge(const AttentionParams& params, int32_t merge) noexcept {
  cpu::run_merge(kEmulatedArithmetic, params, merge);
}

}  // namespace

const AttentionKernel& emulated_kernel() {
  static const AttentionKernel kernel = describe("amx-emulated", unavailable, scratch_bytes, run_worker, run_merge);
  return kernel;
}

}  // namespace folio::inline v0::kernels::amx
