#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::Group;
using testing::LayerSetup;
using testing::message_of;

TEST(FlashInferReorder, FollowsTheProfile) {
  const std::vector<int32_t> scheduled{100, 200, 1, 1};
  const std::vector<int32_t> computed{100, 200, 10, 20};
  const auto order_of = [&](BackendProfile profile) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    FlashInferMetadataBuilder builder = group.make();
    std::vector<int32_t> order{0, 1, 2, 3};
    EXPECT_TRUE(builder.reorder_batch(scheduled, computed, [&](int32_t a, int32_t b) {
      std::swap(order[static_cast<size_t>(a)], order[static_cast<size_t>(b)]);
    }));
    return order;
  };
  EXPECT_EQ(order_of(BackendProfile::kNative), (std::vector<int32_t>{2, 3, 0, 1}));
  EXPECT_EQ(order_of(BackendProfile::kVllm2025_12), (std::vector<int32_t>{2, 3, 0, 1}));
  EXPECT_EQ(order_of(BackendProfile::kVllm2025_07), (std::vector<int32_t>{3, 2, 1, 0}));
}

TEST(FlashInferReorder, OfJuly2025TellsBuildWhatToExpect) {
  LayerSetup setup;
  setup.profile = BackendProfile::kVllm2025_07;
  setup.head_size = 64;
  Group group(setup);
  FlashInferMetadataBuilder builder = group.make();
  const auto build = [&] { return builder.build(0, group.fixture.batch); };
  EXPECT_NE(message_of(build).find("reorder_batch has not been called"), std::string::npos);
  const SwapStates no_swap = [](int32_t, int32_t) { ADD_FAILURE() << "the batch is in order"; };
  const std::vector<int32_t> others{1, 1, 4};
  builder.reorder_batch(others, {}, no_swap);
  EXPECT_NE(message_of(build).find("reorder_batch saw 3 requests of 6 tokens; the batch has 4 of 12"),
            std::string::npos);
  const std::vector<int32_t> scheduled{1, 1, 5, 5};
  builder.reorder_batch(scheduled, {}, no_swap);
  EXPECT_EQ(build().split, (BatchSplit{2, 2, 2, 10}));
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

TEST(FlashInferProfiles, RefuseWhatTheirOriginalsRefused) {
  const auto refusal = [](BackendProfile profile, ErrorCode code, const std::function<void(Group&)>& change) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    change(group);
    return message_of([&] { group.make().build(0, group.fixture.batch); }, code);
  };
  constexpr BackendProfile later = BackendProfile::kVllm2025_12;
  constexpr BackendProfile earlier = BackendProfile::kVllm2025_07;
  const auto windows = [](Group& group) {
    group.add_layer();
    group.layer.sliding_window = 16;
    group.add_layer();
  };
  const auto caps = [](Group& group) {
    group.add_layer();
    group.layer.logits_soft_cap = 30.0f;
    group.add_layer();
  };
  const auto with_sinks = [](Group& group) {
    group.layer.sinks = ConstTensorView(group.sinks.data(), DType::kFloat32, {4});
  };
  const std::string one_set =
      "FlashInfer backend currently only supports models in which all layers share the same values for the following "
      "hyperparameters: `window_left`, `logits_soft_cap`, `sm_scale`.";
  EXPECT_EQ(refusal(later, ErrorCode::kInvalidArgument, windows),
            "Window left is not the same for all layers. One potential fix is to set disable_sliding_window=True");
  EXPECT_EQ(refusal(earlier, ErrorCode::kInvalidArgument, windows), one_set);
  EXPECT_EQ(refusal(later, ErrorCode::kInvalidArgument, caps), one_set);
  EXPECT_EQ(refusal(earlier, ErrorCode::kInvalidArgument, caps), one_set);
  EXPECT_EQ(refusal(later, ErrorCode::kUnsupported, with_sinks),
            "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash "
            "attention on earlier GPUs.");
  EXPECT_NE(refusal(later, ErrorCode::kUnsupported, [](Group& group) { group.spec.page_size = 8; })
                .find("page_size 8 is not supported by FLASHINFER of vllm-2025-12"),
            std::string::npos);
  EXPECT_NE(refusal(later, ErrorCode::kUnsupported, [](Group& group) { group.config.cache.cache_dtype = "bfloat16"; })
                .find("cache_dtype bfloat16"),
            std::string::npos);

  LayerSetup setup;
  setup.profile = later;
  setup.head_size = 80;
  EXPECT_NE(message_of([&] { Group(setup).make(); }).find("Head size 80 is not supported"), std::string::npos);
  setup.head_size = 64;
  setup.model_dtype = DType::kFloat32;
  EXPECT_NE(message_of([&] { Group(setup).make(); }, ErrorCode::kUnsupported).find("model dtype float32"),
            std::string::npos);
}

TEST(FlashInferProfiles, VerifyDraftsAsDecodesInTheNativeOneOnly) {
  for (BackendProfile profile : {BackendProfile::kNative, BackendProfile::kVllm2025_12}) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    group.config.speculative = SpeculativeConfig{3, false};
    EXPECT_EQ(group.make().reorder_batch_threshold(), profile == BackendProfile::kNative ? 4 : 1);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
