#pragma once

#include "kernels/cuda/common/mask.cuh"
#include "kernels/cuda/sm90/common/nonfinite.cuh"
#include "kernels/cuda/sm90/prefill/smem.cuh"

/// Masks of scores, and NaN and Inf in V of masked tokens. p of a masked token is 0, but 0 * NaN and 0 * Inf are NaN.
/// So the producer scans V tiles that some rows see in part: tokens that no row sees become zeros, and it flags NaN and
/// Inf in the others. Where a tile is flagged, the consumers add its NaN and Inf to the rows that see them, replace
/// them by zeros and only then run GEMM1.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// Masks scores of tokens that a row does not see with `hidden`. `first`: the lane's first token.
template <int32_t Count>
__device__ __forceinline__ void mask_scores(const RowInfo& rows, int32_t first_row, int32_t first, float hidden,
                                            float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t begin = rows.visible_begin[first_row + 8 * h] - first;
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      const int32_t column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) s[i / 2 * 4 + 2 * h + i % 2] = hidden;
    }
  }
}

/// The same with -infinity, where no row's range begins behind the lane's first token: only ends are compared.
template <int32_t Count>
__device__ __forceinline__ void mask_ends(const RowInfo& rows, int32_t first_row, int32_t first, float (&s)[Count]) {
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t end = rows.visible_end[first_row + 8 * h] - first;
#pragma unroll
    for (int32_t i = 0; i < Count / 2; ++i) {
      if (i / 2 * 8 + i % 2 >= end) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
    }
  }
}

/// The same by bits of visible tokens.
template <int32_t Words, int32_t Count>
__device__ __forceinline__ void mask_by_bits(const uint32_t (&visible_bits)[2][Words], int32_t lane,
                                             float (&s)[Count]) {
  static_assert(Words * 16 == Count);
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (int32_t w = 0; w < Words; ++w) {
      const uint32_t mine = visible_bits[h][w] >> 2 * (lane % 4);
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        if ((mine >> (i / 2 * 8 + i % 2) & 1) == 0) s[16 * w + i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
      }
    }
  }
}

/// Bits [0, count) for a count of 0 to 32.
__device__ __forceinline__ uint32_t low_bits(int32_t count) {
  return static_cast<uint32_t>((uint64_t{1} << count) - 1);
}

/// The bits of a custom mask.
struct CustomMask {
  const uint8_t* data;
  int64_t bytes;  ///< of all requests: the plan's, since a graph replays steps of other sizes

  /// The `Words` words from bit `bit` on; 0 for bits outside of the mask.
  template <int32_t Words>
  __device__ __forceinline__ void words_at(int64_t bit, uint32_t (&words)[Words]) const {
    const auto misaligned =
        static_cast<int32_t>((reinterpret_cast<uintptr_t>(data) + static_cast<uint64_t>(bit >> 3)) % 4);
    const int64_t at = (bit >> 3) - misaligned;
    uint32_t loaded[Words + 1];
    bool whole = true;
#pragma unroll
    for (int32_t i = 0; i <= Words; ++i) {  // all loads at once
      const bool inside = at + 4 * i >= 0 && at + 4 * i + 4 <= bytes;
      loaded[i] = inside ? *reinterpret_cast<const uint32_t*>(data + at + 4 * i) : 0u;
      whole = whole && (inside || at + 4 * i + 4 <= 0 || at + 4 * i >= bytes);
    }
    if (!whole) [[unlikely]] {
#pragma unroll 1
      for (int32_t i = 0; i < 4 * (Words + 1); ++i) {
        if (at + i < 0 || at + i >= bytes) continue;
#pragma unroll
        for (int32_t w = 0; w <= Words; ++w) loaded[w] |= w == i / 4 ? uint32_t{data[at + i]} << i % 4 * 8 : 0u;
      }
    }
    const int32_t shift = static_cast<int32_t>(bit & 7) + 8 * misaligned;
#pragma unroll
    for (int32_t i = 0; i < Words; ++i) {
      words[i] = static_cast<uint32_t>((uint64_t{loaded[i]} | uint64_t{loaded[i + 1]} << 32) >> shift);
    }
  }

  /// How far the mask's first byte is behind a multiple of 16.
  __device__ __forceinline__ int32_t misaligned() const {
    return static_cast<int32_t>(reinterpret_cast<uintptr_t>(data) % 16);
  }
  /// The 16 bytes from byte `at` on, which is at a multiple of 16; 0 for those outside of the mask.
  __device__ __forceinline__ uint4 chunk_at(int64_t at) const {
    if (at >= 0 && at + 16 <= bytes) [[likely]]
      return *reinterpret_cast<const uint4*>(data + at);
    uint64_t low = 0;
    uint64_t high = 0;
#pragma unroll 1
    for (int32_t i = 0; i < 16; ++i) {
      if (at + i < 0 || at + i >= bytes) continue;
      (i < 8 ? low : high) |= uint64_t{data[at + i]} << i % 8 * 8;
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
            static_cast<uint32_t>(high >> 32)};
  }
};
constexpr int32_t kMaskChunkBits = 128;
constexpr int32_t kMaskChunksAtOnce = 8;  ///< loads in flight

/// Number of the first of the `count` bits from `begin` on that is `value`; `count` where there is none. O(count /
/// 1024) loads one after the other.
__device__ __forceinline__ int32_t first_mask_bit(const CustomMask& mask, int64_t begin, int32_t count, bool value) {
  const int64_t bit = begin + 8 * mask.misaligned();  // counted from a multiple of 16 bytes
  int64_t chunk = bit / kMaskChunkBits * 16 - mask.misaligned();
  const uint32_t flip = value ? 0u : ~0u;
#pragma unroll 1
  for (int32_t at = -static_cast<int32_t>(bit % kMaskChunkBits); at < count; at += kMaskChunksAtOnce * kMaskChunkBits) {
    uint4 chunks[kMaskChunksAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kMaskChunksAtOnce; ++i) {
      chunks[i] = at + i * kMaskChunkBits < count ? mask.chunk_at(chunk + 16 * i) : uint4{};
    }
    int32_t found = INT32_MAX;
#pragma unroll
    for (int32_t i = 4 * kMaskChunksAtOnce - 1; i >= 0; --i) {
      const uint4& four = chunks[i / 4];
      uint32_t word = (i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w) ^ flip;
      if (i < 4) word &= ~low_bits(min(max(-(at + 32 * i), 0), 32));
      if (word != 0) found = at + 32 * i + __ffs(static_cast<int32_t>(word)) - 1;
    }
    if (found != INT32_MAX) return min(found, count);
    chunk += 16 * kMaskChunksAtOnce;
  }
  return count;
}

/// One more than the number of the last bit that is set, of the `count` bits from `begin` on; 0 where there is none.
__device__ __forceinline__ int32_t end_of_mask_bits(const CustomMask& mask, int64_t begin, int32_t count) {
  const int64_t last = begin + 8 * mask.misaligned() + count - 1;
  int64_t chunk = last / kMaskChunkBits * 16 - mask.misaligned();
#pragma unroll 1
  for (int32_t at = count - 1 - static_cast<int32_t>(last % kMaskChunkBits); at > -kMaskChunkBits;
       at -= kMaskChunksAtOnce * kMaskChunkBits) {
    uint4 chunks[kMaskChunksAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kMaskChunksAtOnce; ++i) {
      chunks[i] = at - i * kMaskChunkBits > -kMaskChunkBits ? mask.chunk_at(chunk - 16 * i) : uint4{};
    }
    int32_t found = INT32_MIN;
#pragma unroll
    for (int32_t i = 4 * kMaskChunksAtOnce - 1; i >= 0; --i) {
      const uint4& four = chunks[i / 4];
      const int32_t first = at - i / 4 * kMaskChunkBits + 32 * (3 - i % 4);
      uint32_t word = i % 4 == 0 ? four.w : i % 4 == 1 ? four.z : i % 4 == 2 ? four.y : four.x;
      if (i < 4) word &= low_bits(min(max(count - first, 0), 32));
      if (word != 0) found = first + 31 - __clz(static_cast<int32_t>(word));
    }
    if (found != INT32_MIN) return max(found + 1, 0);
    chunk -= 16 * kMaskChunksAtOnce;
  }
  return 0;
}

/// Of a word's tokens, which begin at `first`, those of [begin, end).
__device__ __forceinline__ uint32_t tokens_between(int32_t first, int32_t begin, int32_t end) {
  return low_bits(min(max(end - first, 0), 32)) & ~low_bits(min(max(begin - first, 0), 32));
}

/// Which of the tokens from `first` on row `row` sees: bit i is token first + i.
template <int32_t Words>
__device__ __forceinline__ void find_visible_bits(const CustomMask& mask, const RowInfo& rows, int32_t row,
                                                  int32_t first, uint32_t (&visible)[Words]) {
  const int32_t begin = rows.visible_begin[row];
  const int32_t end = rows.visible_end[row];
  const int32_t masked = min(rows.mask_begin[row], end);
  uint32_t bits[Words] = {};
  if (max(begin, masked) < min(end, first + 32 * Words)) mask.words_at(rows.mask_bit[row] + first, bits);
#pragma unroll
  for (int32_t w = 0; w < Words; ++w) {
    const int32_t word = first + 32 * w;
    visible[w] = tokens_between(word, begin, masked) | (bits[w] & tokens_between(word, max(begin, masked), end));
  }
}

/// Consumers: adds the NaN and Inf of a V tile to the output of the rows that see them. `first_row`: the lane's first;
/// `o`: see ConsumerWarpgroup.
template <typename T, int32_t Dim, int32_t BlockN>
__device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const RowInfo& rows, uint32_t tile,
                                              int32_t first_token, int32_t first_row, float (&o)[Dim / 2]) {
  struct {
    float x[Dim / 2];
  } local;
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) local.x[i] = o[i];
  auto* out = &local;
  asm volatile("" : "+l"(out)::"memory");  // in local memory
  const uint32_t mine = tile + 4 * (threadIdx.x % 4);
#pragma unroll 1
  for (int32_t i = 0; i < BlockN * (Dim / 8); ++i) {
    const int32_t token = i / (Dim / 8);
    const int32_t column = i % (Dim / 8);
    const uint32_t pair = ptx::ld_shared_4(mine + static_cast<uint32_t>(tile_offset(Dim, token, column)));
    const uint32_t nonfinite = nonfinite_signs<T>(pair);
    if ((nonfinite & (kNonfiniteLow | kNonfiniteHigh)) == 0) continue;
#pragma unroll 1
    for (int32_t h = 0; h < 2; ++h) {
      if (!is_visible(params, rows, first_row + 8 * h, first_token + token)) continue;
      float* const two = &out->x[4 * column + 2 * h];
      if ((nonfinite & kNonfiniteLow) != 0) two[0] += element_of_pair<T>(pair, false);
      if ((nonfinite & kNonfiniteHigh) != 0) two[1] += element_of_pair<T>(pair, true);
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < Dim / 2; ++i) o[i] = out->x[i];
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
