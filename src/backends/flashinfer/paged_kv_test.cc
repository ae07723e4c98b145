#include <gtest/gtest.h>

#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::BatchFixture;
using testing::LayerSetup;

class PagedKvTable : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(PagedKvTable, HasFlashInfersArrays) {
  const std::vector<int32_t> seq_lens = GetParam().ints("seq_lens");
  const std::vector<int32_t> indptr = GetParam().ints("indptr");
  LayerSetup setup;
  setup.num_heads = setup.num_kv_heads = 1;
  setup.head_size = 8;
  setup.page_size = GetParam().at<int32_t>("page_size");
  std::vector<int32_t> query_lens;
  for (int32_t len : seq_lens) query_lens.push_back(len > 0 ? 1 : 0);
  BatchFixture fixture(setup, {"paged", seq_lens, query_lens});
  const FlashInferImpl impl(fixture.context, fixture.layer_config());
  FlashInferMetadataBuilder builder = fixture.make_builder(impl);
  const PagedKvArrays arrays = builder.paged_kv_arrays(builder.build(0, fixture.batch));
  EXPECT_EQ(std::vector<int32_t>(arrays.indptr.begin(), arrays.indptr.end()), indptr);
  EXPECT_EQ(std::vector<int32_t>(arrays.last_page_len.begin(), arrays.last_page_len.end()),
            GetParam().ints("last_page_len"));
  std::vector<int32_t> pages;
  for (size_t row = 0; row < seq_lens.size(); ++row) {
    const auto begin =
        fixture.block_table.begin() + static_cast<std::ptrdiff_t>(row) * fixture.batch.block_table.row_stride;
    pages.insert(pages.end(), begin, begin + indptr[row + 1] - indptr[row]);
  }
  EXPECT_EQ(folio::testing::on_host(arrays.indices), pages);
}

INSTANTIATE_TEST_SUITE_P(Golden, PagedKvTable, ::testing::ValuesIn(golden_cases("kvcache/paged_indptr")),
                         folio::testing::golden_case_name);

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

TEST(CopyPageIndices, RowLongerThanTheTables_IsRefused) {
  const std::vector<int32_t> table{1, 2, 3, 4}, offsets{0, 2, 4}, three_and_one{0, 3, 4};
  std::vector<int32_t> indices(4);
  EXPECT_THROW(copy_page_indices(dense_table(table, 2, 2), three_and_one, indices), Error);
  EXPECT_THROW(copy_page_indices(dense_table(table, 2, 2, 1), std::vector<int32_t>{0, 2, 3}, indices), Error);
  EXPECT_THROW(copy_page_indices(csr_table(table, offsets), three_and_one, indices), Error);
  EXPECT_THROW(copy_page_indices(csr_table(table, offsets), std::vector<int32_t>{0, 1, 4}, indices), Error);
  EXPECT_EQ(indices, std::vector<int32_t>(4)) << "nothing is written before";
}

}  // namespace
}  // namespace folio::inline v0::backends
