#include "replay/yardstick.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "replay/stopwatch.hpp"
#include "replay/yardstick_kernels.hpp"

namespace folio::replay {
namespace {

#if defined(FOLIO_YARDSTICK_X86)
bool has_feature(std::string_view name) {
  static const std::vector<std::string> features = cpu_features();
  return std::find(features.begin(), features.end(), name) != features.end();
}
#endif

const YardstickKernels& choose_kernels() {
#if defined(FOLIO_YARDSTICK_X86)
  const auto has = [](std::initializer_list<std::string_view> names) {
    return std::all_of(names.begin(), names.end(), has_feature);
  };
  const bool v3 = has({"avx2", "fma", "f16c", "bmi2"});
  if (v3 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl"})) return yardstick_v4::kKernels;
  if (v3) return yardstick_v3::kKernels;
#endif
  return yardstick_baseline::kKernels;
}

const YardstickKernels& kernels() {
  static const YardstickKernels& chosen = choose_kernels();
  return chosen;
}

std::atomic<uint64_t> sink{0};  // results go here, so that nothing is optimised away

struct ReadTask {
  const PageList* list;
  int32_t streams;
  int64_t threads;
};

void read_share(void* self, int64_t index) noexcept {
  const ReadTask& task = *static_cast<const ReadTask*>(self);
  const auto count = static_cast<int64_t>(task.list->pages.size());
  const int64_t first = count * index / task.threads;
  const int64_t last = count * (index + 1) / task.threads;
  sink += kernels().read_pages(task.list->pages.data() + first, static_cast<size_t>(last - first),
                               task.list->page_bytes, task.streams);
}

struct MultiplyTask {
  float (*multiply)(int64_t iterations, double* flops);
  int64_t iterations;
  std::atomic<double>* flops;
};

void multiply_share(void* self, int64_t) noexcept {
  const MultiplyTask& task = *static_cast<const MultiplyTask*>(self);
  double flops = 0.0;
  sink += static_cast<uint64_t>(task.multiply(task.iterations, &flops));
  double before = task.flops->load();
  while (!task.flops->compare_exchange_weak(before, before + flops)) {
  }
}

/// Operations a second of all threads.
double rate_of(const Context& context, float (*multiply)(int64_t, double*), double seconds) {
  constexpr int64_t kFirstIterations = 20000;
  double rate = 0.0;
  int64_t iterations = kFirstIterations;
  for (int round = 0; round < 2; ++round) {  // the first one finds out how many iterations fill the time
    std::atomic<double> flops{0.0};
    MultiplyTask task{multiply, iterations, &flops};
    Stopwatch watch;
    context.parallel_for(context.concurrency(), &multiply_share, &task);
    const double taken = watch.elapsed();
    rate = flops.load() / taken;
    iterations =
        std::max<int64_t>(kFirstIterations, static_cast<int64_t>(static_cast<double>(iterations) * seconds / taken));
  }
  return rate;
}

}  // namespace

double read_rate(const Context& context, const PageList& list, int32_t streams) {
  const int64_t threads = context.concurrency();
  ReadTask task{&list, streams, threads};
  int64_t pages_read = 0;  // a share's last pages that do not fill a group are left out
  for (int64_t t = 0; t < threads; ++t) {
    const auto count = static_cast<int64_t>(list.pages.size());
    const int64_t share = count * (t + 1) / threads - count * t / threads;
    pages_read += share / streams * streams;
  }
  Stopwatch watch;
  context.parallel_for(threads, &read_share, &task);
  return static_cast<double>(pages_read) * static_cast<double>(list.page_bytes) / watch.elapsed();
}

double best_read_rate(const Context& context, const PageList& list) {
  double best = 0.0;
  for (const int32_t streams : {1, 4, 8}) best = std::max(best, read_rate(context, list, streams));
  return best;
}

double multiply_rate(const Context& context, double seconds) {
  return rate_of(context, kernels().multiply, seconds);
}

double matrix_rate(const Context& context, double seconds) {
#if defined(FOLIO_YARDSTICK_X86)
  if (has_feature("amx_bf16")) return rate_of(context, &multiply_in_tiles, seconds);
#endif
  static_cast<void>(context);
  static_cast<void>(seconds);
  return 0.0;
}

double pair_rate(const Context& context, double seconds) {
#if defined(FOLIO_YARDSTICK_X86)
  if (has_feature("avx512f") && has_feature("avx512_bf16")) return rate_of(context, &multiply_pairs, seconds);
#endif
  static_cast<void>(context);
  static_cast<void>(seconds);
  return 0.0;
}

double product_rate(const Context& context, std::string_view kernel, double seconds) {
  if (kernel.starts_with("amx")) return matrix_rate(context, seconds);
  if (kernel == "avx512-bf16") {
    const double pairs = pair_rate(context, seconds / 2);
    return pairs == 0.0 ? 0.0 : std::max(pairs, multiply_rate(context, seconds / 2));
  }
  const bool generic = kernel.starts_with("generic") && kernel != "generic-bf16";
  const bool float32 = generic || kernel == "avx2" || kernel == "avx512";
  return float32 ? multiply_rate(context, seconds) : 0.0;
}

std::string_view yardstick_isa() {
  return kernels().isa;
}

}  // namespace folio::replay
