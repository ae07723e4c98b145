#include "replay/row_checker.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "replay/page_manager.hpp"
#include "replay/scene_test_util.hpp"

namespace folio::replay {
namespace {

/// Outputs that are off by what FP8 MMA may lose, and exact ones may not.
std::vector<uint16_t> moved(const StepBatch& batch, const LayerOutput& output) {
  std::vector<uint16_t> values(batch.rows.size() * output.row_bytes / sizeof(uint16_t));
  std::memcpy(values.data(), output.data, values.size() * sizeof(uint16_t));
  for (uint16_t& value : values) value = float_to_bfloat16(bfloat16_to_float(value) + 0x1p-6f);
  return values;
}

/// Without the rows of requests with several queries: a checker passes over them as over rejected drafts.
StepBatch decodes_of(StepBatch batch) {
  for (size_t r = 0; r + 1 < batch.cu_q.size(); ++r) {
    const auto first = static_cast<size_t>(batch.cu_q[r]);
    const auto end = static_cast<size_t>(batch.cu_q[r + 1]);
    for (size_t t = first; t < end; ++t) batch.rows[t].rejected = end - first > 1;
  }
  return batch;
}

/// What an op is permitted says nothing: of a pair, decodes are computed without, and held to the tight tolerance.
TEST(RowChecker, AllowsForProductsOfFp8WhereTheyWereComputed) {
  Scene scene = small_scene(4);
  StackConfig& stack = scene.options.stack;
  stack.q = stack.kv = DType::kFloat8E4M3;
  const CheckOptions all{.rate = 1.0};
  RowChecker none(scene.workload, stack, all);
  RowChecker every(scene.workload, stack, all);
  RowChecker prefill(scene.workload, stack, all);
  RowChecker decode(scene.workload, stack, all);
  RowChecker untouched(scene.workload, stack, all);
  PageManager pages(static_cast<int32_t>(stack.num_pages), /*reuse=*/true);
  Scheduler scheduler(scene.workload, pages, scene.options.scheduler);
  const auto layers = make_stack(context(), stack, nullptr);
  const auto observe = [&](const StepBatch& batch, const LayerOutput& output) {
    EXPECT_EQ(output.fp8_mma_from, kNoQueries);  // no kernel of a CPU has them
    untouched.observe(batch, output, scheduler);
    const std::vector<uint16_t> values = moved(batch, output);
    LayerOutput changed = output;
    changed.data = reinterpret_cast<const std::byte*>(values.data());
    none.observe(batch, changed, scheduler);
    decode.observe(decodes_of(batch), changed, scheduler);
    changed.fp8_mma_from = 1;
    every.observe(batch, changed, scheduler);
    changed.fp8_mma_from = 2;
    prefill.observe(batch, changed, scheduler);
  };
  PhaseClock clock(nullptr);
  StepBatch batch;
  while (!scheduler.done()) {
    batch.build(scheduler.next_step(/*now_ms=*/1e9), scheduler, stack.tokens_per_page_id());
    layers->step(batch, clock, observe);
    scheduler.finish_step();
  }
  EXPECT_EQ(untouched.counts().failures, 0) << untouched.counts().first_failure;
  EXPECT_EQ(every.counts().failures, 0) << every.counts().first_failure;
  EXPECT_GT(none.counts().failures, none.counts().rows * 9 / 10);
  EXPECT_GT(decode.counts().failures, decode.counts().rows * 9 / 10);
  EXPECT_LT(decode.counts().rows, none.counts().rows);
  EXPECT_EQ(prefill.counts().failures, decode.counts().failures);
}

}  // namespace
}  // namespace folio::replay
