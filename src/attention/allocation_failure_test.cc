// Every allocation fails once, and from there on: an error, no leak, and what was there before can be used again.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "core/allocation_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::atomic<int64_t> allocations_left{kNever};  // until the one that fails
std::atomic<bool> all_after{false};             // the later ones fail too
std::atomic<int64_t> blocks{0};

/// Makes the n-th allocation from now on fail; counts the blocks that are not freed.
class FailingAllocation {
 public:
  FailingAllocation(int64_t n, bool later_too) {
    blocks = 0;
    all_after = later_too;
    allocations_left = n;
    folio::testing::memory_hook = {.allocate = allocate, .release = release};
  }
  ~FailingAllocation() { disarm(); }
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  static bool failed() { return allocations_left <= 0; }
  /// Memory can be had again; blocks are still counted.
  static void allow() {
    if (allocations_left > 0) allocations_left = kNever;
    all_after = false;
  }
  static void disarm() {
    folio::testing::memory_hook = {};
    allocations_left = kNever;
  }

 private:
  static void* allocate(size_t, size_t) {
    const int64_t left = --allocations_left;
    if (left == 0 || (left < 0 && all_after)) throw std::bad_alloc();
    ++blocks;
    return nullptr;  // from the heap
  }
  static bool release(void* memory) noexcept {
    if (memory != nullptr) --blocks;
    return false;
  }
};

/// How a call ended.
enum class End { kDone, kOutOfMemory, kOther };

template <typename Call>
End end_of(const Call& call) {
  try {
    call();
    return End::kDone;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kOutOfMemory ? End::kOutOfMemory : End::kOther;
  } catch (const std::bad_alloc&) {
    return End::kOutOfMemory;
  }
}

/// Calls `call` with the first, second, ... allocation failing, until there are no more; `after` with memory again.
template <typename Call, typename After>
void sweep(const Call& call, const After& after) {
  call();  // makes what is made once in a process and kept: the list of kernels
  after();
  for (const bool later_too : {false, true}) {
    int64_t n = 1;
    int64_t refused = 0;
    for (;; ++n) {
      ASSERT_LT(n, 10000);
      End end = End::kDone;
      int64_t kept = 0;
      bool failed = false;
      {
        const FailingAllocation failing(n, later_too);
        end = end_of(call);
        failed = FailingAllocation::failed();
        FailingAllocation::allow();
        after();
        kept = blocks;
      }
      EXPECT_EQ(kept, 0) << "allocation " << n << ": blocks are not freed";
      if (!failed) {
        EXPECT_EQ(end, End::kDone);
        break;
      }
      // What an algorithm can do without, such as stable_sort's buffer, fails unseen.
      ASSERT_NE(end, End::kOther) << "allocation " << n << (later_too ? " and all later ones" : "");
      refused += end == End::kOutOfMemory ? 1 : 0;
    }
    EXPECT_GT(refused, n / 2) << "of " << n << " allocations";
  }
}

/// Two segments, the first shared, and enough workers for splits: every array of a plan is used.
struct SharingBatch : SmallDecode {
  std::vector<int32_t> group_len{8}, groups{0, 2}, own_len{5, 12}, group_indptr{0, 1}, own_indptr{1, 2, 4};
  std::array<KvSegment, 2> both;
  std::array<SegmentArgs, 2> both_args;

  SharingBatch() {
    both[0].kv_len = group_len.data();
    both[0].group_indptr = groups.data();
    both[0].num_groups = 1;
    both[1].kv_len = own_len.data();
    both_args = {segment_args[0], segment_args[0]};
    both_args[0].table = csr_table(indices, group_indptr);
    both_args[1].table = csr_table(indices, own_indptr);
    batch.segments = both;
    args.segments = both_args;
  }
};

TEST(AllocationFailure, PrepareToRun_FailsCleanlyAtEveryAllocation) {
  SharingBatch small;
  const Workspace workspace = small.workspace(size_t{1} << 20);
  sweep(
      [&] {
        const Context context = Context::cpu({.executor = {}, .num_threads = 3, .force_kernel = {}});
        const AttentionOp op = prepare(context, small.config);
        PlanBuffer buffer = make_plan_buffer(op);
        run(plan(op, small.batch, buffer), small.args, workspace);
        run(plan(op, small.batch, buffer), small.args, workspace);
      },
      [] {});
}

TEST(AllocationFailure, Plan_ItsBufferIsUsableAfterwards) {
  SharingBatch small;
  const Workspace workspace = small.workspace(size_t{1} << 20);
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer first = make_plan_buffer(op);
  run(plan(op, small.batch, first), small.args, workspace);
  const std::vector<float> expected = small.out;
  std::unique_ptr<PlanBuffer> buffer;
  BatchView one = small.batch;  // then a larger one: arrays grow
  one.num_requests = one.num_tokens = 1;
  const std::array<int32_t, 2> one_group{0, 1};
  std::array<KvSegment, 2> one_segments = small.both;
  one_segments[0].group_indptr = one_group.data();
  one.segments = one_segments;
  bool same = true;
  sweep(
      [&] {
        buffer = std::make_unique<PlanBuffer>(make_plan_buffer(op));
        plan(op, one, *buffer);
        plan(op, small.batch, *buffer);
      },
      [&] {
        if (buffer == nullptr) return;
        small.out.assign(small.out.size(), -1.0f);
        run(plan(op, small.batch, *buffer), small.args, workspace);
        same = same && small.out == expected;
        buffer.reset();
      });
  EXPECT_TRUE(same) << "a buffer whose planning failed gives other results";
}

}  // namespace
}  // namespace folio::inline v0::attention
