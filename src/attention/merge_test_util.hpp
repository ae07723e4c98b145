#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "folio/merge.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::merge_test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kEps32 =
    std::numeric_limits<float>::epsilon();  // 2^-23: twice the rounding error of one operation

inline const Context& context() {
  static const Context shared = [] {
    ContextOptions options;
    options.num_threads = 3;
    return Context::cpu(options);
  }();
  return shared;
}

/// A packed tensor with its memory.
class Tensor {
 public:
  Tensor(DType type, std::vector<int64_t> dims) : dtype(type), shape(std::move(dims)) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    memory.assign(static_cast<size_t>(count * size_of(type)), 0xcd);
  }
  int64_t size() const { return static_cast<int64_t>(memory.size()) / size_of(dtype); }
  void set(int64_t i, float value) { store_from_float(memory.data(), dtype, i, value); }
  float get(int64_t i) const { return load_as_float(memory.data(), dtype, i); }
  TensorView view() {
    TensorView v;
    v.data = memory.data();
    v.dtype = dtype;
    v.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t k = shape.size(); k-- > 0; stride *= shape[k]) {
      v.shape[k] = shape[k];
      v.strides[k] = stride;
    }
    return v;
  }

  DType dtype;
  std::vector<int64_t> shape;
  std::vector<unsigned char> memory;
};

struct Row {
  std::vector<double> out;
  double lse;
};

/// The merge rule in double precision, from its definition: natural logarithms, states with an infinite LSE left out.
inline Row merge_in_double(const std::vector<std::vector<double>>& outs, const std::vector<double>& lses, size_t dim) {
  Row row{std::vector<double>(dim, 0.0), -std::numeric_limits<double>::infinity()};
  double top = row.lse;
  for (const double lse : lses) {
    if (!std::isinf(lse)) top = std::max(top, lse);
  }
  if (std::isinf(top)) return row;
  double sum = 0;
  for (size_t s = 0; s < lses.size(); ++s) {
    if (std::isinf(lses[s])) continue;
    const double weight = std::exp(lses[s] - top);
    sum += weight;
    for (size_t d = 0; d < dim; ++d) row.out[d] += weight * outs[s][d];
  }
  for (double& value : row.out) value /= sum;
  row.lse = top + std::log(sum);
  return row;
}

/// Half the distance between neighbouring values of `dtype` around `value`: the error of one rounding.
inline double rounding(DType dtype, double value) {
  int mantissa = 23, smallest = -126;
  switch (dtype) {
    case DType::kFloat16: mantissa = 10, smallest = -14; break;
    case DType::kBFloat16: mantissa = 7; break;
    case DType::kFloat8E4M3: mantissa = 3, smallest = -6; break;
    case DType::kFloat8E5M2: mantissa = 2, smallest = -14; break;
    default: break;
  }
  const int exponent = value == 0 ? smallest : std::max(smallest, std::ilogb(value));
  return std::ldexp(0.5, exponent - mantissa);
}

/// What float32 arithmetic may lose on a merged value. Each weight is an exponential (argument rounded once, at most
/// ~90 in size before the weight vanishes: error weight * |argument| * eps / 2 <= eps / 5 of the total), a sum, a
/// quotient; each product and sum of `states` terms rounds once more. `largest` bounds |values|.
inline double float_error(size_t states, double largest) {
  return (static_cast<double>(states) + 6) * kEps32 * largest;
}

}  // namespace folio::inline v0::merge_test
