// Attention over divided queries on a GPU, every rank with a stream of its own.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "distributed/pcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

using ::testing::HasSubstr;

void require_success(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Memory of the device with a copy of the host's.
class DeviceCopy {
 public:
  DeviceCopy(const void* from, size_t bytes) {
    require_success(cudaMalloc(&data_, bytes + 256));
    require_success(cudaMemset(data_, 0xff, bytes + 256));  // NaN
    if (from != nullptr && bytes > 0) require_success(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
    require_success(cudaStreamSynchronize(nullptr));
  }
  ~DeviceCopy() { static_cast<void>(cudaFree(data_)); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// One rank's arguments, moved to the device, and its results, back from there.
class RankOnDevice {
 public:
  RankOnDevice(PcpCase& divided, int32_t rank) : rank_(divided.ranks[static_cast<size_t>(rank)]) {
    args = divided.args(rank);
    DcpCase::Rank& shared = divided.whole.ranks[static_cast<size_t>(rank)];
    args.q.data = copy(rank_.q);
    args.k.data = copy(rank_.k);
    args.v.data = copy(rank_.v);
    auto* const cache = static_cast<std::byte*>(copy(shared.cache));
    args.cache.v = cache + (static_cast<std::byte*>(args.cache.v) - static_cast<std::byte*>(args.cache.k));
    args.cache.k = cache;
    args.table.indices = static_cast<const int32_t*>(copy(shared.table));
    if (args.alibi_slopes != nullptr)
      args.alibi_slopes = static_cast<const float*>(copy(divided.whole.ranks[0].slopes));
    if (args.sinks != nullptr) args.sinks = static_cast<const float*>(copy(divided.whole.ranks[0].sinks));
    if (args.q_scale.data != nullptr) args.q_scale.data = static_cast<const float*>(copy(divided.whole.setup.q_scales));
    args.out.data = copy(rank_.out);
    args.lse.data = static_cast<float*>(copy(rank_.lse));
  }

  Workspace workspace(size_t bytes) {
    copies_.push_back(std::make_unique<DeviceCopy>(nullptr, bytes));
    return {copies_.back()->data(), bytes};
  }

  void take_results() {
    require_success(cudaMemcpy(rank_.out.data(), args.out.data, rank_.out.size(), cudaMemcpyDeviceToHost));
    require_success(
        cudaMemcpy(rank_.lse.data(), args.lse.data, rank_.lse.size() * sizeof(float), cudaMemcpyDeviceToHost));
  }

  PcpArgs args;

 private:
  template <typename T>
  void* copy(const std::vector<T>& values) {
    copies_.push_back(std::make_unique<DeviceCopy>(values.data(), values.size() * sizeof(T)));
    return copies_.back()->data();
  }

  PcpCase::Rank& rank_;
  std::vector<std::unique_ptr<DeviceCopy>> copies_;
};

ThreadGroupOptions on_gpu() {
  ThreadGroupOptions options;
  options.context = Context::cuda(0);
  return options;
}

void run_on_gpu(PcpCase& divided) {
  run_ranks(
      divided.world(),
      [&](ProcessGroup& group) {
        const Context context = Context::cuda(0);
        cudaStream_t native = nullptr;
        require_success(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking));
        const Stream stream{native};
        {
          PcpAttention attention(context, group, divided.config());
          RankOnDevice rank(divided, group.rank());
          const PcpPlan first = attention.plan(divided.batch(), stream);
          const Workspace workspace = rank.workspace(attention.workspace_size(first));
          attention.run(first, rank.args, workspace, stream);
          // A plan of the next step while the last one's layers may wait on the stream.
          attention.run(attention.plan(divided.batch(), stream), rank.args, workspace, stream);
          synchronize(context, stream);
          rank.take_results();
          if (group.rank() == 0) divided.whole.ranks[0].p_dtype = attention.fresh_op().p_dtype();
        }
        require_success(cudaStreamDestroy(native));
      },
      on_gpu());
}

std::vector<PcpSetup> gpu_setups() {
  PcpSetup plain;
  plain.whole.requests = {{5, 1}, {70, 4}, {133, 70}, {1, 1}, {100, 17}, {40, 0}};
  plain.whole.heads = 4;
  plain.whole.dim_qk = plain.whole.dim_v = 64;
  plain.whole.model = plain.whole.cache = DType::kBFloat16;
  plain.whole.interleave = 4;
  std::vector<PcpSetup> setups;
  const auto add = [&](const char* name, auto change) {
    setups.push_back(plain);
    setups.back().whole.name = name;
    change(setups.back().whole);
  };
  add("plain", [](DcpSetup&) {});
  add("three ranks, a window", [](DcpSetup& s) { s.world = 3, s.window_left = 40, s.hnd = true; });
  // Reading begins with the sixth page of each rank's row.
  add("a window behind whole pages", [](DcpSetup& s) { s.window_left = 40, s.requests = {{70, 4}, {400, 20}}; });
  add("ALiBi, sinks, soft cap", [](DcpSetup& s) { s.alibi = s.sinks = true, s.soft_cap = 2.0f; });
  add("e4m3", [](DcpSetup& s) { s.cache = DType::kFloat8E4M3, s.k_scale = 0.5f, s.v_scale = 2.0f; });
  add("new requests only", [](DcpSetup& s) { s.requests = {{3, 3}, {77, 77}}; });
  return setups;
}

class PcpAttentionOnAGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(PcpAttentionOnAGpu, EqualsTheUndividedBatch) {
  for (PcpSetup setup : gpu_setups()) {
    for (const PcpExchange exchange : {PcpExchange::kPassQ, PcpExchange::kPassKv}) {
      setup.exchange = exchange;
      PcpCase divided(setup);
      run_on_gpu(divided);
      EXPECT_EQ(divided.wrong_outputs(), "");
    }
  }
}

TEST_F(PcpAttentionOnAGpu, PlansCompareTheBatches) {
  PcpSetup setup = gpu_setups()[0], other = setup;
  other.whole.requests[1].seq_len = 71;
  run_ranks(
      2,
      [&](ProcessGroup& group) {
        PcpCase divided(group.rank() == 0 ? setup : other);
        PcpAttention attention(Context::cuda(0), group, divided.config());
        try {
          attention.plan(divided.batch());
          ADD_FAILURE() << "did not throw";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_THAT(error.what(), HasSubstr("runs another batch or configuration than rank"));
        }
      },
      on_gpu());
}

TEST_F(PcpAttentionOnAGpu, RefusesWhatItsKernelsDoNotTake) {
  PcpSetup setup = gpu_setups()[0];
  setup.whole.world = 9;
  setup.exchange = PcpExchange::kPassKv;
  const auto groups = make_thread_groups(9, on_gpu());
  try {
    PcpAttention(Context::cuda(0), *groups[0], PcpCase(setup).config());
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("kPassKv over 9 ranks"));
  }
}

}  // namespace
}  // namespace folio::distributed::testing
