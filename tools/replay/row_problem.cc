#include "replay/row_problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "folio/types/float_convert.hpp"

namespace folio::replay {
namespace {

/// Half a unit in the last place relative to the value, and the smallest positive value, of each output type.
struct Rounding {
  double relative;
  double smallest;
};

Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return {std::ldexp(1.0, -11), std::ldexp(1.0, -24)};
    case DType::kBFloat16: return {std::ldexp(1.0, -8), std::numeric_limits<float>::min()};
    case DType::kFloat8E4M3: return {std::ldexp(1.0, -4), std::ldexp(1.0, -9)};
    case DType::kFloat8E5M2: return {std::ldexp(1.0, -3), std::ldexp(1.0, -16)};
    case DType::kFloat32:
    case DType::kInt8:
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
  return {std::ldexp(1.0, -24), std::numeric_limits<float>::min()};
}

float rounded(float value, DType dtype) {
  if (dtype == DType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  if (dtype == DType::kFloat16) return float16_to_float(float_to_float16(value));
  if (dtype == DType::kFloat8E4M3) return fp8_e4m3_to_float(float_to_fp8_e4m3(value * 0x1p8f)) * 0x1p-8f;
  return value;
}

}  // namespace

double plain_row(const RowProblem& problem, DType compute, std::span<float> out) {
  const auto dim_qk = static_cast<size_t>(problem.head_dim_qk);
  const auto dim_v = static_cast<size_t>(problem.head_dim_v);
  const auto keys = static_cast<size_t>(problem.kv_len);
  const size_t first =
      problem.window_left < 0 ? 0 : static_cast<size_t>(std::max(0, problem.kv_len - 1 - problem.window_left));
  const float scale = 1.0f / std::sqrt(static_cast<float>(problem.head_dim_qk));
  std::vector<float> logits(keys);
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t key = first; key < keys; ++key) {
    float dot = 0.0f;
    for (size_t d = 0; d < dim_qk; ++d) dot += problem.q[d] * problem.k[key * dim_qk + d];
    float logit = dot * scale;
    if (problem.logits_soft_cap != 0.0f) logit = problem.logits_soft_cap * std::tanh(logit / problem.logits_soft_cap);
    logits[key] = logit;
    largest = std::max(largest, logit);
  }
  std::fill(out.begin(), out.end(), 0.0f);
  float sum = 0.0f;
  for (size_t key = first; key < keys; ++key) {
    const float weight = std::exp(logits[key] - largest);
    sum += weight;
    const float stored = rounded(weight, compute);
    for (size_t d = 0; d < dim_v; ++d) out[d] += stored * problem.v[key * dim_v + d];
  }
  for (float& value : out) value /= sum;
  return 1.0 / static_cast<double>(sum);
}

double RowTolerance::allowed(double exact, DType out) const {
  const Rounding rounding = rounding_of(out);
  return 4.0 * plain_error + floor + rounding.relative * std::abs(exact) + rounding.smallest;
}

namespace {

/// What FP8 MMA may move an output by, relative to the largest |v|: they cut off what is 2^-13 below the
/// largest of 32 terms and of their sum so far, of 34 numbers a step. Logits sum head_dim_qk / 32 steps, a tile of 128
/// keys four. Decision 0039; the conformance cases' comparison, which is internal to the library, allows for the same.
double product_loss(const RowProblem& problem) {
  constexpr double kStepCut = 34 * 0x1p-13;
  const auto dim = static_cast<size_t>(problem.head_dim_qk);
  double most = 0.0;
  for (size_t key = 0; key < static_cast<size_t>(problem.kv_len); ++key) {
    double sum = 0.0;
    double steps = 0.0;
    double largest = 0.0;
    for (size_t d = 0; d < dim; ++d) {
      if (d % 32 == 0) {
        steps += largest;
        largest = std::abs(sum);
      }
      const double product = static_cast<double>(problem.q[d]) * static_cast<double>(problem.k[key * dim + d]);
      largest = std::max(largest, std::abs(product));
      sum += product;
    }
    most = std::max(most, steps + largest);
  }
  return 4.0 * kStepCut + std::expm1(2.0 * kStepCut * most / std::sqrt(static_cast<double>(problem.head_dim_qk)));
}

}  // namespace

RowTolerance row_tolerance(const RowProblem& problem, std::span<const double> exact, DType compute) {
  std::vector<float> plain(exact.size());
  const double largest_probability = plain_row(problem, compute, plain);
  RowTolerance tolerance;
  for (size_t d = 0; d < exact.size(); ++d) {
    tolerance.plain_error = std::max(tolerance.plain_error, std::abs(static_cast<double>(plain[d]) - exact[d]));
  }
  // A sum of n float32 terms errs by about sqrt(n) roundings of its size; the logit's error is a relative error of the
  // probability, the weighted sum's one of the output. The largest |v| bounds the output.
  float largest_v = 0.0f;
  for (const float value : problem.v) largest_v = std::max(largest_v, std::abs(value));
  double logit_size = 0.0;
  for (const float value : problem.q) logit_size += std::abs(value);
  logit_size *= 2.0 / std::sqrt(static_cast<double>(problem.head_dim_qk));  // |k| < 2
  const double unit = std::ldexp(1.0, -24);
  const double roundings = logit_size * std::sqrt(static_cast<double>(problem.head_dim_qk)) +
                           std::sqrt(static_cast<double>(problem.kv_len)) + 8.0;  // 8: exp, tanh, scaling, division
  tolerance.floor = unit * roundings * static_cast<double>(largest_v);
  // The plain computation's largest p is exactly 1; a kernel whose p is relative to another number rounds
  // that one too.
  if (compute != DType::kFloat32) {
    tolerance.floor += rounding_of(compute).relative * largest_probability * static_cast<double>(largest_v);
  }
  if (compute == DType::kFloat8E4M3) tolerance.floor += product_loss(problem) * static_cast<double>(largest_v);
  return tolerance;
}

}  // namespace folio::replay
