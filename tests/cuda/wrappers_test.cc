// FlashInfer's wrappers on a GPU: decodes captured from a graph wrapper, and the LSE that ALiBi shifts. That their
// results are right is src/backends/flashinfer/wrappers_test.cc's business, which runs on both devices.
#include <cmath>

#include "device_array.hpp"
#include "device_layers.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"
#include "folio/page_table.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

namespace folio::cuda_test {
namespace {

using Layers = DeviceLayers;

WrapperPlanOptions plan_options(Determinism determinism) {
  WrapperPlanOptions options;
  options.num_qo_heads = Layers::kHeads;
  options.num_kv_heads = Layers::kKvHeads;
  options.head_dim_qk = Layers::kDim;
  options.page_size = Layers::kPageSize;
  options.causal = true;
  options.q_data_type = DType::kBFloat16;
  options.determinism = determinism;
  return options;
}

/// A step's pages on the host.
PagedMetadata pages_of(const Layers& layers) {
  const std::vector<int32_t> table = layers.table.get();
  return to_csr(dense_table(table, static_cast<int32_t>(layers.seq_lens_host.size()), Layers::kColumns),
                layers.seq_lens_host, Layers::kPageSize);
}

class DecodeWrapperGraph : public CudaTest, public testing::WithParamInterface<int32_t> {};

/// One capture, whatever the lengths and pages of later plans: the bits of a wrapper that plans for that step alone.
TEST_P(DecodeWrapperGraph, AThousandReplaysEqualEagerRuns) {
  const int32_t q_len = GetParam();
  const Context context = Context::cuda(0);
  const WrapperPlanOptions options = plan_options(Determinism::kBatchInvariant);
  BatchDecodeWithPagedKVCacheWrapper captured(context, KvCacheLayout::kNhd, Layers::kRequests, Layers::kPages);
  BatchDecodeWithPagedKVCacheWrapper eager(context);
  Layers layers;
  const TestStream stream;
  const WrapperKvCache cache(FlashInferSide::cache(layers.cache.data()));
  ConstTensorView query = layers.query(0);
  TensorView output = layers.output(0);
  query.shape[0] = output.shape[0] = Layers::kRequests * q_len;
  const auto run = [&](const BatchDecodeWithPagedKVCacheWrapper& wrapper) {
    wrapper.run(query, cache, output, {}, stream.get());
  };
  std::optional<CapturedGraph> graph;
  for (int i = 0; i < repeats(1000); ++i) {
    StepRequests requests;
    for (int32_t r = 0; r < Layers::kRequests; ++r) {
      requests.query_lens.push_back(q_len);
      requests.seq_lens.push_back(
          std::uniform_int_distribution<int32_t>(q_len, i % 3 == 0 ? Layers::kMaxLen : 40)(layers.random));
    }
    layers.set(requests, requests.num_tokens());
    const PagedMetadata csr = pages_of(layers);
    const DeviceArray<int32_t> device_indices(csr.indices);
    WrapperPages pages{csr.indptr, csr.indices, csr.last_page_len};
    if (i % 2 == 1) {
      pages.indices = {device_indices.data(), csr.indices.size()};
      pages.indices_where = Where::kDevice;
    }
    captured.plan(pages, options, q_len, stream.get());
    if (!graph) graph.emplace(stream, [&] { run(captured); });
    layers.out.fill(0xff);
    graph->launch(stream);
    stream.wait();
    const std::vector<uint16_t> replayed = layers.out.get();
    layers.out.fill(0xff);
    eager.plan(pages, options, q_len, stream.get());
    run(eager);
    stream.wait();
    ASSERT_TRUE(replayed == layers.out.get()) << "replay " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Tokens, DecodeWrapperGraph, testing::Values(1, 3));

/// ALiBi's LSE counts from the request's first query, which a kernel of its own makes of the attention's.
TEST_F(CudaTest, AlibiOfWrappersGivesTheCpusLse) {
  Layers layers;
  const StepRequests requests{{300, 40, 5}, {1, 7, 5}};
  layers.set(requests, requests.num_tokens());
  const PagedMetadata csr = pages_of(layers);
  WrapperPlanOptions options = plan_options(Determinism::kRunToRun);
  options.pos_encoding_mode = PosEncodingMode::kAlibi;
  const int32_t tokens = requests.num_tokens();
  const size_t rows = static_cast<size_t>(tokens) * Layers::kHeads;
  const TestStream stream;
  const auto lse_of = [&](const Context& context, uint16_t* q, uint16_t* cache, uint16_t* out, float* lse, Stream on) {
    BatchPrefillWithPagedKVCacheWrapper wrapper(context);
    wrapper.plan(layers.cu_q_host, {csr.indptr, csr.indices, csr.last_page_len}, options, {}, on);
    WrapperRunArgs args;
    args.lse = lse;
    wrapper.run(ConstTensorView(q, DType::kBFloat16, {tokens, Layers::kHeads, Layers::kDim}),
                WrapperKvCache(FlashInferSide::cache(cache)),
                TensorView(out, DType::kBFloat16, {tokens, Layers::kHeads, Layers::kDim}), args, on);
  };
  const DeviceArray<float> device_lse(rows);
  lse_of(Context::cuda(0), layers.q.data(), layers.cache.data(), layers.out.data(), device_lse.data(), stream.get());
  stream.wait();
  std::vector<uint16_t> q = layers.q.get(), cache = layers.cache.get(), out(Layers::kQ);
  std::vector<float> lse(rows);
  lse_of(Context::cpu(), q.data(), cache.data(), out.data(), lse.data(), {});
  const std::vector<float> actual = device_lse.get();
  for (size_t i = 0; i < rows; ++i) {
    // Kernels may sum probabilities that are rounded to bfloat16; a shift of up to 150 leaves what float32 holds of it.
    ASSERT_NEAR(actual[i], lse[i], 0x1p-8f + 0x1p-20f * std::abs(lse[i])) << i;
  }
}

}  // namespace
}  // namespace folio::cuda_test
