#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

/// Holds a stream up until it is opened.
class Gate {
 public:
  void close(const TestStream& stream) { check(cudaLaunchHostFunc(stream.native(), wait, this)); }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  static void wait(void* self) {
    auto& gate = *static_cast<Gate*>(self);
    std::unique_lock lock(gate.mutex_);
    gate.opened_.wait(lock, [&] { return gate.open_; });
  }
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

/// Any pages will do for any of the lengths: the table has all that a request may have.
StepLengths longest(const StepLengths& lengths) {
  StepLengths full = lengths;
  full.kv_len.assign(full.kv_len.size(), ServingStep::kMaxKvLen);
  return full;
}

/// Plans made while the stream stands still must not overwrite each other: each keeps a stage until it is copied. The
/// stream is opened by another thread, after `milliseconds`: `plan` waits where there are more plans than stages.
void plan_behind_a_stalled_stream(size_t num_plans, int milliseconds) {
  const TableChecks unchecked(false);  // the check waits for its stream
  ServingStep step;
  const TestStream stream;
  std::mt19937 random(11);
  std::vector<StepLengths> lengths;
  for (size_t i = 0; i < num_plans; ++i) lengths.push_back(ServingStep::random_lengths(random));
  step.set(longest(lengths[0]), random);
  std::vector<ServingStep::Output> expected;
  PlanBuffer buffer = make_plan_buffer(step.op());
  for (const StepLengths& one : lengths) {
    step.clear_output();
    step.enqueue(buffer, &one, stream.get());
    stream.wait();
    expected.push_back(step.output());
  }

  PlanBuffer stalled = make_plan_buffer(step.op());
  step.clear_output();
  Gate gate;
  gate.close(stream);
  AttentionPlan first = step.enqueue(stalled, &lengths[0], stream.get());
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    gate.open();
  });
  for (size_t i = 1; i < num_plans; ++i) {
    StepLengths borrowed = lengths[i];
    step.enqueue(stalled, &borrowed, stream.get());
    borrowed.kv_len.assign(borrowed.kv_len.size(), -1);  // until `plan` returns only
  }
  opener.join();
  stream.wait();
  EXPECT_TRUE(step.output() == [&] {
    ServingStep::Output last = expected.front();
    for (size_t i = 1; i < num_plans; ++i) {  // a step writes the rows of its own tokens only
      const auto tokens = static_cast<size_t>(lengths[i].cu_q.back());
      for (size_t layer = 0; layer < ServingStep::kLayers; ++layer) {
        const auto take = [&](auto& to, const auto& from, size_t row) {
          const size_t begin = layer * ServingStep::kTokens * row;
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(begin), tokens * row,
                      to.begin() + static_cast<std::ptrdiff_t>(begin));
        };
        take(last.out, expected[i].out, size_t{ServingStep::kQHeads} * ServingStep::kHeadDim);
        take(last.lse, expected[i].lse, ServingStep::kQHeads);
      }
    }
    return last;
  }());
  EXPECT_THROW(step.run_layers(first, stream.get()), Error) << "planned into again since: stale";
}

TEST_F(CudaTest, PlansInFlightBehindAStalledStream) {
  plan_behind_a_stalled_stream(3, 200);
}

TEST_F(CudaTest, MorePlansInFlightThanStages) {
  plan_behind_a_stalled_stream(9, 200);
}

TEST_F(CudaTest, TwoBuffersOnTwoStreams) {
  ServingStep a;
  ServingStep b;
  const TestStream first;
  const TestStream second;
  std::mt19937 random(13);
  const StepLengths of_a = ServingStep::random_lengths(random);
  const StepLengths of_b = ServingStep::random_lengths(random);
  a.set(of_a, random);
  b.set(of_b, random);
  PlanBuffer buffer_a = make_plan_buffer(a.op());
  PlanBuffer buffer_b = make_plan_buffer(b.op());
  a.clear_output();
  b.clear_output();
  a.enqueue(buffer_a, &of_a, first.get());
  first.wait();
  b.enqueue(buffer_b, &of_b, second.get());
  second.wait();
  const auto alone_a = a.output();
  const auto alone_b = b.output();
  for (int i = 0; i < 20; ++i) {
    a.clear_output();
    b.clear_output();
    check(cudaDeviceSynchronize());
    a.enqueue(buffer_a, &of_a, first.get());
    b.enqueue(buffer_b, &of_b, second.get());
    first.wait();
    second.wait();
    ASSERT_TRUE(a.output() == alone_a);
    ASSERT_TRUE(b.output() == alone_b);
  }
}

}  // namespace
}  // namespace folio::cuda_test
