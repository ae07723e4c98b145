#include "kernels/cpu/common/costs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace folio::inline v0::kernels::cpu {
namespace {

/// Rows of fp8_ds_mla become float32 in scratch memory.
CostLine key_of(const AttentionConfig& config) {
  const bool decoded = config.kv_format == KvFormat::kFp8DsMla;
  return {.kv = decoded ? DType::kFloat32 : config.kv,
          .format = decoded ? KvFormat::kStrided : config.kv_format,
          .page_tokens = config.page_size,
          .wide_heads = config.head_dim_qk + config.head_dim_v > 512,
          .nanoseconds = {}};
}

const CostLine* find(std::span<const CostLine> lines, const AttentionConfig& config) {
  const CostLine key = key_of(config);
  const auto found = std::find_if(lines.begin(), lines.end(), [&](const CostLine& line) {
    return line.kv == key.kv && line.format == key.format && key.page_tokens % line.page_tokens == 0 &&
           (key.wide_heads || !line.wide_heads);
  });
  return found == lines.end() ? nullptr : &*found;
}

double interpolate(const std::array<double, kCostRows.size()>& nanoseconds, double rows) {
  if (rows >= kCostRows.back()) return nanoseconds.back() * rows / kCostRows.back();
  size_t upper = 1;
  while (kCostRows[upper] < rows) ++upper;
  const double part = std::log(rows / kCostRows[upper - 1]) /
                      std::log(static_cast<double>(kCostRows[upper]) / static_cast<double>(kCostRows[upper - 1]));
  return nanoseconds[upper - 1] * std::pow(nanoseconds[upper] / nanoseconds[upper - 1], part);
}

}  // namespace

double cost(std::span<const CostLine> lines, const AttentionConfig& config, double rows) {
  const CostLine* line = find(lines, config);
  if (line == nullptr) return std::numeric_limits<double>::infinity();
  constexpr double kMeasuredDims = 256;
  return interpolate(line->nanoseconds, rows) * (config.head_dim_qk + config.head_dim_v) / kMeasuredDims;
}

int32_t least_rows(std::span<const CostLine> few, std::span<const CostLine> many, const AttentionConfig& config) {
  const CostLine* of_few = find(few, config);
  const CostLine* of_many = find(many, config);
  if (of_few == nullptr || of_many == nullptr) return 0;
  size_t first = kCostRows.size();
  while (first > 0 && of_many->nanoseconds[first - 1] <= of_few->nanoseconds[first - 1]) --first;
  if (first == 0) return 0;
  return first == kCostRows.size() ? std::numeric_limits<int32_t>::max() : kCostRows[first];
}

}  // namespace folio::inline v0::kernels::cpu
