// Graphs of FlashAttention's steps that share prefixes, given or found, and steps whose schedules the engine holds.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "device_array.hpp"
#include "platform/cuda/captured_graph_test_util.hpp"
#include "replayed_steps.hpp"

namespace folio::cuda_test {
namespace {

using ::testing::HasSubstr;

/// Steps with shared prefixes of any length, or none, captured once for every number of tokens: FlashAttention's, whose
/// batches have all one memory. Plans of captured shapes are divided otherwise than eager ones, so that rounding may
/// differ.
TEST_F(CudaTest, AThousandReplaysOfSharedPrefixesGiveTheSame) {
  const BackendModel<FlashAttentionSide> model;
  DeviceLayers layers;
  auto captured = model.make(DecodeGraphMode::kFull, Determinism::kRunToRun);
  auto eager = model.make(DecodeGraphMode::kNone, Determinism::kRunToRun);
  const TestStream stream;
  std::map<int32_t, CapturedGraph> graphs;
  for (int i = 0; i < repeats(1000); ++i) {
    StepRequests requests = random_requests(layers.random, /*uniform=*/false);
    const int32_t prefix = 16 * between(layers.random, 0, 20);
    for (size_t r = 0; r < requests.seq_lens.size(); ++r) {
      requests.seq_lens[r] = std::max(requests.seq_lens[r], prefix + requests.query_lens[r]);
    }
    const int32_t tokens = pad(requests, /*uniform=*/false);
    const CommonAttentionMetadata batch = layers.set(requests, tokens, prefix / 16);
    const auto metadata = FlashAttentionSide::build(captured, prefix, batch, stream.get());
    ASSERT_EQ(metadata.use_cascade, prefix > 0);
    ASSERT_EQ(metadata.cascade.num_segments, 2);
    if (graphs.count(tokens) == 0) {
      graphs.try_emplace(tokens, stream, [&] { model.forward(layers, metadata, stream.get()); });
    }
    layers.out.fill(0xff);
    graphs.at(tokens).launch(stream);
    stream.wait();
    const Bits replayed = layers.out.get();
    layers.out.fill(0xff);
    model.forward(layers, FlashAttentionSide::build(eager, prefix, batch, stream.get()), stream.get());
    stream.wait();
    const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
    ASSERT_LE(furthest(replayed, layers.out.get(), count), 0x1p-6f) << "replay " << i << " of " << tokens << " tokens";
  }
  EXPECT_GT(graphs.size(), 1u);
}

/// Prefixes that are found anew in every step, some of them in none: a graph that was captured beside one step is
/// replayed with all. Against eager steps that share nothing.
void expect_replays_of_found_prefixes(int replays) {
  const BackendModel<FlashAttentionSide> model;
  DeviceLayers layers;
  const auto make = [&](DecodeGraphMode graphs, CascadeMode cascade) {
    FlashAttentionOptions options = FlashAttentionSide::options(graphs);
    options.cascade = cascade;
    return model.make(DeviceLayers::engine(graphs, Determinism::kRunToRun), options);
  };
  auto captured = make(DecodeGraphMode::kFull, CascadeMode::kAuto);
  auto eager = make(DecodeGraphMode::kNone, CascadeMode::kOff);
  const TestStream stream;
  std::map<int32_t, CapturedGraph> graphs;
  std::map<int32_t, int> steps_of;  // by levels
  for (int i = 0; i < replays; ++i) {
    StepRequests requests = random_requests(layers.random, /*uniform=*/false);
    const int32_t shared_pages = 15 * between(layers.random, 0, 2);
    for (size_t r = 0; r < requests.seq_lens.size(); ++r) {
      requests.seq_lens[r] = std::max(requests.seq_lens[r], shared_pages * 16 + requests.query_lens[r]);
    }
    const int32_t tokens = pad(requests, /*uniform=*/false);
    const CommonAttentionMetadata batch = layers.set(requests, tokens, shared_pages);
    // Some graphs are captured beside a batch in which nothing was looked for.
    const bool first = graphs.count(tokens) == 0;
    const auto metadata = first && i % 2 == 1 ? captured.build_for_cudagraph_capture(batch, stream.get())
                                              : FlashAttentionSide::build(captured, 0, batch, stream.get());
    EXPECT_EQ(metadata.cascade.num_segments, 5);
    ++steps_of[metadata.cascade.num_levels];
    if (first) graphs.try_emplace(tokens, stream, [&] { model.forward(layers, metadata, stream.get()); });
    layers.out.fill(0xff);
    graphs.at(tokens).launch(stream);
    stream.wait();
    const Bits replayed = layers.out.get();
    layers.out.fill(0xff);
    model.forward(layers, FlashAttentionSide::build(eager, 0, batch, stream.get()), stream.get());
    stream.wait();
    const size_t count = static_cast<size_t>(requests.num_tokens()) * DeviceLayers::kHeads * DeviceLayers::kDim;
    ASSERT_LE(furthest(replayed, layers.out.get(), count), 0x1p-6f) << "replay " << i << " of " << tokens << " tokens";
  }
  EXPECT_GT(steps_of[0], 0);
  EXPECT_GT(steps_of[1], 0);
}

TEST_F(CudaTest, AThousandReplaysOfFoundPrefixesGiveTheSame) {
  expect_replays_of_found_prefixes(repeats(1000));
}

/// Few enough to be watched by compute-sanitizer.
TEST_F(CudaTest, AFewReplaysOfFoundPrefixesGiveTheSame) {
  expect_replays_of_found_prefixes(8);
}

/// A model of one window, of whose steps schedules are made.
struct ScheduledModel : BackendModel<FlashAttentionSide> {
  ScheduledModel() { impls.pop_back(); }
  FlashAttentionMetadataBuilder make_scheduled(DecodeGraphMode graphs, bool scheduled, CascadeMode cascade) const {
    FlashAttentionOptions options = FlashAttentionSide::options(graphs);
    options.aot_schedule = scheduled;
    options.cascade = cascade;
    return make(DeviceLayers::engine(graphs, Determinism::kRunToRun), options);
  }
};

Bits outputs_of(const ScheduledModel& model, DeviceLayers& layers, const FlashAttentionMetadata& metadata,
                const TestStream& stream) {
  layers.out.fill(0xff);
  model.forward(layers, metadata, stream.get());
  stream.wait();
  return layers.out.get();
}

/// Captured layers read whatever schedule the last build has written to the memory that the engine was given.
void expect_replays_of_schedules(int replays) {
  const ScheduledModel model;
  DeviceLayers layers;
  const TestStream stream;
  for (const CascadeMode cascade : {CascadeMode::kOff, CascadeMode::kAuto}) {
    auto captured = model.make_scheduled(DecodeGraphMode::kFull, true, cascade);
    auto handled = model.make_scheduled(DecodeGraphMode::kFull, false, cascade);
    EXPECT_TRUE(captured.aot_schedule());
    EXPECT_FALSE(model.make(DecodeGraphMode::kFull, Determinism::kRunToRun).aot_schedule()) << "where it is asked for";
    std::map<int32_t, CapturedGraph> graphs;
    const int32_t* memory = nullptr;
    for (int i = 0; i < replays; ++i) {
      StepRequests requests = random_requests(layers.random, /*uniform=*/false);
      const int32_t tokens = pad(requests, /*uniform=*/false);
      const CommonAttentionMetadata batch = layers.set(requests, tokens);
      const auto metadata = FlashAttentionSide::build(captured, 0, batch, stream.get());
      ASSERT_FALSE(metadata.scheduler_metadata.empty());
      ASSERT_LE(static_cast<int64_t>(metadata.scheduler_metadata.size()), captured.scheduler_metadata_capacity());
      if (memory == nullptr) memory = metadata.scheduler_metadata.data();
      ASSERT_EQ(metadata.scheduler_metadata.data(), memory);
      layers.out.fill(0xff);
      if (graphs.count(tokens) == 0) {
        graphs.try_emplace(tokens, stream, [&] { model.forward(layers, metadata, stream.get()); });
      }
      graphs.at(tokens).launch(stream);
      stream.wait();
      const Bits replayed = layers.out.get();
      const auto plain = FlashAttentionSide::build(handled, 0, batch, stream.get());
      ASSERT_TRUE(replayed == outputs_of(model, layers, plain, stream)) << "replay " << i;
    }
  }
}

TEST_F(CudaTest, FiveHundredReplaysOfSchedulesGiveTheBitsOfHandles) {
  expect_replays_of_schedules(repeats(500));
}

/// Few enough to be watched by compute-sanitizer.
TEST_F(CudaTest, AFewReplaysOfSchedulesGiveTheBitsOfHandles) {
  expect_replays_of_schedules(4);
}

/// Nothing is computed from a schedule that was changed, and the next build says so; others are refused at once.
TEST_F(CudaTest, ChangedSchedulesComputeNothing) {
  const ScheduledModel model;
  DeviceLayers layers;
  const TestStream stream;
  for (const DecodeGraphMode graphs : {DecodeGraphMode::kNone, DecodeGraphMode::kFull}) {
    auto builder = model.make_scheduled(graphs, true, CascadeMode::kOff);
    const StepRequests requests{{300, 420, 700, 257}, {1, 1, 30, 1}};
    const CommonAttentionMetadata batch = layers.set(requests, requests.num_tokens());
    const auto build = [&] { return FlashAttentionSide::build(builder, 0, batch, stream.get()); };
    FlashAttentionMetadata metadata = build();
    const Bits expected = outputs_of(model, layers, metadata, stream);
    const size_t count = metadata.scheduler_metadata.size();
    for (const size_t at : {size_t{0}, size_t{70}, count / 2, count - 3}) {
      // Any of it: what stands in front, an image's header, the work.
      auto* const word = const_cast<int32_t*>(metadata.scheduler_metadata.data()) + at;
      int32_t value = 0;
      check(cudaMemcpy(&value, word, sizeof(value), cudaMemcpyDeviceToHost));
      value ^= 1 << 20;
      check(cudaMemcpy(word, &value, sizeof(value), cudaMemcpyHostToDevice));
      const Bits unwritten = outputs_of(model, layers, metadata, stream);
      EXPECT_TRUE(std::all_of(unwritten.begin(), unwritten.end(), [](uint16_t bits) { return bits == 0xffff; })) << at;
      EXPECT_THAT(refusal(build), HasSubstr("an earlier schedule's checksum does not match")) << at;
      metadata = build();
      EXPECT_TRUE(outputs_of(model, layers, metadata, stream) == expected) << at;
    }
    FlashAttentionMetadata wrong = metadata;
    const auto forward = [&] { outputs_of(model, layers, wrong, stream); };
    wrong.scheduler_metadata = metadata.scheduler_metadata.first(count - 2);
    EXPECT_THAT(refusal(forward), HasSubstr("it is truncated or padded"));
    wrong.scheduler_metadata = {};
    EXPECT_THAT(refusal(forward), HasSubstr("it is truncated or padded"));
    const DeviceArray<int32_t> copy(count);
    check(cudaMemcpy(copy.data(), metadata.scheduler_metadata.data(), count * sizeof(int32_t), cudaMemcpyDefault));
    wrong.scheduler_metadata = {copy.data(), count};
    EXPECT_THAT(refusal(forward), HasSubstr("not the one that this step was planned into"));
  }
}

}  // namespace
}  // namespace folio::cuda_test
