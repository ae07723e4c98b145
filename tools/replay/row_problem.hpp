#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "folio/types/dtype.hpp"

namespace folio::replay {

/// One query row of one head against all keys of its request, values as the kernel saw them.
struct RowProblem {
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  int32_t kv_len = 0;  ///< the query stands at the last key's position
  int32_t window_left = -1;
  float logits_soft_cap = 0.0f;
  std::vector<float> q;  ///< [head_dim_qk]
  std::vector<float> k;  ///< [kv_len, head_dim_qk]
  std::vector<float> v;  ///< [kv_len, head_dim_v]
};

/// The row by Folio's float64 oracle. `out` has head_dim_v elements.
void oracle_row(const RowProblem& problem, std::span<double> out);

/// The row by a textbook computation: float32, the probabilities rounded to `compute` (float32, float16, bfloat16 or,
/// the largest being 2^8, e4m3). Returns the largest probability.
double plain_row(const RowProblem& problem, DType compute, std::span<float> out);

/// How far a kernel's output may lie from the oracle's.
struct RowTolerance {
  double plain_error = 0.0;  ///< the largest error of plain_row over the row
  double floor = 0.0;  ///< rounding that any order of summation may have: of float32, and of the largest probability;
                       ///< of e4m3, what FP8 MMA may lose too (PrepareOptions::allow_fp8_mma)

  /// Most allowed at an output whose exact value is `exact`, stored as `out`: four times the plain computation's error,
  /// as other orders of summation and online rescaling round more often, and half a unit in the last place of the
  /// stored type.
  double allowed(double exact, DType out) const;
};
RowTolerance row_tolerance(const RowProblem& problem, std::span<const double> exact, DType compute);

}  // namespace folio::replay
