// The token pool's case matrix with the device switched: the fixture's arrays on a GPU, the same expectations in
// float64. Besides, what the matrix has not: encoders, fp8 pools, caps, rows of draft models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "backends/token_pool/pool_test_util.hpp"
#include "core/golden_test.hpp"
#include "device_home.hpp"
#include "device_step.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden;
using folio::testing::GoldenCase;
using testing::DeviceHome;
using testing::DeviceStep;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
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

class OnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
  /// One step of every layer that the setup has. Kernels that a GPU has here may not take every dtype: refused ones
  /// are counted.
  void run(const PoolSetup& setup, const PoolLengths& lengths) {
    PoolFixture fixture(setup, lengths);
    try {
      DeviceStep step(fixture, context());
      step.init();
      EXPECT_EQ(step.wrong_forward(fixture.layer()), "");
      if (setup.window) {
        EXPECT_EQ(step.wrong_forward(fixture.full_layer()), "");
      }
      if (setup.encoder_decoder) {
        EXPECT_EQ(step.wrong_forward(fixture.cross_layer()), "");
      }
      ++computed_;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      ++refused_;
    }
  }
  const Context& context() {
    if (!context_) context_ = Context::cuda(0);
    return *context_;
  }
  void TearDown() override {
    RecordProperty("computed", computed_);
    RecordProperty("refused", refused_);
  }
  std::optional<Context> context_;
  int computed_ = 0, refused_ = 0;
};

class TokenPoolCasesOnGpu : public OnGpu, public ::testing::WithParamInterface<GoldenCase> {};

TEST_P(TokenPoolCasesOnGpu, GiveAttention) {
  const GoldenCase& c = GetParam();
  const auto document = golden("token_pool/case_matrix");
  for (const auto& heads : document.at("heads")) {
    for (const DType cache : {DType::kFloat16, DType::kFloat8E4M3}) {
      PoolSetup setup;
      setup.num_heads = heads[0];
      setup.num_kv_heads = heads[1];
      setup.head_dim = setup.v_head_dim = document.at("head_dim");
      setup.q_dtype = DType::kFloat16;
      setup.kv_dtype = cache;
      if (is_fp8(cache)) setup.k_scale = setup.v_scale = 0.5f;
      setup.page_size = c.at<int32_t>("page_size");
      if (c.data.contains("window")) setup.window = c.at<int32_t>("window");
      for (const int32_t kernel_page_size : setup.page_size == 1 ? Ints{1} : Ints{1, setup.page_size}) {
        setup.kernel_page_size = kernel_page_size;
        for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
          if (path == ExtendPath::kRagged && lengths_of(c).mode != ForwardMode::kExtend) continue;
          setup.extend_path = path;
          SCOPED_TRACE(heads.dump() + (is_fp8(cache) ? ", fp8" : "") + ", pages of " +
                       std::to_string(kernel_page_size) + (path == ExtendPath::kRagged ? ", ragged" : ""));
          run(setup, lengths_of(c));
        }
      }
    }
  }
  EXPECT_GT(computed_ + (c.data.contains("parents") ? refused_ : 0), 0);
}

INSTANTIATE_TEST_SUITE_P(Data, TokenPoolCasesOnGpu,
                         ::testing::ValuesIn(folio::testing::golden_cases("token_pool/case_matrix")),
                         folio::testing::golden_case_name);

class TokenPoolStepsOnGpu : public OnGpu {};

TEST_F(TokenPoolStepsOnGpu, EncodersAndCapsGiveAttention) {
  const PoolLengths extends{ForwardMode::kExtend, {5, 0, 17, 3}, {3, 7, 1, 2}, {8, 4, 12, 0}};
  const PoolLengths decodes{ForwardMode::kDecode, {5, 9, 17, 3}, {1, 1, 1, 1}, {8, 4, 12, 0}};
  for (const PoolLengths& lengths : {extends, decodes}) {
    for (const int32_t page_size : {1, 4}) {
      PoolSetup setup;
      setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
      setup.page_size = page_size;
      setup.encoder_decoder = true;
      setup.logit_cap = 1.5f;
      setup.v_head_dim = 24;
      SCOPED_TRACE(page_size);
      run(setup, lengths);
    }
  }
  EXPECT_EQ(computed_, 4);
}

/// Whisper-like encoders: no request reads another's keys, or the encoder's.
TEST_F(TokenPoolStepsOnGpu, EncodersThatEndInsideAPage_GiveAttention) {
  for (const ForwardMode mode : {ForwardMode::kExtend, ForwardMode::kDecode}) {
    for (const bool joint : {false, true}) {
      PoolSetup setup;
      setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
      setup.page_size = 16;
      setup.encoder_decoder = true;
      setup.joint_pages = joint;
      run(setup, {mode, {5, 9, 17, 3}, {1, 1, 1, 1}, {20, 48, 100, 0}});
    }
  }
  EXPECT_EQ(computed_, 4);
}

std::string fault_of(TokenPoolBackend& backend) {
  try {
    backend.check_plans();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was reported";
}

/// A row that the table does not have: the other requests are served, and the fault is told once.
TEST_F(TokenPoolStepsOnGpu, RowsThatAreNotThere_AreReported) {
  for (const int32_t page_size : {1, 16}) {
    PoolSetup setup;
    setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
    setup.page_size = page_size;
    PoolFixture fixture(setup, {ForwardMode::kDecode, {5, 9, 40}, {1, 1, 1}});
    DeviceStep step(fixture, context());
    Ints rows = fixture.rows;
    rows[2] = 77;
    step.batch().req_pool_indices = step.place(rows);
    step.init();
    EXPECT_THAT(step.wrong_forward(fixture.layer()), ::testing::StartsWith("request 2")) << "the first two are right";
    EXPECT_THAT(fault_of(step.backend()), ::testing::HasSubstr("request 2 has row 77"));
    EXPECT_EQ(fault_of(step.backend()), "nothing was reported");
  }
}

/// A plan from the host's lengths reads what it counts with, and says that the device's are others.
TEST_F(TokenPoolStepsOnGpu, HostLengthsThatAreOthers_AreReported) {
  PoolSetup setup;
  setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
  PoolFixture fixture(setup, {ForwardMode::kDecode, {5, 9, 40}, {1, 1, 1}});
  DeviceStep step(fixture, context());
  Ints stale = fixture.seq_lens;
  stale[1] = 3;
  step.batch().seq_lens = step.place(stale);
  step.init();
  EXPECT_EQ(step.wrong_forward(fixture.layer()), "");
  EXPECT_THAT(fault_of(step.backend()), ::testing::HasSubstr("request 1 has 3 tokens to read by the device's lengths"));
}

TEST_F(TokenPoolStepsOnGpu, KvIndices_AreMadeOnTheDevice) {
  DeviceHome home;
  Ints table(3 * 8), rows{1, 2, 9}, lens{5, 8, 4}, indptr{0, 2, 4, 5}, indices(5, -1);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  KvIndicesArgs args;
  args.req_to_token = dense_table(table, 3, 8);
  args.req_to_token.indices = home.move_in(table).data();
  args.req_pool_indices = home.move_in(rows);
  args.paged_kernel_lens = home.move_in(lens);
  args.kv_indptr = home.move_in(indptr);
  args.page_size = 4;
  DeviceFaults faults(context());
  create_kv_indices(args, home.move_in(indices), faults);
  home.finish();
  EXPECT_EQ(indices, (Ints{2, 3, 4, 5, 0}));
  try {
    faults.check();
    ADD_FAILURE() << "nothing was reported";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("request 2 has row 9; req_to_token has rows 0 to 2"));
  }
  EXPECT_NO_THROW(faults.check());
}

/// Lists that the engine has built, one row a branch: with one branch a plain decode.
TEST_F(TokenPoolStepsOnGpu, RowsOfDraftModelsAreTheEnginesLists) {
  PoolSetup setup;
  setup.q_dtype = setup.kv_dtype = DType::kBFloat16;
  PoolFixture fixture(setup, {ForwardMode::kDecode, {5, 9, 40}, {1, 1, 1}});
  Ints indptr{0}, indices;
  for (size_t r = 0; r < fixture.num_requests(); ++r) {
    for (int32_t position = 0; position < fixture.seq_lens[r]; ++position) indices.push_back(fixture.slot(r, position));
    indptr.push_back(static_cast<int32_t>(indices.size()));
  }
  DeviceStep step(fixture, context());
  step.batch().spec_info.kv_indptr = step.place(indptr);
  step.batch().spec_info.kv_indices = step.place(indices);
  step.batch().spec_info.kv_indptr_cpu = indptr;
  step.init();
  EXPECT_EQ(step.wrong_forward(fixture.layer()), "");
}

}  // namespace
}  // namespace folio::inline v0::backends
