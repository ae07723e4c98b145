// Two kernels, the same batches: random mixed lengths, one layer in NHD and one in HND.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "folio/types/float_convert.hpp"
#include "folio/verify.hpp"
#include "serving_step.hpp"

namespace folio::cuda_test {
namespace {

/// 200, or fewer with prompts among them, or as many as the environment asks for: 10,000 take minutes.
int batches(const ServingSizes& sizes) {
  const char* asked = std::getenv("FOLIO_TWIN_BATCHES");
  return asked != nullptr ? std::atoi(asked)
                          : (sizes.tokens == ServingStep::kTokens ? 200
                             : sizes.tokens < 1000                ? 40
                                                                  : 8);
}

/// Values are of magnitude 1 or less, so that a kernel's outputs are off by at most 2^-9 through its weights, which are
/// rounded to bfloat16, and by as much through their own rounding; float32 in between adds little. Two kernels: four
/// times that.
constexpr float kAllowed = 0x1p-7f;
/// Of the LSE, which both sum in float32 in units of the largest logit.
constexpr float kAllowedLse = 0x1p-14f;

/// What is compared with cuda-sm80.
struct Compared {
  const char* kernel;
  const char* name;
  ServingSizes sizes = ServingStep::kSizes;
};
/// Prompts among decodes: many packed rows, of several row tiles, and few.
constexpr ServingSizes prompts(int32_t head_dim) {
  return {.tokens = 256, .max_q_len = 120, .max_kv_len = 700, .head_dim = head_dim};
}
/// Prompts of so many tiles, and so many of them, that a CTA goes from item to item without a pause.
constexpr ServingSizes long_prompts(int32_t head_dim, int32_t window_left = -1) {
  return {.tokens = 6144,
          .max_q_len = 2000,
          .max_kv_len = 2500,
          .head_dim = head_dim,
          .window_left = window_left,
          .lse = false};
}

class HopperTwin : public CudaTest, public testing::WithParamInterface<Compared> {};

TEST_P(HopperTwin, AgreesWithThePortableKernel) {
  const std::vector<std::string> kernels = verify::runnable_kernels(Context::cuda(0));
  if (IsSkipped()) return;
  const auto& [kernel, name, sizes] = GetParam();
  if (std::count(kernels.begin(), kernels.end(), kernel) == 0) {
    GTEST_SKIP() << kernel << " does not run on this GPU";
  }
  ServingStep twin(Determinism::kRunToRun, "cuda-sm80", 0, sizes);
  ServingStep step(Determinism::kRunToRun, kernel, 0, sizes);
  PlanBuffer twin_buffer = make_plan_buffer(twin.op());
  PlanBuffer buffer = make_plan_buffer(step.op());
  const TestStream stream;
  std::mt19937 lengths_of(29);
  std::mt19937 first(31);
  std::mt19937 second(31);
  for (int i = 0; i < batches(sizes); ++i) {
    const StepLengths lengths = ServingStep::random_lengths(lengths_of, sizes);
    twin.set(lengths, first);
    step.set(lengths, second);
    twin.clear_output();
    step.clear_output();
    twin.enqueue(twin_buffer, &lengths, stream.get());
    step.enqueue(buffer, i % 2 == 0 ? &lengths : nullptr, stream.get());
    stream.wait();
    const ServingStep::Output expected = twin.output();
    const ServingStep::Output got = step.output();
    for (size_t j = 0; j < got.out.size(); ++j) {
      if (got.out[j] == expected.out[j]) continue;  // rows of no request hold NaN in both
      ASSERT_LE(std::fabs(bfloat16_to_float(got.out[j]) - bfloat16_to_float(expected.out[j])), kAllowed)
          << "batch " << i;
    }
    for (size_t j = 0; j < got.lse.size(); ++j) {
      if (got.lse[j] == expected.lse[j]) continue;
      ASSERT_LE(std::fabs(got.lse[j] - expected.lse[j]), kAllowedLse * std::max(1.0f, std::fabs(expected.lse[j])))
          << "batch " << i;
    }
  }
}

constexpr Compared kCompared[] = {{"cuda-sm90-decode", "Decode"},
                                  {"cuda-sm90", "Pair"},
                                  {"cuda-sm90", "PairPrompts64", prompts(64)},
                                  {"cuda-sm90", "PairPrompts96", prompts(96)},
                                  {"cuda-sm90", "PairPrompts128", prompts(128)},
                                  {"cuda-sm90", "PairPrompts256", prompts(256)},
                                  {"cuda-sm90-prefill", "Prefill128", prompts(128)},
                                  {"cuda-sm90-prefill", "LongPrompts64", long_prompts(64)},
                                  {"cuda-sm90-prefill", "LongPrompts96", long_prompts(96)},
                                  {"cuda-sm90-prefill", "LongPrompts128", long_prompts(128)},
                                  {"cuda-sm90-prefill", "LongPrompts256", long_prompts(256)},
                                  {"cuda-sm90-prefill", "Window128", long_prompts(128, 900)}};
INSTANTIATE_TEST_SUITE_P(Kernels, HopperTwin, testing::ValuesIn(kCompared),
                         [](const auto& compared) { return std::string(compared.param.name); });

}  // namespace
}  // namespace folio::cuda_test
