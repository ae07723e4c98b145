// The quantisers, from arbitrary values, strides, shapes and scales. A finite value comes back within the step of its
// format; gaps between rows are never written; what is refused leaves its output alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "calls.hpp"
#include "folio/context.hpp"
#include "folio/quantize.hpp"
#include "folio/types/nvfp4.hpp"
#include "input.hpp"

namespace {

using folio::DType;

constexpr uint8_t kGap = 0xa5;

const folio::Context& shared_context() {
  static const folio::Context context = folio::Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return context;
}

/// Values of [tokens, heads, dim], mostly of everyday size.
std::vector<float> take_values(FuzzInput& input, size_t count) {
  std::vector<float> values(count);
  for (float& value : values) {
    const auto kind = input.take<uint8_t>();
    value = kind < 240 ? static_cast<float>(input.take<int16_t>()) / 1024.0f : input.take<float>();
  }
  return values;
}

struct Shape {
  int32_t tokens, heads, dim, gap;  // gap: elements between the output's rows
  size_t values() const { return static_cast<size_t>(tokens) * static_cast<size_t>(heads) * static_cast<size_t>(dim); }
};

/// A byte tensor whose rows of `width` bytes have gaps; bytes at `at(t, h)`.
struct GappedBytes {
  GappedBytes(const Shape& shape, int32_t row_width, DType dtype)
      : width(row_width), heads(shape.heads), stride(row_width + shape.gap) {
    bytes.assign(static_cast<size_t>(shape.tokens) * static_cast<size_t>(heads) * static_cast<size_t>(stride), kGap);
    view = {bytes.data(), dtype, {shape.tokens, heads, width}};
    view.strides[0] = int64_t{heads} * stride;
    view.strides[1] = stride;
  }
  const uint8_t* row(size_t index) const { return bytes.data() + index * static_cast<size_t>(stride); }
  bool gaps_untouched() const {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (i % static_cast<size_t>(stride) >= static_cast<size_t>(width) && bytes[i] != kGap) return false;
    }
    return true;
  }
  bool untouched() const {
    return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == kGap; });
  }
  int32_t width, heads, stride;
  std::vector<uint8_t> bytes;
  folio::TensorView view;
};

/// The number that an fp8 byte stands for, from the format's definition.
double fp8_value(uint8_t byte, bool e5m2) {
  const int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const int exponent = (byte & 0x7f) >> mantissa_bits, mantissa = byte & ((1 << mantissa_bits) - 1);
  const double sign = byte >= 0x80 ? -1.0 : 1.0;
  const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1.0 + fraction, exponent - bias);
}

void check_fp8(FuzzInput& input, const Shape& shape) {
  const bool e5m2 = input.take<uint8_t>() % 2 != 0;
  const std::vector<float> values = take_values(input, shape.values());
  GappedBytes out(shape, shape.dim, e5m2 ? DType::kFloat8E5M2 : DType::kFloat8E4M3);
  folio::Scale scale;
  scale.value =
      input.take<uint8_t>() % 4 != 0 ? static_cast<float>(1 + input.take<uint8_t>()) / 64.0f : input.take<float>();
  const folio::ConstTensorView in(values.data(), DType::kFloat32, {shape.tokens, shape.heads, shape.dim});
  if (!accepted([&] { folio::quantize_fp8(shared_context(), in, out.view, scale); })) {
    FUZZ_CHECK(!(scale.value > 0.0f && std::isfinite(scale.value)) && out.untouched());
    return;
  }
  FUZZ_CHECK(scale.value > 0.0f && out.gaps_untouched());
  const double largest = e5m2 ? 57344.0 : 448.0, half_step = e5m2 ? 0.125 : 0.0625, least = e5m2 ? 0x1p-17 : 0x1p-10;
  for (size_t i = 0; i < values.size(); ++i) {
    const double real = static_cast<double>(values[i]) / static_cast<double>(scale.value);
    if (!std::isfinite(real)) continue;
    const double expected = std::clamp(real, -largest, largest);
    const double stored =
        fp8_value(out.row(i / static_cast<size_t>(shape.dim))[i % static_cast<size_t>(shape.dim)], e5m2);
    // 1e-6: the library divides in float32.
    FUZZ_CHECK(std::abs(stored - expected) <= std::max(half_step * std::abs(expected), least) * (1.0 + 1e-6));
  }
}

void check_nvfp4(FuzzInput& input, Shape shape) {
  shape.dim *= 16;
  const int64_t first_row = input.take<uint8_t>() % 160;
  const int64_t row_blocks = int64_t{shape.heads} * shape.dim / 16;
  const std::vector<float> values = take_values(input, shape.values());
  GappedBytes out(shape, shape.dim / 2, DType::kFloat4E2M1x2);
  std::vector<uint8_t> scales(static_cast<size_t>(folio::nvfp4_scale_bytes(first_row + shape.tokens, row_blocks)),
                              kGap);
  const folio::BlockScaleArgs block_scale = {scales.data(), first_row};
  const float global = input.take<uint8_t>() % 4 != 0 ? 16.0f : input.take<float>();
  const folio::ConstTensorView in(values.data(), DType::kFloat32, {shape.tokens, shape.heads, shape.dim});
  if (!accepted([&] { folio::quantize_nvfp4(shared_context(), in, out.view, block_scale, global); })) {
    FUZZ_CHECK(!(global > 0.0f && std::isfinite(global)) && out.untouched());
    return;
  }
  FUZZ_CHECK(global > 0.0f && out.gaps_untouched());
  std::vector<float> back(values.size());
  folio::dequantize_nvfp4(shared_context(), out.view, block_scale, global,
                          {back.data(), DType::kFloat32, {shape.tokens, shape.heads, shape.dim}});
  for (size_t block = 0; block < values.size(); block += 16) {
    double largest = 0.0;
    for (size_t i = block; i < block + 16; ++i) {
      largest = std::isfinite(values[i]) ? std::max(largest, std::abs(static_cast<double>(values[i]))) : INFINITY;
    }
    const double factor = largest * static_cast<double>(global) / 6.0;
    if (!(factor >= 0x1p-6 && factor <= 448.0)) continue;  // the block's scale factor is not a normal number
    // Half of e2m1's widest step, 1 of 6, and what rounding the factor to e4m3 adds: 1 of 16 of the largest.
    for (size_t i = block; i < block + 16; ++i) {
      FUZZ_CHECK(std::abs(static_cast<double>(back[i]) - static_cast<double>(values[i])) <=
                 largest * (1.0 / 6.0 * (1.0 + 1.0 / 16.0) + 1.0 / 16.0));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const Shape shape = {input.take_between(0, 5), input.take_between(1, 3), input.take_between(1, 4),
                       input.take_between(0, 3)};
  if (input.take<uint8_t>() % 2 == 0) {
    check_fp8(input, shape);
  } else {
    check_nvfp4(input, shape);
  }
  return 0;
}
