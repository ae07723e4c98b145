#include "folio/backends/attention_layer.hpp"

#include <gtest/gtest.h>

#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

struct FakeImpl {
  PerLayerParameters parameters;
  PerLayerParameters per_layer_parameters() const { return parameters; }
};

TEST(PerLayerParametersTest, AreReadInTheOrderOfTheLayers) {
  const FakeImpl windowed{{127, 0.0f, 0.5f, false}};
  const FakeImpl plain{{-1, 0.0f, 0.5f, false}};
  const std::vector<AttentionLayer<FakeImpl>> layers{{"b", &windowed}, {"a", &plain}};
  const auto parameters = get_per_layer_parameters<FakeImpl>(layers);
  ASSERT_EQ(parameters.size(), 2u);
  EXPECT_EQ(parameters[0].first, "b");
  EXPECT_EQ(parameters[0].second.window_left, 127);
  const GlobalHyperparameters global = infer_global_hyperparameters(parameters);
  EXPECT_EQ(global.first, windowed.parameters) << "the first layer's, whatever its name";
  EXPECT_FALSE(global.has_same_window_lefts);
  EXPECT_FALSE(global.has_same_all_params);
}

TEST(InferGlobalHyperparameters, TellsWindowsFromOtherDifferences) {
  const PerLayerParameters base{-1, 30.0f, 0.5f, false};
  const auto infer = [&](PerLayerParameters other) {
    return infer_global_hyperparameters(std::vector<NamedLayerParameters>{{"0", base}, {"1", other}});
  };
  EXPECT_TRUE(infer(base).has_same_all_params);
  for (const PerLayerParameters& other :
       {PerLayerParameters{-1, 0.0f, 0.5f, false}, {-1, 30.0f, 0.25f, false}, {-1, 30.0f, 0.5f, true}}) {
    EXPECT_TRUE(infer(other).has_same_window_lefts);
    EXPECT_FALSE(infer(other).has_same_all_params);
  }
}

TEST(InferGlobalHyperparameters, NeedsLayers) {
  try {
    infer_global_hyperparameters({});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "No attention layers found in the model.");
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
