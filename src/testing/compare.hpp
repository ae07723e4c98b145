#pragma once

#include <string>
#include <vector>

#include "folio/verify.hpp"
#include "testing/batch_memory.hpp"
#include "testing/plain_attention.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {

/// What a result may differ from the oracle by.
///
/// The yardstick is a plain float32 computation on the same stored inputs (plain_attention.hpp), itself measured
/// against the oracle. With u = 2^-24:
///   E_out = max over rows and components of |plain - oracle| / (the row's weighted mean of |v|),
///   E_lse = max over rows of |plain - oracle|,
/// maxima over the whole case, so that no row's lucky rounding makes its limit small. The plain computation's sums over
/// keys do not drift (nested_sum.hpp), so the limits do not grow with the number of keys: a kernel that adds every key
/// to one accumulator exceeds them over long contexts. Neither is taken below
///   floor = 4u (1 + X + c): a logit passes a few roundings (product, scales, bias), each of u times its size, and its
///   probability's relative error is its own absolute one; X is the largest |logit|, c the soft cap (0 without: a tanh
///   made of exponentials errs by u absolutely, so a capped logit by u c).
/// Where a kernel rounds its probabilities p to a narrower type, with half a unit in the last place of u_w relative to
/// a value (AttentionOp::p_dtype), every p moves by at most u_w of itself and an output by at most u_w times
/// the row's weighted mean of |v|: that is added to its tolerance, without a factor. The LSE has no part in it.
///
/// Where it rounds keys and values behind their rows' scales (AttentionOp::kv_dtype, u_kv), a logit moves by up to
/// d = u_kv * AttentionResult::largest_terms, the LSE by d, p over row_sum by exp(2d) - 1 of themselves, and values by
/// u_kv of themselves: added likewise.
///
/// Where fp8 is multiplied as it is (AttentionOp::fp8_mma, u_w = 2^-4), what is 2^-13 below the largest of 32
/// products and the sum that they are added to is cut off (measured: decision 0039): of each of these 33 and of the
/// new sum less than that, 34 * 2^-13 of the largest together. Over each 32 components of a logit this comes to d = 34
/// * 2^-13 * AttentionResult::largest_steps; the LSE may move by d, p over row_sum by exp(2d) - 1 of
/// themselves. Values are summed so over a tile of 128 keys, in four steps whose largest is no more than the tile's sum
/// of |p v|: 4 * 34 * 2^-13 of the weighted mean of |v|. A p that is subnormal in e4m3 moves by up to 2^-15 of the
/// largest p: that, the number of keys and the largest |v| are multiplied. All of it is added, without a factor.
///
/// A kernel sums in another order and has its own exp, so it gets kFactor times that. The output's rounding is exact: a
/// stored value must lie between the oracle's value minus and plus the tolerance, each rounded to the output's dtype.
struct Tolerance {
  static constexpr double kFactor = 4.0;
  std::vector<double> out;  ///< [rows], absolute, before the output's rounding
  double lse = 0.0;         ///< absolute, natural logarithm; the rounding of the float32 LSE is added

  Tolerance(const Problem& problem, const AttentionResult<double>& oracle, const AttentionResult<float>& plain,
            DType p_dtype = DType::kFloat32, DType kv_dtype = DType::kFloat32);
};

/// Compares the two references with each other. They read a problem by different ways, so a mistake in building or
/// reading views shows here. The limit is the a-priori bound of a float32 computation. Empty if they agree.
std::string compare_references(const Problem& problem, const AttentionResult<double>& oracle,
                               const AttentionResult<float>& plain);

/// Compares a run with the oracle: first which values are finite, then their differences; all of them, the worst is
/// reported with its place. Adds to the report's counts. Empty if all is within the tolerance.
std::string compare_output(const Problem& problem, const AttentionResult<double>& oracle, const Tolerance& tolerance,
                           const RunOutput& output, LseBase base, CaseReport& report);

/// "token 5 (query 1 of request 2), head 3, component 17".
std::string place(const Problem& problem, size_t row, int64_t component);

}  // namespace folio::inline v0::verify
