#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <vector>

#include "device_array.hpp"
#include "folio/backends/cascade.hpp"

namespace folio::cuda_test {
namespace {

using backends::CascadeMode;
using backends::StepCascade;

constexpr int32_t kRequests = 40, kColumns = 72, kSharedPages = 64, kPageSize = 16;

/// Requests of one token behind the same first pages.
struct Sharers {
  Sharers() {
    std::iota(starts.begin(), starts.end(), 0);
    for (int32_t r = 0; r < kRequests; ++r) {
      for (int32_t page = 0; page < kColumns; ++page) table.push_back(page < kSharedPages ? page : 100 * r + page);
    }
    on_gpu.set(table);
    batch.num_requests = kRequests;
    batch.cu_q = starts.data();
    batch.kv_len = lens.data();
    batch.table = dense_table(table, kRequests, kColumns);
    batch.device_indices = on_gpu.data();
  }
  std::vector<int32_t> starts = std::vector<int32_t>(kRequests + 1);
  std::vector<int32_t> lens = std::vector<int32_t>(kRequests, kSharedPages* kPageSize + 20);
  std::vector<int32_t> table;
  DeviceArray<int32_t> on_gpu = DeviceArray<int32_t>(size_t{kRequests} * kColumns);
  CascadeBatch batch;
};

/// What `enqueue` puts on a stream.
size_t nodes_of(const TestStream& stream, const std::function<void()>& enqueue) {
  check(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
  enqueue();
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream.native(), &graph));
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count));
  check(cudaGraphDestroy(graph));
  return count;
}

using CascadesOnGpu = CudaTest;

/// Where tables begin is copied once a step, whatever the rule says.
TEST_F(CascadesOnGpu, AStepIsUploadedOnce) {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim_qk = config.head_dim_v = 128;
  config.page_size = kPageSize;
  PrepareOptions options;
  options.bounds = GraphBounds{
      .max_requests = kRequests, .max_tokens = kRequests, .max_q_len = 1, .max_kv_len = 4096, .max_shared_levels = 1};
  const std::vector<AttentionOp> ops{prepare(Context::cuda(0), config, options)};
  const Sharers sharers;
  const TestStream stream;
  for (const CascadeMode mode : {CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    StepCascade cascade(ops, {.mode = mode, .max_levels = 1});
    for (const int32_t prefix : {0, kSharedPages * kPageSize}) {
      int32_t levels = 0;
      const auto plan = [&] { levels = cascade.plan(prefix, sharers.batch, stream.get()).num_levels(); };
      EXPECT_EQ(nodes_of(stream, plan), 1u) << to_string(mode) << ", prefix " << prefix;
      EXPECT_EQ(levels, mode == CascadeMode::kAuto || prefix > 0 ? 1 : 0) << to_string(mode) << ", prefix " << prefix;
    }
  }
}

}  // namespace
}  // namespace folio::cuda_test
