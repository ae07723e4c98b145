#include "backends/token_pool/extend_path.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace folio::inline v0::backends::token_pool {
namespace {

using Ints = std::vector<int32_t>;

TEST(ExtendPathCost, IsLessForNewTokensOnTheirOwnAndForLongExtends) {
  EXPECT_TRUE(ragged_costs_less(Ints{0, 5, 6}, Ints{0, 0})) << "nothing is cached: there is nothing to merge";
  EXPECT_FALSE(ragged_costs_less(Ints{0, 1, 2}, Ints{1000, 3})) << "extends of one token";
  EXPECT_FALSE(ragged_costs_less(Ints{0, 500}, Ints{16}));
  EXPECT_TRUE(ragged_costs_less(Ints{0, 4096}, Ints{16}));
  EXPECT_TRUE(ragged_costs_less(Ints{0, 4096, 4097}, Ints{16, 70})) << "a decode beside it";
  EXPECT_TRUE(ragged_costs_less(Ints{0}, Ints{})) << "nothing to do";
}

TEST(ExtendPathCost, CountsIn64Bits) {
  EXPECT_TRUE(ragged_costs_less(Ints{0, 1 << 30}, Ints{1}));
}

}  // namespace
}  // namespace folio::inline v0::backends::token_pool
