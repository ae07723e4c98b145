#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/kvcache/prefix_cache.hpp"

/// The cases of tests/golden/kvcache/prefix_cache.json: the originals' tests, the originals' mistakes, and cases of our
/// own, step by step.
namespace folio {
namespace {

using nlohmann::json;
using Ints = std::vector<int32_t>;

class PrefixCacheGolden : public ::testing::TestWithParam<testing::GoldenCase> {
 protected:
  PrefixCacheGolden() : cache_({GetParam().at<int32_t>("page_size"), GetParam().at<int32_t>("window_left")}) {}

  void insert(const json& step) {
    const PrefixCache::Inserted got =
        cache_.insert(key(step), ints(step, "slots"), changes_, step.value("window_begin", int64_t{0}));
    EXPECT_EQ(got.present, step.at("present").get<int64_t>());
    EXPECT_EQ(got.inserted, step.at("inserted").get<int64_t>());
    json moved = json::array();
    for (const SlotChanges::Move& move : changes_.moved) moved.push_back({move.from, move.to});
    EXPECT_EQ(moved, step.value("moved", json::array()));
    EXPECT_TRUE(changes_.freed.empty() && changes_.window_freed.empty());
  }

  void acquire(const json& step) {
    Ints slots{-5};
    PrefixLock lock = cache_.acquire(key(step), slots);
    EXPECT_EQ(lock.length() + 1, static_cast<int64_t>(slots.size()));
    EXPECT_EQ(slots.front(), -5);
    slots.erase(slots.begin());
    EXPECT_EQ(slots, ints(step, "slots"));
    if (step.contains("keep_as")) locks_[step.at("keep_as")] = std::move(lock);
  }

  void evict(const json& step) {
    const PrefixCache::Amount gone =
        cache_.evict({step.at("slots").get<int64_t>(), step.at("window_copies").get<int64_t>()}, changes_);
    EXPECT_EQ(json({gone.slots, gone.window_copies}), step.at("gone"));
    EXPECT_EQ(changes_.freed, ints(step, "freed"));
    EXPECT_EQ(changes_.window_freed, ints(step, "window_freed"));
  }

  void sizes(const json& step) {
    EXPECT_EQ(cache_.size(), step.at("size").get<int64_t>());
    EXPECT_EQ(cache_.evictable(), step.at("evictable").get<int64_t>());
    EXPECT_EQ(cache_.protected_slots(), step.at("protected").get<int64_t>());
    EXPECT_EQ(cache_.window_evictable(), step.value("window_evictable", int64_t{0}));
    EXPECT_EQ(cache_.window_protected(), step.value("window_protected", int64_t{0}));
  }

  PrefixKey key(const json& step) {
    tokens_ = ints(step, "tokens");
    extra_key_ = step.value("extra_key", "");
    return {tokens_, extra_key_};
  }

  static Ints ints(const json& step, const char* field) { return step.at(field).get<Ints>(); }

  PrefixCache cache_;
  SlotChanges changes_;
  std::map<std::string, PrefixLock> locks_;
  Ints tokens_;
  std::string extra_key_;
};

TEST_P(PrefixCacheGolden, AnswersAsExpected) {
  for (const json& step : GetParam().data.at("ops")) {
    SCOPED_TRACE(step.dump());
    const auto op = step.at("op").get<std::string>();
    changes_.clear();
    if (op == "insert") {
      insert(step);
    } else if (op == "match") {
      EXPECT_EQ(cache_.match(key(step)), step.at("length").get<int64_t>());
    } else if (op == "acquire") {
      acquire(step);
    } else if (op == "release") {
      locks_.at(step.at("lock")).reset();
    } else if (op == "evict") {
      evict(step);
    } else if (op == "sizes") {
      sizes(step);
    } else {
      FAIL() << "no such op";
    }
    cache_.check_invariants();
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, PrefixCacheGolden, ::testing::ValuesIn(testing::golden_cases("kvcache/prefix_cache")),
                         testing::golden_case_name);

}  // namespace
}  // namespace folio
