#include "scheduler/cuda/plan_kernel.hpp"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "scheduler/device_scheduler.hpp"
#include "scheduler/device_test_util.hpp"
#include "scheduler/plan_digest_test_util.hpp"

/// The device scheduler on a GPU. Skipped, and says so, without one. FOLIO_PLAN_BATCHES lowers the number of random
/// batches, for runs under compute-sanitizer.
namespace folio::inline v0::scheduler {
namespace {

using testing::Case;
using testing::OwnedBatch;
using testing::RawBatch;

void ok(cudaError_t status) {
  ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status);
}

/// Device memory that is used again from batch to batch.
class Arena {
 public:
  ~Arena() {
    cudaFree(image_);
    cudaFree(lengths_);
    cudaFree(causal_);
  }

  /// The batch with its lengths on the device, side by side, and nothing behind them.
  BatchView upload(RawBatch& batch) {
    std::vector<int32_t> all;
    const auto add = [&all](const std::vector<int32_t>& lengths) {
      all.insert(all.end(), lengths.begin(), lengths.end());
    };
    add(batch.cu_q);
    add(batch.q_first_pos);
    for (const testing::OwnedSegment& segment : batch.segments) {
      add(segment.kv_len);
      add(segment.first_pos);
    }
    add(batch.kv_start);
    add(batch.spans);
    grow(lengths_, lengths_bytes_, all.size() * sizeof(int32_t));
    ok(cudaMemcpy(lengths_, all.data(), all.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    BatchView view = batch.view();
    const auto* next = static_cast<const int32_t*>(lengths_);
    const auto take = [&next](const std::vector<int32_t>& lengths) {
      const int32_t* taken = lengths.empty() ? nullptr : next;
      next += lengths.size();
      return taken;
    };
    view.cu_q = take(batch.cu_q);
    view.q_first_pos = take(batch.q_first_pos);
    segments_.assign(view.segments.begin(), view.segments.end());
    for (size_t s = 0; s < segments_.size(); ++s) {
      // Without requests there is no length, but the segment still has an address.
      segments_[s].kv_len = next;
      next += batch.segments[s].kv_len.size();
      segments_[s].first_pos = take(batch.segments[s].first_pos);
    }
    view.segments = segments_;
    view.kv_start = take(batch.kv_start);
    view.spans = take(batch.spans);
    if (!batch.causal.empty()) {
      grow(causal_, causal_bytes_, batch.causal.size());
      ok(cudaMemcpy(causal_, batch.causal.data(), batch.causal.size(), cudaMemcpyHostToDevice));
      view.causal = static_cast<const uint8_t*>(causal_);
    }
    return view;
  }

  /// Full of what was there before.
  void* image(size_t bytes) {
    grow(image_, image_bytes_, bytes);
    ok(cudaMemset(image_, 0xa5, bytes));
    return image_;
  }

 private:
  static void grow(void*& memory, size_t& have, size_t need) {
    if (need <= have) return;
    cudaFree(memory);
    ok(cudaMalloc(&memory, need));
    have = need;
  }

  void* image_ = nullptr;
  void* lengths_ = nullptr;
  void* causal_ = nullptr;
  size_t image_bytes_ = 0;
  size_t lengths_bytes_ = 0;
  size_t causal_bytes_ = 0;
  std::vector<KvSegment> segments_;
};

/// The plan of an image on the device, as numbers, and its status.
class Downloaded {
 public:
  explicit Downloaded(const void* image) {
    ok(cudaMemcpy(&header, image, sizeof(header), cudaMemcpyDeviceToHost));
    PlanView& view = header.view;
    const int64_t requests = view.num_requests;
    fetch(view.segments, view.num_segments, segments_);
    fetch(view.cu_q, requests + 1, lengths_.emplace_back());
    fetch(view.q_first_pos, requests, lengths_.emplace_back());
    for (SegmentLengths& segment : segments_) {
      fetch(segment.kv_len, segment.num_rows, lengths_.emplace_back());
      fetch(segment.first_pos, segment.num_rows, lengths_.emplace_back());
    }
    if (view.worker_indptr != nullptr) {
      fetch(view.worker_indptr, int64_t{view.num_workers} + 1, lengths_.emplace_back());
    }
    fetch(view.combine_sources, header.num_combine_sources, lengths_.emplace_back());
    if (view.visible_positions != nullptr) {
      fetch(view.visible_positions, 2 * int64_t{view.num_tokens}, lengths_.emplace_back());
    }
    fetch(view.work_tiles, view.num_work_tiles, work_tiles_);
    fetch(view.combine_tiles, view.num_combine_tiles, merges_);
  }
  std::vector<int64_t> numbers() const { return testing::serialise(header.view); }

  PlanImageHeader header;

 private:
  template <typename T>
  static void fetch(const T*& there, int64_t count, std::vector<T>& here) {
    here.resize(static_cast<size_t>(count) + 1);
    if (count > 0) ok(cudaMemcpy(here.data(), there, static_cast<size_t>(count) * sizeof(T), cudaMemcpyDeviceToHost));
    there = here.data();
    here.resize(static_cast<size_t>(count));
  }

  std::vector<SegmentLengths> segments_;
  std::vector<WorkTile> work_tiles_;
  std::vector<CombineTile> merges_;
  std::vector<std::vector<int32_t>> lengths_;
};

class PlanKernel : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "there is no CUDA device here";
    ok(cudaMalloc(&sticky_, sizeof(PlanStatus)));
  }
  void TearDown() override { cudaFree(sticky_); }

  static int batches(int usual) {
    const char* few = std::getenv("FOLIO_PLAN_BATCHES");
    return few == nullptr ? usual : std::min(usual, std::atoi(few));
  }

  void plan(const SchedulerConfig& config, RawBatch& batch, void* image) {
    const BatchView view = arena_.upload(batch);
    ASSERT_EQ(device_plan_refusal(config, view), "");
    ok(cudaMemset(sticky_, 0, sizeof(PlanStatus)));
    launch_plan(config, view, image, sticky_, Stream{});
    ok(cudaDeviceSynchronize());
  }

  PlanStatus sticky() {
    PlanStatus status;
    ok(cudaMemcpy(&status, sticky_, sizeof(status), cudaMemcpyDeviceToHost));
    return status;
  }

  Arena arena_;
  PlanStatus* sticky_ = nullptr;
};

TEST_F(PlanKernel, EqualsTheHostPlanOnRandomBatches) {
  std::mt19937 random(61);
  PlanStorage storage;
  for (int i = 0; i < batches(10000); ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    void* image = arena_.image(plan_image_bytes(one.config));
    plan(one.config, batch, image);
    const Downloaded made(image);
    ASSERT_EQ(made.numbers(), testing::serialise(make_plan(one.config, one.batch.view(), storage))) << "case " << i;
    ASSERT_EQ(made.header.status.problem, PlanProblem::kNone) << "case " << i;
  }
}

TEST_F(PlanKernel, PlansTheOthersWhateverTheLengthsAre) {
  std::mt19937 random(62);
  PlanStorage storage;
  for (int i = 0; i < batches(500); ++i) {
    Case one = testing::random_device_case(random);
    RawBatch batch = testing::raw(one.batch);
    testing::spoil(batch, one.config, random);
    int32_t at_fault = -1;
    OwnedBatch sound = testing::repaired(batch, one.config, at_fault);
    void* image = arena_.image(plan_image_bytes(one.config));
    plan(one.config, batch, image);
    SchedulerConfig unbounded = one.config;
    unbounded.bounds.reset();
    const Downloaded made(image);
    ASSERT_EQ(made.numbers(), testing::serialise(make_plan(unbounded, sound.view(), storage))) << "case " << i;
    ASSERT_EQ(made.header.status.problem != PlanProblem::kNone, at_fault >= 0) << "case " << i;
    ASSERT_EQ(sticky().problem, made.header.status.problem) << "case " << i;
    if (at_fault >= 0) {
      ASSERT_EQ(made.header.status.request, at_fault) << "case " << i;
    }
  }
}

/// 256 decode requests of very different lengths, 32 heads over 8 KV heads, 132 workers.
Case decoding_case(int32_t longest, Determinism determinism) {
  std::mt19937 random(7);
  Case one;
  one.config.num_q_heads = 32;
  one.config.num_kv_heads = 8;
  one.config.page_size = 16;
  one.config.determinism = determinism;
  one.config.tile = {.rows = 16, .kv_tokens = 64};
  one.config.num_workers = 132;
  one.config.bounds =
      GraphBounds{.max_requests = 256, .max_tokens = 256, .max_q_len = 1, .max_kv_len = 131072, .max_shared_levels = 0};
  std::vector<int32_t> kv_len;
  for (int r = 0; r < 256; ++r) kv_len.push_back(1 + static_cast<int32_t>(random() % static_cast<uint32_t>(longest)));
  one.batch = testing::paged_batch(std::vector<int32_t>(256, 1), kv_len);
  return one;
}

/// Microseconds of one planning: replays of a graph of 50.
double device_microseconds(Case& one, Arena& arena) {
  RawBatch raw = testing::raw(one.batch);
  const BatchView view = arena.upload(raw);
  void* image = arena.image(plan_image_bytes(one.config));
  constexpr int kPlans = 50;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t events[2];
  ok(cudaStreamCreate(&stream));
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kPlans; ++i) launch_plan(one.config, view, image, nullptr, Stream{stream});
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiate(&executable, graph, 0));
  for (cudaEvent_t& event : events) ok(cudaEventCreate(&event));
  std::vector<double> times;
  for (int i = 0; i < 12; ++i) {
    ok(cudaEventRecord(events[0], stream));
    ok(cudaGraphLaunch(executable, stream));
    ok(cudaEventRecord(events[1], stream));
    ok(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    ok(cudaEventElapsedTime(&milliseconds, events[0], events[1]));
    if (i >= 2) times.push_back(milliseconds * 1000.0 / kPlans);
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TEST_F(PlanKernel, TakesMicroseconds) {
#if defined(FOLIO_EMULATED_CUDA)
  GTEST_SKIP() << "of a GPU";
#endif
  const struct {
    const char* name;
    int32_t longest;
    Determinism determinism;
  } loads[] = {{"up to 1000 keys", 1000, Determinism::kRunToRun},
               {"up to 32768 keys", 32768, Determinism::kRunToRun},
               {"up to 32768 keys, fixed splits", 32768, Determinism::kBatchInvariant}};
  for (const auto& load : loads) {
    for (const Schedule schedule : {Schedule::kStatic, Schedule::kDynamic}) {
      Case one = decoding_case(load.longest, load.determinism);
      one.config.tile.schedule = schedule;
      const double microseconds = device_microseconds(one, arena_);
      std::printf("device plan, 256 requests of %s, %s: %.2f us\n", load.name,
                  schedule == Schedule::kDynamic ? "dynamic" : "static", microseconds);
      // Far from what is measured, and far below what it takes if only one thread works.
      EXPECT_LT(microseconds, 100.0);
    }
  }
  for (const int32_t requests : {1, 8}) {
    Case one = decoding_case(4096, Determinism::kRunToRun);
    one.config.tile.schedule = Schedule::kDynamic;
    one.batch = testing::paged_batch(std::vector<int32_t>(static_cast<size_t>(requests), 1),
                                     std::vector<int32_t>(static_cast<size_t>(requests), 4096 / requests));
    std::printf("device plan, %d requests of %d keys, dynamic: %.2f us\n", requests, 4096 / requests,
                device_microseconds(one, arena_));
  }
}

TEST_F(PlanKernel, TakesMicrosecondsForPrefill) {
#if defined(FOLIO_EMULATED_CUDA)
  GTEST_SKIP() << "of a GPU";
#endif
  const struct {
    int32_t requests;
    int32_t tokens;
    int32_t keys;
  } loads[] = {{1, 2048, 2048}, {8, 4096, 4096}, {1, 16384, 16384}, {64, 1024, 1024}, {256, 32, 4096}, {256, 1, 4096}};
  for (const auto& load : loads) {
    Case one = decoding_case(4096, Determinism::kRunToRun);
    one.config.tile = {.rows = 128, .kv_tokens = 128, .schedule = Schedule::kDynamic, .order = TileOrder::kLpt};
    one.config.l2_swizzle_tokens = 81920;
    one.config.min_split_tokens = 1024;
    one.config.bounds = GraphBounds{.max_requests = load.requests,
                                    .max_tokens = load.requests * load.tokens,
                                    .max_q_len = load.tokens,
                                    .max_kv_len = load.keys,
                                    .max_shared_levels = 0};
    const auto count = static_cast<size_t>(load.requests);
    one.batch = testing::paged_batch(std::vector<int32_t>(count, load.tokens), std::vector<int32_t>(count, load.keys));
    const double microseconds = device_microseconds(one, arena_);
    std::printf("device plan, %d x %d tokens on %d keys, longest first: %.2f us\n", load.requests, load.tokens,
                load.keys, microseconds);
    EXPECT_LT(microseconds, 400.0);
  }
}

TEST_F(PlanKernel, UploadsAHostPlanInMicroseconds) {
  Case one = decoding_case(32768, Determinism::kRunToRun);
  const BatchView view = one.batch.view();
  PlanStorage storage;
  const size_t bytes = plan_image_bytes(one.config);
  void* image = arena_.image(bytes);
  void* stage = nullptr;
  ok(cudaMallocHost(&stage, bytes));
  std::vector<double> times;
  for (int i = 0; i < 200; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const PlanView host = make_plan(one.config, view, storage);
    const size_t used = pack_plan(host, stage, bytes, image);
    ok(cudaMemcpyAsync(image, stage, used, cudaMemcpyHostToDevice, nullptr));
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
    ok(cudaDeviceSynchronize());
    times.push_back(elapsed.count());
  }
  std::sort(times.begin(), times.end());
  std::printf("host plan, packed and its upload enqueued, 256 requests: %.2f us (least %.2f)\n",
              times[times.size() / 2], times[0]);
  EXPECT_EQ(Downloaded(image).numbers(), testing::serialise(make_plan(one.config, view, storage)));
  EXPECT_LT(times[times.size() / 2], 1000.0);
  cudaFreeHost(stage);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
