#include "testing/batch_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::verify {
namespace {

using ::testing::HasSubstr;

/// A case in memory.
struct Built {
  ConformanceCase conformance_case;
  Problem problem;
  KvMemory kv;
  Slice slice;
  BatchMemory batch;

  explicit Built(const std::string& text, int32_t padding_tokens = 2)
      : conformance_case(parse_case(text)),
        problem(make_problem(conformance_case)),
        kv(conformance_case, problem),
        slice(whole_problem(problem)),
        batch(conformance_case, problem, kv, (slice.padding_tokens = padding_tokens, slice)) {}
};

TEST(BatchMemory, EveryFormatHoldsTheProblemsNumbers) {
  for (const char* format : {"nhd", "hnd", "interleaved", "concatenated", "padded", "alias", "packed", "far"}) {
    const Built built(std::string("dtypes=f16/f16/f16 page=16 dims=192/128 lengths=medium format=") + format);
    const KvCacheView& cache = built.kv.cache();
    validate(cache);
    const KvRowModel& row = built.problem.segments[0].rows[0];
    const int32_t token = row.kv_len - 1;
    const int32_t head = built.problem.config.num_kv_heads - 1;
    const int64_t page = row.pages[static_cast<size_t>(token / 16)];
    const int64_t slot = token % 16;
    const int64_t k = page * cache.k_strides.page + slot * cache.k_strides.token + head * cache.k_strides.head + 7;
    const int64_t v_base = page * cache.v_strides.page + head * cache.v_strides.head;
    const int64_t v = cache.format == KvFormat::kCpuPacked ? v_base + slot / 2 * cache.v_strides.token + 14 + slot % 2
                                                           : v_base + slot * cache.v_strides.token + 7;
    const int64_t last_head = int64_t{token} * built.problem.config.num_kv_heads + head;
    EXPECT_EQ(load_as_float(cache.k, cache.dtype, k), row.k[static_cast<size_t>(last_head * 192 + 7)]) << format;
    EXPECT_EQ(load_as_float(cache.v, cache.dtype, v), row.v[static_cast<size_t>(last_head * 128 + 7)]) << format;
  }
}

TEST(BatchMemory, WhatNobodyOwnsIsNotANumber) {
  const Built built("lengths=edges page=32");
  const KvCacheView& cache = built.kv.cache();
  int64_t nans = 0;
  for (int64_t page = 0; page < cache.num_pages; ++page) {
    nans += std::isnan(load_as_float(cache.k, cache.dtype, page * cache.k_strides.page + 31 * cache.k_strides.token));
  }
  EXPECT_GT(nans, 0);
}

TEST(BatchMemory, TablesAreValidAndFullOfJunkElsewhere) {
  for (const char* table : {"csr", "dense"}) {
    const Built built(std::string("lengths=edges page=8 table=") + table);
    const PageTableView& view = built.batch.args().segments[0].table;
    std::vector<int32_t> lengths;
    for (const KvRowModel& row : built.problem.segments[0].rows) lengths.push_back(row.kv_len);
    validate(view, lengths, 8, built.problem.num_pages);
  }
}

TEST(BatchMemory, CanariesTellStrayWrites) {
  const Built built("lengths=medium lse=strided");
  EXPECT_FALSE(built.batch.written());
  EXPECT_EQ(built.batch.collect().stray_write, "");
  const AttentionArgs& args = built.batch.args();
  const LseView& lse = args.lse;
  lse.data[(built.batch.num_tokens()) * lse.token_stride] = 0.0f;  // a padding token's
  EXPECT_TRUE(built.batch.written());
  EXPECT_THAT(built.batch.collect().stray_write, HasSubstr("lse"));

  const Built other("lengths=medium");
  const TensorView& out = other.batch.args().out;
  store_from_float(out.data, out.dtype, other.batch.num_tokens() * out.strides[0], 0.0f);
  EXPECT_THAT(other.batch.collect().stray_write, HasSubstr("out"));
}

TEST(BatchMemory, SlicesTakePartsOfRequests) {
  const Built built("lengths=medium queries=mixed seed=3");
  Slice slice;
  slice.parts = {{1, 0, built.problem.requests[1].q_len, 0}};
  slice.padding_requests = 1;
  const BatchMemory part(built.conformance_case, built.problem, built.kv, slice);
  EXPECT_EQ(part.view().num_requests, 2);
  EXPECT_EQ(part.num_tokens(), built.problem.requests[1].q_len);
  EXPECT_EQ(part.view().segments[0].kv_len[0], built.problem.segments[0].rows[1].kv_len);
  EXPECT_EQ(part.view().segments[0].kv_len[1], 0);
}

}  // namespace
}  // namespace folio::verify
