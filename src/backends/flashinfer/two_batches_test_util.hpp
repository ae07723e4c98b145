#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "core/allocation_failure_test_util.hpp"

namespace folio::inline v0::backends::testing {

/// An engine's steps of two batches through one builder, for tests in which allocations fail: what does not depend on
/// the backend. A derived class has `make` and `steps`.
template <typename Fixture, typename Impl, typename Builder>
class TwoBatches {
 public:
  explicit TwoBatches(const LayerSetup& setup)
      : decodes_(setup, {"decodes", {12, 17, 9, 30, 21}, {1, 1, 1, 1, 1}}),
        mixed_(setup, {"mixed", {20, 13, 26}, {1, 3, 6}}) {}

  static LayerSetup small_layer() {
    LayerSetup setup;
    setup.num_heads = 2;
    setup.num_kv_heads = 1;
    setup.head_size = 16;
    setup.page_size = 4;
    setup.shared_prefix = 8;
    return setup;
  }

  void drop() {
    builder_.reset();
    impl_.reset();
  }
  bool made() const { return builder_ != nullptr; }
  std::string wrong_output() const { return mixed_.wrong_output() + decodes_.wrong_output(); }
  std::vector<std::byte> outputs() const {
    std::vector<std::byte> all = mixed_.out_memory;
    all.insert(all.end(), decodes_.out_memory.begin(), decodes_.out_memory.end());
    return all;
  }
  void clear_outputs() {
    for (Fixture* batch : {&mixed_, &decodes_}) std::ranges::fill(batch->out_memory, kUnwritten);
  }

 protected:
  Fixture decodes_, mixed_;
  std::optional<Impl> impl_;
  std::unique_ptr<Builder> builder_;
};

/// Every allocation of an engine's steps fails once: an error, no leak, and a builder that plans the next steps right.
template <typename Engine>
void expect_clean_failures(Engine& engine) {
  engine.make();
  engine.steps();
  EXPECT_EQ(engine.wrong_output(), "");
  const std::vector<std::byte> expected = engine.outputs();
  engine.drop();
  bool same = true;
  folio::testing::sweep_failing_allocations(
      [&] {
        engine.make();
        engine.steps();
      },
      [&] {
        if (engine.made()) {
          engine.clear_outputs();
          engine.steps();
          same = same && engine.outputs() == expected;
        }
        engine.drop();
      });
  EXPECT_TRUE(same) << "a builder whose step failed plans the next one otherwise";
}

}  // namespace folio::inline v0::backends::testing
