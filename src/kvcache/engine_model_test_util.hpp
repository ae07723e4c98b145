#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "folio/kvcache/prefix_cache.hpp"
#include "folio/kvcache/req_to_token_pool.hpp"
#include "folio/kvcache/window_token_allocator.hpp"
#include "kvcache/naive_prefixes_test_util.hpp"

namespace folio::testing {

/// A small engine that serves random requests from the pools and the prefix cache. What a slot holds is modelled by a
/// number that depends on all tokens up to its own, so that a false prefix hit, a slot with two owners or one used
/// after it was freed shows. Every answer of the cache is compared with NaivePrefixes. Differences throw
/// std::logic_error.
class EngineModel {
 public:
  struct Options {
    int32_t page_size = 1;
    int32_t window_left = -1;
    bool whole_leaves = true;
    int32_t num_slots = 256;
    int32_t num_window_slots = 256;
    int32_t alphabet = 3;  ///< tokens are below it
    int32_t max_len = 40;
    uint32_t seed = 1;
  };

  explicit EngineModel(const Options& options);

  void run(int64_t operations);
  void drain();  ///< ends all requests, empties the cache, checks that all slots are free

  int64_t hit_tokens() const { return hit_tokens_; }
  int64_t evicted_slots() const { return evicted_slots_; }
  int64_t healed_slots() const { return healed_slots_; }

 private:
  struct Request {
    std::string extra_key;
    std::vector<int32_t> tokens;
    std::vector<int32_t> slots;
    PrefixLock lock;
    int64_t window_begin = 0;
    int32_t row = 0;
  };

  int32_t below(int32_t limit) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(limit)); }
  bool windowed() const { return options_.window_left >= 0; }

  void step();
  void start();
  void decode(Request& request);
  void extend(Request& request);
  void end(size_t index, bool keep);
  void match();
  void evict(int64_t slots, int64_t window_copies);

  std::vector<int32_t> random_tokens();
  uint64_t content_of(const Request& request, size_t length) const;
  void store(const Request& request, size_t from);
  void forget(const SlotChanges& changes);
  void apply(const SlotChanges& changes);
  void check_readable(const Request& request) const;
  void check_sizes();
  int32_t window_slot(int32_t slot) const;

  Options options_;
  std::mt19937 random_;
  PrefixCache cache_;
  WindowTokenAllocator allocator_;
  ReqToTokenPool rows_;
  NaivePrefixes naive_;
  std::vector<Request> running_;
  std::vector<std::vector<int32_t>> seen_;  ///< earlier sequences, to begin like
  std::vector<uint64_t> content_;           ///< by slot; 0 = nothing that may be read
  std::vector<uint64_t> window_content_;    ///< by window slot
  int64_t hit_tokens_ = 0;
  int64_t evicted_slots_ = 0;
  int64_t healed_slots_ = 0;
};

}  // namespace folio::testing
