// Contexts, executors, lifetimes and the thread-local message.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "c_decode.hpp"
#include "folio/c/folio.h"
#include "folio/context.hpp"

namespace folio_c_test {
namespace {

TEST(CHandles, OptionsMayBeNullAndFreeingNullIsFine) {
  folio_context* context = nullptr;
  ASSERT_EQ(folio_create_cpu_context(nullptr, &context), FOLIO_OK);
  folio_free_context(context);
  folio_free_context(nullptr);
  folio_free_op(nullptr);
  folio_free_plan_buffer(nullptr);
}

TEST(CHandles, ContextsTellWhatTheyAre) {
  const auto context = make_context(2);
  folio_device_type type = -1;
  int32_t index = -1, concurrency = 0;
  ASSERT_EQ(folio_get_device(context.get(), &type, &index), FOLIO_OK);
  EXPECT_EQ(type, FOLIO_DEVICE_CPU);
  EXPECT_EQ(index, 0);
  ASSERT_EQ(folio_concurrency(context.get(), &concurrency), FOLIO_OK);
  EXPECT_EQ(concurrency, 2);
  EXPECT_EQ(folio_synchronize(context.get(), nullptr), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(folio_map_host_memory(context.get(), &index, 4), FOLIO_UNSUPPORTED);
  const char* features = nullptr;
  ASSERT_EQ(folio_cpu_features(&features), FOLIO_OK);
  std::string expected;
  for (const std::string& feature : folio::cpu_features()) expected += (expected.empty() ? "" : " ") + feature;
  EXPECT_EQ(features, expected);
  expect_refusal(folio_get_device(nullptr, &type, &index), FOLIO_INVALID_ARGUMENT, "context is null");
  expect_refusal(folio_get_device(context.get(), nullptr, &index), FOLIO_INVALID_ARGUMENT, "type is null");
  expect_refusal(folio_concurrency(context.get(), nullptr), FOLIO_INVALID_ARGUMENT, "concurrency is null");
  expect_refusal(folio_synchronize(nullptr, nullptr), FOLIO_INVALID_ARGUMENT, "context is null");
  expect_refusal(folio_cpu_features(nullptr), FOLIO_INVALID_ARGUMENT, "features is null");
}

TEST(CHandles, AnyOrderOfFreeing) {
  Decode d;
  d.context.reset();
  ASSERT_EQ(d.plan_batch(), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.op.reset();
  size_t bytes = 0;
  ASSERT_EQ(folio_plan_workspace_size(&d.plan, &bytes), FOLIO_OK);
  ASSERT_EQ(folio_run(&d.plan, &d.args, d.allocate(bytes), bytes, nullptr), FOLIO_OK) << folio_last_error();
  d.expect_result();
}

struct CountingExecutor {
  int64_t calls = 0;
  static void parallel_for(void* self, int64_t n, folio_parallel_body body, void* context) {
    for (int64_t i = n - 1; i >= 0; --i) {
      body(context, i);
      ++static_cast<CountingExecutor*>(self)->calls;
    }
  }
};

TEST(CHandles, TheEnginesExecutorRuns) {
  CountingExecutor engine;
  folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.executor = {&engine, 3, CountingExecutor::parallel_for};
  Decode d;
  folio_context* context = nullptr;
  ASSERT_EQ(folio_create_cpu_context(&options, &context), FOLIO_OK) << folio_last_error();
  d.context.reset(context);
  folio_op* op = nullptr;
  ASSERT_EQ(folio_prepare(context, &d.config, nullptr, &op), FOLIO_OK);
  d.op.reset(op);
  folio_plan_buffer* buffer = nullptr;
  ASSERT_EQ(folio_create_plan_buffer(op, &buffer), FOLIO_OK);
  d.buffer.reset(buffer);
  d.context.reset();  // the op keeps what it needs
  ASSERT_EQ(d.plan_batch(), FOLIO_OK);
  ASSERT_EQ(d.run(), FOLIO_OK) << folio_last_error();
  d.expect_result();
  EXPECT_GE(engine.calls, 1);
}

TEST(CHandles, ContextOptionsAreChecked) {
  folio_context* context = reinterpret_cast<folio_context*>(&context);
  folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.num_threads = 5000;
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "num_threads is 5000");
  EXPECT_EQ(context, nullptr) << "failed calls leave no handle";
  options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.executor = {nullptr, 0, CountingExecutor::parallel_for};
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "executor.concurrency is 0");
  options.executor = {nullptr, 4, nullptr};
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "parallel_for is null");
  options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.struct_size = 40;
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "options.struct_size is 40");
  options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.pinning = 3;
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "options.pinning is 3; 0 to 2");
  options.pinning = FOLIO_PINNING_PINNED;
  options.num_threads = 1024;
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "pinning of 1024 threads");
  expect_refusal(folio_create_cuda_context(0, &options, &context), FOLIO_INVALID_ARGUMENT, "which takes none of them");
  options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.reserved = 1;
  expect_refusal(folio_create_cpu_context(&options, &context), FOLIO_INVALID_ARGUMENT, "options.reserved is 1");
}

TEST(CHandles, CudaDevicesThatAreNotThereAreUnavailable) {
  folio_context* context = nullptr;
  expect_refusal(folio_create_cuda_context(1000, nullptr, &context), FOLIO_UNAVAILABLE, "Context::cpu is offered");
  expect_refusal(folio_create_cuda_context(-1, nullptr, &context), FOLIO_INVALID_ARGUMENT, "-1");
  EXPECT_EQ(context, nullptr);
}

TEST(CHandles, MessagesBelongToTheirThread) {
  folio_context* context = nullptr;
  folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
  options.num_threads = -9;
  EXPECT_NE(folio_create_cpu_context(&options, &context), FOLIO_OK);
  const std::string here = folio_last_error();
  EXPECT_NE(here.find("-9"), std::string::npos);
  std::string fresh = "unset";
  std::string there;
  std::thread([&] {
    fresh = folio_last_error();
    folio_context* other = nullptr;
    EXPECT_NE(folio_create_cpu_context(&options, nullptr), FOLIO_OK);
    there = folio_last_error();
    EXPECT_EQ(other, nullptr);
  }).join();
  EXPECT_EQ(fresh, "");
  EXPECT_EQ(there, "context is null");
  EXPECT_EQ(folio_last_error(), here) << "another thread's error does not touch this one's";
  EXPECT_EQ(folio_create_cpu_context(nullptr, &context), FOLIO_OK);
  folio_free_context(context);
  EXPECT_EQ(folio_last_error(), here) << "success leaves the message";
}

}  // namespace
}  // namespace folio_c_test
