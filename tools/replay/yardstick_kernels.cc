// Compiled several times, with FOLIO_YARDSTICK_NAMESPACE, FOLIO_YARDSTICK_ISA and the compiler's -march saying for
// what.
#include "replay/yardstick_kernels.hpp"

namespace folio::replay::FOLIO_YARDSTICK_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

using Words = uint64_t __attribute__((vector_size(kVectorBytes)));
using Floats = float __attribute__((vector_size(kVectorBytes)));

constexpr size_t kChunk = 256;  // bytes of one page before the next page's turn
constexpr size_t kVectorsPerChunk = kChunk / kVectorBytes;
constexpr size_t kLine = 64;

template <size_t kStreams>
uint64_t read_in_step(const std::byte* const* pages, size_t count, size_t page_bytes) {
  Words sums[4] = {};
  for (size_t group = 0; group + kStreams <= count; group += kStreams) {
    const bool more = group + 2 * kStreams <= count;
    for (size_t at = 0; at < page_bytes; at += kChunk) {
      for (size_t s = 0; s < kStreams; ++s) {
        if (more) {
          for (size_t line = 0; line < kChunk; line += kLine)
            __builtin_prefetch(pages[group + kStreams + s] + at + line);
        }
        const std::byte* from = pages[group + s] + at;
        for (size_t v = 0; v < kVectorsPerChunk; ++v) {
          Words words;
          __builtin_memcpy(&words, from + v * kVectorBytes, kVectorBytes);
          sums[v % 4] += words;
        }
      }
    }
  }
  const Words sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  uint64_t total = 0;
  for (size_t i = 0; i < kVectorBytes / sizeof(uint64_t); ++i) total += sum[i];
  return total;
}

uint64_t read_pages(const std::byte* const* pages, size_t count, size_t page_bytes, int32_t streams) {
  if (streams == 8) return read_in_step<8>(pages, count, page_bytes);
  if (streams == 4) return read_in_step<4>(pages, count, page_bytes);
  return read_in_step<1>(pages, count, page_bytes);
}

float multiply(int64_t iterations, double* flops) {
  constexpr size_t kAccumulators =
      12;  // enough to hide the latency of two units; with the operands they fit 16 registers
  constexpr size_t kLanes = kVectorBytes / sizeof(float);
  Floats accumulators[kAccumulators];
  Floats factor;
  Floats addend;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    factor[lane] = 0.999f;
    addend[lane] = 0.001f;
  }
  for (size_t a = 0; a < kAccumulators; ++a) accumulators[a] = factor * static_cast<float>(a + 1);
  for (int64_t i = 0; i < iterations; ++i) {
    for (size_t a = 0; a < kAccumulators; ++a) accumulators[a] = accumulators[a] * factor + addend;
  }
  Floats sum = accumulators[0];
  for (size_t a = 1; a < kAccumulators; ++a) sum += accumulators[a];
  float total = 0.0f;
  for (size_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
  *flops = 2.0 * static_cast<double>(kAccumulators * kLanes) * static_cast<double>(iterations);
  return total;
}

}  // namespace

extern const YardstickKernels kKernels = {FOLIO_YARDSTICK_ISA, &read_pages, &multiply};

}  // namespace folio::replay::FOLIO_YARDSTICK_NAMESPACE
