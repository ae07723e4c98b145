#include <gtest/gtest.h>

#include <algorithm>

#include "backends/token_pool/pool_test_util.hpp"
#include "core/golden_test.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden;
using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::SlotLayout;
using Ints = std::vector<int32_t>;

ForwardMode mode_of(const std::string& name) {
  for (int32_t mode = 1; to_string(ForwardMode(mode)) != "invalid"; ++mode) {
    if (to_string(ForwardMode(mode)) == name) return ForwardMode(mode);
  }
  throw std::runtime_error("no mode " + name);
}

PoolLengths lengths_of(const GoldenCase& c) {
  return {mode_of(c.at<std::string>("mode")), c.ints("prefix"), c.ints("fresh"), {}, c.value("parents", Ints{})};
}

/// What lists must be like, whatever the batch: SGLang's metadata checks, and every entry against the request table.
void check_lists(const PoolFixture& fixture, const TokenPoolConfig& config, const KvWrapper& lists) {
  const size_t count = fixture.num_requests();
  ASSERT_EQ(lists.kv_indptr.size(), count + 1);
  EXPECT_EQ(lists.kv_indptr[0], 0);
  EXPECT_TRUE(std::ranges::is_sorted(lists.kv_indptr));
  EXPECT_EQ(lists.kv_indices.size(), static_cast<size_t>(lists.kv_indptr[count]));
  EXPECT_EQ(Ints(lists.qo_indptr.begin(), lists.qo_indptr.end()), fixture.cu_q);
  for (size_t r = 0; r < count; ++r) {
    ASSERT_GE(lists.kv_lens[r], 0);
    const int32_t entries = lists.kv_indptr[r + 1] - lists.kv_indptr[r];
    EXPECT_EQ(entries, (lists.kv_lens[r] + config.page_size - 1) / config.page_size);
    EXPECT_EQ(lists.kv_starts[r] % config.page_size, 0);
    const int32_t last = lists.kv_lens[r] == 0 ? 1 : lists.kv_lens[r] - (entries - 1) * config.page_size;
    EXPECT_EQ(lists.kv_last_page_len[r], last);
    for (int32_t i = 0; i < entries; ++i) {
      EXPECT_EQ(lists.kv_indices[static_cast<size_t>(lists.kv_indptr[r] + i)],
                fixture.slot(r, lists.kv_starts[r] + i * config.page_size) / config.page_size);
    }
  }
}

std::span<const KvWrapper> wrappers_of(const TokenPoolBackend& backend) {
  if (const auto* decode = std::get_if<DecodeMetadata>(&backend.forward_metadata())) return decode->decode_wrappers;
  return std::get<PrefillMetadata>(backend.forward_metadata()).prefill_wrappers;
}

/// One case with every layout, head count and path, the backend reading slots and pages; layers with and without
/// window.
class TokenPoolCases : public ::testing::TestWithParam<GoldenCase> {};

void run_case(const GoldenCase& c, PoolSetup setup) {
  const int32_t page_size = c.at<int32_t>("page_size");
  setup.page_size = page_size;
  if (c.data.contains("window")) setup.window = c.at<int32_t>("window");
  for (const int32_t kernel_page_size : page_size == 1 ? Ints{1} : Ints{1, page_size}) {
    setup.kernel_page_size = kernel_page_size;
    for (const ExtendPath path : {ExtendPath::kAuto, ExtendPath::kRagged, ExtendPath::kPaged}) {
      if (path != ExtendPath::kAuto && lengths_of(c).mode != ForwardMode::kExtend) continue;
      setup.extend_path = path;
      PoolFixture fixture(setup, lengths_of(c));
      TokenPoolBackend backend(fixture.context, fixture.config());
      backend.init_forward_metadata(fixture.batch);
      for (const KvWrapper& lists : wrappers_of(backend)) {
        if (!folio::testing::on_gpu()) check_lists(fixture, backend.config(), lists);  // there they lie on the device
      }
      const auto* prefill = std::get_if<PrefillMetadata>(&backend.forward_metadata());
      const bool ragged = prefill != nullptr && prefill->use_ragged;
      EXPECT_EQ(ragged, path == ExtendPath::kRagged || (ragged && path == ExtendPath::kAuto));
      fixture.forward(backend, fixture.layer());
      EXPECT_EQ(fixture.wrong_output(fixture.layer(), ragged), "") << "path " << static_cast<int>(path);
      EXPECT_EQ(fixture.wrong_cache(), "");
      fixture.clear_output();
      fixture.forward(backend, fixture.full_layer());
      EXPECT_EQ(fixture.wrong_output(fixture.full_layer(), ragged), "") << "path " << static_cast<int>(path);
    }
  }
}

TEST_P(TokenPoolCases, GiveAttention) {
  const auto document = golden("token_pool/case_matrix");
  for (const auto& heads : document.at("heads")) {
    PoolSetup setup;
    setup.num_heads = heads[0];
    setup.num_kv_heads = heads[1];
    setup.head_dim = setup.v_head_dim = document.at("head_dim");
    setup.q_dtype = setup.kv_dtype = DType::kFloat16;
    SCOPED_TRACE(heads.dump());
    run_case(GetParam(), setup);
  }
}

/// In float32 small differences show: a key too many or too few in a window cannot hide behind rounding.
TEST_P(TokenPoolCases, GiveAttentionInFloat32FromAnyLayout) {
  for (const SlotLayout layout : {SlotLayout::kShuffled, SlotLayout::kInterleaved, SlotLayout::kDescending}) {
    PoolSetup setup;
    setup.slots = layout;
    setup.logit_cap = layout == SlotLayout::kInterleaved ? 1.5f : 0.0f;
    SCOPED_TRACE(static_cast<int>(layout));
    run_case(GetParam(), setup);
  }
}

/// Head counts and dims of other tests, each with its own.
class TokenPoolShapes : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(TokenPoolShapes, GiveAttention) {
  const GoldenCase& c = GetParam();
  PoolSetup setup;
  setup.num_heads = c.at<int32_t>("heads");
  setup.num_kv_heads = c.at<int32_t>("kv_heads");
  setup.head_dim = c.at<int32_t>("head_dim");
  setup.v_head_dim = c.value("v_head_dim", setup.head_dim);
  run_case(c, setup);
}

INSTANTIATE_TEST_SUITE_P(Data, TokenPoolShapes, ::testing::ValuesIn(golden_cases("token_pool/shapes")),
                         golden_case_name);

INSTANTIATE_TEST_SUITE_P(Data, TokenPoolCases, ::testing::ValuesIn(golden_cases("token_pool/case_matrix")),
                         golden_case_name);

}  // namespace
}  // namespace folio::inline v0::backends
