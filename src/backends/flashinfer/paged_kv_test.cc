#include <gtest/gtest.h>

#include <vector>

#include "backends/flashinfer/batch_fixture.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchFixture;
using testing::LayerSetup;

struct PagedCase {
  std::vector<int32_t> seq_lens;
  int32_t page_size;
  std::vector<int32_t> indptr;
  std::vector<int32_t> last_page_len;
};

class PagedKvTable : public ::testing::TestWithParam<PagedCase> {};

TEST_P(PagedKvTable, HasFlashInfersArrays) {
  LayerSetup setup;
  setup.num_heads = setup.num_kv_heads = 1;
  setup.head_size = 8;
  setup.page_size = GetParam().page_size;
  std::vector<int32_t> query_lens;
  for (int32_t len : GetParam().seq_lens) query_lens.push_back(len > 0 ? 1 : 0);
  BatchFixture fixture(setup, {"paged", GetParam().seq_lens, query_lens});
  const FlashInferImpl impl(fixture.context, fixture.layer_config());
  FlashInferMetadataBuilder builder = fixture.make_builder(impl);
  const PagedKvArrays arrays = builder.paged_kv_arrays(builder.build(0, fixture.batch));
  EXPECT_EQ(std::vector<int32_t>(arrays.indptr.begin(), arrays.indptr.end()), GetParam().indptr);
  EXPECT_EQ(std::vector<int32_t>(arrays.last_page_len.begin(), arrays.last_page_len.end()), GetParam().last_page_len);
  std::vector<int32_t> pages;
  for (size_t row = 0; row < GetParam().seq_lens.size(); ++row) {
    const auto begin =
        fixture.block_table.begin() + static_cast<std::ptrdiff_t>(row) * fixture.batch.block_table.row_stride;
    pages.insert(pages.end(), begin, begin + GetParam().indptr[row + 1] - GetParam().indptr[row]);
  }
  EXPECT_EQ(std::vector<int32_t>(arrays.indices.begin(), arrays.indices.end()), pages);
}

// Shapes of vLLM's and FlashInfer's tests; the last row is an empty request, whose last page has no tokens.
INSTANTIATE_TEST_SUITE_P(Golden, PagedKvTable,
                         ::testing::ValuesIn(std::vector<PagedCase>{
                             {{1328, 18, 463}, 16, {0, 83, 85, 114}, {16, 2, 15}},
                             {{1328, 18, 463}, 32, {0, 42, 43, 58}, {16, 18, 15}},
                             {{1, 54, 293, 70}, 16, {0, 1, 5, 24, 29}, {1, 6, 5, 6}},
                             {{32, 40}, 16, {0, 2, 5}, {16, 8}},
                             {{5, 0, 16}, 16, {0, 1, 1, 2}, {5, 0, 16}},
                         }));

TEST(CopyPageIndices, TakesDenseAndCsrTables) {
  const std::vector<int32_t> dense{9, 0, 5, 8, 9, 9, 1, 6, 7, 9, 9, 3, 4, 9, 9};
  const std::vector<int32_t> indptr{0, 3, 6, 8};
  const std::vector<int32_t> expected{0, 5, 8, 1, 6, 7, 3, 4};
  std::vector<int32_t> indices(8);
  copy_page_indices(dense_table(dense, 3, 5, 1), indptr, indices);
  EXPECT_EQ(indices, expected);
  const std::vector<int32_t> offsets{2, 5, 8, 10};
  const std::vector<int32_t> packed{9, 9, 0, 5, 8, 1, 6, 7, 3, 4};
  indices.assign(8, 0);
  copy_page_indices(csr_table(packed, offsets), indptr, indices);
  EXPECT_EQ(indices, expected);
}

TEST(CopyPageIndices, ChecksEveryLength) {
  const std::vector<int32_t> table{1, 2, 3, 4};
  std::vector<int32_t> indices(5);
  const auto copy = [&](const std::vector<int32_t>& indptr, size_t room) {
    copy_page_indices(dense_table(table, 2, 2), indptr, std::span(indices).first(room));
  };
  copy({0, 2, 4}, 4);
  EXPECT_THROW(copy({}, 4), Error);
  EXPECT_THROW(copy({1, 2, 4}, 4), Error);
  EXPECT_THROW(copy({0, 1, 2, 3}, 4), Error) << "more rows than the table has";
  EXPECT_THROW(copy({0, 2, 4}, 3), Error);
  EXPECT_THROW(copy({0, 2, 5}, 5), Error) << "past the table's end";
  EXPECT_THROW(copy({0, 2, 1}, 4), Error) << "falling";
}

}  // namespace
}  // namespace folio::inline v0::backends
