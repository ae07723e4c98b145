#include "distributed/rank_sum.hpp"

#include <algorithm>
#include <array>

#include "attention/op_state.hpp"
#include "core/error.hpp"
#include "distributed/operation_checks.hpp"
#include "folio/distributed/process_group.hpp"

namespace folio::inline v0::distributed {
namespace {

void sum_on_host(std::span<const float* const> sent, size_t count, float* out) {
  constexpr size_t kStep = 1024;
  std::array<float, kStep> sums;
  for (size_t done = 0; done < count; done += kStep) {
    const size_t length = std::min(kStep, count - done);
    std::copy_n(sent[0] + done, length, sums.data());
    for (const float* const values : sent.subspan(1)) {
      for (size_t i = 0; i < length; ++i) sums[i] += values[done + i];
    }
    std::copy_n(sums.data(), length, out + done);
  }
}

/// In as many launches as the parts take: each goes on from the sums of the one before.
void sum_on_gpu(const attention::GpuBackend& gpu, std::span<const float* const> sent, size_t count, float* out,
                Stream stream) {
  using kernels::cuda::SumParams;
  SumParams params;
  params.count = static_cast<int64_t>(count);
  params.out = out;
  for (size_t next = 0; next < sent.size();) {
    params.world = 0;
    if (next > 0) params.sent[params.world++] = out;
    while (next < sent.size() && params.world < SumParams::kMostRanks) params.sent[params.world++] = sent[next++];
    gpu.enqueue(params, stream);
  }
}

}  // namespace

void sum_in_order(const attention::GpuBackend* gpu, std::span<const float* const> sent, size_t count, float* out,
                  Stream stream) {
  if (gpu != nullptr) {
    sum_on_gpu(*gpu, sent, count, out, stream);
  } else {
    sum_on_host(sent, count, out);
  }
}

void sum_over_ranks(const Context& context, std::span<const float* const> sent, size_t count, float* out,
                    Stream stream) {
  core::require(!sent.empty(), "sent has no parts; a sum has one or more");
  const size_t bytes = bytes_of_floats(count);
  check_buffer("out", out, bytes);
  for (const float* const part : sent) check_exchange(part, bytes, out, bytes);
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) check_stream(stream);
  if (count > 0) sum_in_order(gpu, sent, count, out, stream);
}

}  // namespace folio::inline v0::distributed
