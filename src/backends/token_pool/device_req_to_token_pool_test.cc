#include "folio/backends/token_pool/device_req_to_token_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "backends/token_pool/device/request_table_rule.hpp"
#include "backends/token_pool/list_report.hpp"
#include "backends/token_pool/refusal_test_util.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::refusal;
using token_pool::KvRangeFault;
using token_pool::ListReport;
using token_pool::TableWriteJob;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

Ints row_of(const DeviceReqToTokenPool& pool, int32_t row) {
  const PageTableView table = pool.table();
  return {table.indices + row * table.row_stride, table.indices + (row + 1) * table.row_stride};
}

TEST(DeviceReqToTokenPoolTest, WritesPositionsOfHeldRows) {
  DeviceReqToTokenPool pool(Context::cpu(), 2, 4);
  EXPECT_EQ(pool.size(), 2);
  EXPECT_EQ(pool.max_context_len(), 4);
  EXPECT_EQ(pool.alloc(), 1);
  EXPECT_EQ(pool.available(), 1);
  pool.write(1, 0, Ints{5, 6, 7});
  pool.write(1, 2, Ints{8, 9});
  pool.write(1, 4, Ints{});
  EXPECT_EQ(row_of(pool, 1), (Ints{5, 6, 8, 9}));
  EXPECT_THAT(refusal([&] { pool.write(1, 3, Ints{1, 2}); }), HasSubstr("positions up to 5 of row 1, which has 4"));
  EXPECT_THAT(refusal([&] { pool.write(1, -1, Ints{1}); }), HasSubstr("from position -1 of row 1"));
  EXPECT_THAT(refusal([&] { pool.write(2, 0, Ints{1}); }), HasSubstr("row 2 is not held"));
  EXPECT_THAT(refusal([&] { pool.write(3, 0, Ints{1}); }), HasSubstr("row 3 is not of this pool"));
  EXPECT_THAT(refusal([&] { pool.write(0, 0, Ints{1}); }), HasSubstr("row 0 is the dummy row"));
  EXPECT_EQ(row_of(pool, 1), (Ints{5, 6, 8, 9}));
  pool.free(1);
  EXPECT_THAT(refusal([&] { pool.free(1); }), HasSubstr("row 1 is not held"));
  EXPECT_EQ(row_of(pool, 1), (Ints{5, 6, 8, 9})) << "until it is written again";
  pool.clear();
  EXPECT_THAT(row_of(pool, 1), Each(0));
  Ints rows(2);
  EXPECT_TRUE(pool.alloc(rows));
  EXPECT_EQ(rows, (Ints{1, 2}));
  EXPECT_TRUE(pool.is_held(2));
}

TEST(DeviceReqToTokenPoolTest, IsAPageTableWithADummyRow) {
  DeviceReqToTokenPool pool(Context::cpu(), 2, 3);
  ASSERT_EQ(pool.alloc(), 1);
  pool.write(1, 0, Ints{7, 5, 6});
  EXPECT_EQ(pool.table().num_rows, 3);
  EXPECT_THAT(row_of(pool, 0), Each(0));
  validate(pool.table(), Ints{0, 3, 0}, 1, 8);
  EXPECT_THAT(refusal([] { DeviceReqToTokenPool(Context::cpu(), 0, 4); }), HasSubstr("max_reqs is 0"));
  EXPECT_THAT(refusal([] { DeviceReqToTokenPool(Context::cpu(), 4, 0); }), HasSubstr("max_context_len is 0"));
}

/// Extends, decodes and drafts: what a ForwardBatch has.
TEST(DeviceReqToTokenPoolTest, WritesABatch) {
  DeviceReqToTokenPool pool(Context::cpu(), 3, 6);
  Ints held(3);
  ASSERT_TRUE(pool.alloc(held));
  const Ints rows{2, 0, 1}, prefix{1, 0, 2}, fresh{3, 2, 1}, seq_lens{5, 1, 4};
  const Longs slots{11, 12, 13, 0, 0, 31};
  ReqToTokenWrites extend;
  extend.req_pool_indices = rows;
  extend.first = prefix;
  extend.lens = fresh;
  extend.out_cache_loc = slots;
  pool.write(extend);
  EXPECT_EQ(row_of(pool, 2), (Ints{0, 11, 12, 13, 0, 0}));
  EXPECT_EQ(row_of(pool, 1), (Ints{0, 0, 31, 0, 0, 0}));
  ReqToTokenWrites decode;
  decode.req_pool_indices = rows;
  decode.ends = seq_lens;
  const Ints next{14, 0, 32};
  decode.slots = next;
  pool.write(decode);
  EXPECT_EQ(row_of(pool, 2), (Ints{0, 11, 12, 13, 14, 0}));
  EXPECT_EQ(row_of(pool, 1), (Ints{0, 0, 31, 32, 0, 0}));
  EXPECT_THAT(row_of(pool, 0), Each(0)) << "padding writes nothing";
  ReqToTokenWrites verify;
  const Ints two_rows{1, 2}, ends{4, 4}, drafts{41, 42, 51, 52};
  verify.req_pool_indices = two_rows;
  verify.first = ends;
  verify.tokens_per_request = 2;
  verify.slots = drafts;
  DeviceFaults faults(Context::cpu());
  pool.write(verify, faults);  // on a CPU the same
  EXPECT_EQ(row_of(pool, 1), (Ints{0, 0, 31, 32, 41, 42}));
  EXPECT_EQ(row_of(pool, 2), (Ints{0, 11, 12, 13, 51, 52}));
}

TEST(DeviceReqToTokenPoolTest, RefusesABatch_AndWritesNothing) {
  DeviceReqToTokenPool pool(Context::cpu(), 2, 4);
  ASSERT_EQ(pool.alloc(), 1);
  const Ints rows{1, 1}, first{0, 2}, lens{1, 1}, slots{5, 6};
  const auto with = [&](auto&& change) {
    ReqToTokenWrites writes;
    writes.req_pool_indices = rows;
    writes.first = first;
    writes.slots = slots;
    change(writes);
    return refusal([&] { pool.write(writes); });
  };
  const Ints free_row{1, 2}, far{0, 4}, before{0, -1}, one{1}, negative{1, -1}, more{1, 2};
  const Longs wide{5, int64_t{1} << 31};
  using W = ReqToTokenWrites;
  EXPECT_THAT(with([&](W& w) { w.req_pool_indices = free_row; }), HasSubstr("row 2 is not held"));
  EXPECT_THAT(with([&](W& w) { w.first = far; }),
              HasSubstr("request 1 writes positions up to 5 of row 1, which has 4"));
  EXPECT_THAT(with([&](W& w) { w.first = before; }), HasSubstr("request 1 writes from position -1"));
  EXPECT_THAT(with([&](W& w) { w.ends = first; }), HasSubstr("one of them is given"));
  EXPECT_THAT(with([&](W& w) { w.first = {}; }), HasSubstr("one of them is given"));
  EXPECT_THAT(with([&](W& w) { w.first = one; }), HasSubstr("first has 1 entries for 2 requests"));
  EXPECT_THAT(with([&](W& w) { w.lens = one; }), HasSubstr("lens has 1 entries for 2 requests"));
  EXPECT_THAT(with([&](W& w) { w.lens = negative; }), HasSubstr("request 1 has a negative length"));
  EXPECT_THAT(with([&](W& w) { w.lens = more; }), HasSubstr("request 1 takes slots up to the 3th; 2 are given"));
  EXPECT_THAT(with([&](W& w) { w.slots = std::span(slots).first(1); }), HasSubstr("1 are given"));
  EXPECT_THAT(with([&](W& w) { w.req_pool_indices = one, w.first = one; }), HasSubstr("2 slots are given"));
  EXPECT_THAT(with([&](W& w) { w.out_cache_loc = wide; }), HasSubstr("one of them is given"));
  EXPECT_THAT(with([&](W& w) { w.slots = {}, w.out_cache_loc = wide; }), HasSubstr("slot 2147483648"));
  EXPECT_THAT(with([&](W& w) { w.lens = lens, w.tokens_per_request = 2; }), HasSubstr("tokens_per_request is 2"));
  const Ints padding{0}, most{1 << 30};
  EXPECT_THAT(with([&](W& w) { w.req_pool_indices = padding, w.first = one, w.lens = most; }),
              HasSubstr("2 slots are given"));
  EXPECT_THAT(with([&](W& w) {
                w.req_pool_indices = padding, w.first = one, w.lens = most, w.slots = {}, w.out_cache_loc = wide;
              }),
              HasSubstr("2 slots are given"));
  EXPECT_THAT(with([&](W& w) { w.tokens_per_request = -1; }), HasSubstr("tokens_per_request is -1"));
  EXPECT_THAT(row_of(pool, 1), Each(0));
}

/// An engine's host pool and the copy: one set of rows, each write in both.
TEST(DeviceReqToTokenPoolTest, CopiesAHostPool) {
  ReqToTokenPool host(2, 4);
  ASSERT_EQ(host.alloc(), 1);
  host.write(1, 0, Ints{5});
  DeviceReqToTokenPool pool(Context::cpu(), host);
  EXPECT_TRUE(pool.is_held(1));
  EXPECT_EQ(pool.alloc(), 2);
  EXPECT_TRUE(host.is_held(2));
  pool.write(2, 1, Ints{8, 9});
  const Ints rows{1, 2}, ends{2, 4}, slots{6, 7};
  ReqToTokenWrites decode;
  decode.req_pool_indices = rows;
  decode.ends = ends;
  decode.slots = slots;
  pool.write(decode);
  EXPECT_THAT(host.row(1), ElementsAre(5, 6, 0, 0));
  EXPECT_THAT(host.row(2), ElementsAre(0, 8, 9, 7));
  EXPECT_EQ(row_of(pool, 1), (Ints{5, 6, 0, 0}));
  EXPECT_EQ(row_of(pool, 2), (Ints{0, 8, 9, 7}));
  EXPECT_THAT(refusal([&] { pool.write(2, 3, Ints{1, 2}); }), HasSubstr("positions up to 5 of row 2"));
  pool.free(2);
  EXPECT_EQ(host.available(), 1);
  EXPECT_THAT(refusal([&] { pool.write(2, 0, Ints{1}); }), HasSubstr("row 2 is not held"));
  EXPECT_THAT(refusal([&] { pool.write(0, 0, Ints{1}); }), HasSubstr("row 0 is the dummy row"));
  pool.clear();
  EXPECT_EQ(host.available(), 2);
  EXPECT_THAT(host.row(2), Each(0));
}

/// What a kernel writes of a batch in which one request cannot be written: all others.
struct RuleCase {
  RuleCase() {
    std::iota(slots.begin(), slots.end(), 50);
    job.num_rows = 4;
    job.num_columns = 8;
    job.num_requests = 3;
    job.num_slots = 9;
  }
  void run() {
    table.assign(32, 0);
    job.table = table.data();
    job.rows = rows.data();
    job.first = first.data();
    job.lens = lens.data();
    job.wide_slots = slots.data();
    int64_t offset = 0;
    for (int32_t r = 0; r < 3; ++r) {
      for (int32_t lane = 1; lane >= 0; --lane) {
        write_request(job, r, offset, lane, 2, [&](const ListReport& report) { found = report; });
      }
      offset += job.taken(r);
    }
  }
  Ints row(int32_t r) const { return {table.begin() + 8 * r, table.begin() + 8 * r + 8}; }

  Ints table, rows{3, 1, 2}, first{0, 4, 1}, lens{2, 4, 3};
  Longs slots = Longs(9);
  TableWriteJob job;
  ListReport found;
};

TEST(RequestTableRule, RequestsThatCannotBeWritten_AreLeftOut) {
  RuleCase right;
  right.run();
  EXPECT_EQ(right.found.fault, KvRangeFault::kNone);
  EXPECT_EQ(right.row(3), (Ints{50, 51, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(right.row(1), (Ints{0, 0, 0, 0, 52, 53, 54, 55}));
  EXPECT_EQ(right.row(2), (Ints{0, 56, 57, 58, 0, 0, 0, 0}));
  struct Case {
    KvRangeFault fault;
    int32_t row, first, len;
    const char* text;
  };
  const Case cases[] = {
      {KvRangeFault::kRow, 4, 4, 4, "request 1 has row 4; req_to_token has rows 0 to 3"},
      {KvRangeFault::kRow, -1, 4, 4, "row -1"},
      {KvRangeFault::kNone, 0, 4, 4, "nothing"},
      {KvRangeFault::kWriteStart, 1, -1, 4, "from position -1 of row 1"},
      {KvRangeFault::kWriteEnd, 1, 5, 4, "positions up to 9 of row 1, which has 8"},
      {KvRangeFault::kWriteEnd, 1, INT32_MAX, 4, "which has 8"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    RuleCase rule;
    rule.rows[1] = c.row;
    rule.first[1] = c.first;
    rule.lens[1] = c.len;
    rule.run();
    EXPECT_EQ(rule.found.fault, c.fault);
    EXPECT_THAT(describe(rule.found), HasSubstr(c.text));
    EXPECT_THAT(rule.row(0), Each(0));
    EXPECT_THAT(rule.row(1), Each(0));
    EXPECT_EQ(rule.row(3), right.row(3));
    EXPECT_EQ(rule.row(2), right.row(2)) << "behind it, slots are counted on";
  }
  RuleCase rule;
  rule.lens[1] = -4;
  rule.run();
  EXPECT_EQ(rule.found.fault, KvRangeFault::kLength);
  EXPECT_EQ(rule.row(2), (Ints{0, 52, 53, 54, 0, 0, 0, 0})) << "a negative length takes none";
  rule = RuleCase();
  rule.job.num_slots = 8;
  rule.run();
  EXPECT_EQ(rule.found.fault, KvRangeFault::kWriteSlots);
  EXPECT_THAT(rule.row(2), Each(0));
  rule = RuleCase();
  rule.slots[7] = int64_t{1} << 40;
  rule.run();
  EXPECT_THAT(describe(rule.found), HasSubstr("request 2 has slot 1099511627776 for position 2 of row 2"));
  EXPECT_EQ(rule.row(2), (Ints{0, 56, 0, 58, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace folio::inline v0::backends
