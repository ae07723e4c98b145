// What a kernel of lists does for each request, run on the host: the bodies are the kernel's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "backends/token_pool/device/kv_lists_rule.hpp"
#include "backends/token_pool/list_report.hpp"
#include "backends/token_pool/refusal_test_util.hpp"
#include "backends/token_pool/step.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends::token_pool {
namespace {

using ::testing::HasSubstr;
using testing::refusal;
using Ints = std::vector<int32_t>;

/// Two requests of 5 and 9 tokens, pages of 4, in rows 1 and 2 of a table of 12 columns; and what a kernel makes of
/// them.
struct DeviceLists {
  DeviceLists() {
    table.assign(3 * 12, 0);
    for (int32_t position = 0; position < 12; ++position) {
      table[static_cast<size_t>(12 + position)] = 4 + position;
      table[static_cast<size_t>(24 + position)] = 40 + position;
    }
    job.table = {table.data(), 12, 12, static_cast<int64_t>(table.size()), 3};
    job.ranges.num_requests = 2;
    job.ranges.page_size = 4;
    job.capacity = 16;
  }

  /// The kernels' passes over requests, one after the other.
  void build() {
    job.ranges.seq_lens = seq_lens.data();
    job.rows = rows.data();
    if (!encoder_lens.empty()) {
      job.ranges.encoder_lens = encoder_lens.data();
      job.ranges.role = WrapperRole::kSelf;
    }
    lens.assign(2, 0);
    starts.assign(2, 0);
    indptr.assign(3, 0);
    indices.assign(16, -1);
    for (int32_t r = 0; r < 2; ++r) {
      const auto i = static_cast<size_t>(r);
      const ListedRange listed = listed_range(job, r);
      if (listed.found.fault != KvRangeFault::kNone) found = listed.found;
      lens[i] = listed.range.len;
      starts[i] = listed.range.table_start;
      indptr[i + 1] = indptr[i] + (lens[i] + job.ranges.page_size - 1) / job.ranges.page_size;
    }
    job.kv_lens = lens.data();
    job.table_starts = starts.data();
    job.kv_indptr = indptr.data();
    job.kv_indices = indices.data();
    for (int32_t r = 0; r < 2; ++r) {
      for (int32_t lane = 2; lane >= 0; --lane) {
        write_listed(job, r, lane, 3, [&](const ListReport& report) { found = report; });
      }
    }
    indices.resize(static_cast<size_t>(indptr[2]));
  }

  /// As if the host had planned these lengths.
  void plan_on_host(const Ints& host_lens) {
    planned_lens = host_lens;
    job.planned = {planned_cu_q.data(), planned_lens.data(), zeros.data(),
                   encoder_lens.empty() ? zeros.data() : encoder_lens.data()};
  }

  Ints table, seq_lens{5, 9}, rows{1, 2}, encoder_lens, planned_lens, planned_cu_q{0, 1, 2}, zeros{0, 0};
  Ints lens, starts, indptr, indices;
  ListsJob job;
  ListReport found;
};

TEST(DeviceListsTest, RequestsThatCanBeServed_HaveTheirPages) {
  for (const bool planned : {false, true}) {
    DeviceLists lists;
    if (planned) lists.plan_on_host({5, 9});
    lists.build();
    EXPECT_EQ(lists.lens, (Ints{5, 9}));
    EXPECT_EQ(lists.indices, (Ints{1, 2, 10, 11, 12}));
    EXPECT_EQ(lists.found.fault, KvRangeFault::kNone);
  }
}

/// Neither may the other request's pages be read in place of those that are missing.
TEST(DeviceListsTest, RequestsThatCannotBeServed_ReadNothingOfOthers) {
  struct Case {
    const char* name;
    KvRangeFault fault;
    Ints rows{1, 2}, seq_lens{5, 9}, encoder_lens{};
  };
  const std::vector<Case> cases = {
      {"a row that is not there", KvRangeFault::kRow, {7, 2}},
      {"a negative row", KvRangeFault::kRow, {-1, 2}},
      {"beyond the row", KvRangeFault::kEnd, {1, 2}, {13, 9}},
      {"encoders that end inside a page", KvRangeFault::kAlignment, {1, 2}, {5, 8}, {3, 4}},
  };
  for (const Case& c : cases) {
    for (const bool planned : {false, true}) {
      SCOPED_TRACE(std::string(c.name) + (planned ? ", planned on the host" : ""));
      DeviceLists lists;
      lists.rows = c.rows;
      lists.seq_lens = c.seq_lens;
      lists.encoder_lens = c.encoder_lens;
      if (planned) lists.plan_on_host(c.seq_lens);
      lists.build();
      EXPECT_EQ(lists.found.fault, c.fault);
      EXPECT_EQ(lists.found.request, 0);
      // As many keys as the plan says, or none.
      EXPECT_EQ(lists.lens[0], planned ? c.seq_lens[0] : 0);
      for (int32_t entry = lists.indptr[0]; entry < lists.indptr[1]; ++entry) {
        EXPECT_EQ(lists.indices[static_cast<size_t>(entry)], 0) << "the dummy page";
      }
      EXPECT_EQ(lists.lens[1], c.seq_lens[1]) << "the other request is served";
      EXPECT_EQ(lists.indices[static_cast<size_t>(lists.indptr[1])], c.encoder_lens.empty() ? 10 : 11);
    }
  }
}

/// A plan from the host's lengths reads what it counts with, whatever the device holds.
TEST(DeviceListsTest, HostLengthsThatAreOthers_AreListedAndReported) {
  DeviceLists lists;
  lists.plan_on_host({8, 9});
  lists.build();
  EXPECT_EQ(lists.lens, (Ints{8, 9}));
  EXPECT_EQ(lists.indices, (Ints{1, 2, 10, 11, 12}));
  EXPECT_EQ(lists.found.fault, KvRangeFault::kHostLengths);
  EXPECT_THAT(refusal([&] { throw_fault(lists.found); }), HasSubstr("request 0 has 5 tokens"));
}

TEST(DeviceListsTest, SlotsThatAreNoPages_AreTheDummyPage) {
  DeviceLists lists;
  lists.table[24 + 4] = 46;  // not the begin of a page
  lists.build();
  EXPECT_EQ(lists.indices, (Ints{1, 2, 10, 0, 12}));
  EXPECT_EQ(lists.found.fault, KvRangeFault::kPage);
  EXPECT_EQ(lists.found.value, 4);
  lists = DeviceLists();
  lists.job.ranges.page_size = 1;
  lists.job.num_slots = 48;
  lists.build();
  EXPECT_EQ(lists.indices, (Ints{4, 5, 6, 7, 8, 40, 41, 42, 43, 44, 45, 46, 47, 0}));
  EXPECT_EQ(lists.found.fault, KvRangeFault::kSlot);
  EXPECT_EQ(lists.found.value, 8);
}

TEST(DeviceListsTest, ListsThatAreGiven_EndWithTheirMemory) {
  DeviceLists lists;
  const Ints given{0, 5, 20};
  lists.job.given_kv_indptr = given.data();
  EXPECT_EQ(listed_range(lists.job, 0).range.len, 5);
  const ListedRange past = listed_range(lists.job, 1);
  EXPECT_EQ(past.range.len, 0);
  EXPECT_EQ(past.found.fault, KvRangeFault::kCapacity);
  const Ints falling{0, 5, 3};
  lists.job.given_kv_indptr = falling.data();
  EXPECT_EQ(listed_range(lists.job, 1).range.len, 0);
  EXPECT_EQ(listed_range(lists.job, 1).found.fault, KvRangeFault::kLength);
}

/// create_kv_indices on a device: what the host would refuse is the dummy page, and reported; the others are served.
TEST(DeviceKvIndicesTest, FaultsOfOneRequest_LeaveTheOthersServed) {
  struct Case {
    KvRangeFault fault;
    const char* text;
    Ints rows{1, 2}, lens{5, 9}, indptr{0, 2, 5}, starts{0, 0};
    Ints expected{0, 0, 10, 11, 12};
  };
  const std::vector<Case> cases = {
      {KvRangeFault::kNone, "", {1, 2}, {5, 9}, {0, 2, 5}, {0, 0}, {1, 2, 10, 11, 12}},
      {KvRangeFault::kRow, "request 0 has row 3; req_to_token has rows 0 to 2", {3, 2}},
      {KvRangeFault::kLength, "request 0 has a negative length", {1, 2}, {-5, 9}},
      {KvRangeFault::kStart, "request 0 starts at position -4", {1, 2}, {5, 9}, {0, 2, 5}, {-4, 0}},
      {KvRangeFault::kAlignment, "request 0 starts at position 2", {1, 2}, {5, 9}, {0, 2, 5}, {2, 0}},
      {KvRangeFault::kEnd, "positions up to 13 of row 1, which has 12", {1, 2}, {5, 9}, {0, 2, 5}, {8, 0}},
      {KvRangeFault::kOffset, "request 0 has 2 entries by kv_indptr, and 3", {1, 2}, {9, 9}},
      {KvRangeFault::kCapacity,
       "request 1 has entries up to 6 of kv_indices, which has 5",
       {1, 2},
       {5, 9},
       {0, 3, 6},
       {0, 0},
       {0, 0, 0, 0, 0}},
  };
  for (Case c : cases) {
    SCOPED_TRACE(c.text);
    if (c.fault == KvRangeFault::kCapacity) c.lens[0] = 9, c.rows[0] = 3;  // the first has no row either
    DeviceLists lists;
    Ints out(5, -1);
    KvIndicesJob job;
    job.table = lists.job.table;
    job.rows = c.rows.data();
    job.lens = c.lens.data();
    job.indptr = c.indptr.data();
    job.starts = c.starts.data();
    job.page_size = 4;
    job.out = out.data();
    job.capacity = static_cast<int64_t>(out.size());
    ListReport last;
    for (int32_t r = 0; r < 2; ++r) {
      for (int32_t lane = 2; lane >= 0; --lane) {
        create_entries(job, r, lane, 3, [&](const ListReport& found) { last = found; });
      }
    }
    EXPECT_EQ(out, c.expected);
    EXPECT_EQ(last.fault, c.fault);
    if (c.fault != KvRangeFault::kNone) {
      EXPECT_THAT(refusal([&] { throw_fault(last); }), HasSubstr(c.text));
    }
  }
}

TEST(ListReportTest, IsToldOnce) {
  ListReport report{1, KvRangeFault::kEnd, 3, 7, 40, 32};
  EXPECT_THAT(refusal([&] { throw_fault(report); }), HasSubstr("request 3 reads positions up to 40 of row 7"));
  EXPECT_NO_THROW(throw_fault(report));
  EXPECT_EQ(report.claimed, 0) << "the next one may be written";
}

/// A captured shape's lengths may be the device's alone; these arrays stand for a GPU's.
TEST(StepTest, CapturedShapesOnAGpu_NeedNoHostLengths) {
  const Ints table(3 * 12, 0), seq_lens{5, 9}, rows{1, 2}, encoders{3, 0};
  TokenPoolConfig config;
  config.max_context_len = 12;
  config.max_req_pool_size = 4;
  config.req_to_token = dense_table(table, 3, 12);
  ForwardBatch batch;
  batch.forward_mode = ForwardMode::kTargetVerify;
  batch.spec_info.draft_token_num = 3;
  batch.batch_size = 2;
  batch.req_pool_indices = rows;
  batch.seq_lens = seq_lens;
  batch.seq_lens_sum = 14;
  Step step;
  step.read(config, batch, /*on_host=*/false, /*captured=*/true);
  EXPECT_FALSE(step.lengths_known);
  EXPECT_EQ(step.cu_q, (Ints{0, 3, 6}));
  EXPECT_EQ(step.num_tokens, 6);
  EXPECT_EQ(step.seq_lens_sum, 14);
  EXPECT_THAT(refusal([&] { step.read(config, batch, false, /*captured=*/false); }), HasSubstr("seq_lens_cpu has 0"));
  const std::vector<uint8_t> tree(4, 0xff);
  batch.spec_info.tree_mask = tree;
  EXPECT_THAT(refusal([&] { step.read(config, batch, false, true); }), HasSubstr("seq_lens_cpu has 0"));
  batch.spec_info.tree_mask = {};
  batch.seq_lens = std::span(seq_lens).first(1);
  EXPECT_THAT(refusal([&] { step.read(config, batch, false, true); }), HasSubstr("seq_lens has 1"));
  batch.seq_lens = seq_lens;
  config.is_encoder_decoder = true;
  batch.encoder_lens = encoders;
  step.read(config, batch, false, true);
  EXPECT_EQ(step.device_encoder_lens, encoders.data());
  batch.encoder_lens_cpu = std::span(encoders).first(1);
  EXPECT_THAT(refusal([&] { step.read(config, batch, false, true); }), HasSubstr("encoder_lens_cpu has 1"));
}

}  // namespace
}  // namespace folio::inline v0::backends::token_pool
