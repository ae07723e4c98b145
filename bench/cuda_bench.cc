#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_timing.hpp"
#include "folio/folio.hpp"

/// What a decode step of 256 requests costs on a GPU: the host's time in `plan`, `write_kv_cache` and `run`, and the
/// GPU's beside a plain copy in the same process. Needs a GPU; prints medians.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using bench::check;
using bench::DeviceBytes;
using Clock = std::chrono::steady_clock;

constexpr int32_t kRequests = 256;
constexpr int32_t kQHeads = 32;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kPageSize = 16;
constexpr int32_t kMaxKvLen = 4096;
constexpr int32_t kRepeats = 1000;

struct Timing {
  double median = 0.0;
  double least = 0.0;
  double p99 = 0.0;
};

Timing summarise(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  const size_t n = microseconds.size();
  return {microseconds[n / 2], microseconds.front(), microseconds[n * 99 / 100]};
}

void report(const char* what, const Timing& timing) {
  std::printf("%-44s median %8.2f us  least %8.2f us  p99 %8.2f us\n", what, timing.median, timing.least, timing.p99);
}

/// Time of the call on the host. The stream is idle at every call, so that none waits for a stage.
Timing host_time(cudaStream_t stream, const std::function<void()>& call) {
  std::vector<double> times;
  for (int32_t i = 0; i < kRepeats + 50; ++i) {
    check(cudaStreamSynchronize(stream));
    const Clock::time_point begin = Clock::now();
    call();
    const std::chrono::duration<double, std::micro> elapsed = Clock::now() - begin;
    if (i >= 50) times.push_back(elapsed.count());
  }
  return summarise(std::move(times));
}

/// Time on the GPU of ten calls in a row, for one.
Timing gpu_time(cudaStream_t stream, const std::function<void()>& call) {
  constexpr int32_t kCalls = 10;
  std::vector<double> times = bench::round_times(stream, 5, 20, [&] {
    for (int32_t n = 0; n < kCalls; ++n) call();
  });
  for (double& time : times) time /= kCalls;
  return summarise(std::move(times));
}

/// 256 decodes over 1,024 to 4,096 tokens in shuffled pages, bfloat16.
struct Batch {
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> kv_len;
  std::vector<int32_t> indptr{0};
  std::vector<int32_t> indices;
  std::vector<int64_t> slots;
  int64_t tokens = 0;

  Batch() {
    std::mt19937 random(1);
    for (int32_t r = 0; r < kRequests; ++r) {
      cu_q.push_back(r + 1);
      kv_len.push_back(1024 + static_cast<int32_t>(random() % (kMaxKvLen - 1024 + 1)));
      tokens += kv_len.back();
      indptr.push_back(indptr.back() + (kv_len.back() + kPageSize - 1) / kPageSize);
    }
    for (int32_t page = 0; page < indptr.back(); ++page) indices.push_back(page);
    std::shuffle(indices.begin(), indices.end(), random);
    for (size_t r = 0; r < kRequests; ++r) {
      const int32_t last = kv_len[r] - 1;
      const int64_t page = indices[static_cast<size_t>(indptr[r] + last / kPageSize)];
      slots.push_back(page * kPageSize + last % kPageSize);
    }
  }
};

AttentionConfig decode_config() {
  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kHeadDim;
  config.page_size = kPageSize;
  return config;
}

/// `kernel`: which one, forced. `others`: cache writes and the copy too, which have nothing to do with it.
void measure(const Context& context, const std::string& kernel, bool others) {
  const AttentionConfig config = decode_config();
  PrepareOptions options;
  options.force_kernel = kernel;
  options.bounds = GraphBounds{.max_requests = kRequests,
                               .max_tokens = kRequests,
                               .max_q_len = 1,
                               .max_kv_len = kMaxKvLen,
                               .max_shared_levels = 0};
  const AttentionOp op = prepare(context, config, options);
  PlanBuffer buffer = make_plan_buffer(op);
  cudaStream_t native = nullptr;
  check(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking));
  const Stream stream{native};

  const Batch batch;
  const DeviceBytes cu_q(batch.cu_q), kv_len(batch.kv_len), indptr(batch.indptr), indices(batch.indices);
  const DeviceBytes slots(batch.slots);
  const KvCacheShape shape{.num_pages = batch.indptr.back(),
                           .page_size = kPageSize,
                           .num_kv_heads = kKvHeads,
                           .head_dim_qk = kHeadDim,
                           .head_dim_v = kHeadDim,
                           .dtype = DType::kBFloat16};
  const DeviceBytes k_cache(static_cast<size_t>(2 * k_elements(shape)));
  const DeviceBytes v_cache(static_cast<size_t>(2 * v_elements(shape)));
  const DeviceBytes q(size_t{2} * kRequests * kQHeads * kHeadDim), out(q.size());
  const DeviceBytes k_new(size_t{2} * kRequests * kKvHeads * kHeadDim), v_new(k_new.size());

  KvSegment host_segment, device_segment;
  host_segment.kv_len = batch.kv_len.data();
  device_segment.kv_len = kv_len.as<int32_t>();
  BatchView host_batch;
  host_batch.num_requests = host_batch.num_tokens = kRequests;
  host_batch.cu_q = batch.cu_q.data();
  host_batch.segments = {&host_segment, 1};
  BatchView device_batch = host_batch;
  device_batch.where = Where::kDevice;
  device_batch.max_q_len = 1;
  device_batch.max_kv_len = kMaxKvLen;
  device_batch.cu_q = cu_q.as<int32_t>();
  device_batch.segments = {&device_segment, 1};

  SegmentArgs segment;
  segment.cache = make_nhd_view(shape, k_cache.as(), v_cache.as());
  segment.table = {.kind = PageTableKind::kCsr,
                   .indices = indices.as<int32_t>(),
                   .num_indices = static_cast<int64_t>(batch.indices.size()),
                   .indptr = indptr.as<int32_t>(),
                   .row_stride = 0,
                   .first_column = 0,
                   .num_rows = kRequests};
  AttentionArgs args;
  args.q = ConstTensorView(q.as(), DType::kBFloat16, {kRequests, kQHeads, kHeadDim});
  args.out = TensorView(out.as(), DType::kBFloat16, {kRequests, kQHeads, kHeadDim});
  args.segments = {&segment, 1};
  CacheWriteArgs write;
  write.k = ConstTensorView(k_new.as(), DType::kBFloat16, {kRequests, kKvHeads, kHeadDim});
  write.v = ConstTensorView(v_new.as(), DType::kBFloat16, {kRequests, kKvHeads, kHeadDim});
  write.slot_mapping = slots.as<int64_t>();
  write.num_slots = kRequests;
  write.cache = segment.cache;
  const DeviceBytes workspace(workspace_size(op));
  init_workspace(op, {workspace.as(), workspace.size()}, stream);

  const auto plan_host = [&] { return plan(op, host_batch, buffer, stream); };
  const auto plan_device = [&] { return plan(op, device_batch, buffer, stream); };
  report("host: plan, host lengths, with upload", host_time(native, plan_host));
  report("host: plan, device lengths", host_time(native, plan_device));
  if (others) report("host: write_kv_cache", host_time(native, [&] { write_kv_cache(context, write, stream); }));
  const AttentionPlan host_plan = plan_host();
  const auto run_layer = [&] { run(host_plan, args, {workspace.as(), workspace.size()}, stream); };
  report("host: run, with what graphs need", host_time(native, run_layer));
  // Without bounds and with nothing to merge, one kernel is launched.
  AttentionConfig whole_config = config;
  whole_config.determinism = Determinism::kBatchInvariant;
  PrepareOptions no_bounds;
  no_bounds.force_kernel = kernel;
  const AttentionOp whole_op = prepare(context, whole_config, no_bounds);
  PlanBuffer whole_buffer = make_plan_buffer(whole_op);
  std::vector<int32_t> short_lens = batch.kv_len;
  for (int32_t& len : short_lens) len = std::min(len, 2048);
  BatchView short_batch = host_batch;
  KvSegment short_segment = host_segment;
  short_segment.kv_len = short_lens.data();
  short_batch.segments = {&short_segment, 1};
  const AttentionPlan whole = plan(whole_op, short_batch, whole_buffer, stream);
  if (summary(whole).num_combine_tiles == 0) {
    const DeviceBytes memory(std::max<size_t>(workspace_size(whole), 256));
    report("host: run, one kernel", host_time(native, [&] { run(whole, args, {memory.as(), memory.size()}, stream); }));
  }
  report("gpu: plan, device lengths", gpu_time(native, plan_device));
  if (others) report("gpu: write_kv_cache", gpu_time(native, [&] { write_kv_cache(context, write, stream); }));
  const AttentionPlan again = plan_host();
  const Timing layer = gpu_time(native, [&] { run(again, args, {workspace.as(), workspace.size()}, stream); });
  report("gpu: run", layer);
  check(cudaStreamSynchronize(native));
  if (!others) {
    check(cudaStreamDestroy(native));
    return;
  }

  const Timing copy = gpu_time(native, [&] {
    check(cudaMemcpyAsync(v_cache.as(), k_cache.as(), k_cache.size(), cudaMemcpyDeviceToDevice, native));
  });
  report("gpu: copy of one half of the cache", copy);
  const double kv_bytes = 4.0 * static_cast<double>(batch.tokens) * kKvHeads * kHeadDim;
  const double copied = 2.0 * static_cast<double>(k_cache.size());
  std::printf("run reads %.0f GB/s of keys and values, the copy moves %.0f GB/s: a share of %.3f\n",
              kv_bytes / layer.median / 1e3, copied / copy.median / 1e3,
              kv_bytes / layer.median / (copied / copy.median));
  check(cudaStreamDestroy(native));
}

}  // namespace

int main() {
  try {
    const Context context = Context::cuda(0);
    bool first = true;
    for (const KernelAnswer& answer : explain(context, decode_config())) {
      // cuda-plain takes milliseconds a layer: nobody waits for the host there.
      if (!answer.refusal.empty() || answer.name == "cuda-plain") continue;
      std::printf("%s\n", answer.name.c_str());
      measure(context, answer.name, std::exchange(first, false));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
