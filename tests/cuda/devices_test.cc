// Several GPUs, captures of others, and failures of others: what a library shares with the process around it.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

using ::testing::HasSubstr;

int current_device() {
  int device = -1;
  check(cudaGetDevice(&device));
  return device;
}

/// Makes a device the thread's current one.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) { check(cudaSetDevice(device)); }
  ~CurrentDevice() { static_cast<void>(cudaSetDevice(0)); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
};

TEST_F(CudaTest, SecondGpu_WorksWhileTheFirstIsCurrent) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one GPU";
  std::mt19937 random(41);
  const StepLengths lengths = ServingStep::random_lengths(random);
  const auto output_of = [&](int32_t device, const StepLengths* host_lengths) {
    std::unique_ptr<ServingStep> step;
    std::unique_ptr<TestStream> stream;
    {
      const CurrentDevice current(device);
      step = std::make_unique<ServingStep>(Determinism::kRunToRun, "", 0, ServingStep::kSizes, device);
      stream = std::make_unique<TestStream>();
      std::mt19937 values(42);
      step->set(lengths, values);
      step->clear_output();
    }
    PlanBuffer buffer = make_plan_buffer(step->op());
    EXPECT_EQ(current_device(), 0);
    for (int i = 0; i < 6; ++i) step->enqueue(buffer, host_lengths, stream->get());  // more plans than stages
    EXPECT_EQ(current_device(), 0);
    check_plans(buffer);
    synchronize(step->op().context(), stream->get());
    EXPECT_EQ(current_device(), 0);
    return step->output();
  };
  EXPECT_TRUE(output_of(1, &lengths) == output_of(0, &lengths));
  EXPECT_TRUE(output_of(1, nullptr) == output_of(0, nullptr));
}

/// PyTorch captures so. A call that is not allowed then makes the capture end in an error.
TEST_F(CudaTest, CaptureInGlobalMode_SurvivesPlansAndBuffers) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  const TestStream captured;
  std::mt19937 random(43);
  const StepLengths lengths = ServingStep::random_lengths(random);
  step.set(lengths, random);
  step.enqueue(buffer, &lengths, stream.get());  // loads the kernels
  stream.wait();
  check(cudaStreamBeginCapture(captured.native(), cudaStreamCaptureModeGlobal));
  const auto uses_the_gpu = [&] {
    for (int i = 0; i < 9; ++i) step.enqueue(buffer, &lengths, stream.get());
    PlanBuffer another = make_plan_buffer(step.op());
    step.plan(another, lengths, stream.get());
    synchronize(step.op().context(), stream.get());
  };
  EXPECT_NO_THROW(uses_the_gpu());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(captured.native(), &graph), cudaSuccess);
  if (graph != nullptr) check(cudaGraphDestroy(graph));
  static_cast<void>(cudaGetLastError());
}

TEST_F(CudaTest, FailureThatAnotherCallLeft_IsNamedAsThat) {
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random(47);
  const StepLengths lengths = ServingStep::random_lengths(random);
  step.set(lengths, random);
  const AttentionPlan planned = step.plan(buffer, lengths, stream.get());
  const auto run_layer = [&] { run(planned, step.layer_args(0).attention(), step.workspace(), stream.get()); };
  void* too_much = nullptr;
  EXPECT_EQ(cudaMalloc(&too_much, size_t{1} << 60), cudaErrorMemoryAllocation);
  try {
    run_layer();  // a shared library has a CUDA runtime of its own, and hears nothing of this one's failures
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("an earlier CUDA call or kernel of this process has failed: out of memory"));
  }
  EXPECT_NO_THROW(run_layer()) << "it is said once";
  static_cast<void>(cudaGetLastError());
  stream.wait();
}

/// In a process of its own, since nothing revives the device.
void kill_device_and_make_a_context() {
  const TableChecks unchecked(false);
  auto* const step = new ServingStep(Determinism::kRunToRun, "cuda-sm80");  // not destroyed: it waits for the device
  auto* const buffer = new PlanBuffer(make_plan_buffer(step->op()));
  std::mt19937 random(53);
  StepLengths lengths;
  lengths.cu_q.assign(ServingStep::kRequests + 1, 1);
  lengths.cu_q[0] = 0;
  lengths.kv_len.assign(ServingStep::kRequests, 0);
  lengths.kv_len[0] = 40;
  step->set(lengths, random);
  const int32_t no_page = 1'000'000'000;
  check(cudaMemcpy(const_cast<int32_t*>(step->layer_args(0).segment.table.indices), &no_page, sizeof(no_page),
                   cudaMemcpyHostToDevice));
  const AttentionPlan planned = step->plan(*buffer, lengths, {});
  run(planned, step->layer_args(0).attention(), step->workspace());
  static_cast<void>(cudaDeviceSynchronize());
  static_cast<void>(cudaGetLastError());
  try {
    run(planned, step->layer_args(0).attention(), step->workspace());
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  try {
    Context::cuda(0);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    _exit(error.code() == ErrorCode::kDeviceError ? 7 : 8);
  }
  _exit(6);
}

TEST_F(CudaTest, CallsOnADeadDevice_SayWhatFailed) {
#if defined(FOLIO_EMULATED_CUDA)
  GTEST_SKIP() << "a wrong address ends an emulated GPU's process";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(kill_device_and_make_a_context(), ::testing::ExitedWithCode(7),
              "work enqueued before has failed, noticed while launching a kernel(.|\n)*"
              "work enqueued before has failed, noticed while making a context of a CUDA device");
}

}  // namespace
}  // namespace folio::cuda_test
