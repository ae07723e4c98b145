#include <gtest/gtest.h>

#include "backends/token_pool/pool_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolSetup;
using Ints = std::vector<int32_t>;

TEST(TokenPoolModes, AreWhatTheyAreNamed) {
  struct Row {
    ForwardMode mode;
    int32_t number;
    bool extend, decode, mixed, idle;
  };
  for (const Row& row :
       {Row{ForwardMode::kExtend, 1, true, false, false, false},
        Row{ForwardMode::kDecode, 2, false, true, false, false}, Row{ForwardMode::kMixed, 3, true, false, true, false},
        Row{ForwardMode::kIdle, 4, false, false, false, true},
        Row{ForwardMode::kTargetVerify, 5, false, false, false, false},
        Row{ForwardMode::kDraftExtend, 6, true, false, false, false}}) {
    EXPECT_EQ(static_cast<int32_t>(row.mode), row.number);
    EXPECT_EQ(is_extend(row.mode), row.extend);
    EXPECT_EQ(is_prefill(row.mode), row.extend);
    EXPECT_EQ(is_decode(row.mode), row.decode);
    EXPECT_EQ(is_mixed(row.mode), row.mixed);
    EXPECT_EQ(is_idle(row.mode), row.idle);
    EXPECT_EQ(is_decode_or_idle(row.mode), row.decode || row.idle);
    EXPECT_EQ(is_target_verify(row.mode), row.mode == ForwardMode::kTargetVerify);
    EXPECT_EQ(is_draft_extend(row.mode), row.mode == ForwardMode::kDraftExtend);
  }
}

TEST(TokenPoolMetadata, SaysWhichPathAndWhetherThereIsAPrefix) {
  struct Row {
    ExtendPath path;
    ForwardMode mode;
    Ints prefix, fresh;
    bool use_ragged, no_prefix;
  };
  for (const Row& row : {Row{ExtendPath::kAuto, ForwardMode::kExtend, {0, 0}, {5, 3}, true, true},
                         Row{ExtendPath::kAuto, ForwardMode::kExtend, {0, 7}, {5, 3}, false, false},
                         Row{ExtendPath::kAuto, ForwardMode::kExtend, {9}, {2000}, true, false},
                         Row{ExtendPath::kPaged, ForwardMode::kExtend, {0}, {5}, false, true},
                         Row{ExtendPath::kRagged, ForwardMode::kMixed, {8}, {1}, true, false},
                         Row{ExtendPath::kRagged, ForwardMode::kDraftExtend, {8}, {1}, false, false},
                         Row{ExtendPath::kRagged, ForwardMode::kTargetVerify, {8}, {2}, false, false}}) {
    PoolSetup setup;
    setup.extend_path = row.path;
    PoolFixture fixture(setup, {row.mode, row.prefix, row.fresh});
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    const auto& metadata = std::get<PrefillMetadata>(backend.forward_metadata());
    EXPECT_EQ(metadata.use_ragged, row.use_ragged);
    EXPECT_EQ(metadata.extend_no_prefix, row.no_prefix);
    EXPECT_EQ(metadata.prefill_wrappers.size(), 1u);
  }
}

/// On a CPU an array may be given as itself, as its host twin, or both; new tokens' lengths alone say what was cached.
TEST(TokenPoolMetadata, TakesLengthsFromEitherTwin) {
  for (const int which : {0, 1, 2, 3}) {
    PoolFixture fixture({}, {.mode = ForwardMode::kExtend, .prefix = {2, 4, 0}, .fresh = {3, 1, 5}});
    ForwardBatch& batch = fixture.batch;
    if (which >= 1) {
      batch.seq_lens_cpu = batch.seq_lens;
      batch.extend_prefix_lens_cpu = batch.extend_prefix_lens;
      batch.extend_seq_lens_cpu = batch.extend_seq_lens;
    }
    if (which == 2) batch.seq_lens = batch.extend_prefix_lens = batch.extend_seq_lens = {};
    if (which == 3) batch.extend_prefix_lens = batch.extend_prefix_lens_cpu = {};
    EXPECT_EQ(fixture.wrong_step(), "") << which;
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
