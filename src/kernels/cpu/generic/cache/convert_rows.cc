#include "kernels/cpu/generic/cache/convert_rows.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "folio/types/ds_mla.hpp"
#include "kernels/cpu/generic/cache/codec.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

/// Elements converted at a time where a row passes through a buffer; the buffers stay in the L1 cache.
constexpr int64_t kChunk = 256;
constexpr int64_t kMaxElementBytes = 4;

constexpr bool has_scale(DType dtype) {
  return is_fp8(dtype) || dtype == DType::kInt8;
}

template <DType kFrom, DType kTo>
void convert_elements(const std::byte* from, std::byte* to, int64_t n, float from_scale, float to_scale) noexcept {
  const auto* __restrict source = reinterpret_cast<const typename Codec<kFrom>::Storage*>(from);
  auto* __restrict target = reinterpret_cast<typename Codec<kTo>::Storage*>(to);
  for (int64_t i = 0; i < n; ++i) {
    float value = Codec<kFrom>::decode(source[i]);
    if constexpr (has_scale(kFrom)) value *= from_scale;
    if constexpr (has_scale(kTo)) value /= to_scale;  // a true division: the contract's rounding
    target[i] = Codec<kTo>::encode(value);
  }
}

template <DType kFrom>
float largest_magnitude(const std::byte* from, int64_t n, float from_scale) noexcept {
  const auto* __restrict source = reinterpret_cast<const typename Codec<kFrom>::Storage*>(from);
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    float value = Codec<kFrom>::decode(source[i]);
    if constexpr (has_scale(kFrom)) value *= from_scale;
    const int32_t magnitude = std::bit_cast<int32_t>(value) & codec_detail::kMagnitude;
    const int32_t finite = codec_detail::select(magnitude < codec_detail::kInfinity, magnitude, 0);
    largest = codec_detail::select(finite > largest, finite, largest);
  }
  return std::bit_cast<float>(largest);
}

template <int kBytes>
void copy_elements(const std::byte* from, std::byte* to, int64_t n, float, float) noexcept {
  std::memcpy(to, from, static_cast<size_t>(n) * kBytes);
}

template <DType kTo>
void decode_ds_mla(const std::byte* from, std::byte* to, int64_t n, float, float to_scale) noexcept {
  const auto elements = [&](int64_t d) { return to + d * size_of(kTo); };
  float values[kDsMlaBlockDim];
  for (int64_t block = 0; block < kDsMlaBlocks; ++block) {
    float scale = 0.0f;
    std::memcpy(&scale, from + kDsMlaScalesOffset + 4 * block, sizeof(scale));
    const int64_t d = block * kDsMlaBlockDim;
    convert_elements<DType::kFloat8E4M3, DType::kFloat32>(from + d, reinterpret_cast<std::byte*>(values),
                                                          kDsMlaBlockDim, scale, 1.0f);
    convert_elements<DType::kFloat32, kTo>(reinterpret_cast<const std::byte*>(values), elements(d), kDsMlaBlockDim,
                                           1.0f, to_scale);
  }
  if (n == kDsMlaLatentDim) return;
  convert_elements<DType::kBFloat16, kTo>(from + kDsMlaRopeOffset, elements(kDsMlaLatentDim), kDsMlaRopeDim, 1.0f,
                                          to_scale);
}

template <DType kFrom>
void encode_ds_mla(const std::byte* from, std::byte* to, int64_t, float from_scale, float) noexcept {
  constexpr float kLargestE4M3 = 448.0f;
  const auto elements = [&](int64_t d) { return from + d * size_of(kFrom); };
  float values[kDsMlaBlockDim];
  auto* const floats = reinterpret_cast<std::byte*>(values);
  for (int64_t block = 0; block < kDsMlaBlocks; ++block) {
    const int64_t d = block * kDsMlaBlockDim;
    convert_elements<kFrom, DType::kFloat32>(elements(d), floats, kDsMlaBlockDim, from_scale, 1.0f);
    float most = 0.0f;
    for (const float value : values) {
      if (std::isfinite(value)) most = std::max(most, std::abs(value));
    }
    const float scale = std::max(most / kLargestE4M3, std::numeric_limits<float>::min());
    convert_elements<DType::kFloat32, DType::kFloat8E4M3>(floats, to + d, kDsMlaBlockDim, 1.0f, scale);
    std::memcpy(to + kDsMlaScalesOffset + 4 * block, &scale, sizeof(scale));
  }
  convert_elements<kFrom, DType::kFloat32>(elements(kDsMlaLatentDim), floats, kDsMlaRopeDim, from_scale, 1.0f);
  convert_elements<DType::kFloat32, DType::kBFloat16>(floats, to + kDsMlaRopeOffset, kDsMlaRopeDim, 1.0f, 1.0f);
}

template <DType kFrom>
ConvertFunction convert_from(DType to) noexcept {
  switch (to) {
    case DType::kFloat32: return convert_elements<kFrom, DType::kFloat32>;
    case DType::kFloat16: return convert_elements<kFrom, DType::kFloat16>;
    case DType::kBFloat16: return convert_elements<kFrom, DType::kBFloat16>;
    case DType::kFloat8E4M3: return convert_elements<kFrom, DType::kFloat8E4M3>;
    case DType::kFloat8E5M2: return convert_elements<kFrom, DType::kFloat8E5M2>;
    case DType::kInt8: return convert_elements<kFrom, DType::kInt8>;
    case DType::kUnset:
    case DType::kFloat4E2M1x2: break;
  }
  return nullptr;
}

ConvertFunction convert_function(DType from, DType to) noexcept {
  switch (from) {
    case DType::kFloat32: return convert_from<DType::kFloat32>(to);
    case DType::kFloat16: return convert_from<DType::kFloat16>(to);
    case DType::kBFloat16: return convert_from<DType::kBFloat16>(to);
    case DType::kFloat8E4M3: return convert_from<DType::kFloat8E4M3>(to);
    case DType::kFloat8E5M2: return convert_from<DType::kFloat8E5M2>(to);
    case DType::kInt8: return convert_from<DType::kInt8>(to);
    case DType::kUnset:
    case DType::kFloat4E2M1x2: break;
  }
  return nullptr;
}

decltype(RowConversion::largest) largest_function(DType from) noexcept {
  switch (from) {
    case DType::kFloat32: return largest_magnitude<DType::kFloat32>;
    case DType::kFloat16: return largest_magnitude<DType::kFloat16>;
    case DType::kBFloat16: return largest_magnitude<DType::kBFloat16>;
    case DType::kFloat8E4M3: return largest_magnitude<DType::kFloat8E4M3>;
    case DType::kFloat8E5M2: return largest_magnitude<DType::kFloat8E5M2>;
    case DType::kInt8: return largest_magnitude<DType::kInt8>;
    case DType::kUnset:
    case DType::kFloat4E2M1x2: break;
  }
  return nullptr;
}

ConvertFunction copy_function(int32_t bytes) noexcept {
  switch (bytes) {
    case 1: return copy_elements<1>;
    case 2: return copy_elements<2>;
    case 4: return copy_elements<4>;
    default: return nullptr;
  }
}

/// Every second element to or from contiguous ones. Packed elements have 1 or 2 bytes.
template <typename Element>
void take_every_second(const std::byte* from, std::byte* to, int64_t n) noexcept {
  const auto* __restrict source = reinterpret_cast<const Element*>(from);
  auto* __restrict target = reinterpret_cast<Element*>(to);
  for (int64_t i = 0; i < n; ++i) target[i] = source[2 * i];
}

/// The same for elements of `bytes` bytes.
void take_row(const std::byte* from, std::byte* to, int64_t n, int32_t bytes) noexcept {
  if (bytes == 1) return take_every_second<uint8_t>(from, to, n);
  take_every_second<uint16_t>(from, to, n);
}

template <typename Element>
void put_every_second(const std::byte* from, std::byte* to, int64_t n) noexcept {
  const auto* __restrict source = reinterpret_cast<const Element*>(from);
  auto* __restrict target = reinterpret_cast<Element*>(to);
  for (int64_t i = 0; i < n; ++i) target[2 * i] = source[i];
}

template <typename Element>
void interleave(const std::byte* even, const std::byte* odd, std::byte* to, int64_t n) noexcept {
  const auto* __restrict first = reinterpret_cast<const Element*>(even);
  const auto* __restrict second = reinterpret_cast<const Element*>(odd);
  auto* __restrict target = reinterpret_cast<Element*>(to);
  for (int64_t i = 0; i < n; ++i) {
    target[2 * i] = first[i];
    target[2 * i + 1] = second[i];
  }
}

}  // namespace

RowConversion row_conversion(DType from, DType to, bool bitwise) noexcept {
  return {bitwise ? copy_function(size_of(from)) : convert_function(from, to), size_of(from), size_of(to),
          !bitwise && to == DType::kInt8 ? largest_function(from) : nullptr};
}

RowConversion ds_mla_decoding(DType to) noexcept {
  const auto function = [&]() -> ConvertFunction {
    switch (to) {
      case DType::kFloat32: return decode_ds_mla<DType::kFloat32>;
      case DType::kFloat16: return decode_ds_mla<DType::kFloat16>;
      case DType::kBFloat16: return decode_ds_mla<DType::kBFloat16>;
      case DType::kFloat8E4M3: return decode_ds_mla<DType::kFloat8E4M3>;
      case DType::kFloat8E5M2: return decode_ds_mla<DType::kFloat8E5M2>;
      case DType::kInt8:
      case DType::kUnset:
      case DType::kFloat4E2M1x2: break;
    }
    return nullptr;
  };
  return {function(), 1, size_of(to)};
}

RowConversion ds_mla_encoding(DType from) noexcept {
  const auto function = [&]() -> ConvertFunction {
    switch (from) {
      case DType::kFloat32: return encode_ds_mla<DType::kFloat32>;
      case DType::kFloat16: return encode_ds_mla<DType::kFloat16>;
      case DType::kBFloat16: return encode_ds_mla<DType::kBFloat16>;
      case DType::kFloat8E4M3: return encode_ds_mla<DType::kFloat8E4M3>;
      case DType::kFloat8E5M2: return encode_ds_mla<DType::kFloat8E5M2>;
      case DType::kInt8:
      case DType::kUnset:
      case DType::kFloat4E2M1x2: break;
    }
    return nullptr;
  };
  return {function(), size_of(from), 1};
}

void convert_row(const RowConversion& conversion, ConstRow from, Row to, int64_t n, float from_scale,
                 float to_scale) noexcept {
  if (from.step == 1 && to.step == 1) {
    conversion.convert(from.data, to.data, n, from_scale, to_scale);
    return;
  }
  alignas(64) std::byte taken[kChunk * kMaxElementBytes];
  alignas(64) std::byte converted[kChunk * kMaxElementBytes];
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = std::min(kChunk, n - begin);
    const std::byte* source = from.data + begin * from.step * conversion.from_bytes;
    std::byte* target = to.data + begin * to.step * conversion.to_bytes;
    if (from.step == 2) {
      take_row(source, taken, count, conversion.from_bytes);
      source = taken;
    }
    conversion.convert(source, to.step == 2 ? converted : target, count, from_scale, to_scale);
    if (to.step == 2) {
      if (conversion.to_bytes == 1) {
        put_every_second<uint8_t>(converted, target, count);
      } else {
        put_every_second<uint16_t>(converted, target, count);
      }
    }
  }
}

void quantize_row(const RowConversion& conversion, ConstRow from, Row to, int64_t n, float from_scale,
                  float& scale) noexcept {
  constexpr float kLargestInt8 = 127.0f;
  float most = 0.0f;
  alignas(64) std::byte taken[kChunk * kMaxElementBytes];
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = std::min(kChunk, n - begin);
    const std::byte* source = from.data + begin * from.step * conversion.from_bytes;
    if (from.step == 2) {
      take_row(source, taken, count, conversion.from_bytes);
      source = taken;
    }
    most = std::max(most, conversion.largest(source, count, from_scale));
  }
  scale = most / kLargestInt8;
  // Divided by infinity everything is 0, or NaN, which becomes 0.
  convert_row(conversion, from, to, n, from_scale, scale > 0.0f ? scale : std::numeric_limits<float>::infinity());
}

void convert_pair(const RowConversion& conversion, const std::byte* even, const std::byte* odd, std::byte* to,
                  int64_t n, float from_scale, float to_scale) noexcept {
  alignas(64) std::byte first[kChunk * kMaxElementBytes];
  alignas(64) std::byte second[kChunk * kMaxElementBytes];
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = std::min(kChunk, n - begin);
    conversion.convert(even + begin * conversion.from_bytes, first, count, from_scale, to_scale);
    conversion.convert(odd + begin * conversion.from_bytes, second, count, from_scale, to_scale);
    std::byte* target = to + 2 * begin * conversion.to_bytes;
    if (conversion.to_bytes == 1) {
      interleave<uint8_t>(first, second, target, count);
    } else {
      interleave<uint16_t>(first, second, target, count);
    }
  }
}

}  // namespace folio::inline v0::kernels::generic
