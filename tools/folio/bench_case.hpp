#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "folio/context.hpp"
#include "replay/layer_stack.hpp"

namespace folio::cli {

/// One batch of equal requests: the last q_len of kv_len tokens are queries.
struct BenchShape {
  int32_t batch = 1;
  int32_t q_len = 1;
  int32_t kv_len = 1024;
};

struct BenchEffort {
  int32_t rounds = 7;
  double min_seconds = 0.02;  ///< a measurement is repeated within its round until it took this long
};

/// A figure over the rounds.
struct Spread {
  double median = 0.0, min = 0.0, max = 0.0;
};
Spread spread_of(std::vector<double> values);

/// Seconds of one call of `work`, averaged over as many as fill the time. What calls enqueue on a GPU is waited for
/// every few of them.
double seconds_of(const Context& context, double min_seconds, const std::function<void()>& work);

struct BenchResult {
  BenchShape shape;
  std::string kernel;
  double kv_bytes = 0.0;  ///< bytes of keys and values that a run must read at least once
  double flops = 0.0;     ///< of the visible (query, key) pairs: 2 (head_dim_qk + head_dim_v) each
  Spread run_seconds, plan_seconds;
  Spread read_rate, multiply_rate;          ///< of attention: kv_bytes and flops a second
  Spread read_limit, multiply_limit;        ///< of the yardsticks
  Spread share_of_read, share_of_multiply;  ///< taken round by round
  Spread matrix_limit, share_of_matrix;     ///< of tile registers. 0, as those of multiply, where the kernel's products
                                            ///< are not computed there
};

/// Measures one layer's `run` and its `plan` on a fresh pool with shuffled pages, in rounds that alternate with both
/// yardsticks. Throws what prepare, plan and run throw.
BenchResult run_bench_case(const Context& context, const replay::StackConfig& stack, const BenchShape& shape,
                           const BenchEffort& effort);

}  // namespace folio::cli
