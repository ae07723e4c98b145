#pragma once

#include "kernels/cuda/sm80/attention/special_values.cuh"

/// Keys and values that stay fp8 codes (e4m3) in shared memory and are widened, exactly, to float16 between there and
/// the product. Queries are float16 then: bfloat16's are scaled by rows to fit.
namespace folio::inline v0::kernels::cuda::sm80 {

/// The largest power of two in a row of bfloat16 queries becomes this; what is 2^-28 of it or more stays exact.
constexpr int32_t kTopExponent = 14;

/// Two e4m3 codes, which stand in the upper bytes of the halves, as float16. A code's exponent and mantissa are those
/// of a float16 that is 2^8 times smaller, subnormal numbers included; of NaN that is 480, which no code means.
__device__ __forceinline__ uint32_t upcast_e4m3x4(uint32_t spread) {
  const uint32_t small = (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
  uint32_t wide = *reinterpret_cast<const uint32_t*>(&value);
  if ((spread & 0x7f00u) == 0x7f00u) wide |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) wide |= 0x7fff0000u;
  return wide;
}

/// The four codes of a word as two pairs of float16.
__device__ __forceinline__ void widen_four(uint32_t codes, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 first, second; mov.b32 {first, second}, %2; cvt.rn.f16x2.e4m3x2 %0, first; "
      "cvt.rn.f16x2.e4m3x2 %1, second;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  low = upcast_e4m3x4(__byte_perm(codes, 0, 0x1404));
  high = upcast_e4m3x4(__byte_perm(codes, 0, 0x3424));
#endif
}

/// Eight queries in the 16-bit type they have; fp8 ones as float16. Zeros where not valid.
__device__ __forceinline__ uint4 load_queries(const PieceSource& source, int64_t at, bool valid) {
  if (!valid) return uint4{};
  if (is_fp8(source.dtype)) return widen_codes<__half>(load_codes(source, at, valid), source.dtype);
  const auto* const from = static_cast<const uint16_t*>(source.data) + at;
  if (source.aligned) return *reinterpret_cast<const uint4*>(from);
  uint32_t parts[kPiece / 2] = {};
#pragma unroll
  for (int32_t i = 0; i < kPiece; ++i) parts[i / 2] |= uint32_t{from[i]} << (i % 2 * 16);
  return {parts[0], parts[1], parts[2], parts[3]};
}

/// Magnitude bits of the larger of two bfloat16; infinities and NaN count as 0.
__device__ __forceinline__ uint32_t magnitude(uint32_t pair) {
  const uint32_t low = pair & 0x7fffu;
  const uint32_t high = pair >> 16 & 0x7fffu;
  return max(low < 0x7f80u ? low : 0u, high < 0x7f80u ? high : 0u);
}
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  return ptx::pack_two<__half>(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

/// The queries of the item's rows as float16, to a tile of `num_rows` rows, for keys that are codes (`permuted`, see
/// code_pair) or of 16 bits. Eight threads have a row. Writes rows.query_exponent.
template <int32_t Dim, int32_t Rows>
__device__ __forceinline__ void convert_queries(const AttentionParams& params, RowInfo<Rows>& rows, uint32_t tile,
                                                int32_t num_rows, bool permuted) {
  constexpr int32_t kLanes = 8;
  constexpr int32_t kMine = Dim / kPiece / kLanes;  // pieces of a thread
  const PieceSource source{params.q, params.q_dtype, params.q_wide};
  const int32_t thread = thread_number();
  const int32_t lane = thread % kLanes;
#pragma unroll 1
  for (int32_t row = thread / kLanes; row < num_rows; row += kThreads / kLanes) {
    const int64_t at = rows.query[row];
    uint4 pieces[kMine];
    uint32_t most = 0;
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t d = (lane + i * kLanes) * kPiece;
      pieces[i] = load_queries(source, at + d, at != kUnseen && d < params.head_dim_qk);
      most = max(max(most, max(magnitude(pieces[i].x), magnitude(pieces[i].y))),
                 max(magnitude(pieces[i].z), magnitude(pieces[i].w)));
    }
    int32_t exponent = 0;
    if (params.q_dtype == DType::kBFloat16) {
#pragma unroll
      for (int32_t step = 1; step < kLanes; step *= 2) {
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
      }
      if (most != 0) exponent = min(max(static_cast<int32_t>(most >> 7) - 127 - kTopExponent, -120), 120);
      const float scale = __int_as_float((127 - exponent) << 23);
#pragma unroll
      for (int32_t i = 0; i < kMine; ++i) {
        pieces[i] = {scaled_pair(pieces[i].x, scale), scaled_pair(pieces[i].y, scale), scaled_pair(pieces[i].z, scale),
                     scaled_pair(pieces[i].w, scale)};
      }
    }
    if (lane == 0) rows.query_exponent[row] = static_cast<int8_t>(exponent);
#pragma unroll
    for (int32_t i = 0; i < kMine; ++i) {
      const int32_t piece = lane + i * kLanes;
      if (!permuted) {
        ptx::st_shared_16(tile + piece_offset(Dim, row, piece), pieces[i]);
        continue;
      }
      const uint32_t pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t place_of_pair = code_pair(piece % 2 * 4 + j);
        const int32_t target = piece / 2 * 2 + place_of_pair / 4;
        ptx::st_shared_4(tile + piece_offset(Dim, row, target) + place_of_pair % 4 * 4, pairs[j]);
      }
    }
  }
}

/// Bits of the bytes of a word that are NaN: byte i's is bit 8i + 7.
__device__ __forceinline__ uint32_t nan_codes(uint32_t word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

/// scan_special of a warp for codes: whether the rows have a NaN in what this lane looks at; with `clear`, they become
/// zeros.
template <int32_t Dim>
__device__ __forceinline__ bool scan_codes(uint32_t tile, int32_t count, int32_t lane, bool clear) {
  bool found = false;
#pragma unroll 1
  for (int32_t i = lane; i < count * (Dim / 4); i += 32) {
    const uint32_t at = tile + 4 * static_cast<uint32_t>(i);
    const uint32_t word = ptx::ld_shared_4(at);
    const uint32_t special = nan_codes(word);
    if (special == 0) continue;
    found = true;
    if (clear) ptx::st_shared_4(at, word & ~((special >> 7) * 0xffu));
  }
  return found;
}

/// add_special for codes: a lane has components 16j + 4t to 16j + 4t + 3 of its rows.
template <int32_t Dim, int32_t Rows>
__device__ __forceinline__ void add_special_codes(const AttentionParams& params, const RowInfo<Rows>& rows,
                                                  uint32_t tile, int32_t first_token, int32_t count, int32_t first_row,
                                                  float (&acc)[1][Dim / 8][4]) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  LocalSums<1, Dim / 8> storage;
  auto* const sums = to_local(acc, storage);
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
#pragma unroll 1
    for (int32_t j = 0; j < Dim / 16; ++j) {
      const uint32_t special = nan_codes(ptx::ld_shared_4(tile + code_offset(Dim, i, j) + 4 * t));
      if (special == 0) continue;
#pragma unroll 1
      for (int32_t r = 0; r < 2; ++r) {
        if (!sees(params, rows, first_row + 8 * r, first_token + i)) continue;
#pragma unroll 1
        for (int32_t b = 0; b < 4; ++b) {
          if ((special >> (8 * b + 7) & 1) != 0) sums->x[(2 * j + b % 2) * 4 + 2 * r + b / 2] = NAN;
        }
      }
    }
  }
  from_local(sums, acc);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
