#include "testing/compare.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/error.hpp"
#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"
#include "testing/nested_sum.hpp"

namespace folio::inline v0::verify {
namespace {

constexpr double kUnit = 0x1p-24;  // half a unit in the last place of a float32, relative

// FP8 MMA (compare.hpp): of what a step adds up, each of 32 products and of the sum before, and of what becomes
// of it, less than 2^-13 of the largest is cut off.
constexpr double kStepCut = 34 * 0x1p-13;
constexpr double kStepsOfTile = 4;       // of 32 keys, whose products with values are summed so
constexpr double kSubnormalP = 0x1p-15;  // half of e4m3's least step, of the largest p, which is above 2^5

/// u_w and u_kv; 0 for float32, whose roundings the plain computation has too.
double rounding_unit(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 0x1p-11;
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat8E4M3: return 0x1p-4;
    default: return 0.0;
  }
}

float as_stored(DType dtype, double value) {
  std::array<unsigned char, 4> bytes{};
  store_from_float(bytes.data(), dtype, 0, static_cast<float>(value));
  return load_as_float(bytes.data(), dtype, 0);
}

/// The same kind: both finite, both NaN, or the same infinity.
bool alike(double a, double b) {
  return std::isfinite(a) ? std::isfinite(b) : a == b || (std::isnan(a) && std::isnan(b));
}

double largest_error(const std::vector<double>& oracle, const std::vector<float>& plain) {
  double largest = 0.0;
  for (size_t i = 0; i < oracle.size(); ++i) {
    if (std::isfinite(oracle[i])) largest = std::max(largest, std::abs(double{plain[i]} - oracle[i]));
  }
  return largest;
}

/// What a row's errors are relative to: its weighted mean of |v|; not below where exponentials are subnormal (beside a
/// sink that outweighs every key) and lose their bits.
double row_size(const AttentionResult<float>& plain, size_t row) {
  return std::max(double{plain.weight[row]}, 0x1p-90);
}

double largest_relative_error(const Problem& problem, const AttentionResult<double>& oracle,
                              const AttentionResult<float>& plain) {
  const auto dim = static_cast<size_t>(problem.config.head_dim_v);
  double largest = 0.0;
  for (size_t row = 0; row < plain.weight.size(); ++row) {
    for (size_t i = row * dim; i < (row + 1) * dim; ++i) {
      largest = std::max(largest, std::abs(double{plain.out[i]} - oracle.out[i]) / row_size(plain, row));
    }
  }
  return largest;
}

/// The worst of many differences.
class Worst {
 public:
  /// `share`: error over what is allowed; infinite where even the kind differs.
  void add(bool passed, double share, size_t index, double got, double expected, double allowed) {
    ++count_;
    if (!passed) ++failed_;
    const double counted = passed ? std::min(share, 1.0) : std::max(share, 1.0 + 1e-9);
    if (counted <= share_) return;
    share_ = counted;
    index_ = index;
    got_ = got;
    expected_ = expected;
    allowed_ = allowed;
  }
  std::string failure(const char* what, const Problem& problem, int64_t components) const {
    if (failed_ == 0) return {};
    const auto row = index_ / static_cast<size_t>(components);
    return core::message(what, ": ", failed_, " of ", count_, " values differ from the oracle; the worst at ",
                         place(problem, row, components > 1 ? static_cast<int64_t>(index_) % components : -1), ": got ",
                         got_, ", expected ", expected_, " within ", allowed_);
  }
  double share() const { return std::max(share_, 0.0); }
  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0, failed_ = 0;
  double share_ = -1.0, got_ = 0.0, expected_ = 0.0, allowed_ = 0.0;
  size_t index_ = 0;
};

/// A value rounded to e2m1.
double as_e2m1(double value) {
  return double{fp4_e2m1_to_float(float_to_fp4_e2m1(static_cast<float>(value)))};
}

/// The scale factor of a block whose largest magnitude that is.
double nvfp4_scale(double global_scale, double largest) {
  const auto factor = static_cast<float>(global_scale * std::max(largest, 0.0) / 6.0);
  return double{fp8_e4m3_to_float(float_to_fp8_e4m3(factor))};
}

/// Compares an NVFP4 output. Rounding is monotonous, so the scale factor must lie between those of the largest
/// magnitude minus and plus the tolerance, and every value, in units of the factor that was stored, likewise.
void compare_nvfp4(const Problem& problem, const std::vector<double>& oracle, const Tolerance& tolerance,
                   const RunOutput& output, Worst& values, Worst& scales) {
  const auto dim = static_cast<size_t>(problem.config.head_dim_v);
  const double global_scale = double{problem.out_scale.at(0, 0)};
  for (size_t block = 0; block < output.block_scales.size(); ++block) {
    const size_t first = block * kNvfp4BlockSize;
    const double allowed = tolerance.out[first / dim];
    const double scale = double{fp8_e4m3_to_float(output.block_scales[block])};
    double largest = 0.0;
    for (size_t i = first; i < first + kNvfp4BlockSize; ++i) {
      if (!(std::abs(oracle[i]) <= largest)) largest = std::abs(oracle[i]);
    }
    const double low = nvfp4_scale(global_scale, largest - allowed);
    const double high = nvfp4_scale(global_scale, largest + allowed);
    const bool scale_passed = std::isfinite(largest) ? scale >= low && scale <= high : std::isnan(scale);
    scales.add(scale_passed, 0.0, first, scale, nvfp4_scale(global_scale, largest), high - low);
    const double unit = scale == 0.0 ? 0.0 : global_scale / scale;
    for (size_t i = first; i < first + kNvfp4BlockSize; ++i) {
      if (!std::isfinite(oracle[i])) continue;  // its scale says so
      const double got = double{load_fp4_as_float(output.out.data(), static_cast<int64_t>(i))};
      const double exact = oracle[i] * unit;
      const double least = as_e2m1(exact - allowed * unit);
      const double most = as_e2m1(exact + allowed * unit);
      const double rounded = as_e2m1(exact);
      const double error = got == rounded ? 0.0 : std::max(0.0, std::abs(got - exact) - 0.5 * std::abs(got - rounded));
      values.add(got >= least && got <= most, error == 0.0 ? 0.0 : error / (allowed * unit), i, got, exact,
                 std::max(most - exact, exact - least));
    }
  }
}

}  // namespace

std::string place(const Problem& problem, size_t row, int64_t component) {
  const auto heads = static_cast<size_t>(problem.config.num_q_heads);
  const size_t token = row / heads;
  size_t first = 0;
  size_t request = 0;
  while (first + static_cast<size_t>(problem.requests[request].q_len) <= token) {
    first += static_cast<size_t>(problem.requests[request++].q_len);
  }
  std::string text =
      core::message("token ", token, " (query ", token - first, " of request ", request, "), head ", row % heads);
  if (component >= 0) text += core::message(", component ", component);
  return text;
}

Tolerance::Tolerance(const Problem& problem, const AttentionResult<double>& oracle, const AttentionResult<float>& plain,
                     DType p_dtype, DType kv_dtype) {
  const double floor = 4.0 * kUnit * (1.0 + double{plain.largest_logit} + double{problem.logits_soft_cap});
  double relative = kFactor * std::max(floor, largest_relative_error(problem, oracle, plain)) + rounding_unit(p_dtype);
  lse = kFactor * std::max(floor, largest_error(oracle.lse, plain.lse));
  double absolute = 0.0;
  if (const double unit = rounding_unit(kv_dtype); unit > 0.0) {
    const double logit = unit * double{plain.largest_terms};
    relative += std::expm1(2.0 * logit) + unit;
    lse += logit;
  }
  if (p_dtype == DType::kFloat8E4M3) {
    const double logit = kStepCut * double{plain.largest_steps};
    relative += kStepsOfTile * kStepCut + std::expm1(2.0 * logit);
    absolute = kSubnormalP * plain.most_keys * double{plain.largest_value};
    lse += logit;
  }
  for (size_t row = 0; row < plain.weight.size(); ++row) {
    const bool empty = plain.weight[row] == 0.0f && oracle.lse[row] == -std::numeric_limits<double>::infinity();
    out.push_back(empty ? 0.0 : relative * row_size(plain, row) + absolute);
  }
}

std::string compare_references(const Problem& problem, const AttentionResult<double>& oracle,
                               const AttentionResult<float>& plain) {
  if (oracle.out.size() != plain.out.size() || oracle.lse.size() != plain.lse.size()) {
    return core::message("the oracle has ", oracle.lse.size(), " rows, the problem ", plain.lse.size());
  }
  const auto dim = static_cast<size_t>(problem.config.head_dim_v);
  for (size_t row = 0; row < oracle.lse.size(); ++row) {
    bool same = alike(oracle.lse[row], double{plain.lse[row]});
    for (size_t i = row * dim; i < (row + 1) * dim; ++i) same = same && alike(oracle.out[i], double{plain.out[i]});
    if (!same) {
      return core::message("the oracle and the plain computation differ in kind at ", place(problem, row, -1), ": lse ",
                           oracle.lse[row], " and ", plain.lse[row]);
    }
  }
  // Forward error of the logits (a dot product of d terms, scales, cap, bias), doubled by numerator and denominator,
  // and of the additions that a key's share passes; to first order in u, with a factor of two for what is left out.
  const double logit = (problem.config.head_dim_qk + 8) * double{plain.largest_terms} +
                       8.0 * double{plain.largest_logit} + 8.0 * double{problem.logits_soft_cap};
  const auto additions = static_cast<double>(std::min<int64_t>(plain.most_keys, NestedSum<float>::kMostAdditions));
  const double bound = 4.0 * kUnit * (logit + additions + 16.0);
  const double out_error = largest_relative_error(problem, oracle, plain);
  const double lse_error = largest_error(oracle.lse, plain.lse);
  if (out_error <= bound && lse_error <= bound) return {};
  return core::message("the oracle and the plain computation differ by ", out_error, " (out) and ", lse_error,
                       " (lse); float32 explains ", bound);
}

std::string compare_output(const Problem& problem, const AttentionResult<double>& oracle, const Tolerance& tolerance,
                           const RunOutput& output, LseBase base, CaseReport& report) {
  const AttentionConfig& config = problem.config;
  const auto dim = static_cast<size_t>(config.head_dim_v);
  const double out_scale = double{problem.out_scale.at(0, 0)};
  Worst out, lse, scales;
  const bool nvfp4 = config.out == DType::kFloat4E2M1x2;
  if (nvfp4) compare_nvfp4(problem, oracle.out, tolerance, output, out, scales);
  for (size_t i = 0; !nvfp4 && i < oracle.out.size(); ++i) {
    const double expected = oracle.out[i];
    const double allowed = tolerance.out[i / dim];
    const double got = double{load_as_float(output.out.data(), config.out, static_cast<int64_t>(i))};
    const double low = double{as_stored(config.out, (expected - allowed) / out_scale)};
    const double high = double{as_stored(config.out, (expected + allowed) / out_scale)};
    const double exact = expected / out_scale;
    const bool passed = std::isfinite(expected) ? got >= low && got <= high : alike(got, expected);
    // The least error before rounding that explains `got`: to the boundary between it and the oracle's own rounding.
    const double rounded = double{as_stored(config.out, exact)};
    const double error = got == rounded ? 0.0 : std::max(0.0, std::abs(got - exact) - 0.5 * std::abs(got - rounded));
    const double share = std::isnan(error) ? std::numeric_limits<double>::infinity()
                         : error == 0.0    ? 0.0
                                           : error * out_scale / allowed;
    const double limit = std::max({high - exact, exact - low, 0.0});
    out.add(passed, share, i, got, exact, limit);
  }
  const double unit_per_nat = base == LseBase::k2 ? std::numbers::log2e : 1.0;
  for (size_t i = 0; i < output.lse.size(); ++i) {
    const double expected = oracle.lse[i] * unit_per_nat;
    const double got = double{output.lse[i]};
    const double limit =
        tolerance.lse * unit_per_nat + 2.0 * kUnit * std::abs(expected);  // the value's and a base change's
    const bool finite = std::isfinite(expected);
    const double error = std::abs(got - expected);
    const bool passed = finite ? error <= limit : alike(got, expected);
    const double share = !finite ? (passed ? 0.0 : std::numeric_limits<double>::infinity()) : error / limit;
    lse.add(passed, share, i, got, expected, limit);
  }
  report.values += out.count() + lse.count();
  report.worst_share = std::max({report.worst_share, out.share(), lse.share()});
  std::string failure = out.failure("out", problem, config.head_dim_v);
  if (failure.empty()) failure = scales.failure("out_block_scale", problem, config.head_dim_v);
  const std::string lse_failure = lse.failure("lse", problem, 1);
  if (!failure.empty() && !lse_failure.empty()) failure += "; ";
  return failure + lse_failure;
}

}  // namespace folio::inline v0::verify
