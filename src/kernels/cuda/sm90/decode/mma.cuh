#pragma once

#include "kernels/cuda/sm90/decode/smem.cuh"

/// The MMAs of one KV tile by one warp: GEMM0, S^T = K Q^T, and GEMM1, O^T = V^T P^T. Keys and values are the first
/// operand (m16) and rows the second (n8): eight rows fill it.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// First operands of two MMAs from the fp8 keys of 16 tokens and 32 components. `m` is what ldmatrix loads: tokens and
/// tokens + 8 of one 16-byte chunk, then of the next. A lane's four values are neighbours, where an MMA has two pairs
/// that are eight components apart: load_queries permutes queries in the same way.
template <Fp8 kFp8>
__device__ __forceinline__ void dequantize_keys(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    upcast_fp8x4<kFp8>(m[2 * i], a[i][0], a[i][2]);
    upcast_fp8x4<kFp8>(m[2 * i + 1], a[i][1], a[i][3]);
  }
}

/// The same of transposed values. Of 16 components, the even ones become rows 0 to 7 of the MMA and the odd ones rows 8
/// to 15: a word has two neighbouring components of two tokens, where an MMA has two tokens of one component.
template <Fp8 kFp8>
__device__ __forceinline__ void dequantize_values(const uint32_t (&m)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    upcast_fp8x4<kFp8>(__byte_perm(m[2 * i], 0, 0x3120), a[i][0], a[i][1]);
    upcast_fp8x4<kFp8>(__byte_perm(m[2 * i + 1], 0, 0x3120), a[i][2], a[i][3]);
  }
}

template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t Columns>
class TileMma {
  static constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8)};
  static constexpr int32_t kSteps = DimQk / 16;
  static constexpr int32_t kKeyWidth = swizzle_bytes(DimQk, kDims.bytes);
  static constexpr int32_t kValueWidth = swizzle_bytes(DimV, kDims.bytes);

 public:
  /// Queries as second operands of GEMM0. They stay in registers for a whole work tile where they are few enough; else
  /// every KV tile reads them again. What spills goes to the L2, whose fabric is the limit of long batches.
  static constexpr bool kQueriesInRegisters = kSteps <= (Columns == 1 ? 16 : 4);
  using Queries = uint32_t[kSteps][Columns][2];

  /// The ldmatrix addresses of a lane in a KV tile, see swizzled_offset.
  struct Addresses {
    uint32_t key;       ///< of keys
    uint32_t value;     ///< of values, transposed
    uint32_t key_step;  ///< from one swizzle width of a token's bytes to the next
    uint32_t value_step;
  };

  __device__ __forceinline__ explicit TileMma(int32_t lane) : lane_(lane) {}

  __device__ __forceinline__ Addresses addresses(int32_t copy_tokens) const {
    const int32_t matrix = lane_ / 8;
    const int32_t row = lane_ % 8;
    const bool fp8 = kFp8 != Fp8::kNone;
    const int32_t token = row + (fp8 ? matrix % 2 : matrix / 2) * 8;
    const int32_t rows = copy_tokens == kTmaHalfTile ? kTmaHalfTile : kTileTokens;
    return {
        static_cast<uint32_t>(swizzled_offset(DimQk, kDims.bytes, copy_tokens, row + matrix % 2 * 8, matrix / 2)),
        static_cast<uint32_t>(swizzled_offset(DimV, kDims.bytes, copy_tokens, token, fp8 ? matrix / 2 : matrix % 2)),
        static_cast<uint32_t>(rows * kKeyWidth), static_cast<uint32_t>(rows * kValueWidth)};
  }

  /// Queries of all steps, if they stay in registers.
  __device__ __forceinline__ void load_queries(uint32_t queries, Queries& q) const {
#pragma unroll
    for (int32_t step = 0; kQueriesInRegisters && step < kSteps; ++step) load_queries(queries, step, q[step]);
  }

  /// GEMM0. Even and odd steps have accumulators of their own: that halves the chain of dependent MMAs.
  __device__ __forceinline__ void gemm0(uint32_t keys, const Addresses& addresses, uint32_t queries, const Queries& q,
                                        float (&s)[Columns][4]) const {
    float odd[Columns][4];
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.0f;
    }
    const auto mma = [&](int32_t step, const uint32_t(&a)[4]) {
      uint32_t b[Columns][2];
      if constexpr (!kQueriesInRegisters) load_queries(queries, step, b);
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
        if constexpr (kQueriesInRegisters) {
          ptx::mma_m16n8k16<T>(step % 2 == 0 ? s[n] : odd[n], a, q[step][n][0], q[step][n][1]);
        } else {
          ptx::mma_m16n8k16<T>(step % 2 == 0 ? s[n] : odd[n], a, b[n][0], b[n][1]);
        }
      }
    };
    if constexpr (kFp8 == Fp8::kNone) {
#pragma unroll
      for (int32_t step = 0; step < kSteps; ++step) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, advance<kKeyWidth>(keys, addresses.key_step, step));
        mma(step, a);
      }
    } else {
#pragma unroll
      for (int32_t step = 0; step < kSteps; step += 2) {
        uint32_t fp8[4];
        uint32_t a[2][4];
        ptx::ldmatrix_x4(fp8, advance<kKeyWidth>(keys, addresses.key_step, step / 2));
        dequantize_keys<kFp8>(fp8, a);
        mma(step, a[0]);
        mma(step + 1, a[1]);
      }
    }
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) s[n][i] = __fadd_rn(s[n][i], odd[n][i]);
    }
  }

  /// GEMM1. `p` as online_softmax leaves it; accumulators `o` have 16 components each, see first_component.
  __device__ __forceinline__ void gemm1(uint32_t values, const Addresses& addresses, const float (&p)[Columns][4],
                                        float (&o)[DimV / 16][Columns][4]) const {
    uint32_t b[Columns][2];
#pragma unroll
    for (int32_t n = 0; n < Columns; ++n) {
      b[n][0] = ptx::movmatrix_trans(ptx::pack_two<T>(p[n][0], p[n][1]));
      b[n][1] = ptx::movmatrix_trans(ptx::pack_two<T>(p[n][2], p[n][3]));
    }
    if constexpr (kFp8 == Fp8::kNone) {
#pragma unroll
      for (int32_t m = 0; m < DimV / 16; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, advance<kValueWidth>(values, addresses.value_step, m));
#pragma unroll
        for (int32_t n = 0; n < Columns; ++n) ptx::mma_m16n8k16<T>(o[m][n], a, b[n][0], b[n][1]);
      }
    } else {
#pragma unroll
      for (int32_t m = 0; m < DimV / 16; m += 2) {
        uint32_t fp8[4];
        uint32_t a[2][4];
        ptx::ldmatrix_x4_trans(fp8, advance<kValueWidth>(values, addresses.value_step, m / 2));
        dequantize_values<kFp8>(fp8, a);
#pragma unroll
        for (int32_t n = 0; n < Columns; ++n) {
          ptx::mma_m16n8k16<T>(o[m][n], a[0], b[n][0], b[n][1]);
          ptx::mma_m16n8k16<T>(o[m + 1][n], a[1], b[n][0], b[n][1]);
        }
      }
    }
  }

 private:
  /// The lane's ldmatrix address `number` times 32 bytes further on. `kWidth` bytes are 2 or 4 of these.
  template <int32_t kWidth>
  __device__ __forceinline__ static uint32_t advance(uint32_t address, uint32_t step, int32_t number) {
    constexpr int32_t kParts = kWidth / 32;
    return (address + static_cast<uint32_t>(number / kParts) * step) ^ static_cast<uint32_t>(number % kParts * 32);
  }

  /// Queries of 16 components.
  __device__ __forceinline__ void load_queries(uint32_t queries, int32_t step, uint32_t (&b)[Columns][2]) const {
    const auto row = static_cast<uint32_t>(query_stride(kDims));
    if constexpr (kFp8 != Fp8::kNone) {  // in the order of dequantize_keys
#pragma unroll
      for (int32_t n = 0; n < Columns; ++n) {
        const uint32_t at = queries + static_cast<uint32_t>(8 * n + lane_ / 4) * row +
                            32 * static_cast<uint32_t>(step) + 8 * static_cast<uint32_t>(lane_ % 4);
        const uint2 two = ptx::ld_shared_8(at);
        b[n][0] = two.x;
        b[n][1] = two.y;
      }
    } else if constexpr (Columns == 1) {
      const uint32_t at = queries + static_cast<uint32_t>(lane_ / 4) * row + 32 * static_cast<uint32_t>(step) +
                          4 * static_cast<uint32_t>(lane_ % 4);
      b[0][0] = ptx::ld_shared_4(at);
      b[0][1] = ptx::ld_shared_4(at + 16);
    } else {
#pragma unroll
      for (int32_t n = 0; n < Columns; n += 2) {
        uint32_t four[4];
        ptx::ldmatrix_x4(four, queries + static_cast<uint32_t>(8 * n + lane_ % 8 + lane_ / 16 * 8) * row +
                                   32 * static_cast<uint32_t>(step) + 16 * static_cast<uint32_t>(lane_ / 8 % 2));
        b[n][0] = four[0];
        b[n][1] = four[1];
        b[n + 1][0] = four[2];
        b[n + 1][1] = four[3];
      }
    }
  }

  const int32_t lane_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
