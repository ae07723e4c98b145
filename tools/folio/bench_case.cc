#include "bench_case.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "replay/gpu.hpp"
#include "replay/synthetic.hpp"
#include "replay/yardstick.hpp"

namespace folio::cli {
namespace {

using replay::StackConfig;
using replay::StepBatch;
using replay::Stopwatch;

/// Tokens [first, first + count) of every request, over pages in a fixed random order.
class Batches {
 public:
  Batches(const BenchShape& shape, int32_t page_size)
      : shape_(shape), page_size_(page_size), pages_each_((shape.kv_len + page_size - 1) / page_size) {
    pages_.resize(static_cast<size_t>(pages_each_) * static_cast<size_t>(shape.batch));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937_64(1));
  }

  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }

  StepBatch make(int32_t request, int32_t requests, int32_t first, int32_t count) const {
    StepBatch batch;
    batch.cu_q.push_back(0);
    batch.indptr.push_back(0);
    for (int32_t r = request; r < request + requests; ++r) {
      const int32_t* pages = pages_.data() + static_cast<size_t>(r) * static_cast<size_t>(pages_each_);
      const int32_t end = first + count;
      const int32_t used = (end + page_size_ - 1) / page_size_;
      batch.cu_q.push_back(batch.cu_q.back() + count);
      batch.kv_len.push_back(end);
      batch.indices.insert(batch.indices.end(), pages, pages + used);
      batch.indptr.push_back(batch.indptr.back() + used);
      for (int32_t p = first; p < end; ++p) {
        batch.slots.push_back(int64_t{pages[p / page_size_]} * page_size_ + p % page_size_);
        batch.rows.push_back({r, p, static_cast<uint64_t>(r) << 32 | static_cast<uint64_t>(p)});
      }
    }
    return batch;
  }

 private:
  BenchShape shape_;
  int32_t page_size_;
  int32_t pages_each_;
  std::vector<int32_t> pages_;
};

/// Visible pairs of one request's rows: exact for causal masks with or without a window.
double visible_pairs(const BenchShape& shape, int32_t window_left) {
  double pairs = 0.0;
  for (int32_t p = shape.kv_len - shape.q_len; p < shape.kv_len; ++p) {
    pairs += window_left < 0 ? p + 1 : std::min(p, window_left) + 1;
  }
  return pairs;
}

/// Keys of one request that any of its rows sees.
int32_t visible_keys(const BenchShape& shape, int32_t window_left) {
  return window_left < 0 ? shape.kv_len : std::min(shape.kv_len, window_left + shape.q_len);
}

/// The K and V halves of all pages, page by page, as the batch walks them.
std::vector<const std::byte*> page_addresses(const replay::LayerStack& stack, const StepBatch& batch, size_t chunk) {
  std::vector<const std::byte*> addresses;
  const auto add = [&](const void* base, size_t page_bytes) {
    for (const int32_t page : batch.indices) {
      const auto* at = static_cast<const std::byte*>(base) + static_cast<size_t>(page) * page_bytes;
      for (size_t offset = 0; offset + chunk <= page_bytes; offset += chunk) addresses.push_back(at + offset);
    }
  };
  add(stack.cache(0).k, stack.k_page_bytes());
  if (stack.v_page_bytes() > 0) add(stack.cache(0).v, stack.v_page_bytes());
  return addresses;
}

/// What the machine can do at most, in a round beside attention. Zero: not measured.
struct Limits {
  double read = 0.0;
  double multiply = 0.0;
  double matrix = 0.0;
};

/// Plain reads of the pages, the best of 1, 4 and 8 streams; products of the unit that `kernel` multiplies in.
Limits cpu_limits(const Context& context, const replay::PageList& pages, std::string_view kernel, double min_seconds) {
  Limits limits;
  for (const int32_t streams : {1, 4, 8}) {
    int64_t reads = 0;
    Stopwatch watch;
    double sum = 0.0;
    do {
      sum += replay::read_rate(context, pages, streams);
      ++reads;
    } while (watch.elapsed() < min_seconds / 3);
    limits.read = std::max(limits.read, sum / static_cast<double>(reads));
  }
  (kernel.starts_with("amx") ? limits.matrix : limits.multiply) = replay::product_rate(context, kernel, min_seconds);
  return limits;
}

/// Copies of as much memory as a run reads, at least of what caches do not hold.
Limits gpu_limits(const Context& context, double kv_bytes, double min_seconds) {
  constexpr double kLeastBytes = double{256 << 20};
  Limits limits;
  limits.read = replay::gpu::copy_rate(context, static_cast<size_t>(std::max(kv_bytes, kLeastBytes)), min_seconds);
  return limits;
}

/// The largest piece in which both halves of a page can be read whole: a multiple of 256 bytes, or 0.
size_t common_chunk(const replay::LayerStack& stack) {
  const size_t chunk = std::gcd(stack.k_page_bytes(), stack.v_page_bytes());
  return chunk % 256 == 0 ? chunk : 0;
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const double median = n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
  return {median, values.front(), values.back()};
}

double seconds_of(const Context& context, double min_seconds, const std::function<void()>& work) {
  int64_t at_once = 1;  // the first call alone: it may take seconds
  int64_t calls = 0;
  Stopwatch watch;
  do {
    for (int64_t i = 0; i < at_once; ++i) work();
    replay::gpu::wait(context);
    calls += at_once;
    if (replay::gpu::is_gpu(context)) at_once = 16;
  } while (watch.elapsed() < min_seconds);
  return watch.elapsed() / static_cast<double>(calls);
}

BenchResult run_bench_case(const Context& context, const StackConfig& given, const BenchShape& shape,
                           const BenchEffort& effort) {
  constexpr int32_t kFillTokens = 512;
  StackConfig config = given;
  config.num_layers = 1;
  const Batches batches(shape, config.page_size);
  config.num_pages = batches.num_pages();
  config.max_tokens = std::max(kFillTokens, shape.batch * shape.q_len);
  replay::LayerStack stack(context, config);
  for (int32_t request = 0; request < shape.batch; ++request) {
    for (int32_t first = 0; first < shape.kv_len; first += kFillTokens) {
      stack.fill(batches.make(request, 1, first, std::min(kFillTokens, shape.kv_len - first)));
    }
  }
  const StepBatch batch = batches.make(0, shape.batch, shape.kv_len - shape.q_len, shape.q_len);
  stack.load(batch);

  BenchResult result;
  result.shape = shape;
  result.kernel = stack.kernel_name();
  const double heads = config.num_kv_heads;
  const int32_t window = stack.attention().window_left;
  result.kv_bytes = heads * static_cast<double>(config.token_bytes()) * shape.batch * visible_keys(shape, window);
  result.flops =
      2.0 * (config.head_dim_qk + config.head_dim_v) * config.num_q_heads * shape.batch * visible_pairs(shape, window);
  const bool on_gpu = replay::gpu::is_gpu(context);
  const size_t chunk = common_chunk(stack);
  if (chunk == 0 && !on_gpu)
    throw Error(ErrorCode::kUnsupported,
                "pages of this shape are not whole multiples of 256 bytes; try a larger --page-size");
  std::vector<const std::byte*> pages;
  if (!on_gpu) pages = page_addresses(stack, batch, chunk);
  const replay::PageList list{pages, chunk};

  std::vector<double> run, plan, read, multiply, read_limit, multiply_limit, matrix_limit, share_read, share_multiply,
      share_matrix;
  AttentionPlan made = stack.plan_step(batch);
  stack.attend(batch, made);  // warm
  for (int32_t round = 0; round < effort.rounds; ++round) {
    plan.push_back(seconds_of(context, effort.min_seconds / 10, [&] { made = stack.plan_step(batch); }));
    run.push_back(seconds_of(context, effort.min_seconds, [&] { stack.attend(batch, made); }));
    const Limits limits = on_gpu ? gpu_limits(context, result.kv_bytes, effort.min_seconds)
                                 : cpu_limits(context, list, result.kernel, effort.min_seconds);
    read_limit.push_back(limits.read);
    multiply_limit.push_back(limits.multiply);
    matrix_limit.push_back(limits.matrix);
    read.push_back(result.kv_bytes / run.back());
    multiply.push_back(result.flops / run.back());
    share_read.push_back(read.back() / read_limit.back());
    share_multiply.push_back(multiply_limit.back() > 0.0 ? multiply.back() / multiply_limit.back() : 0.0);
    share_matrix.push_back(matrix_limit.back() > 0.0 ? multiply.back() / matrix_limit.back() : 0.0);
  }
  result.run_seconds = spread_of(run);
  result.plan_seconds = spread_of(plan);
  result.read_rate = spread_of(read);
  result.multiply_rate = spread_of(multiply);
  result.read_limit = spread_of(read_limit);
  result.multiply_limit = spread_of(multiply_limit);
  result.share_of_read = spread_of(share_read);
  result.share_of_multiply = spread_of(share_multiply);
  result.matrix_limit = spread_of(matrix_limit);
  result.share_of_matrix = spread_of(share_matrix);
  return result;
}

}  // namespace folio::cli
