// Schedules made ahead of time for steps over a divided cache: what they are, and that they are what runs.
#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "backend_step.hpp"
#include "core/error.hpp"

namespace folio::backends::testing {
namespace {

using Schedule = std::vector<int32_t>;

Context one_thread() {
  return Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
}

DcpSetup mixed_setup() {
  DcpSetup setup;
  setup.world = 3;
  setup.interleave = 2;
  setup.model = setup.cache = DType::kBFloat16;
  setup.requests = {{70, 1}, {33, 1}, {65, 4}, {40, 40}, {131, 17}};
  return for_backend(setup, BackendKind::kFlashAttention);
}

/// All ranks, in threads; rank 0's schedules.
struct Schedules {
  Schedule cached, new_tokens;
};
Schedules run_all(DcpCase& whole, std::optional<bool> aot_schedule = std::nullopt) {
  Schedules schedules;
  distributed::run_ranks(whole.setup.world, [&](distributed::ProcessGroup& group) {
    FlashAttentionHooks hooks;
    hooks.options = [&](FlashAttentionOptions& options) { options.aot_schedule = aot_schedule; };
    hooks.built = [&](FlashAttentionMetadata& metadata) {
      if (group.rank() != 0) return;
      schedules.cached.assign(metadata.scheduler_metadata.begin(), metadata.scheduler_metadata.end());
      schedules.new_tokens.assign(metadata.new_tokens_scheduler_metadata.begin(),
                                  metadata.new_tokens_scheduler_metadata.end());
    };
    run_backend(whole, BackendKind::kFlashAttention, group, one_thread(), {}, nullptr, hooks);
  });
  EXPECT_EQ(whole.wrong_outputs(), "");
  return schedules;
}

TEST(DcpSchedules, AreMadeForThePassesOfAStep) {
  DcpCase mixed(mixed_setup());
  const Schedules both = run_all(mixed);
  EXPECT_FALSE(both.cached.empty());
  EXPECT_FALSE(both.new_tokens.empty());

  DcpSetup setup = mixed_setup();
  setup.requests = {{17, 17}, {5, 5}};
  DcpCase prompts(setup);
  const Schedules fresh = run_all(prompts);
  EXPECT_TRUE(fresh.cached.empty()) << "nothing is in the cache";
  EXPECT_FALSE(fresh.new_tokens.empty());

  setup = mixed_setup();
  setup.cross = true;
  DcpCase cross(for_backend(setup, BackendKind::kFlashAttention));
  const Schedules encoders = run_all(cross);
  EXPECT_FALSE(encoders.cached.empty());
  EXPECT_TRUE(encoders.new_tokens.empty()) << "cross attention has no new tokens";
}

TEST(DcpSchedules, ChangeNoBit) {
  for (const bool all_heads : {false, true}) {
    DcpSetup setup = mixed_setup();
    setup.sinks = setup.alibi = true;
    setup.replicated_queries = setup.all_heads_out = all_heads;
    DcpCase with(setup), without(setup);
    EXPECT_FALSE(run_all(with, true).cached.empty());
    const Schedules none = run_all(without, false);
    EXPECT_TRUE(none.cached.empty() && none.new_tokens.empty());
    for (size_t r = 0; r < with.ranks.size(); ++r) EXPECT_EQ(with.ranks[r].out, without.ranks[r].out);
  }
}

TEST(DcpSchedules, AreOffInBatchInvariantMode) {
  DcpSetup setup = mixed_setup();
  setup.determinism = Determinism::kBatchInvariant;
  DcpCase whole(setup);
  EXPECT_TRUE(run_all(whole, true).cached.empty());
}

// One rank alone: if anything were sent, it would wait for the others.
TEST(DcpSchedules, ChangedOnes_AreRefusedBeforeAnythingIsSentOrWritten) {
  const auto groups = distributed::make_thread_groups(3, {std::chrono::seconds(40)});
  const auto refused = [&](const char* text, const std::function<void(FlashAttentionMetadata&)>& change) {
    DcpCase whole(mixed_setup());
    std::vector<std::byte> before;
    FlashAttentionHooks hooks;
    hooks.built = [&](FlashAttentionMetadata& metadata) {
      before = whole.ranks[0].out;
      change(metadata);
    };
    try {
      run_backend(whole, BackendKind::kFlashAttention, *groups[0], one_thread(), {}, nullptr, hooks);
      ADD_FAILURE() << "did not throw: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
    EXPECT_EQ(whole.ranks[0].out, before);
  };
  Schedule memory;
  const auto other = [&](std::span<const int32_t> schedule) {
    memory.assign(schedule.begin(), schedule.end());
    return std::span<const int32_t>(memory);
  };
  const auto damage = [](std::span<const int32_t> schedule) {
    const_cast<int32_t&>(schedule[schedule.size() / 2]) ^= 1;  // what an engine's stray write would do
  };
  refused("schedule", [&](auto& metadata) { damage(metadata.scheduler_metadata); });
  refused("schedule", [&](auto& metadata) { damage(metadata.new_tokens_scheduler_metadata); });
  refused("schedule", [&](auto& metadata) { metadata.scheduler_metadata = other(metadata.scheduler_metadata); });
  refused("schedule", [](auto& metadata) {
    metadata.new_tokens_scheduler_metadata = metadata.new_tokens_scheduler_metadata.first(4);
  });
  refused("schedule", [](auto& metadata) { metadata.scheduler_metadata = {}; });
}

TEST(DcpSchedules, ForAPassThatTheStepDoesNotHave_AreRefused) {
  const auto groups = distributed::make_thread_groups(3, {std::chrono::seconds(40)});
  DcpSetup setup = mixed_setup();
  setup.requests = {{17, 17}};
  DcpCase whole(setup);
  FlashAttentionHooks hooks;
  hooks.built = [](FlashAttentionMetadata& metadata) {
    metadata.scheduler_metadata = metadata.new_tokens_scheduler_metadata;
  };
  try {
    run_backend(whole, BackendKind::kFlashAttention, *groups[0], one_thread(), {}, nullptr, hooks);
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "scheduler_metadata is given for a step planned without one");
  }
}

}  // namespace
}  // namespace folio::backends::testing
