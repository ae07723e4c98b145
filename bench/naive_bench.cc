#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "folio/folio.hpp"

/// What a kernel is worth beside the loops one would write first: causal prefill of one request, 8 q heads on 2 KV
/// heads of 128 dims, one thread. The naive loops keep float32 keys contiguous (no pages, nothing converted) and are
/// compiled with the same flags.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr int32_t kTokens = 512;
constexpr int32_t kHeads = 8;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kDim = 128;
constexpr int32_t kPage = 16;

std::vector<float> random_values(size_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

void report(benchmark::State& state) {
  const double flops = 2.0 * 2.0 * kDim * kHeads * (0.5 * kTokens * (kTokens + 1));
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void naive_loops(benchmark::State& state) {
  const std::vector<float> q = random_values(size_t{kTokens} * kHeads * kDim);
  const std::vector<float> k = random_values(size_t{kTokens} * kKvHeads * kDim);
  const std::vector<float>& v = k;
  std::vector<float> out(q.size());
  std::vector<float> p(kTokens);
  const float scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  for (auto _ : state) {
    for (int32_t t = 0; t < kTokens; ++t) {
      for (int32_t h = 0; h < kHeads; ++h) {
        const float* query = &q[static_cast<size_t>((t * kHeads + h) * kDim)];
        const int32_t kv_head = h / (kHeads / kKvHeads);
        float row_max = -INFINITY;
        for (int32_t j = 0; j <= t; ++j) {
          float sum = 0.0f;
          for (int32_t d = 0; d < kDim; ++d)
            sum += query[d] * k[static_cast<size_t>((j * kKvHeads + kv_head) * kDim + d)];
          p[static_cast<size_t>(j)] = sum * scale;
          row_max = std::fmax(row_max, sum * scale);
        }
        float row_sum = 0.0f;
        for (int32_t j = 0; j <= t; ++j) {
          p[static_cast<size_t>(j)] = std::exp(p[static_cast<size_t>(j)] - row_max);
          row_sum += p[static_cast<size_t>(j)];
        }
        for (int32_t d = 0; d < kDim; ++d) {
          float sum = 0.0f;
          for (int32_t j = 0; j <= t; ++j) {
            sum += p[static_cast<size_t>(j)] * v[static_cast<size_t>((j * kKvHeads + kv_head) * kDim + d)];
          }
          out[static_cast<size_t>((t * kHeads + h) * kDim + d)] = sum / row_sum;
        }
      }
    }
    benchmark::DoNotOptimize(out.data());
  }
  report(state);
}
BENCHMARK(naive_loops)->Unit(benchmark::kMillisecond);

void folio_run(benchmark::State& state, const char* kernel, DType dtype) {
  AttentionConfig config;
  config.num_q_heads = kHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.q = config.kv = dtype;
  config.page_size = kPage;
  ContextOptions options;
  options.num_threads = 1;
  PrepareOptions prepare_options;
  prepare_options.force_kernel = kernel;
  try {
    const AttentionOp op = prepare(Context::cpu(options), config, prepare_options);
    const auto element = static_cast<size_t>(size_of(dtype));
    const std::vector<float> values = random_values(size_t{kTokens} * kHeads * kDim);
    std::vector<unsigned char> q(values.size() * element);
    std::vector<unsigned char> k(size_t{kTokens} * kKvHeads * kDim * element);
    for (size_t i = 0; i < values.size(); ++i) store_from_float(q.data(), dtype, static_cast<int64_t>(i), values[i]);
    for (size_t i = 0; i < k.size() / element; ++i)
      store_from_float(k.data(), dtype, static_cast<int64_t>(i), values[i]);
    std::vector<unsigned char> out(q.size());
    std::vector<int32_t> pages(kTokens / kPage);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    const std::vector<int32_t> cu_q{0, kTokens};
    const std::vector<int32_t> page_indptr{0, static_cast<int32_t>(pages.size())};
    KvSegment segment;
    segment.kv_len = &cu_q[1];
    BatchView batch;
    batch.num_requests = 1;
    batch.num_tokens = kTokens;
    batch.cu_q = cu_q.data();
    batch.segments = {&segment, 1};
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan step = plan(op, batch, buffer);
    const KvCacheShape shape{static_cast<int64_t>(pages.size()), kPage, kKvHeads, kDim, kDim, dtype};
    SegmentArgs keys;
    keys.cache = make_nhd_view(shape, k.data(), k.data());
    keys.table = csr_table(pages, page_indptr);
    AttentionArgs args;
    args.q = ConstTensorView(q.data(), dtype, {kTokens, kHeads, kDim});
    args.out = TensorView(out.data(), dtype, {kTokens, kHeads, kDim});
    args.segments = {&keys, 1};
    const size_t bytes = workspace_size(step);
    const Workspace workspace{::operator new (bytes, std::align_val_t{256}), bytes};
    init_workspace(op, workspace);
    for (auto _ : state) run(step, args, workspace);
    ::operator delete (workspace.data, std::align_val_t{256});
    report(state);
  } catch (const Error& error) {
    state.SkipWithError(error.what());
  }
}
BENCHMARK_CAPTURE(folio_run, generic_float32, "generic", DType::kFloat32)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(folio_run, generic_v3_float32, "generic-v3", DType::kFloat32)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(folio_run, generic_v4_float32, "generic-v4", DType::kFloat32)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(folio_run, generic_v4_bfloat16, "generic-v4", DType::kBFloat16)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(folio_run, any_bfloat16, "", DType::kBFloat16)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
