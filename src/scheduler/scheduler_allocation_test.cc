#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <random>

#include "scheduler/plan_test_util.hpp"

namespace {

std::atomic<int64_t> allocations{0};

void* counted_allocation(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Every allocation of this test program is counted. noinline: otherwise gcc sees malloc and operator delete as a
// mismatched pair.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  return counted_allocation(bytes);
}
__attribute__((noinline)) void* operator new[](std::size_t bytes) {
  return counted_allocation(bytes);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace folio::inline v0::scheduler {
namespace {

TEST(Allocation, MakePlan_WarmStorage_AllocatesNothing) {
  std::mt19937 random(5);
  std::vector<testing::Case> cases;
  for (int i = 0; i < 200; ++i) cases.push_back(testing::random_case(random));
  testing::Case decode = cases[0];
  decode.batch = testing::paged_batch(std::vector<int32_t>(256, 1), std::vector<int32_t>(256, 5000));
  decode.config.mask = MaskKind::kCausal;
  decode.config.num_q_heads = 32;
  decode.config.num_kv_heads = 8;
  decode.config.num_workers = 132;
  cases.push_back(decode);
  for (size_t i = cases.size(); i-- > 0;) {
    cases.push_back(cases[i]);
    cases.back().config.tile.schedule = Schedule::kDynamic;
    cases.back().config.min_split_tokens = 4;
  }
  std::vector<BatchView> batches;
  for (testing::Case& one : cases) batches.push_back(one.batch.view());

  PlanStorage storage;
  const int64_t before_cold = allocations.load();
  for (size_t i = 0; i < cases.size(); ++i) make_plan(cases[i].config, batches[i], storage);
  const int64_t before_warm = allocations.load();
  EXPECT_GT(before_warm, before_cold) << "allocations are not counted";
  for (size_t i = 0; i < cases.size(); ++i) make_plan(cases[i].config, batches[i], storage);
  EXPECT_EQ(allocations.load(), before_warm);
}

}  // namespace
}  // namespace folio::inline v0::scheduler
