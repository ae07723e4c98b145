#include "kvcache/strided_set.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace folio::inline v0::kvcache {
namespace {

StridedSet random_set(std::mt19937& random, uintptr_t base) {
  const auto up_to = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
  StridedSet set;
  set.base = base;
  set.row_bytes = 1 + up_to(4);
  set.extent = set.row_bytes;
  // Dimensions that nest, the innermost first; then reversed, as a StridedSet has them.
  set.num_dims = static_cast<int32_t>(up_to(4));
  for (int32_t i = set.num_dims - 1; i >= 0; --i) {
    auto& dim = set.dims[static_cast<size_t>(i)];
    dim.stride = set.extent + up_to(2) * up_to(12);
    dim.count = 2 + up_to(3);
    set.extent += (dim.count - 1) * dim.stride;
  }
  return set;
}

std::set<uintptr_t> bytes_of(const StridedSet& set) {
  std::set<uintptr_t> starts{set.base};
  for (int32_t i = 0; i < set.num_dims; ++i) {
    std::set<uintptr_t> more;
    for (uintptr_t start : starts) {
      for (int64_t k = 0; k < set.dims[static_cast<size_t>(i)].count; ++k) {
        more.insert(start + static_cast<uintptr_t>(k * set.dims[static_cast<size_t>(i)].stride));
      }
    }
    starts = more;
  }
  std::set<uintptr_t> bytes;
  for (uintptr_t start : starts) {
    for (int64_t b = 0; b < set.row_bytes; ++b) bytes.insert(start + static_cast<uintptr_t>(b));
  }
  return bytes;
}

/// Never calls overlapping sets apart; where both nest and have the same strides, it is exact.
TEST(LieApart, AgreesWithEnumeration) {
  std::mt19937 random(99);
  int apart_inside = 0;
  for (int round = 0; round < 20000; ++round) {
    const StridedSet a = random_set(random, 1000);
    const bool same_shape = random() % 2 == 0;
    StridedSet b = same_shape ? a : random_set(random, 1000);
    b.base = 1000 + random() % 64 - 32;
    const std::set<uintptr_t> of_a = bytes_of(a);
    bool overlap = false;
    for (uintptr_t byte : bytes_of(b)) overlap = overlap || of_a.count(byte) != 0;
    const bool apart = lie_apart(a, b);
    ASSERT_EQ(apart, lie_apart(b, a));
    ASSERT_FALSE(overlap && apart) << "round " << round;
    ASSERT_TRUE(overlap || apart || !same_shape) << "round " << round;
    const bool ranges_meet =
        b.base < a.base + static_cast<uintptr_t>(a.extent) && a.base < b.base + static_cast<uintptr_t>(b.extent);
    if (apart && ranges_meet) ++apart_inside;
  }
  EXPECT_GT(apart_inside, 500);  // sets that interleave were found apart
}

}  // namespace
}  // namespace folio::inline v0::kvcache
