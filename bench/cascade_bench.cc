#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "folio/folio.hpp"

/// What a cascade costs to find and what it saves: decodes of Llama-3-8B's heads in bfloat16, with 512 keys of their
/// own behind `prefix` shared ones.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr int32_t kPageSize = 16;
constexpr int32_t kOwnPages = 32;

AttentionConfig llama() {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim_qk = config.head_dim_v = 128;
  config.page_size = kPageSize;
  return config;
}

struct Decodes {
  Decodes(int32_t requests, int32_t prefix, bool shared = true) {
    const int32_t prefix_pages = prefix / kPageSize;
    const int32_t columns = prefix_pages + kOwnPages;
    num_pages = shared ? prefix_pages : 0;
    for (int32_t r = 0; r < requests; ++r) {
      for (int32_t page = 0; page < columns; ++page) {
        table.push_back(shared && page < prefix_pages ? page : num_pages++);
      }
      cu_q.push_back(r + 1);
      kv_len.push_back(columns * kPageSize);
    }
    batch = {requests, cu_q.data(), kv_len.data(), dense_table(table, requests, columns)};
  }
  std::vector<int32_t> cu_q{0}, kv_len, table;
  int32_t num_pages = 0;
  CascadeBatch batch;
};

/// Finding and choosing, once a step: 256 requests.
void discover(benchmark::State& state, bool shared) {
  const Decodes decodes(256, static_cast<int32_t>(state.range(0)), shared);
  CascadePlanner planner(prepare(Context::cpu(), llama()));
  for (auto _ : state) benchmark::DoNotOptimize(&planner.discover(decodes.batch));
  state.counters["levels"] = planner.discover(decodes.batch).num_levels();
}
void BM_DiscoverShared(benchmark::State& state) {
  discover(state, true);
}
void BM_DiscoverNothing(benchmark::State& state) {
  discover(state, false);
}
BENCHMARK(BM_DiscoverShared)->Arg(512)->Arg(8192)->Arg(131072)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_DiscoverNothing)->Arg(512)->Arg(8192)->Unit(benchmark::kMicrosecond);

/// One layer's attention: how = 0 without a cascade, 1 with one whatever it costs, 2 as the costs decide.
void BM_Attention(benchmark::State& state) {
  const Decodes decodes(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)));
  const auto how = state.range(2);
  const Context context = Context::cpu();
  const AttentionOp op = prepare(context, llama());
  CascadeCosts costs = cascade_costs(op);
  if (how == 1) costs.q_row_bytes = costs.partial_row_bytes = 0;
  CascadePlanner planner(costs, how == 0 ? 0 : 1);
  const Cascade& cascade =
      how == 1 ? planner.share(decodes.batch, static_cast<int32_t>(state.range(1))) : planner.discover(decodes.batch);
  BatchView view;
  view.num_requests = view.num_tokens = decodes.batch.num_requests;
  view.cu_q = decodes.cu_q.data();
  view.segments = cascade.segments;
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan planned = plan(op, view, buffer);

  const KvCacheShape shape{decodes.num_pages, kPageSize, 8, 128, 128, DType::kBFloat16};
  std::vector<uint16_t> k(static_cast<size_t>(k_elements(shape))), v(k.size());
  std::mt19937 random(1);
  for (uint16_t& value : k) value = static_cast<uint16_t>(0x3c00 + random() % 0x400);
  for (uint16_t& value : v) value = static_cast<uint16_t>(0x3c00 + random() % 0x400);
  const auto tokens = static_cast<size_t>(view.num_tokens);
  std::vector<uint16_t> q(tokens * 32 * 128, 0x3c80), out(q.size());
  const size_t bytes = workspace_size(planned);
  std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(256, bytes + 256 - bytes % 256)), &std::free);
  std::vector<SegmentArgs> segments(cascade.segments.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    segments[s].cache = make_nhd_view(shape, k.data(), v.data());
    segments[s].table = cascade.tables[s];
  }
  AttentionArgs args;
  args.q = ConstTensorView(q.data(), DType::kBFloat16, {view.num_tokens, 32, 128});
  args.out = TensorView(out.data(), DType::kBFloat16, {view.num_tokens, 32, 128});
  args.segments = segments;
  for (auto _ : state) run(planned, args, {memory.get(), bytes});
  state.counters["levels"] = cascade.num_levels();
  state.counters["kv_MiB"] = static_cast<double>(summary(planned).kv_tokens_read * 512) / (1 << 20);
}
BENCHMARK(BM_Attention)
    ->ArgsProduct({{2, 4, 16, 64}, {16, 64, 256, 2048}, {0, 1, 2}})
    ->ArgNames({"requests", "prefix", "how"})
    ->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
