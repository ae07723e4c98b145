#include <gtest/gtest.h>

#include <random>

#include "backends/token_pool/pool_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::SlotLayout;

/// Batches and models of any kind, one after the other.
class RandomCases {
 public:
  explicit RandomCases(uint32_t seed) : random_(seed) {}

  PoolSetup setup() {
    PoolSetup setup;
    setup.num_kv_heads = between(1, 2);
    setup.num_heads = setup.num_kv_heads * between(1, 4);
    setup.head_dim = 8 * between(1, 4);
    setup.v_head_dim = chance(2) ? setup.head_dim : 8 * between(1, 4);
    setup.q_dtype = chance(2) ? DType::kFloat32 : DType::kBFloat16;
    setup.kv_dtype = setup.q_dtype;
    if (setup.q_dtype == DType::kBFloat16 && chance(2)) {
      setup.kv_dtype = DType::kFloat8E4M3;
      setup.k_scale = 0.25f;
      setup.v_scale = 0.5f;
    }
    setup.page_size = chance(2) ? 1 : 1 << between(1, 4);
    setup.kernel_page_size = chance(3) ? 1 : setup.page_size;
    setup.slots = static_cast<SlotLayout>(between(0, 2));
    if (chance(2)) setup.window = between(0, 40);
    if (!setup.window && chance(4)) setup.encoder_decoder = true;
    if (chance(3)) setup.logit_cap = 1.0f;
    setup.extend_path = static_cast<ExtendPath>(between(0, 2));
    setup.determinism =
        setup.extend_path == ExtendPath::kRagged ? Determinism::kRunToRun : static_cast<Determinism>(between(0, 3));
    return setup;
  }

  PoolLengths lengths(const PoolSetup& setup) {
    PoolLengths lengths;
    lengths.mode = static_cast<ForwardMode>(between(1, 6));
    if (is_idle(lengths.mode)) lengths.mode = ForwardMode::kDecode;
    const int32_t drafts = between(1, 9);
    if (is_target_verify(lengths.mode) && chance(2)) {
      lengths.parents.push_back(-1);
      while (static_cast<int32_t>(lengths.parents.size()) < drafts) {
        lengths.parents.push_back(between(0, static_cast<int32_t>(lengths.parents.size()) - 1));
      }
    }
    const int32_t requests = between(0, 5);
    for (int32_t r = 0; r < requests; ++r) {
      const bool fixed = !is_extend(lengths.mode);
      const int32_t tokens = is_target_verify(lengths.mode) ? drafts : 1;
      lengths.prefix.push_back(chance(3) ? 0 : between(0, 90));
      lengths.fresh.push_back(fixed ? tokens : between(0, 30));
      if (setup.encoder_decoder) lengths.encoder.push_back(between(0, 3) * setup.page_size);
    }
    return lengths;
  }

  uint32_t seed() { return static_cast<uint32_t>(random_()); }

 private:
  int32_t between(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random_); }
  bool chance(int32_t of) { return between(1, of) == 1; }
  std::mt19937 random_;
};

TEST(TokenPoolRandom, BatchesGiveAttention) {
  RandomCases cases(1);
  for (int i = 0; i < folio::testing::random_cases(300); ++i) {
    SCOPED_TRACE(i);
    const PoolSetup setup = cases.setup();
    PoolFixture fixture(setup, cases.lengths(setup), cases.seed());
    ASSERT_EQ(fixture.wrong_step(), "");
    fixture.clear_output();
    ASSERT_EQ(fixture.wrong_step(fixture.full_layer()), "");
    if (setup.encoder_decoder) {
      fixture.clear_output();
      ASSERT_EQ(fixture.wrong_step(fixture.cross_layer()), "");
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
