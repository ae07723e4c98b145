#include "kernels/cuda/common/combine/arrange.hpp"
#include "kernels/cuda/common/combine/head_order.hpp"
#include "kernels/cuda/common/launch.hpp"

namespace folio::inline v0::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

/// A thread takes words of 1, 2, 4 or 8 bytes.
template <typename Word>
__global__ void __launch_bounds__(kThreads) arrange_kernel(const __grid_constant__ ArrangeParams params) {
  const int32_t all = params.ranks * params.heads;
  const int64_t row_words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t words = params.num_tokens * all * row_words;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t at = thread; at < words; at += int64_t{gridDim.x} * kThreads) {
    const int64_t row = at / row_words;
    const auto head = static_cast<int32_t>(row % all);
    const HeadOwner owner = head_owner(head, params.ranks, params.heads, params.groups);
    const std::byte* const from = params.from + owner.rank * params.rank_stride + row / all * params.token_stride +
                                  owner.head * params.head_stride + at % row_words * static_cast<int64_t>(sizeof(Word));
    reinterpret_cast<Word*>(params.to)[at] = *reinterpret_cast<const Word*>(from);
  }
  if (params.slopes_to == nullptr || thread >= all) return;
  const auto head = static_cast<int32_t>(thread);
  const HeadOwner owner = head_owner(head, params.ranks, params.heads, params.groups);
  float slope = 0.0f;
  if (params.slopes != nullptr) {
    slope = reinterpret_cast<const float*>(params.slopes + owner.rank * params.slopes_rank_stride)[owner.head];
  }
  params.slopes_to[head] = slope;
}

/// Whether words of so many bytes can be moved.
bool fits(const ArrangeParams& params, int64_t bytes) {
  const auto from = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.from));
  const auto to = static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.to));
  return (from | to | params.rank_stride | params.token_stride | params.head_stride | params.row_bytes) % bytes == 0;
}

}  // namespace

void enqueue(const ArrangeParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  auto* kernel = arrange_kernel<uint8_t>;
  int64_t word = 1;
  if (fits(params, 8)) {
    kernel = arrange_kernel<uint64_t>, word = 8;
  } else if (fits(params, 4)) {
    kernel = arrange_kernel<uint32_t>, word = 4;
  } else if (fits(params, 2)) {
    kernel = arrange_kernel<uint16_t>, word = 2;
  }
  const int64_t all = int64_t{params.ranks} * params.heads;
  // Enough threads for the slopes, too: rows are of a word at least.
  const int64_t words = params.num_tokens * all * (params.row_bytes / word);
  kernel<<<grid_for(words, kThreads), kThreads, 0, native(stream)>>>(params);
  check_launch("the arranging of queries");
}

}  // namespace folio::inline v0::kernels::cuda
