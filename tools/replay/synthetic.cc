#include "replay/synthetic.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "folio/types/float_convert.hpp"
#include "replay/mix.hpp"

namespace folio::replay {
namespace {

constexpr int32_t kValuesPerWord = 8;  // one 64-bit hash gives eight values

float value_of(uint8_t byte) {
  return static_cast<float>(2 * static_cast<int8_t>(byte) + 1) * (1.0f / 128.0f);
}

/// What each byte becomes in the 16-bit and 8-bit types.
template <typename Code, Code (*Convert)(float)>
std::array<Code, 256> make_codes() {
  std::array<Code, 256> codes{};
  for (size_t byte = 0; byte < codes.size(); ++byte) codes[byte] = Convert(value_of(static_cast<uint8_t>(byte)));
  return codes;
}

template <typename Code>
void fill_by_table(uint64_t row_key, int32_t dim, const std::array<Code, 256>& codes, Code* row) {
  for (int32_t word = 0; word < dim / kValuesPerWord; ++word) {
    const uint64_t bits = mix(row_key + static_cast<uint64_t>(word) * kGoldenGamma);
    for (int32_t i = 0; i < kValuesPerWord; ++i) *row++ = codes[(bits >> (8 * i)) & 0xff];
  }
}

void fill_floats(uint64_t row_key, int32_t dim, float* row) {
  for (int32_t word = 0; word < dim / kValuesPerWord; ++word) {
    const uint64_t bits = mix(row_key + static_cast<uint64_t>(word) * kGoldenGamma);
    for (int32_t i = 0; i < kValuesPerWord; ++i) *row++ = value_of(static_cast<uint8_t>(bits >> (8 * i)));
  }
}

/// The values have 8 significant bits, as many as a bfloat16: the upper half of the float is exact.
void fill_bfloat16(uint64_t row_key, int32_t dim, uint16_t* row) {
  for (int32_t word = 0; word < dim / kValuesPerWord; ++word) {
    const uint64_t bits = mix(row_key + static_cast<uint64_t>(word) * kGoldenGamma);
    for (int32_t i = 0; i < kValuesPerWord; ++i) {
      const float value = value_of(static_cast<uint8_t>(bits >> (8 * i)));
      *row++ = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }
}

}  // namespace

uint64_t kv_row_key(uint64_t seed, InputKind kind, uint64_t link, int32_t layer, int32_t head) {
  const auto place =
      static_cast<uint64_t>(kind) << 56 | static_cast<uint64_t>(layer) << 28 | static_cast<uint64_t>(head);
  return mix(mix(seed) ^ link, place);
}

uint64_t query_row_key(uint64_t seed, int32_t request, int32_t position, int32_t layer, int32_t head) {
  const auto token = static_cast<uint64_t>(request) << 32 | static_cast<uint64_t>(position);
  const auto place =
      static_cast<uint64_t>(InputKind::kQuery) << 56 | static_cast<uint64_t>(layer) << 28 | static_cast<uint64_t>(head);
  return mix(mix(seed, token), place);
}

void fill_row(uint64_t row_key, DType dtype, int32_t dim, void* row) {
  static const auto kHalf = make_codes<uint16_t, float_to_float16>();
  static const auto kE4M3 = make_codes<uint8_t, float_to_fp8_e4m3>();
  static const auto kE5M2 = make_codes<uint8_t, float_to_fp8_e5m2>();
  switch (dtype) {
    case DType::kFloat32: fill_floats(row_key, dim, static_cast<float*>(row)); return;
    case DType::kBFloat16: fill_bfloat16(row_key, dim, static_cast<uint16_t*>(row)); return;
    case DType::kFloat16: fill_by_table(row_key, dim, kHalf, static_cast<uint16_t*>(row)); return;
    case DType::kFloat8E4M3: fill_by_table(row_key, dim, kE4M3, static_cast<uint8_t*>(row)); return;
    case DType::kFloat8E5M2: fill_by_table(row_key, dim, kE5M2, static_cast<uint8_t*>(row)); return;
    case DType::kFloat4E2M1x2:
    case DType::kInt8:
    case DType::kUnset: return;
  }
}

namespace {

/// What write_kv_cache makes the scale of a row; 1 for zeros.
float int8_scale(int32_t dim, const float* row) {
  float largest = 0.0f;
  for (int32_t i = 0; i < dim; ++i) largest = std::max(largest, std::abs(row[i]));
  return largest > 0.0f ? largest / 127.0f : 1.0f;
}

}  // namespace

void fill_row_as_stored(uint64_t row_key, DType stored, float scale, int32_t dim, float* row) {
  fill_floats(row_key, dim, row);
  if (stored == DType::kInt8) scale = int8_scale(dim, row);
  if (!is_fp8(stored) && stored != DType::kInt8) return;
  for (int32_t i = 0; i < dim; ++i) {
    uint8_t code[sizeof(float)] = {};  // of the first byte; gcc cannot see that wider types do not come here
    store_from_float(code, stored, 0, row[i] / scale);
    row[i] = load_as_float(code, stored, 0) * scale;
  }
}

}  // namespace folio::replay
