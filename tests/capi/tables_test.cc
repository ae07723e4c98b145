// Page tables and slots: the C functions have the C++ functions' numbers.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "c_handles.hpp"
#include "folio/c/folio.h"
#include "folio/page_table.hpp"
#include "folio/table_ops.hpp"

namespace folio_c_test {
namespace {

using Ints = std::vector<int32_t>;

/// Three requests of 5, 0 and 20 tokens over pages of 8, as CSR.
struct Tables {
  static constexpr int32_t kPageSize = 8, kRequests = 3;
  Owned<folio_context> context = make_context(1);
  folio::Context cpp = folio::Context::cpu();
  Ints lens = {5, 0, 20}, indptr = {0, 1, 1, 4}, pages = {3, 0, 2, 1};
  folio_page_table_view table = {FOLIO_TABLE_CSR, pages.data(), 4, indptr.data(), 0, 0, 3};
  folio::PageTableView cpp_table = folio::csr_table(pages, indptr);
};

TEST(CTables, LengthsAndIndptrs) {
  Tables t;
  Ints indptr(4, -1), last(3, -1), lens(3, -1);
  ASSERT_EQ(folio_paged_indptr(t.context.get(), t.lens.data(), 3, 8, indptr.data(), last.data(), nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(indptr, t.indptr);
  EXPECT_EQ(last, (Ints{5, 0, 4}));
  ASSERT_EQ(folio_seq_lens_from_paged(t.context.get(), indptr.data(), last.data(), 3, 8, lens.data(), nullptr, nullptr),
            FOLIO_OK);
  EXPECT_EQ(lens, t.lens);
  int32_t pages = 0;
  ASSERT_EQ(folio_pages_for(17, 8, &pages), FOLIO_OK);
  EXPECT_EQ(pages, 3);
}

TEST(CTables, DenseAndBack) {
  Tables t;
  Ints dense(12, -1);
  ASSERT_EQ(folio_table_to_dense(t.context.get(), &t.table, t.lens.data(), 3, 8, 4, 77, dense.data(), nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(dense, folio::to_dense(t.cpp_table, t.lens, 8, 4, 77));
  const folio_page_table_view dense_table = {FOLIO_TABLE_DENSE, dense.data(), 12, nullptr, 4, 0, 3};
  Ints indptr(4), indices(4), last(3);
  ASSERT_EQ(folio_table_to_csr(t.context.get(), &dense_table, t.lens.data(), 3, 8, indptr.data(), indices.data(), 4,
                               last.data(), nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(indices, t.pages);
  EXPECT_EQ(indptr, t.indptr);
  ASSERT_EQ(folio_validate_page_table(t.context.get(), &t.table, t.lens.data(), 3, 8, 4, nullptr, nullptr), FOLIO_OK);
  expect_refusal(folio_validate_page_table(t.context.get(), &t.table, t.lens.data(), 3, 8, 3, nullptr, nullptr),
                 FOLIO_INVALID_ARGUMENT, "3");
}

TEST(CTables, TokensAndSlots) {
  Tables t;
  Ints indptr(4), indices(25), expected_indptr(4), expected(25);
  std::vector<int64_t> offsets(25), expected_offsets(25);
  ASSERT_EQ(folio_token_indices(t.context.get(), &t.table, t.lens.data(), 3, 8, indptr.data(), indices.data(), 25,
                                nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  folio::token_indices(t.cpp, t.cpp_table, t.lens, 8, expected_indptr, expected);
  EXPECT_EQ(indices, expected);
  EXPECT_EQ(indptr, expected_indptr);
  ASSERT_EQ(folio_token_offsets(t.context.get(), &t.table, t.lens.data(), 3, 8, 1000, 10, indptr.data(), offsets.data(),
                                25, nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  folio::token_offsets(t.cpp, t.cpp_table, t.lens, 8, 1000, 10, expected_indptr, expected_offsets);
  EXPECT_EQ(offsets, expected_offsets);

  const Ints rows = {0, 2, 2, 2}, positions = {4, 19, -1, 8};
  std::vector<int64_t> slots(4);
  ASSERT_EQ(folio_slot_mapping(t.context.get(), &t.table, rows.data(), positions.data(), 4, 8, nullptr, slots.data(),
                               nullptr, nullptr),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(slots, (std::vector<int64_t>{28, 11, -1, 16}));
  const folio_kv_shard shard = {2, 1, 4};
  std::vector<int64_t> sharded(4);
  ASSERT_EQ(folio_slot_mapping(t.context.get(), &t.table, rows.data(), positions.data(), 4, 8, &shard, slots.data(),
                               nullptr, nullptr),
            FOLIO_OK);
  folio::slot_mapping(t.cpp_table, rows, positions, 8, sharded, 2, 1, 4);
  EXPECT_EQ(slots, sharded);
  Ints local(3);
  ASSERT_EQ(folio_shard_lens(t.context.get(), t.lens.data(), 3, &shard, local.data(), nullptr, nullptr), FOLIO_OK);
  for (size_t r = 0; r < 3; ++r) EXPECT_EQ(local[r], folio::shard_len(t.lens[r], 2, 1, 4));
}

TEST(CTables, SmallerPages) {
  Tables t;
  Ints expanded(8);
  ASSERT_EQ(folio_expand_pages(t.context.get(), t.pages.data(), 4, 2, expanded.data(), nullptr, nullptr), FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(expanded, folio::expand_pages(t.pages, 2));
}

TEST(CTables, BadArguments) {
  Tables t;
  const folio_context* c = t.context.get();
  Ints out(16, -7);
  std::vector<int64_t> slots(4);
  int32_t* o = out.data();
  const int32_t* lens = t.lens.data();
  expect_null_refused(folio_pages_for(1, 1, nullptr), "pages");
  expect_refusal(folio_pages_for(1, 0, o), FOLIO_INVALID_ARGUMENT, "page_size");
  expect_null_refused(folio_paged_indptr(nullptr, lens, 3, 8, o, o + 8, nullptr, nullptr), "context");
  expect_null_refused(folio_paged_indptr(c, nullptr, 3, 8, o, o + 8, nullptr, nullptr), "seq_lens");
  expect_null_refused(folio_paged_indptr(c, lens, 3, 8, nullptr, o, nullptr, nullptr), "indptr");
  expect_null_refused(folio_paged_indptr(c, lens, 3, 8, o, nullptr, nullptr, nullptr), "last_page_len");
  for (const int32_t wrong : {-1, INT32_MIN}) {
    const std::string text = "has " + std::to_string(wrong) + " elements";
    expect_refusal(folio_paged_indptr(c, lens, wrong, 8, o, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, text);
    expect_refusal(folio_seq_lens_from_paged(c, o, o, wrong, 8, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, text);
    expect_refusal(folio_shard_lens(c, lens, wrong, nullptr, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, text);
    expect_refusal(folio_table_to_dense(c, &t.table, lens, wrong, 8, 4, 0, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                   text);
  }
  expect_null_refused(folio_table_to_csr(c, nullptr, lens, 3, 8, o, o, 4, o, nullptr, nullptr), "table");
  expect_refusal(folio_table_to_dense(c, &t.table, lens, 3, 8, -1, 0, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 "dense has 3 x -1 elements");
  expect_refusal(folio_expand_pages(c, t.pages.data(), INT64_MAX, 2, o, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 "expanded has");
  expect_null_refused(folio_shard_lens(c, lens, 3, nullptr, o, nullptr, nullptr), "shard");
  t.table.kind = 2;
  expect_refusal(folio_validate_page_table(c, &t.table, lens, 3, 8, 4, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 "table.kind is 2");
  t.table.kind = FOLIO_TABLE_CSR;
  const Ints row_of_nobody = {3};
  const Ints position = {0};
  expect_refusal(folio_slot_mapping(c, &t.table, row_of_nobody.data(), position.data(), 1, 8, nullptr, slots.data(),
                                    nullptr, nullptr),
                 FOLIO_INVALID_ARGUMENT, "0");
  EXPECT_EQ(out, Ints(16, -7));
}

}  // namespace
}  // namespace folio_c_test
