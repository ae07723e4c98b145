#include <gmock/gmock.h>

#include <cmath>

#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Rows of one request of a step's output, in the first layer.
struct RequestRows {
  std::vector<uint16_t> out;
  std::vector<float> lse;
};
RequestRows rows_of(const ServingStep::Output& output, int32_t begin, int32_t end) {
  constexpr size_t kRow = size_t{ServingStep::kQHeads} * ServingStep::kHeadDim;
  const auto slice = [&](const auto& values, size_t row) {
    return std::remove_cvref_t<decltype(values)>(values.begin() + static_cast<std::ptrdiff_t>(begin * row),
                                                 values.begin() + static_cast<std::ptrdiff_t>(end * row));
  };
  return {slice(output.out, kRow), slice(output.lse, ServingStep::kQHeads)};
}

/// A request with more keys than the bound gives zeros and -infinity, the others what they would give without it, and
/// the next plan says which request it was, once; the layers of the step itself run, however soon the device has found
/// it.
TEST_F(CudaTest, ARequestBeyondTheBoundsGivesNothing) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(17);
  StepLengths lengths = ServingStep::random_lengths(random);
  lengths.cu_q.assign(1, 0);
  for (int32_t r = 0; r < ServingStep::kRequests; ++r) {
    lengths.cu_q.push_back(lengths.cu_q.back() + 2);
    lengths.kv_len[static_cast<size_t>(r)] = 50 * (r + 1);
  }
  step.set(lengths, random);
  constexpr size_t kBad = 3;
  for (const int32_t length : {ServingStep::kMaxKvLen + 1, INT32_MAX, -1, INT32_MIN}) {
    StepLengths none = lengths;
    none.kv_len[kBad] = 0;
    step.set_lengths(none);
    step.clear_output();
    step.enqueue(buffer, nullptr, stream.get());
    stream.wait();
    const ServingStep::Output expected = step.output();

    StepLengths bad = lengths;
    bad.kv_len[kBad] = length;
    step.set_lengths(bad);
    step.clear_output();
    step.enqueue(buffer, nullptr, stream.get());
    stream.wait();
    const ServingStep::Output output = step.output();
    EXPECT_TRUE(output == expected) << length;
    const RequestRows rows = rows_of(output, lengths.cu_q[kBad], lengths.cu_q[kBad + 1]);
    EXPECT_THAT(rows.out, testing::Each(0));
    EXPECT_THAT(rows.lse, testing::Each(-INFINITY));
    step.set_lengths(lengths);
    EXPECT_THAT(message_of([&] { step.enqueue(buffer, nullptr, stream.get()); }), HasSubstr("request 3")) << length;
    EXPECT_EQ(message_of([&] { step.enqueue(buffer, nullptr, stream.get()); }), "") << "said once";
    stream.wait();
  }
}

/// For engines that replay graphs and call nothing else of the buffer.
TEST_F(CudaTest, CheckPlansReportsOnce) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  std::mt19937 random(29);
  StepLengths lengths = ServingStep::random_lengths(random);
  step.set(lengths, random);
  step.enqueue(buffer, nullptr, {});
  check(cudaDeviceSynchronize());
  EXPECT_EQ(message_of([&] { check_plans(buffer); }), "");
  lengths.kv_len[5] = -7;
  step.set_lengths(lengths);
  step.enqueue(buffer, nullptr, {});
  check(cudaDeviceSynchronize());
  EXPECT_THAT(message_of([&] { check_plans(buffer); }), HasSubstr("request 5"));
  EXPECT_EQ(message_of([&] { check_plans(buffer); }), "") << "said once";
}

/// Whatever the device's lengths are, nothing beyond the arrays is touched (compute-sanitizer watches).
TEST_F(CudaTest, GarbageLengthsOverrunNothing) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(19);
  step.set(ServingStep::random_lengths(random), random);
  std::uniform_int_distribution<int32_t> any(INT32_MIN, INT32_MAX);
  std::uniform_int_distribution<int32_t> one_of_four(0, 3);
  for (int i = 0; i < 50; ++i) {
    StepLengths lengths = ServingStep::random_lengths(random);
    for (int32_t& offset : lengths.cu_q) offset = one_of_four(random) == 0 ? any(random) : offset;
    // Lengths within the bounds stay, so that tables are read only where they have pages.
    for (int32_t& length : lengths.kv_len) length = one_of_four(random) == 0 ? any(random) | INT32_MIN : 0;
    step.set_lengths(lengths);
    static_cast<void>(message_of([&] { step.enqueue(buffer, nullptr, stream.get()); }));
    stream.wait();
  }
}

}  // namespace
}  // namespace folio::cuda_test
