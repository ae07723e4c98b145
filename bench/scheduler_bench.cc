#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "folio/folio.hpp"

/// Time of one warm plan. The promise (docs/architecture.md): under 20 microseconds for 256 decode requests, 32 query
/// heads over 8 KV heads, 132 workers, whatever the lengths.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header

AttentionOp serving_op(Determinism determinism) {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim_qk = config.head_dim_v = 128;
  config.page_size = 16;
  config.determinism = determinism;
  ContextOptions one_thread;
  one_thread.num_threads = 1;
  PrepareOptions options;
  options.num_workers = 132;
  return prepare(Context::cpu(one_thread), config, options);
}

/// Requests of `q_len` new tokens over contexts of `kv_len` tokens, every fourth one of them a quarter longer.
void plan_batch(benchmark::State& state, Determinism determinism, int32_t requests, int32_t q_len, int32_t kv_len) {
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < requests; ++r) {
    cu_q.push_back(cu_q.back() + q_len);
    lengths.push_back(r % 4 == 0 ? kv_len + kv_len / 4 : kv_len);
  }
  KvSegment segment;
  segment.kv_len = lengths.data();
  BatchView batch;
  batch.num_requests = requests;
  batch.num_tokens = cu_q.back();
  batch.cu_q = cu_q.data();
  batch.segments = {&segment, 1};
  const AttentionOp op = serving_op(determinism);
  PlanBuffer buffer = make_plan_buffer(op);
  for (auto _ : state) benchmark::DoNotOptimize(plan(op, batch, buffer));
  state.counters["work_tiles"] = summary(plan(op, batch, buffer)).num_work_tiles;
}

void BM_Decode(benchmark::State& state) {
  plan_batch(state, Determinism::kRunToRun, 256, 1, static_cast<int32_t>(state.range(0)));
}
BENCHMARK(BM_Decode)->Arg(100)->Arg(1000)->Arg(4096)->Arg(131072)->Arg(1 << 20)->Unit(benchmark::kMicrosecond);

/// Fixed splits of 2048 tokens: as many work tiles as splits.
void BM_DecodeBatchInvariant(benchmark::State& state) {
  plan_batch(state, Determinism::kBatchInvariant, 256, 1, static_cast<int32_t>(state.range(0)));
}
BENCHMARK(BM_DecodeBatchInvariant)->Arg(1000)->Arg(4096)->Arg(32768)->Unit(benchmark::kMicrosecond);

void BM_Prefill(benchmark::State& state) {
  plan_batch(state, Determinism::kRunToRun, 8, 1024, static_cast<int32_t>(state.range(0)));
}
BENCHMARK(BM_Prefill)->Arg(1024)->Arg(131072)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
