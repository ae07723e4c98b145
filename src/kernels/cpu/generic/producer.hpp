#pragma once

#include "folio/types/ds_mla.hpp"
#include "kernels/cpu/common/producer.hpp"

/// Rows of KvFormat::kFp8DsMla, and the rotary embedding of Q and K.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// Decodes the rows of a KV tile to floats in scratch memory, and lets `rows` point there: values are the first
/// components of their keys. Rows of zeros stay zeros.
static inline void decode_ds_mla(const WorkTileParams& work, const TilePointers& rows) {
  for (int32_t t = 0; t < kTileTokens; ++t) {
    const unsigned char* const row = rows.k[t];
    float* const to = work.scratch.decoded + t * work.qk_stride;
    for (int32_t block = 0; block < kDsMlaBlocks; ++block) {
      float scale = 0.0f;
      __builtin_memcpy(&scale, row + kDsMlaScalesOffset + 4 * block, sizeof(scale));
      const Vec scales = splat(scale);
      for (int32_t d = block * kDsMlaBlockDim; d < (block + 1) * kDsMlaBlockDim; d += kLanes) {
        store(to + d, load_elements<DType::kFloat8E4M3>(row + d) * scales);
      }
    }
    convert_row<DType::kBFloat16>(row + kDsMlaRopeOffset, kDsMlaRopeDim, to + kDsMlaLatentDim);
    rows.k[t] = rows.v[t] = reinterpret_cast<const unsigned char*>(to);
  }
}

/// Cosine and sine of a position's angles, each within 2^-22 of the exact value.
struct Rotation {
  Vec cosine;
  Vec sine;
};

/// The angles are position * rope_frequencies[0, kLanes), in quarter turns: float64 keeps what is left of them after
/// whole turns, however far the position. The rest, at most an eighth of a turn, goes through the Taylor polynomials of
/// sine and cosine of degrees 9 and 10 (2^-29 and 2^-33 of truncation at pi / 4).
FOLIO_INLINE Rotation rotation_at(int64_t position, const double* rope_frequencies) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: a float64 near it has its integer in the low bits
  float rest[kLanes];
  int32_t quarters[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const double angle = static_cast<double>(position) * rope_frequencies[i];
    const double shifted = angle + kMagic;
    int64_t word = 0;
    __builtin_memcpy(&word, &shifted, sizeof(word));
    quarters[i] = static_cast<int32_t>(word & 3);
    rest[i] = static_cast<float>(angle - (shifted - kMagic));
  }
  const Vec x = load<Vec>(rest) * splat(1.57079632679489662f);
  const Vec square = x * x;
  Vec sine = splat(2.75573192e-6f);
  sine = multiply_add(sine, square, splat(-1.98412698e-4f));
  sine = multiply_add(sine, square, splat(8.33333333e-3f));
  sine = multiply_add(sine, square, splat(-1.66666667e-1f));
  sine = multiply_add(sine * square, x, x);
  Vec cosine = splat(-2.75573192e-7f);
  cosine = multiply_add(cosine, square, splat(2.48015873e-5f));
  cosine = multiply_add(cosine, square, splat(-1.38888889e-3f));
  cosine = multiply_add(cosine, square, splat(4.16666667e-2f));
  cosine = multiply_add(cosine, square, splat(-0.5f));
  cosine = multiply_add(cosine, square, splat(1.0f));
  // A quarter turn makes the cosine the sine and the sine the negative cosine; half a turn changes both signs.
  const IntVec quarter = load<IntVec>(quarters);
  const IntVec odd = (quarter & splat_int(1)) != 0;
  const IntVec sine_sign = (quarter & splat_int(2)) << 30;
  const IntVec cosine_sign = ((quarter + splat_int(1)) & splat_int(2)) << 30;
  return {from_bits(bits(select(odd, sine, cosine)) ^ cosine_sign),
          from_bits(bits(select(odd, cosine, sine)) ^ sine_sign)};
}

/// Rotates one upcast query or key, head_dim_qk floats, by its position's angles.
static inline void rotate(const WorkTileParams& work, int64_t position, float* vector) {
  const int32_t half = work.head_dim_qk / 2;
  for (int32_t d = 0; d < half; d += kLanes) {
    const Rotation rotation = rotation_at(position, work.rope + d);
    const auto bytes = static_cast<size_t>(smaller(half - d, kLanes)) * sizeof(float);
    Vec x{};
    Vec y{};
    __builtin_memcpy(&x, vector + d, bytes);
    __builtin_memcpy(&y, vector + half + d, bytes);
    const Vec rotated_x = multiply_add(x, rotation.cosine, -(y * rotation.sine));
    const Vec rotated_y = multiply_add(y, rotation.cosine, x * rotation.sine);
    __builtin_memcpy(vector + d, &rotated_x, bytes);
    __builtin_memcpy(vector + half + d, &rotated_y, bytes);
  }
}

static void load_rotated_q(const WorkTileParams& work) noexcept {
  load_q(work);
  for (int32_t r = 0; work.rope != nullptr && r < work.num_rows; ++r) {
    rotate(work, work.rows[r].position, work.scratch.q + r * work.qk_stride);
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
