#include "folio/table_ops.hpp"
#include "core/error_test_util.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "attention/cache_test_util.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::attention {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ints = std::vector<int32_t>;

/// Three rows: two pages, none, three, the last of which has two of its four tokens.
struct Batch {
  Ints lens{8, 0, 10};
  Ints indptr{0, 2, 2, 5};
  Ints indices{7, 3, 1, 0, 9};
  PageTableView table() const { return csr_table(indices, indptr); }
};

const Context& cpu() {
  static const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return context;
}

TEST(TableOps, ListsPagesAndTokens) {
  const Batch batch;
  Ints indptr(4), last(3), lens(3), indices(6, -9), dense(9), local(3);
  paged_indptr(cpu(), batch.lens, 4, indptr, last);
  EXPECT_EQ(indptr, batch.indptr);
  EXPECT_THAT(last, ElementsAre(4, 0, 2));
  seq_lens_from_paged(cpu(), indptr, last, 4, lens);
  EXPECT_EQ(lens, batch.lens);
  to_dense(cpu(), batch.table(), batch.lens, 4, 3, -1, dense);
  EXPECT_THAT(dense, ElementsAre(7, 3, -1, -1, -1, -1, 1, 0, 9));
  to_csr(cpu(), dense_table(dense, 3, 3), batch.lens, 4, indptr, indices, last);
  EXPECT_EQ(indptr, batch.indptr);
  EXPECT_THAT(indices, ElementsAre(7, 3, 1, 0, 9, -9));
  shard_lens(cpu(), batch.lens, {2, 1, 3}, local);
  EXPECT_THAT(local, ElementsAre(3, 0, 4));
  Ints expanded(10);
  expand_pages(cpu(), batch.indices, 2, expanded);
  EXPECT_THAT(expanded, ElementsAre(14, 15, 6, 7, 2, 3, 0, 1, 18, 19));
}

TEST(TableOps, TokenIndices_OneForEachToken) {
  const Batch batch;
  Ints indptr(4), indices(19, -9);
  token_indices(cpu(), batch.table(), batch.lens, 4, indptr, indices);
  EXPECT_THAT(indptr, ElementsAre(0, 8, 8, 18));
  EXPECT_THAT(indices, ElementsAre(28, 29, 30, 31, 12, 13, 14, 15, 4, 5, 6, 7, 0, 1, 2, 3, 36, 37, -9));
  std::vector<int64_t> offsets(18);
  token_offsets(cpu(), batch.table(), batch.lens, 4, int64_t{1} << 33, 100, indptr, offsets);
  EXPECT_EQ(offsets[0], int64_t{7} << 33);
  EXPECT_EQ(offsets[5], (int64_t{3} << 33) + 100);
  EXPECT_EQ(offsets[17], (int64_t{9} << 33) + 100);
}

TEST(TableOps, SlotsOfAShard) {
  const Batch batch;
  const Ints rows{0, 0, 0, 2, 5}, positions{0, 1, 2, 7, -1};
  std::vector<int64_t> slots(5), expected(5);
  slot_mapping(cpu(), batch.table(), rows, positions, 4, slots, {2, 1, 1});
  slot_mapping(batch.table(), rows, positions, 4, expected, 2, 1, 1);
  EXPECT_EQ(slots, expected);
  EXPECT_THAT(slots, ElementsAre(-1, 28, -1, 7, -1));
}

TEST(TableOps, RefuseWhatDoesNotFit) {
  const Batch batch;
  Ints indptr(4), last(3), few(17), wrong(3);
  EXPECT_THAT(folio::testing::message_of([&] { token_indices(cpu(), batch.table(), batch.lens, 4, indptr, few); }),
              HasSubstr("there are 18 tokens; the list has room for 17"));
  EXPECT_THAT(folio::testing::message_of([&] { token_indices(cpu(), batch.table(), batch.lens, 4, wrong, few); }),
              HasSubstr("indptr has 3 entries; it must have 4"));
  const Ints longer{8, 0, 13};
  EXPECT_THAT(folio::testing::message_of([&] { token_indices(cpu(), batch.table(), longer, 4, indptr, few); }),
              HasSubstr("row 2 needs 4 pages"));
  Ints huge{INT32_MAX}, huge_indptr{0, 1}, one(1), starts(2);
  EXPECT_THAT(
      folio::testing::message_of([&] { token_indices(cpu(), csr_table(huge, huge_indptr), Ints{1}, 4, starts, one); }),
      HasSubstr("page 2147483647 of 4 tokens has no indices of 32 bits"));
  Ints indices(4);
  EXPECT_THAT(folio::testing::message_of([&] { to_csr(cpu(), batch.table(), batch.lens, 4, indptr, indices, last); }),
              HasSubstr("there are 5 pages; indices has room for 4"));
  EXPECT_NO_THROW(validate(cpu(), batch.table(), batch.lens, 4, 10));
  EXPECT_NE(folio::testing::message_of([&] { validate(cpu(), batch.table(), batch.lens, 4, 9); }), "");
  int32_t status = 0;
  EXPECT_THAT(folio::testing::message_of([&] { validate(cpu(), batch.table(), batch.lens, 4, 10, {}, &status); }),
              HasSubstr("status is given on a CPU context"));
  EXPECT_THAT(folio::testing::message_of([&] { paged_indptr(cpu(), batch.lens, 4, indptr, last, {}, &status); }),
              HasSubstr("status is given on a CPU context"));
  EXPECT_THAT(folio::testing::message_of([&] {
                shard_lens(cpu(), batch.lens, {2, 2, 1}, last);
              }),
              HasSubstr("rank 2 of 2"));
  EXPECT_THAT(folio::testing::message_of([&] { paged_indptr(cpu(), batch.lens, 4, indptr, last, Stream{&status}); }),
              HasSubstr("takes no stream"));
}

}  // namespace
}  // namespace folio::inline v0::attention
