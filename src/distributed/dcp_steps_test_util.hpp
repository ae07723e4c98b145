#pragma once

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.hpp"
#include "distributed/dcp_case_test_util.hpp"
#include "distributed/device_memory_test_util.hpp"
#include "distributed/enqueued_group_test_util.hpp"
#include "distributed/expectations_test_util.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"

/// Steps of DcpAttention on a GPU, as tests make them: one rank's arguments in its memory, streams, captures.
namespace folio::distributed::testing {

using cuda_test::CapturedGraph;
using cuda_test::check;
using cuda_test::TestStream;

/// Keeps a stream from going on until it is opened.
class Gate {
 public:
  explicit Gate(const TestStream& stream) {
    check(cudaLaunchHostFunc(
        stream.native(), [](void* self) { static_cast<Gate*>(self)->pass(); }, this));
  }
  /// Whether nobody has gone through yet: the gate opens by itself when a test has waited too long.
  bool open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
    return !passed_;
  }

 private:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return open_; });
    passed_ = true;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false, passed_ = false;
};

/// One rank's arguments in device memory that has room for the case it was made for, and holds any smaller one.
class DeviceRank {
 public:
  DeviceRank(DcpCase& most, int32_t rank)
      : rank_(rank),
        args_(most.args(rank)),
        columns_(most.ranks[static_cast<size_t>(rank)].columns),
        q_(of(most).q.size()),
        k_(of(most).k.size()),
        v_(of(most).v.size()),
        cache_(of(most).cache.size()),
        table_(of(most).table.size() * sizeof(int32_t)),
        slopes_(of(most).slopes.size() * sizeof(float) * static_cast<size_t>(most.setup.world)),
        sinks_(of(most).sinks.size() * sizeof(float)),
        q_scales_(most.setup.q_scales.size() * sizeof(float)),
        out_(of(most).out.size()),
        lse_(of(most).lse.size() * sizeof(float)),
        cu_q_(most.cu_q.size() * sizeof(int32_t)),
        seq_lens_(most.seq_lens.size() * sizeof(int32_t)) {
    const auto move = [](auto*& data, const DeviceMemory& memory) {
      using Pointer = std::remove_reference_t<decltype(data)>;
      if (data != nullptr) data = reinterpret_cast<Pointer>(memory.data());
    };
    args_.q.data = q_.data();
    if (args_.k.data != nullptr) args_.k.data = k_.data();
    if (args_.v.data != nullptr) args_.v.data = v_.data();
    const auto* const cache = of(most).cache.data();
    args_.cache.v = cache_.data() + (static_cast<const std::byte*>(args_.cache.v) - cache);
    args_.cache.k = cache_.data() + (static_cast<const std::byte*>(args_.cache.k) - cache);
    args_.table.indices = reinterpret_cast<const int32_t*>(table_.data());
    move(args_.alibi_slopes, slopes_);
    move(args_.sinks, sinks_);
    move(args_.q_scale.data, q_scales_);
    args_.out.data = out_.data();
    args_.lse.data = reinterpret_cast<float*>(lse_.data());
  }

  /// Copies a case's data here. Its caches have the pages of the case that this was made for, or fewer.
  void load(DcpCase& whole) {
    const DcpCase::Rank& rank = of(whole);
    q_.set(rank.q);
    k_.set(rank.k);
    v_.set(rank.v);
    const size_t half = rank.cache.size() * static_cast<size_t>(whole.setup.dim_qk) /
                        static_cast<size_t>(whole.setup.dim_qk + whole.setup.dim_v);
    check(cudaMemcpy(const_cast<void*>(args_.cache.k), rank.cache.data(), half, cudaMemcpyHostToDevice));
    check(cudaMemcpy(const_cast<void*>(args_.cache.v), rank.cache.data() + half, rank.cache.size() - half,
                     cudaMemcpyHostToDevice));
    std::vector<int32_t> table(whole.setup.requests.size() * static_cast<size_t>(columns_), 0);
    for (size_t r = 0; r < whole.setup.requests.size(); ++r) {
      std::copy_n(rank.table.begin() + static_cast<std::ptrdiff_t>(r) * rank.columns, rank.columns,
                  table.begin() + static_cast<std::ptrdiff_t>(r) * columns_);
    }
    table_.set(table);
    slopes_.set(rank.slopes);
    sinks_.set(rank.sinks);
    q_scales_.set(whole.setup.q_scales);
    cu_q_.set(whole.cu_q);
    seq_lens_.set(whole.seq_lens);
  }

  /// Copies the results of the case's tokens into it, and says what the kernels rounded p to.
  void store(DcpCase& whole, const DcpAttention& attention) const {
    static_cast<void>(whole.args(rank_));  // clears the results
    DcpCase::Rank& rank = whole.ranks[static_cast<size_t>(rank_)];
    const auto rows = static_cast<size_t>(whole.tokens() * whole.out_heads());
    out_.get(rank.out.data(), rows * static_cast<size_t>(whole.setup.dim_v * size_of(whole.setup.model)));
    lse_.get(rank.lse.data(), rows * sizeof(float));
    rank.p_dtype = attention.cached_op().p_dtype() == DType::kFloat32 ? attention.fresh_op().p_dtype()
                                                                      : attention.cached_op().p_dtype();
  }

  DcpArgs& args() { return args_; }

  DcpBatch device_batch(const DcpCase& whole, int32_t num_tokens) const {
    DcpBatch batch = whole.batch();
    batch.where = Where::kDevice;
    batch.cu_q = reinterpret_cast<const int32_t*>(cu_q_.data());
    batch.seq_lens = reinterpret_cast<const int32_t*>(seq_lens_.data());
    batch.num_tokens = num_tokens;
    return batch;
  }
  void set_seq_lens(const std::vector<int32_t>& lens) { seq_lens_.set(lens); }
  void set_q_scales(const std::vector<float>& scales) { q_scales_.set(scales); }

 private:
  DcpCase::Rank& of(DcpCase& whole) const { return whole.ranks[static_cast<size_t>(rank_)]; }

  int32_t rank_;
  DcpArgs args_;
  int32_t columns_;
  DeviceMemory q_, k_, v_, cache_, table_, slopes_, sinks_, q_scales_, out_, lse_, cu_q_, seq_lens_;
};

inline DcpSetup small_setup() {
  DcpSetup setup;
  setup.model = setup.cache = DType::kBFloat16;
  setup.requests = {{37, 1}, {20, 3}, {9, 9}};
  return setup;
}

inline constexpr GraphBounds kBounds{4, 32, 16, 64, 0};

/// One rank of a case: its attention, arguments and workspace.
struct RankStep {
  RankStep(DcpCase& most, EnqueuedGroup& group, const Context& context, const DcpConfig& config)
      : attention(context, group, config), memory(most, group.rank()) {
    memory.load(most);
    group.meet();
  }
  /// A workspace that is large enough from here on.
  Workspace workspace(const DcpPlan& plan) {
    scratch = std::make_unique<DeviceMemory>(attention.workspace_size(plan));
    return scratch->workspace();
  }
  TestStream stream;
  DcpAttention attention;
  DeviceRank memory;
  std::unique_ptr<DeviceMemory> scratch;
};

}  // namespace folio::distributed::testing
