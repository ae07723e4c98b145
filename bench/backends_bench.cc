#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"

// What an engine's step costs before the first layer: the metadata of a batch of decodes, by requests and context
// length.
namespace folio::inline v0::backends {
namespace {

constexpr int32_t kPageSize = 16;

struct Decodes {
  Decodes(int32_t num_reqs, int32_t context) {
    const int32_t columns = (context + kPageSize - 1) / kPageSize;
    for (int32_t i = 0; i <= num_reqs; ++i) starts.push_back(i);
    seq_lens.assign(static_cast<size_t>(num_reqs), context);
    table.assign(static_cast<size_t>(num_reqs) * static_cast<size_t>(columns), 1);
    slots.assign(static_cast<size_t>(num_reqs), 0);
    batch.query_start_loc = starts;
    batch.seq_lens = seq_lens;
    batch.num_reqs = batch.num_actual_tokens = num_reqs;
    batch.max_query_len = 1;
    batch.max_seq_len = context;
    batch.block_table = {table.data(), num_reqs, columns, columns};
    batch.slot_mapping = slots;
  }

  std::vector<int32_t> starts, seq_lens, table;
  std::vector<int64_t> slots;
  CommonAttentionMetadata batch;
};

FlashInferMetadataBuilder make_builder(const FlashInferImpl& impl, const Context& context) {
  EngineConfig engine;
  engine.model.num_attention_heads = impl.num_heads();
  engine.model.num_kv_heads = impl.num_kv_heads();
  const AttentionSpec spec{kPageSize, impl.num_kv_heads(), impl.head_size(), DType::kBFloat16};
  const std::vector<AttentionLayer<FlashInferImpl>> layers{{"layer", &impl}};
  return FlashInferMetadataBuilder(context, spec, layers, engine);
}

/// Llama-3-8B's heads.
FlashInferImpl make_impl(const Context& context) {
  FlashInferLayerConfig layer;
  layer.num_heads = 32;
  layer.num_kv_heads = 8;
  layer.head_size = 128;
  layer.scale = 0.088388f;
  return FlashInferImpl(context, layer);
}

void Build(benchmark::State& state) {
  const Context context = Context::cpu();
  const FlashInferImpl impl = make_impl(context);
  FlashInferMetadataBuilder builder = make_builder(impl, context);
  const Decodes decodes(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)));
  for (auto _ : state) benchmark::DoNotOptimize(builder.build(0, decodes.batch));
}
BENCHMARK(Build)
    ->ArgsProduct({{1, 64, 256}, {1024, 8192, 131072}})
    ->ArgNames({"requests", "context"})
    ->Unit(benchmark::kMicrosecond);

/// The same of the FlashAttention backend, with the schedule made ahead of time and without.
void BuildFlashAttn(benchmark::State& state) {
  const Context context = Context::cpu();
  FlashAttentionLayerConfig layer;
  layer.num_heads = 32;
  layer.num_kv_heads = 8;
  layer.head_size = 128;
  layer.scale = 0.088388f;
  const FlashAttentionImpl impl(context, layer);
  EngineConfig engine;
  engine.model.num_attention_heads = 32;
  engine.model.num_kv_heads = 8;
  const AttentionSpec spec{kPageSize, 8, 128, DType::kBFloat16};
  const std::vector<AttentionLayer<FlashAttentionImpl>> layers{{"layer", &impl}};
  FlashAttentionMetadataBuilder builder(context, spec, layers, engine);
  const Decodes decodes(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)));
  const bool fast_build = state.range(2) == 0;
  for (auto _ : state) benchmark::DoNotOptimize(builder.build(0, decodes.batch, fast_build));
}
BENCHMARK(BuildFlashAttn)
    ->ArgsProduct({{1, 64, 256}, {1024, 131072}, {0, 1}})
    ->ArgNames({"requests", "context", "aot"})
    ->Unit(benchmark::kMicrosecond);

/// Apart, because only those who ask for CSR tables pay for them.
void PagedKvArraysOnRequest(benchmark::State& state) {
  const Context context = Context::cpu();
  const FlashInferImpl impl = make_impl(context);
  FlashInferMetadataBuilder builder = make_builder(impl, context);
  const Decodes decodes(256, static_cast<int32_t>(state.range(0)));
  const FlashInferMetadata metadata = builder.build(0, decodes.batch);
  for (auto _ : state) benchmark::DoNotOptimize(builder.paged_kv_arrays(metadata));
}
BENCHMARK(PagedKvArraysOnRequest)->Arg(1024)->Arg(8192)->ArgName("context")->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace folio::inline v0::backends

BENCHMARK_MAIN();
