// FlashInfer's and FlashAttention's backends on a GPU: captured graphs against eager steps, shared prefixes, zeros, and
// what is refused there. That steps are right is tests/backends/batches_cuda_test.cc's business.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "device_array.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"
#include "folio/distributed.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"
#include "replayed_steps.hpp"

namespace folio::cuda_test {
namespace {

using ::testing::HasSubstr;

template <typename Side>
class BackendsOnGpu : public CudaTest {
 protected:
  static constexpr bool kUniform = std::is_same_v<Side, FlashInferSide>;

  /// Captured once for every number of tokens, replayed after later builds: the bits of eager steps.
  static void expect_replays_equal_eager_steps(Determinism determinism, int replays, bool block_tables = false) {
    const BackendModel<Side> model;
    DeviceLayers layers;
    const auto make = [&](DecodeGraphMode graphs) {
      EngineConfig engine = DeviceLayers::engine(graphs, determinism);
      if (block_tables) engine.use_block_table_kernels = true;
      return model.make(engine, Side::options(graphs));
    };
    auto captured = make(DecodeGraphMode::kFull);
    auto eager = make(DecodeGraphMode::kNone);
    const TestStream stream;
    std::map<int32_t, CapturedGraph> graphs;
    for (int i = 0; i < replays; ++i) {
      StepRequests requests = random_requests(layers.random, kUniform);
      const int32_t tokens = pad(requests, kUniform);
      const CommonAttentionMetadata batch = layers.set(requests, tokens);
      layers.out.fill(0xff);
      const auto metadata = Side::build(captured, 0, batch, stream.get());
      if (graphs.count(tokens) == 0) {
        graphs.try_emplace(tokens, stream, [&] { model.forward(layers, metadata, stream.get()); });
      }
      graphs.at(tokens).launch(stream);
      stream.wait();
      const Bits replayed = layers.out.get();
      layers.out.fill(0xff);
      model.forward(layers, Side::build(eager, 0, batch, stream.get()), stream.get());
      stream.wait();
      ASSERT_TRUE(replayed == layers.out.get()) << "replay " << i << " of " << tokens << " tokens";
    }
    EXPECT_GT(graphs.size(), 1u);
  }
};

using Sides = testing::Types<FlashInferSide, FlashAttentionSide>;
struct SideNames {
  template <typename Side>
  static std::string GetName(int) {
    return std::is_same_v<Side, FlashInferSide> ? "FlashInfer" : "FlashAttention";
  }
};
TYPED_TEST_SUITE(BackendsOnGpu, Sides, SideNames);

TYPED_TEST(BackendsOnGpu, AThousandReplaysEqualEagerSteps) {
  TestFixture::expect_replays_equal_eager_steps(Determinism::kBatchInvariant, repeats(1000));
}

using FlashInferOnGpu = BackendsOnGpu<FlashInferSide>;

/// Kernels that take block tables: `build` makes the plans that captured layers read.
TEST_F(FlashInferOnGpu, AThousandReplaysOverBlockTablesEqualEagerSteps) {
  expect_replays_equal_eager_steps(Determinism::kBatchInvariant, repeats(1000), /*block_tables=*/true);
}

/// Few enough to be watched by compute-sanitizer.
TYPED_TEST(BackendsOnGpu, AFewReplaysEqualEagerSteps) {
  TestFixture::expect_replays_equal_eager_steps(Determinism::kBatchInvariant, 6);
}

/// Values are means of numbers up to 1, rounded to bfloat16 on both sides.
TYPED_TEST(BackendsOnGpu, SharedPrefixesGiveTheSame) {
  const BackendModel<TypeParam> model;
  DeviceLayers layers;
  auto builder = model.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
  const TestStream stream;
  const StepRequests requests{{300, 420, 700, 257}, {1, 1, 30, 1}};
  const CommonAttentionMetadata batch = layers.set(requests, requests.num_tokens(), /*shared_pages=*/16);
  const auto output = [&](int32_t common_prefix_len) {
    layers.out.fill(0xff);
    const auto metadata = TypeParam::build(builder, common_prefix_len, batch, stream.get());
    EXPECT_EQ(metadata.use_cascade, common_prefix_len > 0);
    model.forward(layers, metadata, stream.get());
    stream.wait();
    return layers.out.get();
  };
  const Bits alone = output(0);
  const Bits shared = output(256);
  const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
  for (size_t layer = 0; layer < DeviceLayers::kLayers; ++layer) {
    const auto of_layer = [layer](const Bits& bits) {
      return Bits(bits.begin() + static_cast<std::ptrdiff_t>(layer * DeviceLayers::kQ),
                  bits.begin() + static_cast<std::ptrdiff_t>((layer + 1) * DeviceLayers::kQ));
    };
    EXPECT_LE(furthest(of_layer(alone), of_layer(shared), count), 0x1p-6f) << "layer " << layer;
  }
}

TYPED_TEST(BackendsOnGpu, WithoutMetadataOutputsAreZeros) {
  const BackendModel<TypeParam> model;
  DeviceLayers layers;
  layers.out.fill(0xff);
  const TestStream stream;
  model.impls[0].forward({}, layers.query(0), layers.key(0), layers.value(0), TypeParam::cache(layers.cache.data()),
                         nullptr, layers.output(0), {}, stream.get());
  stream.wait();
  const Bits values = layers.out.get();
  EXPECT_EQ(std::count(values.begin(), values.begin() + DeviceLayers::kQ, 0), std::ptrdiff_t{DeviceLayers::kQ});
  EXPECT_EQ(std::count(values.begin() + DeviceLayers::kQ, values.end(), 0xffff), std::ptrdiff_t{DeviceLayers::kQ});
}

TYPED_TEST(BackendsOnGpu, RefuseWhatTheyDoNotOfferThere) {
  const BackendModel<TypeParam> model;
  const auto made = [&](const std::function<void(EngineConfig&, typename TypeParam::Options&)>& change) {
    return refusal([&] {
      EngineConfig engine = DeviceLayers::engine(DecodeGraphMode::kNone, Determinism::kRunToRun);
      typename TypeParam::Options options;
      change(engine, options);
      model.make(engine, options);
    });
  };
  if constexpr (std::is_same_v<TypeParam, FlashAttentionSide>) {
    EXPECT_THAT(made([](auto& engine, auto&) { engine.use_block_table_kernels = true; }), HasSubstr("block"));
  }
  const auto groups = distributed::make_thread_groups(2);
  EXPECT_THAT(made([&](auto& engine, auto&) {
                engine.parallel.decode_context_parallel_size = 2;
                engine.parallel.dcp_group = groups[0].get();
              }),
              HasSubstr("lie in another memory"));

  DeviceLayers layers;
  const StepRequests requests{{30, 20}, {1, 1}};
  CommonAttentionMetadata batch = layers.set(requests, 2);
  batch.block_table_host = {};
  typename TypeParam::Options discovering;
  discovering.cascade = CascadeMode::kAuto;
  auto finder = model.make(DeviceLayers::engine(DecodeGraphMode::kNone, Determinism::kRunToRun), discovering);
  EXPECT_THAT(refusal([&] { TypeParam::build(finder, 0, batch, {}); }), HasSubstr("block_table_host has 0 rows"));
  auto builder = model.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
  CommonAttentionMetadata wrong = batch;
  wrong.seq_lens_host = {};
  EXPECT_THAT(refusal([&] { TypeParam::build(builder, 0, wrong, {}); }), HasSubstr("seq_lens_host has 0 entries"));
  wrong = batch;
  wrong.where = Where::kHost;
  EXPECT_THAT(refusal([&] { TypeParam::build(builder, 0, wrong, {}); }),
              HasSubstr("the batch's arrays are on the host"));
}

/// Pages are gathered on the device, in an order that FlashInfer's `plan` takes: a wrapper given them computes what the
/// layer does.
TEST_F(CudaTest, CsrArraysFeedAWrapper) {
  BackendModel<FlashInferSide> model;
  DeviceLayers layers;
  auto builder = model.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
  const TestStream stream;
  const StepRequests requests{{300, 420, 700, 257}, {1, 1, 30, 9}};
  const CommonAttentionMetadata batch = layers.set(requests, requests.num_tokens());
  const FlashInferMetadata metadata = builder.build(0, batch, stream.get());
  layers.out.fill(0xff);
  model.forward(layers, metadata, stream.get());
  stream.wait();
  const Bits expected = layers.out.get();

  const PagedKvArrays arrays = builder.paged_kv_arrays(metadata, stream.get());
  WrapperPlanOptions options;
  options.num_qo_heads = DeviceLayers::kHeads;
  options.num_kv_heads = DeviceLayers::kKvHeads;
  options.head_dim_qk = DeviceLayers::kDim;
  options.page_size = DeviceLayers::kPageSize;
  options.causal = true;
  options.sm_scale = 0.125f;
  options.window_left = 37;
  options.sinks = true;
  options.q_data_type = DType::kBFloat16;
  BatchPrefillWithPagedKVCacheWrapper wrapper(model.context);
  wrapper.plan(layers.cu_q_host, {arrays.indptr, arrays.indices, arrays.last_page_len, Where::kDevice}, options, {},
               stream.get());
  const DeviceArray<float> sinks(std::vector<float>(model.impls[1].sinks().begin(), model.impls[1].sinks().end()));
  WrapperRunArgs args;
  args.sinks = sinks.data();
  layers.out.fill(0xff);
  ConstTensorView query = layers.query(1);
  TensorView output = layers.output(1);
  query.shape[0] = output.shape[0] = requests.num_tokens();
  const TensorView cache = FlashInferSide::cache(layers.cache.data() + DeviceLayers::kCache);
  wrapper.run(query, WrapperKvCache(cache), output, args, stream.get());
  stream.wait();
  const Bits actual = layers.out.get();
  const auto first = static_cast<std::ptrdiff_t>(DeviceLayers::kQ);
  const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
  EXPECT_LE(furthest(Bits(expected.begin() + first, expected.end()), Bits(actual.begin() + first, actual.end()), count),
            0x1p-6f);
}

bool kernels_write_fp8() {
  AttentionConfig config;
  config.num_q_heads = DeviceLayers::kHeads;
  config.num_kv_heads = DeviceLayers::kKvHeads;
  config.head_dim_qk = config.head_dim_v = DeviceLayers::kDim;
  config.out = DType::kFloat8E4M3;
  const std::vector<KernelAnswer> answers = explain(Context::cuda(0), config);
  return std::ranges::any_of(answers, [](const KernelAnswer& answer) { return answer.refusal.empty(); });
}

/// Dense tables without a plan to hand over give what planned kernels give, and fp8 outputs are those divided by the
/// scale and rounded.
TEST_F(CudaTest, BlockTablesAndFp8OutputsGiveTheSame) {
  const BackendModel<FlashInferSide> model;
  DeviceLayers layers;
  auto planned = model.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
  EngineConfig engine = DeviceLayers::engine(DecodeGraphMode::kNone, Determinism::kRunToRun);
  engine.use_block_table_kernels = true;
  auto with_tables = model.make(engine, {});
  const TestStream stream;
  const StepRequests requests{{300, 420, 700, 257}, {1, 1, 30, 9}};
  const CommonAttentionMetadata batch = layers.set(requests, requests.num_tokens());
  const auto output = [&](FlashInferMetadataBuilder& builder) {
    layers.out.fill(0xff);
    const FlashInferMetadata metadata = builder.build(0, batch, stream.get());
    model.forward(layers, metadata, stream.get());
    stream.wait();
    return layers.out.get();
  };
  const Bits expected = output(planned);
  const Bits actual = output(with_tables);
  const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
  for (size_t layer = 0; layer < DeviceLayers::kLayers; ++layer) {
    const auto first = static_cast<std::ptrdiff_t>(layer * DeviceLayers::kQ);
    EXPECT_LE(
        furthest(Bits(expected.begin() + first, expected.end()), Bits(actual.begin() + first, actual.end()), count),
        0x1p-6f)
        << "layer " << layer;
  }
  if (!kernels_write_fp8()) return;

  const float scale = 1.0f / 256.0f;
  OutputQuantization quantization;
  quantization.scale = &scale;
  DeviceArray<uint8_t> quantised(DeviceLayers::kQ);
  quantised.fill(0xff);
  const FlashInferMetadata metadata = planned.build(0, batch, stream.get());
  model.impls[1].forward({}, layers.query(1), layers.key(1), layers.value(1),
                         FlashInferSide::cache(layers.cache.data() + DeviceLayers::kCache), &metadata,
                         TensorView(quantised.data(), DType::kFloat8E4M3,
                                    {DeviceLayers::kTokens, DeviceLayers::kHeads, DeviceLayers::kDim}),
                         quantization, stream.get());
  stream.wait();
  const std::vector<uint8_t> codes = quantised.get();
  for (size_t i = 0; i < count; ++i) {
    const float real = bfloat16_to_float(expected[DeviceLayers::kQ + i]);
    const float error = std::abs(fp8_e4m3_to_float(codes[i]) * scale - real);
    // Half a step of three bits of significand, or of the least numbers; and both computations' own roundings.
    ASSERT_LE(error, 0x1p-4f * std::abs(real) + 0x1p-10f * scale + 0x1p-6f) << i;
  }
  DeviceArray<float> device_scale(1);
  device_scale.set({scale});
  quantization.scale = device_scale.data();
  quantization.scale_where = Where::kDevice;
  quantised.fill(0xff);
  model.impls[1].forward({}, layers.query(1), layers.key(1), layers.value(1),
                         FlashInferSide::cache(layers.cache.data() + DeviceLayers::kCache), &metadata,
                         TensorView(quantised.data(), DType::kFloat8E4M3,
                                    {DeviceLayers::kTokens, DeviceLayers::kHeads, DeviceLayers::kDim}),
                         quantization, stream.get());
  stream.wait();
  EXPECT_EQ(quantised.get(), codes) << "a scale in device memory is the same scale";
}

/// The vLLM profiles prefill over 16-bit copies of fp8 pages; the native one reads the pages.
TEST_F(CudaTest, CopiesOfFp8PagesGiveWhatThePagesGive) {
  if (!kernels_write_fp8()) GTEST_SKIP() << "no kernel here takes fp8 caches";
  DeviceLayers layers;
  std::vector<uint8_t> codes(DeviceLayers::kCache);
  std::uniform_real_distribution<float> uniform(-200.0f, 200.0f);
  for (uint8_t& code : codes) code = float_to_fp8_e4m3(uniform(layers.random));
  const DeviceArray<uint8_t> pages(codes);
  const Context context = Context::cuda(0);
  DispatchFacts facts;
  facts.profile = BackendProfile::kVllm2025_12;
  facts.device = {Platform::kCuda, DeviceCapability{10, 0}};
  facts.has_flashinfer_cubin = true;
  facts.has_module = [](std::string_view) { return true; };
  facts.use_block_table_kernels = true;
  const StepRequests requests{{300, 420, 700, 257}, {1, 1, 30, 9}};
  const CommonAttentionMetadata batch = layers.set(requests, requests.num_tokens());
  const TestStream stream;
  const auto output = [&](BackendProfile profile) {
    EngineConfig engine = DeviceLayers::engine(DecodeGraphMode::kNone, Determinism::kRunToRun);
    engine.cache.cache_dtype = "fp8";
    engine.cache.layout = KvCacheLayout::kHnd;  // what the profile requires on such a device
    engine.speculative.reset();
    auto config = DeviceLayers::layer<FlashInferLayerConfig>(1);
    config.kv_cache_dtype = "fp8";
    config.profile = profile;
    FlashInferOptions options;
    options.profile = profile;
    if (profile != BackendProfile::kNative) {
      options.dispatch = KernelDispatch(facts);
      config.dispatch = options.dispatch;
      config.disable_q_quantization = options.disable_q_quantization = true;
      engine.use_block_table_kernels = true;
    }
    const FlashInferImpl impl(context, config);
    const std::vector<AttentionLayer<FlashInferImpl>> named{{"layer", &impl}};
    AttentionSpec spec = DeviceLayers::spec();
    spec.dtype = DType::kFloat8E4M3;
    FlashInferMetadataBuilder builder(context, spec, named, engine, options);
    const FlashInferMetadata metadata = builder.build(0, batch, stream.get());
    EXPECT_EQ(metadata.prefill_use_trtllm, profile != BackendProfile::kNative);
    AttentionLayerScales scales;
    scales.k.value = scales.v.value = 1.0f / 256.0f;
    const TensorView cache = FlashInferBackend::kv_cache_tensor(
        pages.data(), DType::kFloat8E4M3, FlashInferSide::cache(nullptr).shape, KvCacheLayout::kHnd);
    layers.out.fill(0xff);
    impl.forward(scales, layers.query(1), layers.key(1), layers.value(1), cache, &metadata, layers.output(1), {},
                 stream.get());
    stream.wait();
    const Bits all = layers.out.get();
    return Bits(all.begin() + DeviceLayers::kQ, all.end());
  };
  const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
  EXPECT_LE(furthest(output(BackendProfile::kNative), output(BackendProfile::kVllm2025_12), count), 0x1p-6f);
}

/// PyTorch captures so; another thread's layers, builders and growing steps must not make its capture end in an error.
TEST_F(CudaTest, CaptureInGlobalMode_SurvivesBackends) {
  DeviceLayers layers;
  const BackendModel<FlashInferSide> model;
  const CommonAttentionMetadata batch = layers.set({{50, 20}, {1, 1}}, 2);
  const TestStream stream;
  const TestStream captured;
  const auto serve = [&] {
    const BackendModel<FlashInferSide> another(model.context);
    auto builder = another.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
    another.forward(layers, builder.build(0, batch, stream.get()), stream.get());
    synchronize(model.context, stream.get());
  };
  serve();  // loads the kernels
  check(cudaStreamBeginCapture(captured.native(), cudaStreamCaptureModeGlobal));
  EXPECT_NO_THROW(serve());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(captured.native(), &graph), cudaSuccess);
  if (graph != nullptr) check(cudaGraphDestroy(graph));
  static_cast<void>(cudaGetLastError());
}

TEST_F(CudaTest, FlashAttentionRefusesStepsInFlightOfGraphs) {
  const BackendModel<FlashAttentionSide> model;
  const EngineConfig engine = DeviceLayers::engine(DecodeGraphMode::kFull, Determinism::kRunToRun);
  EXPECT_THAT(refusal([&] { model.make(engine, {}); }), HasSubstr("steps_in_flight is 2"));
}

/// Values that were loaded later reach graphs that were captured before.
TEST_F(CudaTest, SinksOfCapturedLayersCanBeReplaced) {
  BackendModel<FlashInferSide> model;
  DeviceLayers layers;
  auto builder = model.make(DecodeGraphMode::kFull, Determinism::kBatchInvariant);
  const TestStream stream;
  const FlashInferMetadata metadata = builder.build(0, layers.set({{50, 20}, {1, 1}}, 2), stream.get());
  layers.out.fill(0);
  const CapturedGraph graph(stream, [&] { model.forward(layers, metadata, stream.get()); });
  graph.launch(stream);
  stream.wait();
  const Bits before = layers.out.get();
  const std::vector<float> sinks(DeviceLayers::kHeads, 3.0f);
  model.impls[1].set_sinks(ConstTensorView(sinks.data(), DType::kFloat32, {DeviceLayers::kHeads}));
  graph.launch(stream);
  stream.wait();
  const Bits replayed = layers.out.get();
  EXPECT_FALSE(replayed == before);
  layers.out.fill(0);
  model.forward(layers, metadata, stream.get());
  stream.wait();
  const size_t count = size_t{2} * DeviceLayers::kHeads * DeviceLayers::kDim;
  const Bits eager = layers.out.get();
  EXPECT_TRUE(std::equal(eager.begin() + DeviceLayers::kQ, eager.begin() + DeviceLayers::kQ + count,
                         replayed.begin() + DeviceLayers::kQ));
}

}  // namespace
}  // namespace folio::cuda_test
