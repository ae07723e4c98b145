#include "replay/row_problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "folio/types/float_convert.hpp"
#include "replay/synthetic.hpp"

namespace folio::replay {
namespace {

RowProblem synthetic_problem(int32_t kv_len, uint64_t query = 1) {
  RowProblem problem;
  problem.head_dim_qk = 64;
  problem.head_dim_v = 32;
  problem.kv_len = kv_len;
  problem.q.resize(64);
  problem.k.resize(static_cast<size_t>(kv_len) * 64);
  problem.v.resize(static_cast<size_t>(kv_len) * 32);
  fill_row(query, DType::kFloat32, 64, problem.q.data());
  for (size_t key = 0; key < static_cast<size_t>(kv_len); ++key) {
    fill_row(1000 + key, DType::kFloat32, 64, problem.k.data() + key * 64);
    fill_row(9000 + key, DType::kFloat32, 32, problem.v.data() + key * 32);
  }
  return problem;
}

TEST(RowProblem, OracleOnAHandComputedRow) {
  RowProblem problem;
  problem.head_dim_qk = 8;
  problem.head_dim_v = 8;
  problem.kv_len = 2;
  problem.q = {1, 0, 0, 0, 0, 0, 0, 0};
  problem.k.resize(16, 0.0f);
  problem.k[0] = static_cast<float>(std::sqrt(8.0) * std::log(3.0));  // a logit of ln 3 against 0: p of 3/4 and 1/4
  problem.v.resize(16, 0.0f);
  problem.v[0] = 4.0f;
  problem.v[8] = 8.0f;
  std::vector<double> out(8);
  oracle_row(problem, out);
  EXPECT_NEAR(out[0], 0.75 * 4.0 + 0.25 * 8.0, 8.0 * std::ldexp(1.0, -22));  // the float32 key's own rounding
  EXPECT_EQ(out[1], 0.0);
  problem.window_left = 0;
  oracle_row(problem, out);
  EXPECT_EQ(out[0], 8.0);
  std::vector<float> plain(8);
  plain_row(problem, DType::kFloat32, plain);
  EXPECT_EQ(plain[0], 8.0f);
}

TEST(RowProblem, AFloat32ComputationStaysWithinTheTolerance) {
  for (const int32_t kv_len : {1, 2, 7, 100, 1000}) {
    for (const float cap : {0.0f, 3.0f}) {
      RowProblem problem = synthetic_problem(kv_len);
      problem.logits_soft_cap = cap;
      std::vector<double> exact(32);
      oracle_row(problem, exact);
      const RowTolerance tolerance = row_tolerance(problem, exact, DType::kBFloat16);
      std::vector<float> plain(32);
      plain_row(problem, DType::kFloat32, plain);
      for (size_t d = 0; d < exact.size(); ++d) {
        const double stored = bfloat16_to_float(float_to_bfloat16(plain[d]));
        EXPECT_LE(std::abs(stored - exact[d]), tolerance.allowed(exact[d], DType::kBFloat16)) << kv_len;
      }
    }
  }
}

/// A row whose p is `base` times the plain computation's before it is rounded to bfloat16, as those of
/// kernels that do not wait for the largest logit.
std::vector<float> row_of_scaled_p(const RowProblem& problem, double base) {
  const auto keys = static_cast<size_t>(problem.kv_len);
  std::vector<double> logits(keys);
  for (size_t key = 0; key < keys; ++key) {
    for (size_t d = 0; d < 64; ++d) {
      logits[key] += static_cast<double>(problem.q[d]) * static_cast<double>(problem.k[key * 64 + d]) / 8.0;
    }
  }
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> sums(32);
  double denominator = 0.0;
  for (size_t key = 0; key < keys; ++key) {
    const double weight = base * std::exp(logits[key] - largest);
    denominator += weight;
    const double stored = bfloat16_to_float(float_to_bfloat16(static_cast<float>(weight)));
    for (size_t d = 0; d < 32; ++d) sums[d] += stored * static_cast<double>(problem.v[key * 32 + d]);
  }
  std::vector<float> out;
  for (const double sum : sums) out.push_back(static_cast<float>(sum / denominator));
  return out;
}

TEST(RowProblem, WeightsRelativeToAnotherNumberStayWithinTheTolerance) {
  for (const int32_t kv_len : {1, 2, 7, 40, 450}) {
    for (uint64_t query = 1; query <= 20; ++query) {
      const RowProblem problem = synthetic_problem(kv_len, query);
      std::vector<double> exact(32);
      oracle_row(problem, exact);
      const RowTolerance tolerance = row_tolerance(problem, exact, DType::kBFloat16);
      for (const double base : {0.502, 0.61, 0.73, 0.998}) {
        const std::vector<float> out = row_of_scaled_p(problem, base);
        for (size_t d = 0; d < exact.size(); ++d) {
          const double stored = bfloat16_to_float(float_to_bfloat16(out[d]));
          EXPECT_LE(std::abs(stored - exact[d]), tolerance.allowed(exact[d], DType::kBFloat16))
              << kv_len << ", " << query << ", " << base;
        }
      }
    }
  }
}

/// The first component of `wrong`'s output that the tolerance of `right` does not allow; -1 if it allows all.
int32_t caught_at(const RowProblem& right, const RowProblem& wrong) {
  std::vector<double> exact(32);
  std::vector<double> out(32);
  oracle_row(right, exact);
  oracle_row(wrong, out);
  const RowTolerance tolerance = row_tolerance(right, exact, DType::kBFloat16);
  for (size_t d = 0; d < out.size(); ++d) {
    const double stored = bfloat16_to_float(float_to_bfloat16(static_cast<float>(out[d])));
    if (std::abs(stored - exact[d]) > tolerance.allowed(exact[d], DType::kBFloat16)) return static_cast<int32_t>(d);
  }
  return -1;
}

/// Rows that miss a key at either end, or take another's value, must not slip through. A key that a query hardly looks
/// at cannot show in that row: of many queries, two in five must show it.
TEST(RowProblem, OffByOneRowsAreBeyondTheTolerance) {
  constexpr int32_t kQueries = 32;
  for (const int32_t kv_len : {2, 7, 100, 600}) {
    int32_t caught[3] = {};
    for (uint64_t query = 1; query <= kQueries; ++query) {
      const RowProblem problem = synthetic_problem(kv_len, query);
      RowProblem wrong[3] = {problem, problem, problem};
      wrong[0].window_left = kv_len - 2;
      wrong[1].kv_len -= 1;
      for (size_t d = 0; d < 32; ++d) wrong[2].v[d] = problem.v[32 + d];
      for (size_t mutation = 0; mutation < 3; ++mutation)
        caught[mutation] += caught_at(problem, wrong[mutation]) >= 0 ? 1 : 0;
    }
    for (const int32_t count : caught) EXPECT_GE(count, kQueries * 2 / 5) << "kv_len " << kv_len;
  }
}

}  // namespace
}  // namespace folio::replay
