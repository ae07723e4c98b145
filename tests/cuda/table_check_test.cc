// ContextOptions::validate_tables on a GPU.
#include <gmock/gmock.h>

#include "core/error_test_util.hpp"
#include "device_array.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"
#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kNoPage = 1'000'000'000;

/// One request with a query and 40 keys, on three pages.
StepLengths one_request() {
  StepLengths lengths;
  lengths.cu_q.assign(ServingStep::kRequests + 1, 1);
  lengths.cu_q[0] = 0;
  lengths.kv_len.assign(ServingStep::kRequests, 0);
  lengths.kv_len[0] = 40;
  return lengths;
}

template <typename T>
void poke(const T* array, size_t index, T value) {
  check(cudaMemcpy(const_cast<T*>(array) + index, &value, sizeof(T), cudaMemcpyHostToDevice));
  check(cudaStreamSynchronize(nullptr));
}

struct CheckedStep {
  const TableChecks checks{true};
  ServingStep step;
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 random{71};
  StepLengths lengths = one_request();

  CheckedStep() {
    step.set(lengths, random);
    step.clear_output();
  }
};

TEST_F(CudaTest, ValidateTables_PageBeyondTheCache_IsNamedAndNothingIsLaunched) {
  for (const bool host_lengths : {true, false}) {
    CheckedStep c;
    const ServingStep::Output cleared = c.step.output();
    const AttentionPlan sound = c.step.plan(c.buffer, c.lengths, c.stream.get());
    run(sound, c.step.layer_args(0).attention(), c.step.workspace(), c.stream.get());
    c.stream.wait();
    EXPECT_FALSE(c.step.output() == cleared);
    c.step.clear_output();
    for (const int32_t page : {kNoPage, ServingStep::kPages, -1}) {
      poke(c.step.layer_args(0).segment.table.indices, 1, page);
      const std::string message = folio::testing::message_of(
          [&] { c.step.enqueue(c.buffer, host_lengths ? &c.lengths : nullptr, c.stream.get()); });
      EXPECT_EQ(message, "segment 0, request 0: column 1 of row 0 of the table is page " + std::to_string(page) +
                             "; the cache has " + std::to_string(ServingStep::kPages) + " pages");
      c.stream.wait();
      EXPECT_TRUE(c.step.output() == cleared);
      EXPECT_NO_THROW(check_plans(c.buffer)) << "it has been reported";
    }
  }
}

TEST_F(CudaTest, ValidateTables_CsrRowsThatDoNotFit_AreNamed) {
  CheckedStep c;
  ServingStep::LayerArgs layer = c.step.layer_args(0);
  const AttentionPlan planned = c.step.plan(c.buffer, c.lengths, c.stream.get());
  const auto message_with = [&](int32_t begin, int32_t end) {
    std::vector<int32_t> offsets(ServingStep::kRequests + 1, end);
    offsets[0] = begin;
    const DeviceArray<int32_t> indptr(offsets);
    PageTableView& table = layer.segment.table;
    table.kind = PageTableKind::kCsr;
    table.indptr = indptr.data();
    table.row_stride = 0;
    const std::string message =
        folio::testing::message_of([&] { run(planned, layer.attention(), c.step.workspace(), c.stream.get()); });
    return message;
  };
  EXPECT_EQ(message_with(0, 2), "segment 0, request 0: row 0 has 2 entries; its keys need 3");
  EXPECT_THAT(message_with(-1, 3), HasSubstr("row 0 is [-1, 3); it must ascend within [0, "));
  EXPECT_THAT(message_with(0, 1 << 30), HasSubstr("row 0 is [0, 1073741824)"));
  c.stream.wait();
}

TEST_F(CudaTest, ValidateTables_SlotBeyondTheCache_IsNamedAndNothingIsWritten) {
  CheckedStep c;
  const CacheWriteArgs write = c.step.layer_args(0).write;
  const int64_t limit = int64_t{ServingStep::kPages} * ServingStep::kPageSize;
  write_kv_cache(c.step.op().context(), write, c.stream.get());
  poke(write.slot_mapping, 0, limit);
  EXPECT_THAT(folio::testing::message_of([&] { write_kv_cache(c.step.op().context(), write, c.stream.get()); }),
              HasSubstr("slot_mapping[0] is " + std::to_string(limit)));
  c.stream.wait();
}

/// The cache's memory has the pages, so that the replay reads nothing that is not there.
TEST_F(CudaTest, ValidateTables_CapturedRun_ReportsToCheckPlans) {
  CheckedStep c;
  c.step.enqueue(c.buffer, nullptr, c.stream.get());
  c.stream.wait();
  ServingStep::LayerArgs layer = c.step.layer_args(0);
  layer.segment.cache.num_pages = 1;
  layer.segment.table.num_indices = ServingStep::kRequests * ServingStep::kPagesPerRequest;
  poke(layer.segment.table.indices, 0, 0);
  poke(layer.segment.table.indices, 1, 0);
  poke(layer.segment.table.indices, 2, 0);
  const CapturedGraph graph(c.stream, [&] {
    const AttentionPlan planned = c.step.enqueue(c.buffer, nullptr, c.stream.get());
    run(planned, layer.attention(), c.step.workspace(), c.stream.get());
  });
  graph.launch(c.stream);
  c.stream.wait();
  EXPECT_NO_THROW(check_plans(c.buffer));
  poke(layer.segment.table.indices, 2, 5);
  for (int replay = 0; replay < 2; ++replay) {
    graph.launch(c.stream);
    c.stream.wait();
    EXPECT_EQ(folio::testing::message_of([&] { check_plans(c.buffer); }),
              "an earlier run of a captured graph: segment 0, request 0: column 2 of row 0 of the table is page 5; the "
              "cache has 1 pages");
    EXPECT_NO_THROW(check_plans(c.buffer));
  }
}

/// Random steps within the bounds, through every path of a step, have nothing that is wrong.
TEST_F(CudaTest, ValidateTables_SoundSteps_ComputeTheSame) {
  std::mt19937 random(73);
  const TestStream stream;
  const auto outputs = [&](bool checked, const StepLengths& lengths, uint32_t seed) {
    const TableChecks checks(checked);
    ServingStep step;
    PlanBuffer buffer = make_plan_buffer(step.op());
    std::mt19937 values(seed);
    step.set(lengths, values);
    step.clear_output();
    step.enqueue(buffer, seed % 2 == 0 ? &lengths : nullptr, stream.get());
    stream.wait();
    return step.output();
  };
  for (uint32_t i = 0; i < 6; ++i) {
    const StepLengths lengths = ServingStep::random_lengths(random);
    EXPECT_TRUE(outputs(true, lengths, i) == outputs(false, lengths, i)) << i;
  }
}

}  // namespace
}  // namespace folio::cuda_test
