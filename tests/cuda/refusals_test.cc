#include <gmock/gmock.h>

#include <algorithm>

#include "core/expect_refused_test_util.hpp"
#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

using ::testing::HasSubstr;

AttentionConfig plain_config() {
  AttentionConfig config;
  config.num_q_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = 64;
  return config;
}

TEST_F(CudaTest, ContextSaysWhatItIs) {
  const Context context = Context::cuda(0);
  EXPECT_EQ(context.device().type, DeviceType::kCuda);
  EXPECT_GT(context.concurrency(), 1);
  folio::testing::expect_refused(
      "parallel_for on a GPU",
      [&] {
        context.parallel_for(
            1, [](void*, int64_t) noexcept {}, nullptr);
      },
      ErrorCode::kUnsupported);
  ContextOptions threads;
  threads.num_threads = 2;
  folio::testing::expect_refused("takes none of them", [&] { Context::cuda(0, threads); });
  EXPECT_EQ(recommended_kv_format(plain_config(), context).format, KvFormat::kStrided);
}

TEST_F(CudaTest, PrepareRefusesWhatNoKernelTakes) {
  const Context context = Context::cuda(0);
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, 0));
  EXPECT_EQ(prepare(context, plain_config()).kernel_name(), gpu.major == 9 ? "cuda-sm90" : "cuda-sm80");
  AttentionConfig fp8 = plain_config();
  fp8.kv = DType::kFloat8E4M3;
  EXPECT_EQ(prepare(context, fp8).kernel_name(), "cuda-sm80");
  fp8.head_dim_qk = fp8.head_dim_v = 128;
  EXPECT_EQ(prepare(context, fp8).kernel_name(), gpu.major == 9 ? "cuda-sm90" : "cuda-sm80");
  fp8.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(prepare(context, fp8).kernel_name(), "cuda-sm80");
  AttentionConfig packed = plain_config();
  packed.kv_format = KvFormat::kCpuPacked;
  folio::testing::expect_refused(
      "kv_format is cpu_packed", [&] { prepare(context, packed); }, ErrorCode::kUnsupported);
  AttentionConfig int8 = plain_config();
  int8.kv = DType::kInt8;
  folio::testing::expect_refused(
      "kv is int8", [&] { prepare(context, int8); }, ErrorCode::kUnsupported);
  AttentionConfig odd = plain_config();
  odd.head_dim_qk = 100;
  folio::testing::expect_refused(
      "multiples of 8", [&] { prepare(context, odd); }, ErrorCode::kUnsupported);
  AttentionConfig float32 = plain_config();
  float32.kv = DType::kFloat32;
  EXPECT_EQ(prepare(context, float32).kernel_name(), "cuda-plain");
  PrepareOptions fast;
  fast.force_kernel = "cuda-sm80";
  folio::testing::expect_refused(
      "fp8 and one of float16 and bfloat16; cuda-plain takes the others", [&] { prepare(context, float32, fast); },
      ErrorCode::kUnsupported);
  PrepareOptions forced;
  forced.force_kernel = "generic";
  folio::testing::expect_refused("kernels here are: cuda-sm90, cuda-sm90-mla, cuda-sm80, cuda-plain",
                                 [&] { prepare(context, plain_config(), forced); });
}

TEST_F(CudaTest, Int8CachesAreForCpus) {
  std::vector<int8_t> values(2 * 128);
  std::vector<float> scales(2 * 16);
  const KvCacheView cache = make_nhd_view({1, 16, 1, 8, 8, DType::kInt8}, values.data(), values.data() + 128,
                                          scales.data(), scales.data() + 16);
  const Context context = Context::cuda(0);
  const auto refused = [](const char* text, const auto& call) {
    folio::testing::expect_refused(text, call, ErrorCode::kUnsupported);
  };
  CacheWriteArgs args;
  args.cache = cache;
  refused("write_kv_cache of an int8 cache on a GPU", [&] { write_kv_cache(context, args); });
  refused("gather_kv of an int8 cache on a GPU", [&] { gather_kv(context, cache, {}, {}, {}, {}); });
  refused("copy_pages of an int8 cache on a GPU", [&] { copy_pages(context, cache, cache, {}, {}); });
  refused("convert_pages of an int8 cache on a GPU", [&] { convert_pages(context, cache, cache, {}, {}); });
}

TEST_F(CudaTest, DeviceLengthsNeedBounds) {
  const AttentionOp op = prepare(Context::cuda(0), plain_config());
  PlanBuffer buffer = make_plan_buffer(op);
  const DeviceArray<int32_t> cu_q(std::vector<int32_t>{0, 1});
  const DeviceArray<int32_t> kv_len(std::vector<int32_t>{5});
  KvSegment segment;
  segment.kv_len = kv_len.data();
  BatchView batch;
  batch.where = Where::kDevice;
  batch.num_requests = batch.num_tokens = batch.max_q_len = 1;
  batch.max_kv_len = 5;
  batch.cu_q = cu_q.data();
  batch.segments = {&segment, 1};
  EXPECT_THROW(plan(op, batch, buffer), Error);
}

/// A misaligned address would be an error of the device that nothing recovers from.
TEST_F(CudaTest, MisalignedAddressesAreRefused) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  std::mt19937 random(31);
  step.set(ServingStep::random_lengths(random), random);
  const AttentionPlan plan = step.enqueue(buffer, nullptr, {});
  const auto shifted = [](auto* address) {
    return reinterpret_cast<decltype(address)>(reinterpret_cast<uintptr_t>(address) + 1);
  };
  const auto expect_refusal = [&](const std::string& text, auto change) {
    folio::testing::expect_refused(text, [&] {
      ServingStep::LayerArgs layer = step.layer_args(0);
      change(layer);
      run(plan, layer.attention(), step.workspace());
    });
  };
  using Layer = ServingStep::LayerArgs;
  expect_refusal("q.data is not aligned", [&](Layer& l) { l.args.q.data = shifted(l.args.q.data); });
  expect_refusal("out.data is not aligned", [&](Layer& l) { l.args.out.data = shifted(l.args.out.data); });
  expect_refusal("lse.data is not aligned", [&](Layer& l) { l.args.lse.data = shifted(l.args.lse.data); });
  expect_refusal("table.indices is not aligned",
                 [&](Layer& l) { l.segment.table.indices = shifted(l.segment.table.indices); });
  Workspace workspace = step.workspace();
  workspace.data = shifted(workspace.data);
  folio::testing::expect_refused("aligned to 256", [&] { run(plan, step.layer_args(0).attention(), workspace); });
  check(cudaDeviceSynchronize());
}

/// An array of no elements often has no address. Lengths on the device are not known to be 0.
TEST_F(CudaTest, ATableWithoutAnAddressIsForBatchesWithoutKeys) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  std::mt19937 random(37);
  const StepLengths some = ServingStep::random_lengths(random);
  StepLengths none = some;
  std::fill(none.kv_len.begin(), none.kv_len.end(), 0);
  step.set(none, random);
  ServingStep::LayerArgs layer = step.layer_args(0);
  layer.segment.table.indices = nullptr;
  layer.segment.table.num_indices = 0;
  run(step.plan(buffer, none, {}), layer.attention(), step.workspace());
  check(cudaDeviceSynchronize());
  folio::testing::expect_refused("table.indices is null",
                                 [&] { run(step.plan(buffer, some, {}), layer.attention(), step.workspace()); });
  step.set(some, random);
  const AttentionPlan on_device = step.enqueue(buffer, nullptr, {});
  check(cudaDeviceSynchronize());
  folio::testing::expect_refused("table.indices is null", [&] { run(on_device, layer.attention(), step.workspace()); });
}

TEST_F(CudaTest, WhatIsOnTheDeviceIsNotReadOnTheHost) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  std::mt19937 random(23);
  step.set(ServingStep::random_lengths(random), random);
  const AttentionPlan plan = step.enqueue(buffer, nullptr, {});
  check(cudaDeviceSynchronize());
  folio::testing::expect_refused(
      "made on the device", [&] { summary(plan); }, ErrorCode::kUnsupported);
  folio::testing::expect_refused(
      "the plan was made on the device", [&] { validate(plan, AttentionArgs{}); }, ErrorCode::kUnsupported);
}

/// Tables are copied to the host for it.
TEST_F(CudaTest, ValidateNamesThePageThatIsWrong) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  std::mt19937 random(29);
  const StepLengths lengths = ServingStep::random_lengths(random);
  step.set(lengths, random);
  const AttentionPlan planned = step.plan(buffer, lengths, {});
  ServingStep::LayerArgs layer = step.layer_args(0);
  validate(planned, layer.attention());
  layer.segment.cache.num_pages = 1;
  folio::testing::expect_refused("of the table is page", [&] { validate(planned, layer.attention()); });
  layer.segment.cache.num_pages = ServingStep::kPages;
  const DeviceArray<int32_t> indptr(std::vector<int32_t>(ServingStep::kRequests + 1));
  layer.segment.table.kind = PageTableKind::kCsr;
  layer.segment.table.indptr = indptr.data();
  EXPECT_THROW(validate(planned, layer.attention()), Error) << "rows without pages";
}

}  // namespace
}  // namespace folio::cuda_test
