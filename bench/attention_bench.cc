#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "folio/folio.hpp"

/// Attention beside yardsticks of the same process: decode against the plain read of the same pages, prefill against
/// the multiply-adds of registers alone. Rounds alternate; times are the busiest thread's CPU time, so that other
/// programs on the machine disturb little; the ratio is the result.
///
///   folio_attention_bench [--rounds N] [--kernel NAME] [--filter TEXT]
///   folio_attention_bench --costs [--rounds N] [--kernel NAME] [--filter TEXT]
///
/// The second prints what src/kernels/cpu/*/costs.hpp hold: this machine's nanoseconds for a key of a KV head, of each
/// kernel that it can run. --filter then selects caches by their line's begin, such as "kInt8, KvFormat::kStrided".
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Runs index i on thread i % threads, and keeps the busiest thread's CPU time.
struct TimedExecutor {
  int32_t threads = 1;
  double seconds = 0.0;

  static void parallel_for(void* self, int64_t n, ParallelBody body, void* context) {
    auto& executor = *static_cast<TimedExecutor*>(self);
    std::vector<double> busy(static_cast<size_t>(executor.threads));
    const auto work = [&](int32_t thread) {
      const double begin = thread_seconds();
      for (int64_t i = thread; i < n; i += executor.threads) body(context, i);
      busy[static_cast<size_t>(thread)] = thread_seconds() - begin;
    };
    std::vector<std::thread> others;
    for (int32_t t = 1; t < executor.threads; ++t) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
    executor.seconds += *std::max_element(busy.begin(), busy.end());
  }
  Executor view() { return {this, threads, parallel_for}; }
  template <typename Body>
  double time(Body&& body) {
    seconds = 0.0;
    body();
    return seconds;
  }
};

struct Options {
  int rounds = 5;
  std::string kernel;
  std::string filter;
  bool costs = false;
};

struct Shape {
  const char* name;
  int32_t threads;
  int32_t requests;
  int32_t q_len;
  int32_t kv_len;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  DType kv;
  KvFormat format;
  bool hnd;
  Determinism determinism = Determinism::kRunToRun;
  int32_t page_size = 16;
  int32_t head_dim_qk = 128;
  int32_t head_dim_v = 128;
};

/// A batch of `shape`, with pages in random order. Queries are bfloat16, over float16 caches float16.
class Batch {
 public:
  Batch(const Shape& shape, const Options& options) : shape_(shape), executor_{shape.threads} {
    config_.num_q_heads = shape.num_q_heads;
    config_.num_kv_heads = shape.num_kv_heads;
    config_.head_dim_qk = shape.head_dim_qk;
    config_.head_dim_v = shape.head_dim_v;
    config_.q = shape.kv == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
    config_.kv = shape.kv;
    config_.page_size = shape.page_size;
    config_.kv_format = shape.format;
    config_.determinism = shape.determinism;
    const int32_t pages_each = pages_for(shape.kv_len, config_.page_size);
    cache_shape_ = {.num_pages = int64_t{pages_each} * shape.requests,
                    .page_size = config_.page_size,
                    .num_kv_heads = shape.num_kv_heads,
                    .head_dim_qk = shape.head_dim_qk,
                    .head_dim_v = shape.head_dim_v,
                    .dtype = shape.kv};
    k_bytes_ = static_cast<size_t>(k_elements(cache_shape_) * size_of(shape.kv));
    v_bytes_ = static_cast<size_t>(v_elements(cache_shape_) * size_of(shape.kv));
    k_ = allocate(k_bytes_);
    v_ = allocate(v_bytes_);
    std::mt19937 random(1);
    fill(k_, k_bytes_, random);
    fill(v_, v_bytes_, random);
    args_.cache = view();
    indices_.resize(static_cast<size_t>(cache_shape_.num_pages));
    std::iota(indices_.begin(), indices_.end(), 0);
    std::shuffle(indices_.begin(), indices_.end(), random);
    for (int32_t r = 0; r <= shape.requests; ++r) {
      indptr_.push_back(r * pages_each);
      cu_q_.push_back(r * shape.q_len);
    }
    kv_len_.assign(static_cast<size_t>(shape.requests), shape.kv_len);
    args_.table = csr_table(indices_, indptr_);
    const int64_t tokens = cu_q_.back();
    const int64_t rows = tokens * shape.num_q_heads;
    q_.resize(static_cast<size_t>(rows * shape.head_dim_qk));
    for (int64_t i = 0; i < rows * shape.head_dim_qk; ++i) {
      store_from_float(q_.data(), config_.q, i, std::normal_distribution<float>()(random));
    }
    out_.resize(static_cast<size_t>(rows * shape.head_dim_v));
    segment_.kv_len = kv_len_.data();
    batch_.num_requests = shape.requests;
    batch_.num_tokens = cu_q_.back();
    batch_.cu_q = cu_q_.data();
    batch_.segments = {&segment_, 1};
    run_args_.q = ConstTensorView(q_.data(), config_.q, {tokens, shape.num_q_heads, shape.head_dim_qk});
    run_args_.out = TensorView(out_.data(), config_.q, {tokens, shape.num_q_heads, shape.head_dim_v});
    run_args_.segments = {&args_, 1};
    ContextOptions context_options;
    context_options.executor = executor_.view();
    PrepareOptions prepare_options;
    prepare_options.force_kernel = options.kernel;
    context_ = std::make_unique<Context>(Context::cpu(context_options));
    op_ = std::make_unique<AttentionOp>(prepare(*context_, config_, prepare_options));
    buffer_ = std::make_unique<PlanBuffer>(make_plan_buffer(*op_));
    plan_ = std::make_unique<AttentionPlan>(plan(*op_, batch_, *buffer_));
    workspace_.bytes = workspace_size(*plan_);
    workspace_.data = allocate(workspace_.bytes);
  }
  ~Batch() {
    std::free(k_);
    std::free(v_);
    std::free(workspace_.data);
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Of one run; small batches run often enough for the clock.
  double attention_seconds() {
    return repeated_seconds([&] { run(*plan_, run_args_, workspace_); });
  }

  /// The pages of both halves in the table's order, several at a time, divided over the threads.
  double read_seconds(int32_t streams) {
    struct Job {
      const Batch* batch;
      int32_t streams;
    } job{this, streams};
    const ParallelBody body = [](void* context, int64_t thread) noexcept {
      const Job& mine = *static_cast<const Job*>(context);
      mine.batch->read_share(mine.streams, static_cast<int32_t>(thread));
    };
    return repeated_seconds([&] { TimedExecutor::parallel_for(&executor_, shape_.threads, body, &job); });
  }

  double kv_bytes() const { return static_cast<double>(k_bytes_ + v_bytes_); }
  std::string kernel_name() const { return op_->kernel_name(); }

  /// Multiply-adds of the visible pairs, times two.
  double flops() const {
    const double rows = static_cast<double>(shape_.requests) * shape_.q_len * shape_.num_q_heads;
    const double keys = shape_.kv_len - 0.5 * (shape_.q_len - 1);
    return rows * keys * 2 * (shape_.head_dim_qk + shape_.head_dim_v);
  }

 private:
  /// Over k_ and v_; int8 caches have a scale of 1/32 for each token and head.
  KvCacheView view() {
    const auto make = [&](auto... scales) {
      if (shape_.format == KvFormat::kCpuPacked) return make_cpu_packed_view(cache_shape_, k_, v_, scales...);
      return shape_.hnd ? make_hnd_view(cache_shape_, k_, v_, scales...)
                        : make_nhd_view(cache_shape_, k_, v_, scales...);
    };
    if (shape_.kv != DType::kInt8) return make();
    token_scales_.assign(2 * static_cast<size_t>(token_scale_elements(cache_shape_)), 1.0f / 32);
    return make(token_scales_.data(), token_scales_.data() + token_scales_.size() / 2);
  }

  static void* allocate(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, size_t{2} << 20, std::max<size_t>(bytes, 1)) != 0) std::abort();
    madvise(memory, bytes, MADV_HUGEPAGE);  // as core::AlignedBuffer does for large pools
    return memory;
  }

  /// Values of about 1 in every dtype here.
  void fill(void* data, size_t bytes, std::mt19937& random) const {
    std::vector<unsigned char> pattern(4096);
    const int32_t count = 4096 / size_of(shape_.kv);
    for (int32_t i = 0; i < count; ++i) {
      const float value = std::normal_distribution<float>()(random);
      if (shape_.kv == DType::kInt8) {
        pattern[static_cast<size_t>(i)] = static_cast<unsigned char>(static_cast<int8_t>(32 * value));
      } else {
        store_from_float(pattern.data(), shape_.kv, i, value);
      }
    }
    for (size_t at = 0; at < bytes; at += pattern.size()) {
      std::memcpy(static_cast<unsigned char*>(data) + at, pattern.data(), std::min(pattern.size(), bytes - at));
    }
  }

  template <typename Body>
  double repeated_seconds(Body body) {
    const int times = std::max(1, static_cast<int>(64e6 / kv_bytes()));
    return executor_.time([&] {
      for (int i = 0; i < times; ++i) body();
    }) / times;
  }

  void read_share(int32_t streams, int32_t thread) const {
    const size_t pages = indices_.size();
    const size_t begin = pages * static_cast<size_t>(thread) / static_cast<size_t>(shape_.threads);
    const size_t end = pages * static_cast<size_t>(thread + 1) / static_cast<size_t>(shape_.threads);
    uint64_t sums[8] = {};
    const size_t width = static_cast<size_t>(streams);
    for (const auto& [half, bytes] : {std::pair{k_, k_bytes_}, {v_, v_bytes_}}) {
      const size_t page_bytes = bytes / static_cast<size_t>(cache_shape_.num_pages);
      for (size_t i = begin; i + width <= end; i += width) {
        for (size_t at = 0; at < page_bytes; at += 256) {
          for (size_t s = 0; s < width; ++s) {
            const auto* words = reinterpret_cast<const uint64_t*>(
                static_cast<const unsigned char*>(half) + static_cast<size_t>(indices_[i + s]) * page_bytes + at);
            for (size_t w = 0; w < 32; w += 8) {
              for (size_t lane = 0; lane < 8; ++lane) sums[lane] += words[w + lane];
            }
          }
        }
      }
    }
    volatile uint64_t sink = std::accumulate(std::begin(sums), std::end(sums), uint64_t{0});
    static_cast<void>(sink);
  }

  Shape shape_;
  TimedExecutor executor_;
  AttentionConfig config_;
  KvCacheShape cache_shape_;
  size_t k_bytes_ = 0;
  size_t v_bytes_ = 0;
  void* k_ = nullptr;
  void* v_ = nullptr;
  std::vector<int32_t> indices_, indptr_, cu_q_, kv_len_;
  std::vector<uint16_t> q_, out_;
  std::vector<float> token_scales_;
  KvSegment segment_;
  SegmentArgs args_;
  BatchView batch_;
  AttentionArgs run_args_;
  Workspace workspace_;
  std::unique_ptr<Context> context_;
  std::unique_ptr<AttentionOp> op_;
  std::unique_ptr<PlanBuffer> buffer_;
  std::unique_ptr<AttentionPlan> plan_;
};

#if defined(__x86_64__)
/// Multiply-adds per second of one thread, on registers of kBytes alone.
template <int kBytes>
__attribute__((always_inline)) inline double multiply_rate() {
  using Wide = float __attribute__((vector_size(kBytes)));
  Wide sums[12] = {};
  Wide factor = 0.5f - Wide{};
  const int64_t count = 4'000'000;
  const double begin = thread_seconds();
  for (int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 12
    for (Wide& sum : sums) {
      sum = sum * factor + factor;
      __asm__ volatile("" : "+v"(sum));  // apart from the others, which hold the same value
    }
  }
  const double seconds = thread_seconds() - begin;
  return static_cast<double>(count) * 12 * (kBytes / 4) / seconds;
}
__attribute__((target("avx512f"))) double multiply_rate_512() {
  return multiply_rate<64>();
}
__attribute__((target("avx2,fma"))) double multiply_rate_256() {
  return multiply_rate<32>();
}
#endif

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const Shape& shape, const std::string& kernel, const char* unit, const std::vector<double>& rates,
           const std::vector<double>& yardsticks) {
  std::vector<double> ratios;
  for (size_t i = 0; i < rates.size(); ++i) ratios.push_back(rates[i] / yardsticks[i]);
  const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
  std::printf("%-44s %-10s threads %d  %7.2f %s  yardstick %7.2f  share %.2f [%.2f, %.2f]\n", shape.name,
              kernel.c_str(), shape.threads, median(rates), unit, median(yardsticks), median(ratios), *low, *high);
  std::fflush(stdout);
}

void bench_decode(const Shape& shape, const Options& options) {
  Batch batch(shape, options);
  std::vector<double> rates;
  std::vector<double> reads;
  batch.attention_seconds();
  for (int round = 0; round < options.rounds; ++round) {
    double best = 0.0;
    for (const int32_t streams : {1, 4, 8})
      best = std::max(best, batch.kv_bytes() / batch.read_seconds(streams) * 1e-9);
    reads.push_back(best);
    rates.push_back(batch.kv_bytes() / batch.attention_seconds() * 1e-9);
  }
  print(shape, batch.kernel_name(), "GB/s", rates, reads);
}

void bench_prefill(const Shape& shape, const Options& options) {
#if defined(__x86_64__)
  const bool wide = __builtin_cpu_supports("avx512f") != 0;
  if (!wide && __builtin_cpu_supports("fma") == 0) return;
  Batch batch(shape, options);
  std::vector<double> rates;
  std::vector<double> peaks;
  for (int round = 0; round < options.rounds; ++round) {
    peaks.push_back(2e-9 * (wide ? multiply_rate_512() : multiply_rate_256()) * shape.threads);
    rates.push_back(batch.flops() / batch.attention_seconds() * 1e-9);
  }
  print(shape, batch.kernel_name(), "GFLOP/s", rates, peaks);
#else
  static_cast<void>(shape);
  static_cast<void>(options);
#endif
}

constexpr KvFormat kStrided = KvFormat::kStrided;
constexpr KvFormat kPacked = KvFormat::kCpuPacked;
constexpr DType kBf16 = DType::kBFloat16;

const Shape kDecode[] = {
    {"decode bf16 group 4 HND", 1, 8, 1, 8192, 32, 8, kBf16, kStrided, true},
    {"decode bf16 group 4 HND", 2, 8, 1, 8192, 32, 8, kBf16, kStrided, true},
    {"decode bf16 group 4 packed", 1, 8, 1, 8192, 32, 8, kBf16, kPacked, true},
    {"decode bf16 group 4 packed", 2, 8, 1, 8192, 32, 8, kBf16, kPacked, true},
    {"decode bf16 group 4 NHD", 1, 8, 1, 8192, 32, 8, kBf16, kStrided, false},
    {"decode bf16 group 4 NHD", 2, 8, 1, 8192, 32, 8, kBf16, kStrided, false},
    {"decode bf16 group 1 HND", 1, 8, 1, 8192, 8, 8, kBf16, kStrided, true},
    {"decode bf16 group 1 packed", 1, 8, 1, 8192, 8, 8, kBf16, kPacked, true},
    {"decode bf16 group 1 packed", 2, 8, 1, 8192, 8, 8, kBf16, kPacked, true},
    {"decode bf16 group 8 packed", 1, 8, 1, 8192, 64, 8, kBf16, kPacked, true},
    {"decode bf16 group 8 packed", 2, 8, 1, 8192, 64, 8, kBf16, kPacked, true},
    {"decode bf16 group 8 HND", 1, 8, 1, 8192, 64, 8, kBf16, kStrided, true},
    {"decode bf16 group 16 HND", 1, 8, 1, 4096, 128, 8, kBf16, kStrided, true},
    {"decode bf16 group 1 in L2", 1, 1, 1, 512, 1, 1, kBf16, kStrided, true},
    {"decode bf16 group 4 in L2", 1, 1, 1, 512, 4, 1, kBf16, kStrided, true},
    {"decode bf16 group 8 in L2", 1, 1, 1, 512, 8, 1, kBf16, kStrided, true},
    {"decode e4m3 group 1 in L2", 1, 1, 1, 512, 1, 1, DType::kFloat8E4M3, kStrided, true},
    {"decode e4m3 group 4 in L2", 1, 1, 1, 512, 4, 1, DType::kFloat8E4M3, kStrided, true},
    {"decode fp16 group 4 HND", 1, 8, 1, 8192, 32, 8, DType::kFloat16, kStrided, true},
    {"decode e4m3 group 4 HND", 1, 8, 1, 8192, 32, 8, DType::kFloat8E4M3, kStrided, true},
    {"decode e4m3 group 1 packed", 1, 8, 1, 8192, 8, 8, DType::kFloat8E4M3, kPacked, true},
    {"decode e4m3 group 4 packed", 1, 8, 1, 8192, 32, 8, DType::kFloat8E4M3, kPacked, true},
    {"decode e4m3 group 4 packed", 2, 8, 1, 8192, 32, 8, DType::kFloat8E4M3, kPacked, true},
    {"decode e4m3 group 8 packed", 1, 8, 1, 8192, 64, 8, DType::kFloat8E4M3, kPacked, true},
    {"decode e5m2 group 4 packed", 1, 8, 1, 8192, 32, 8, DType::kFloat8E5M2, kPacked, true},
    {"verify 4 tokens bf16 group 4 HND", 1, 8, 4, 4096, 32, 8, kBf16, kStrided, true},
    {"decode bf16 group 4 HND, schedule-invariant", 1, 8, 1, 8192, 32, 8, kBf16, kStrided, true,
     Determinism::kScheduleInvariant},
};

const Shape kPrefill[] = {
    {"prefill bf16 2048 causal HND", 1, 1, 2048, 2048, 8, 2, kBf16, kStrided, true},
    {"prefill bf16 2048 causal HND", 2, 1, 2048, 2048, 8, 2, kBf16, kStrided, true},
    {"prefill bf16 512 on 4096 packed", 1, 1, 512, 4096, 8, 2, kBf16, kPacked, true},
    {"prefill e4m3 512 on 4096 HND", 1, 1, 512, 4096, 8, 2, DType::kFloat8E4M3, kStrided, true},
};

/// Query rows of a KV head that costs are measured for, as kernels/cpu/common/costs.hpp has them.
constexpr std::array<int32_t, 7> kCostRows{1, 4, 8, 16, 32, 64, 256};

/// A cache that costs are measured for; `name` is the begin of a line of costs.hpp.
struct CostCache {
  const char* name;
  DType kv;
  KvFormat format;
  int32_t page_size;
  bool wide_heads;
};

const CostCache kCostCaches[] = {
    {"DType::kBFloat16, KvFormat::kStrided, 1, true", kBf16, kStrided, 16, true},
    {"DType::kBFloat16, KvFormat::kStrided, 1, false", kBf16, kStrided, 16, false},
    {"DType::kBFloat16, KvFormat::kCpuPacked, 32, false", kBf16, kPacked, 32, false},
    {"DType::kBFloat16, KvFormat::kCpuPacked, 1, false", kBf16, kPacked, 16, false},
    {"DType::kFloat16, KvFormat::kStrided, 1, false", DType::kFloat16, kStrided, 16, false},
    {"DType::kFloat16, KvFormat::kCpuPacked, 1, false", DType::kFloat16, kPacked, 16, false},
    {"DType::kFloat8E4M3, KvFormat::kStrided, 1, false", DType::kFloat8E4M3, kStrided, 16, false},
    {"DType::kFloat8E4M3, KvFormat::kCpuPacked, 1, false", DType::kFloat8E4M3, kPacked, 16, false},
    {"DType::kFloat8E5M2, KvFormat::kStrided, 1, false", DType::kFloat8E5M2, kStrided, 16, false},
    {"DType::kFloat8E5M2, KvFormat::kCpuPacked, 1, false", DType::kFloat8E5M2, kPacked, 16, false},
    {"DType::kInt8, KvFormat::kStrided, 1, false", DType::kInt8, kStrided, 16, false},
    {"DType::kInt8, KvFormat::kCpuPacked, 1, false", DType::kInt8, kPacked, 16, false},
    {"DType::kFloat32, KvFormat::kStrided, 1, false", DType::kFloat32, kStrided, 16, false},
};

/// Eight requests of 4,096 keys: of eight KV heads of 128 components, or of MLA's one head of 576 and 512. Up to 16
/// rows are the query heads of one token, more rows are tokens of four query heads. Strided caches are NHD.
Shape cost_shape(const CostCache& cache, int32_t rows) {
  const int32_t group = rows <= 16 ? rows : 4;
  const int32_t kv_heads = cache.wide_heads ? 1 : 8;
  return {.name = cache.name,
          .threads = 1,
          .requests = 8,
          .q_len = rows / group,
          .kv_len = 4096,
          .num_q_heads = group * kv_heads,
          .num_kv_heads = kv_heads,
          .kv = cache.kv,
          .format = cache.format,
          .hnd = false,
          .page_size = cache.page_size,
          .head_dim_qk = cache.wide_heads ? 576 : 128,
          .head_dim_v = cache.wide_heads ? 512 : 128};
}

/// Nanoseconds for a key of a KV head, divided by head dims over 2 x 128: the least of all rounds, since neighbours
/// only add to it.
double cost(const Shape& shape, const Options& options) {
  Batch batch(shape, options);
  double least = batch.attention_seconds();
  for (int round = 0; round < options.rounds; ++round) least = std::min(least, batch.attention_seconds());
  const double keys = static_cast<double>(shape.requests) * shape.kv_len * shape.num_kv_heads;
  return 1e9 * least / keys * 256 / (shape.head_dim_qk + shape.head_dim_v);
}

/// The kernels that run a shape here, or the one asked for.
std::vector<std::string> kernels_for(const Shape& shape, const Options& options) {
  AttentionConfig config;
  config.num_q_heads = shape.num_q_heads;
  config.num_kv_heads = shape.num_kv_heads;
  config.head_dim_qk = shape.head_dim_qk;
  config.head_dim_v = shape.head_dim_v;
  config.q = shape.kv == DType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
  config.kv = shape.kv;
  config.kv_format = shape.format;
  config.page_size = shape.page_size;
  std::vector<std::string> names;
  for (const KernelAnswer& answer : explain(Context::cpu(), config)) {
    const bool asked = options.kernel.empty() || options.kernel == answer.name;
    if (asked && answer.available && answer.refusal.empty()) names.push_back(answer.name);
  }
  return names;
}

/// Kernels of a shape run one after the other, so that what else the machine does meets all of them.
void print_costs(const Options& options) {
  std::map<std::string, std::string> tables;
  for (const CostCache& cache : kCostCaches) {
    if (std::string(cache.name).find(options.filter) == std::string::npos) continue;
    std::map<std::string, std::string> lines;
    for (const int32_t rows : kCostRows) {
      const Shape shape = cost_shape(cache, rows);
      for (const std::string& kernel : kernels_for(shape, options)) {
        Options one = options;
        one.kernel = kernel;
        char text[32];
        std::snprintf(text, sizeof(text), "%s%.4g", lines[kernel].empty() ? "" : ", ", cost(shape, one));
        lines[kernel] += text;
      }
    }
    for (const auto& [kernel, line] : lines) {
      tables[kernel] += "    {" + std::string(cache.name) + ", {" + line + "}},\n";
    }
  }
  for (const auto& [kernel, table] : tables) std::printf("%s\n%s", kernel.c_str(), table.c_str());
}

bool wanted(const Shape& shape, const Options& options) {
  return std::string(shape.name).find(options.filter) != std::string::npos;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--costs") options.costs = true;
    if (i + 1 == argc) break;
    if (flag == "--rounds") options.rounds = std::max(1, std::atoi(argv[i + 1]));
    if (flag == "--kernel") options.kernel = argv[i + 1];
    if (flag == "--filter") options.filter = argv[i + 1];
  }
  if (options.costs) {
    print_costs(options);
    return 0;
  }
  for (const Shape& shape : kDecode) {
    if (wanted(shape, options)) bench_decode(shape, options);
  }
  for (const Shape& shape : kPrefill) {
    if (wanted(shape, options)) bench_prefill(shape, options);
  }
}
