#pragma once

#include "kernels/cpu/amx/config.hpp"
#include "kernels/cpu/common/convert.hpp"
#include "kernels/cpu/common/token_scales.hpp"

/// Makes the operands of tile loads ready. K and V are loaded straight from the cache where 16 keys or 16 pairs of
/// values lie in one page and are whole tile rows of bfloat16. Else they are packed into scratch memory: fp8 and int8
/// as the bfloat16 that they are, float16 as two bfloat16 terms. A packed copy has zeros for tokens outside the work
/// tile, and for non-finite values that some row must not attend to: 0 * NaN would be NaN.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

FOLIO_INLINE bool holds_int8(const KvOperand& kv) {
  return kv.dtype == DType::kInt8;
}

/// fp8 or int8, which bfloat16 holds without rounding: int8 has 8 significant bits.
FOLIO_INLINE bool holds_bytes(const KvOperand& kv) {
  return kv.dtype == DType::kFloat8E4M3 || kv.dtype == DType::kFloat8E5M2 || holds_int8(kv);
}

FOLIO_INLINE bool holds_float16(const KvOperand& kv) {
  return kv.dtype == DType::kFloat16;
}

FOLIO_INLINE int32_t element_bytes(const KvOperand& kv) {
  return holds_bytes(kv) ? 1 : kBf16Bytes;
}

/// Element `i` of a row: fp8 and int8 as bfloat16, 16-bit types as stored.
FOLIO_INLINE uint16_t element16(const KvOperand& kv, const unsigned char* from, int32_t i) {
  if (!holds_bytes(kv)) return load<uint16_t>(from + i * kBf16Bytes);
  if (holds_int8(kv)) {
    const auto value = static_cast<float>(static_cast<int8_t>(from[i]));
    return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
  }
  const Fp8Table& table = kv.dtype == DType::kFloat8E4M3 ? kE4M3Table : kE5M2Table;
  const uint32_t fp8 = from[i];
  const uint32_t magnitude = uint32_t{table.high[fp8 & 0x7f]} << 8 | table.low[fp8 & 0x7f];
  return static_cast<uint16_t>(magnitude | (fp8 & 0x80) << 8);
}

/// The upper halves of floats as pairs of bfloat16.
FOLIO_INLINE IntVec join_upper_halves(IntVec even, IntVec odd) {
  return reinterpret_cast<IntVec>(_mm512_maskz_srli_epi32(0xffff, reinterpret_cast<__m512i>(even), 16)) |
         (odd & splat_int(-65536));
}

/// Upcasts 64 bytes of a type to bfloat16, in order.
template <DType kType>
struct ByteUpcast {
  Fp8Lookup lookup = Fp8Lookup::of<kType>();

  FOLIO_INLINE_MEMBER void in_order(__m512i fp8, __m512i& first, __m512i& second) const {
    // vpunpck takes the lower half of each 128 bits, then the upper: the permutation brings the quarters there.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    lookup.upcast(_mm512_permutexvar_epi64(order, fp8), first, second);
  }
};

template <>
struct ByteUpcast<DType::kInt8> {
  FOLIO_INLINE_MEMBER void in_order(__m512i int8, __m512i& first, __m512i& second) const {
    first = upcast(_mm512_castsi512_si256(int8));
    second = upcast(_mm512_extracti64x4_epi64(int8, 1));
  }

 private:
  FOLIO_INLINE_MEMBER static __m512i upcast(__m256i pairs) {
    const IntVec words = zero_extend_halves(reinterpret_cast<HalfVec>(pairs));
    const Vec even = to_float((words << 24) >> 24);
    const Vec odd = to_float((words << 16) >> 24);
    return reinterpret_cast<__m512i>(join_upper_halves(bits(even), bits(odd)));
  }
};

/// Upcasts n bytes (a multiple of 8) to bfloat16, in order. Writes whole lines of 32, `step` bytes apart, with zeros
/// beyond n.
template <DType kType>
FOLIO_INLINE void upcast_byte_row(const ByteUpcast<kType>& upcast, const unsigned char* from, int32_t n,
                                  unsigned char* to, int64_t step) {
  for (int32_t i = 0; i < n; i += 64, from += 64, to += 2 * step) {
    const int32_t left = n - i;
    const __m512i line =
        left >= 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - left), from);
    __m512i first;
    __m512i second;
    upcast.in_order(line, first, second);
    store(to, first);
    if (left > 32) store(to + step, second);
  }
}

/// Calls `use` with what upcasts a cache of bytes. Its tables stay in registers for all rows.
template <class Use>
FOLIO_INLINE void with_upcast(const KvOperand& kv, const Use& use) {
  if (kv.dtype == DType::kFloat8E4M3) {
    use(ByteUpcast<DType::kFloat8E4M3>{});
  } else if (kv.dtype == DType::kFloat8E5M2) {
    use(ByteUpcast<DType::kFloat8E5M2>{});
  } else {
    use(ByteUpcast<DType::kInt8>{});
  }
}

/// n elements of a row (a multiple of 8) as element16 has them, in lines of 32, `step` bytes apart, and zeros up to
/// the next whole line.
static inline void copy_elements(const KvOperand& kv, const unsigned char* from, int32_t n, unsigned char* to,
                                 int64_t step) {
  if (holds_bytes(kv)) {
    with_upcast(
        kv, [&](const auto& upcast) __attribute__((always_inline)) { upcast_byte_row(upcast, from, n, to, step); });
  } else {
    for (; n >= 32; n -= 32, from += 64, to += step) store(to, load<__m512i>(from));
    if (n != 0) store(to, _mm512_maskz_loadu_epi16(static_cast<__mmask32>(bit_range(0, n)), from));
  }
}

/// A token's page and its slot there. Without pages: page 0 and the token itself.
struct Place {
  int64_t page;
  int32_t slot;
};

FOLIO_INLINE Place place_of(const KvOperand& kv, int32_t local) {
  if (kv.pages == nullptr) return {0, local};
  const int32_t number = local / kv.page_size;
  return {kv.pages[number], local - number * kv.page_size};
}

FOLIO_INLINE const unsigned char* key_at(const KvOperand& kv, int32_t local) {
  const Place place = place_of(kv, local);
  return kv.k + place.page * kv.k_page + place.slot * kv.k_token;
}

/// The V row of a token. Packed: the row of its pair, where the token's components are every second one from local % 2
/// on.
FOLIO_INLINE const unsigned char* value_at(const KvOperand& kv, int32_t local) {
  const Place place = place_of(kv, local);
  return kv.v + place.page * kv.v_page + (kv.packed_v ? place.slot / 2 : place.slot) * kv.v_token;
}

/// The K and V rows of one head in a KV tile. In packed caches a V row is that of the token's pair.
struct HeadRows {
  const unsigned char* const* rows;  ///< [2, kTileTokens]: of K and of V, of the first head
  uint64_t breaks;                   ///< tokens whose rows do not follow those of the token before
  int64_t to_k;                      ///< bytes from the first head's to this one's
  int64_t to_v;
  FOLIO_INLINE_MEMBER const unsigned char* k(int32_t token) const { return rows[token] + to_k; }
  FOLIO_INLINE_MEMBER const unsigned char* v(int32_t token) const { return rows[kTileTokens + token] + to_v; }
  /// Whether so many rows from token `first` on are equally spaced.
  FOLIO_INLINE_MEMBER bool equally_spaced(int32_t first, int32_t count) const {
    return (breaks & bit_range(first + 1, first + count)) == 0;
  }
};

/// The rows of all heads in a KV tile, found once.
class TileRows {
 public:
  /// `number`: 0 or 1; `first`: the first head.
  FOLIO_INLINE_MEMBER TileRows(const WorkTileParams& first, int32_t number)
      : first_(first), rows_(first.scratch.rows + number * 2 * kTileTokens) {}

  /// Tokens that nobody attends to have the row of one next to them.
  FOLIO_INLINE_MEMBER void locate(const KvTile& tile) {
    const KvOperand& kv = first_.kv;
    breaks_ = ~bit_range(tile.begin, tile.end);
    for (int32_t t = tile.begin; t < tile.end;) {
      breaks_ |= uint64_t{1} << t;
      const Place place = place_of(kv, tile.first + t);
      const int32_t count = kv.pages == nullptr ? tile.end - t : smaller(tile.end - t, kv.page_size - place.slot);
      const unsigned char* const k = kv.k + place.page * kv.k_page + place.slot * kv.k_token;
      const unsigned char* const v = kv.v + place.page * kv.v_page;
      const int32_t pair = kv.packed_v ? 1 : 0;  // shift to a pair's number
      for (int32_t i = 0; i < count; ++i) rows_[t + i] = k + i * kv.k_token;
      for (int32_t i = 0; i < count; ++i) rows_[kTileTokens + t + i] = v + ((place.slot + i) >> pair) * kv.v_token;
      t += count;
    }
    for (int32_t t = 0; t < kTileTokens; ++t) {
      const int32_t nearest = larger(smaller(t, tile.end - 1), tile.begin);
      if (t == nearest) continue;
      rows_[t] = rows_[nearest];
      rows_[kTileTokens + t] = rows_[kTileTokens + nearest];
    }
  }

  FOLIO_INLINE_MEMBER HeadRows of(const WorkTileParams& head) const {
    return {rows_, breaks_, head.kv.k - first_.kv.k, head.kv.v - first_.kv.v};
  }

 private:
  const WorkTileParams& first_;
  const unsigned char** const rows_;
  uint64_t breaks_ = 0;
};

/// NaN without a payload, which rounding to bfloat16 (pack_bfloat16) could carry out of it.
FOLIO_INLINE Vec with_plain_nan(Vec value) {
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), splat(__builtin_nanf("")));
}

/// Pairs of float16 as pairs of bfloat16 whose sums they are, exactly: a float16 has 11 significant bits, `high` the
/// first 8 of them and `low` the others. Of NaN and infinity `low` is 0. Float16's exponents fit bfloat16's.
FOLIO_INLINE void split_pairs(IntVec pairs, IntVec& high, IntVec& low) {
  const Vec even = upcast_float16(low_halves(pairs));
  const Vec odd = upcast_float16(low_halves(pairs >> 16));
  const IntVec upper = splat_int(-65536);
  const Vec even_rest = even - from_bits(bits(even) & upper);  // NaN of infinity
  const Vec odd_rest = odd - from_bits(bits(odd) & upper);
  const __mmask16 even_finite = _mm512_cmp_ps_mask(even_rest, even_rest, _CMP_ORD_Q);
  const __mmask16 odd_finite = _mm512_cmp_ps_mask(odd_rest, odd_rest, _CMP_ORD_Q);
  const IntVec even_low = bits(Vec(_mm512_maskz_mov_ps(even_finite, even_rest)));
  const IntVec odd_low = bits(Vec(_mm512_maskz_mov_ps(odd_finite, odd_rest)));
  high = join_upper_halves(bits(even), bits(odd));
  low = join_upper_halves(even_low, odd_low);
}

/// NaN and infinity among 32 bfloat16.
FOLIO_INLINE __mmask32 non_finite_elements(__m512i values) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
}

/// Splits lines of float16, `stride` bytes apart: high terms in place, low ones `to_low` bytes further on. Returns
/// whether there are NaN or infinities.
static inline bool split_lines(unsigned char* at, int64_t lines, int64_t stride, int64_t to_low) {
  __mmask32 non_finite = 0;
  for (unsigned char* const end = at + lines * stride; at < end; at += stride) {
    IntVec high;
    IntVec low;
    split_pairs(load<IntVec>(at), high, low);
    store(at, high);
    store(at + to_low, low);
    non_finite |= non_finite_elements(reinterpret_cast<__m512i>(high));
  }
  return non_finite != 0;
}

/// Tiles of 16 packed keys.
FOLIO_INLINE int32_t key_tiles(const WorkTileParams& work) {
  return num_terms(work.q_dtype) * rounded_up(work.head_dim_qk, kMmaDims) / kMmaDims;
}

/// The copy of 16 keys from token `first` on.
FOLIO_INLINE unsigned char* packed_keys(const TileOperands& operands, int32_t tiles, int32_t first) {
  return operands.k_buffer + int64_t{first / kGroupTokens} * tiles * kTileBytes;
}

/// Packs keys: the rows, or of float16 the rows of their high terms and then those of the low ones.
static inline void pack_k(const WorkTileParams& work, const HeadRows& rows, int32_t begin, int32_t end, int32_t tiles,
                          TileOperands& operands) {
  const CopyLayout layout = copy_layout(work.num_rows, tiles);
  unsigned char* const copies = packed_keys(operands, tiles, begin);
  if (holds_bytes(work.kv)) {
    with_upcast(
        work.kv, [&](const auto& upcast) __attribute__((always_inline)) {
          for (int32_t t = begin; t < end; ++t) {
            unsigned char* const copy = copies + t % kGroupTokens * layout.stride;
            upcast_byte_row(upcast, rows.k(t), work.head_dim_qk, copy, layout.step);
          }
        });
    return;
  }
  for (int32_t t = begin; t < end; ++t) {
    unsigned char* const copy = copies + t % kGroupTokens * layout.stride;
    copy_elements(work.kv, rows.k(t), work.head_dim_qk, copy, layout.step);
    if (!holds_float16(work.kv)) continue;
    if (split_lines(copy, tiles / 2, layout.step, tiles / 2 * layout.step)) {
      operands.non_finite_keys |= uint64_t{1} << t;
    }
  }
}

/// Keys are loaded as they lie where 16 of them are equally spaced rows of bfloat16. Masked keys need neither a copy
/// nor zeros: nobody reads their scores.
static inline void produce_k(const WorkTileParams& work, const HeadRows& rows, TileOperands& operands) {
  const KvOperand& kv = work.kv;
  const bool in_place = work.head_dim_qk % kMmaDims == 0 && kv.dtype == DType::kBFloat16;
  const int32_t tiles = key_tiles(work);
  const CopyLayout layout = copy_layout(work.num_rows, tiles);
  TileSource some{};
  for (int32_t g = 0; g < kTileTokens / kGroupTokens; ++g) {
    const int32_t first = g * kGroupTokens;
    const int32_t begin = larger(operands.tile.begin, first);
    const int32_t end = smaller(operands.tile.end, first + kGroupTokens);
    operands.keys[g] = {};
    if (begin >= end) continue;
    if (in_place && rows.equally_spaced(first, kGroupTokens)) {
      operands.keys[g] = {rows.k(first), kv.k_token, kTileRowBytes};
    } else {
      pack_k(work, rows, begin, end, tiles, operands);
      operands.keys[g] = {packed_keys(operands, tiles, first), layout.stride, layout.step};
    }
    some = operands.keys[g];
  }
  for (TileSource& group : operands.keys) {
    if (group.at == nullptr) group = some;  // any readable memory
  }
}

/// Bytes of two rows in turn: the order of _mm512_permutex2var_epi8.
struct alignas(64) AlternateBytes {
  uint8_t of[64];
};
consteval AlternateBytes make_alternate_bytes() {
  AlternateBytes order{};
  for (int i = 0; i < 64; ++i) order.of[i] = static_cast<uint8_t>(i / 2 + i % 2 * 64);
  return order;
}
static constexpr AlternateBytes kAlternateBytes = make_alternate_bytes();

/// Stores 32 components of two tokens as pairs in order, those of them that a row of `left` components has.
FOLIO_INLINE void store_pairs(__m512i first, __m512i second, int32_t left, unsigned char* to, int64_t step) {
  store(to, first);
  if (left > kDimTile) store(to + step, second);
}

/// The row of a pair from those of its two tokens, in lines as copy_elements writes them.
static inline void interleave_bf16(const unsigned char* even, const unsigned char* odd, int32_t dim, unsigned char* to,
                                   int64_t step) {
  const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const auto interleave = [&](__m512i a, __m512i b, int32_t left) __attribute__((always_inline)) {
    const __m512i low = _mm512_unpacklo_epi16(a, b);
    const __m512i high = _mm512_unpackhi_epi16(a, b);
    store_pairs(_mm512_permutex2var_epi64(low, lower, high), _mm512_permutex2var_epi64(low, upper, high), left, to,
                step);
    to += 2 * step;
  };
  int32_t d = 0;
  for (; d + 32 <= dim; d += 32) {
    interleave(_mm512_loadu_si512(even + d * kBf16Bytes), _mm512_loadu_si512(odd + d * kBf16Bytes), 32);
  }
  if (d == dim) return;
  const auto some = static_cast<__mmask32>(bit_range(0, dim - d));
  interleave(_mm512_maskz_loadu_epi16(some, even + d * kBf16Bytes),
             _mm512_maskz_loadu_epi16(some, odd + d * kBf16Bytes), dim - d);
}

/// The same of rows of bytes.
template <DType kType>
FOLIO_INLINE void interleave_bytes(const ByteUpcast<kType>& upcast, const unsigned char* even, const unsigned char* odd,
                                   int32_t dim, unsigned char* to, int64_t step) {
  const __m512i order = load<__m512i>(kAlternateBytes.of);
  const auto interleave = [&](__m512i a, __m512i b, int32_t left) __attribute__((always_inline)) {
    __m512i first;
    __m512i second;
    upcast.in_order(_mm512_permutex2var_epi8(a, order, b), first, second);
    store_pairs(first, second, left, to, step);
    to += 2 * step;
  };
  int32_t d = 0;
  for (; d + 32 <= dim; d += 32) {
    const auto half = [d](const unsigned char* row) __attribute__((always_inline)) {
      return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d)));
    };
    interleave(half(even), half(odd), 32);
  }
  if (d == dim) return;
  const uint64_t some = bit_range(0, dim - d);
  interleave(_mm512_maskz_loadu_epi8(some, even + d), _mm512_maskz_loadu_epi8(some, odd + d), dim - d);
}

FOLIO_INLINE void interleave_rows(const KvOperand& kv, const unsigned char* even, const unsigned char* odd, int32_t dim,
                                  unsigned char* to, int64_t step) {
  if (holds_bytes(kv)) {
    with_upcast(
        kv, [&](const auto& upcast)
                __attribute__((always_inline)) { interleave_bytes(upcast, even, odd, dim, to, step); });
  } else {
    interleave_bf16(even, odd, dim, to, step);
  }
}

/// One token of a packed pair, with zeros for the other.
static inline void copy_half_of_pair(const KvOperand& kv, const unsigned char* from, int32_t odd, int32_t dim,
                                     unsigned char* to, int64_t step) {
  for (int32_t d = 0; d < rounded_up(dim, kDimTile); ++d) {
    const uint32_t value = d < dim ? element16(kv, from, 2 * d + odd) : 0u;
    store(to + d / kDimTile * step + d % kDimTile * 4, value << (16 * odd));
  }
}

/// Tiles of 16 packed pairs of V rows.
FOLIO_INLINE int32_t value_tiles(const WorkTileParams& work) {
  return rounded_up(work.head_dim_v, kDimTile) / kDimTile;
}

/// Packs tokens [begin, end) of the half from token `first` on as pairs (VNNI layout), with zeros for all others.
static inline void pack_v(const WorkTileParams& work, const HeadRows& rows, int32_t first, int32_t begin, int32_t end,
                          unsigned char* copy) {
  const KvOperand& kv = work.kv;
  const int32_t dim = work.head_dim_v;
  const CopyLayout layout = copy_layout(work.num_rows, value_tiles(work));
  const int64_t step = layout.step;
  if (!kv.packed_v && begin == first && end == first + kHalfTokens) {
    const auto each_pair = [&](const auto& interleave) __attribute__((always_inline)) {
      for (int32_t t = first; t < end; t += 2, copy += layout.stride) interleave(rows.v(t), rows.v(t + 1));
    };
    if (holds_bytes(kv)) {
      with_upcast(
          kv, [&](const auto& upcast) __attribute__((always_inline)) {
            each_pair([&](const unsigned char* a, const unsigned char* b)
                          __attribute__((always_inline)) { interleave_bytes(upcast, a, b, dim, copy, step); });
          });
    } else {
      each_pair([&](const unsigned char* a, const unsigned char* b)
                    __attribute__((always_inline)) { interleave_bf16(a, b, dim, copy, step); });
    }
    return;
  }
  for (int32_t t = first; t < first + kHalfTokens; t += 2, copy += layout.stride) {
    const bool even = t >= begin && t < end;
    const bool odd = t + 1 >= begin && t + 1 < end;
    if (!even && !odd) {
      for (int32_t d = 0; d < dim; d += kDimTile) store(copy + d / kDimTile * step, IntVec{});
    } else if (!kv.packed_v) {
      const unsigned char* const zeros = work.scratch.zeros;
      interleave_rows(kv, even ? rows.v(t) : zeros, odd ? rows.v(t + 1) : zeros, dim, copy, step);
    } else if (even && odd) {
      copy_elements(kv, rows.v(t), dim * 2, copy, step);
    } else {
      copy_half_of_pair(kv, rows.v(t + (odd ? 1 : 0)), odd ? 1 : 0, dim, copy, step);
    }
  }
}

/// Replaces NaN and infinity in a packed copy of 16 pairs by zeros. Returns a bit for each token that had any.
static inline uint32_t zero_non_finite(const WorkTileParams& work, unsigned char* copy) {
  const CopyLayout layout = copy_layout(work.num_rows, value_tiles(work));
  uint32_t tokens = 0;
  for (int32_t pair = 0; pair < kHalfTokens / 2; ++pair) {
    for (int32_t d = 0; d < work.head_dim_v; d += kDimTile) {
      unsigned char* const at = copy + d / kDimTile * layout.step + pair * layout.stride;
      const __m512i value = load<__m512i>(at);
      const __mmask32 non_finite = non_finite_elements(value);
      if (non_finite == 0) continue;
      store(at, _mm512_mask_mov_epi16(value, non_finite, _mm512_setzero_si512()));
      if ((non_finite & 0x55555555u) != 0) tokens |= uint32_t{1} << (2 * pair);
      if ((non_finite & 0xaaaaaaaau) != 0) tokens |= uint32_t{2} << (2 * pair);
    }
  }
  return tokens;
}

static inline bool has_non_finite(const WorkTileParams& work, const TileSource& rows) {
  __mmask32 non_finite = 0;
  for (int32_t pair = 0; pair < kHalfTokens / 2; ++pair) {
    for (int32_t d = 0; d < work.head_dim_v; d += kDimTile) {
      non_finite |= non_finite_elements(load<__m512i>(rows.at + pair * rows.stride + d / kDimTile * rows.step));
    }
  }
  return non_finite != 0;
}

/// Bytes of half a KV tile's packed V.
FOLIO_INLINE int64_t packed_half_bytes(int32_t head_dim_v) {
  return int64_t{rounded_up(head_dim_v, kDimTile)} / kDimTile * kTileBytes;
}

/// From the high terms of a tile's float16 V to the low ones.
FOLIO_INLINE int64_t low_value_bytes(int32_t head_dim_v) {
  return kTileTokens / kHalfTokens * packed_half_bytes(head_dim_v);
}

static inline void produce_v(const WorkTileParams& work, const HeadRows& rows, TileOperands& operands) {
  const KvOperand& kv = work.kv;
  const int64_t half_bytes = packed_half_bytes(work.head_dim_v);
  const CopyLayout layout = copy_layout(work.num_rows, value_tiles(work));
  for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
    const int32_t first = h * kHalfTokens;
    const int32_t begin = larger(operands.tile.begin, first);
    const int32_t end = smaller(operands.tile.end, first + kHalfTokens);
    operands.values[h] = {};
    if (begin >= end) continue;
    unsigned char* const copy = operands.v_buffer + h * half_bytes;
    const bool direct = kv.packed_v && kv.dtype == DType::kBFloat16 && work.head_dim_v % kDimTile == 0 &&
                        end - begin == kHalfTokens && rows.equally_spaced(first, kHalfTokens);
    if (direct) {
      operands.values[h] = {rows.v(first), kv.v_token, kTileRowBytes};
      if (operands.uniform || !has_non_finite(work, operands.values[h])) continue;
    }
    pack_v(work, rows, first, begin, end, copy);
    operands.values[h] = {copy, layout.stride, layout.step};
    // Float16: also where every row sees the token. An infinity times the low term of a p would add up to NaN.
    const bool split = holds_float16(kv);
    const bool any =
        split ? split_lines(copy, half_bytes / kTileRowBytes, kTileRowBytes, low_value_bytes(work.head_dim_v))
              : !operands.uniform && !holds_int8(kv);
    if (any) operands.non_finite |= uint64_t{zero_non_finite(work, copy)} << first;
  }
}

/// All 64 tokens are visible to every row: a packed copy needs no zeros.
FOLIO_INLINE bool is_full_tile(const TileOperands& operands) {
  return operands.uniform && operands.tile.begin == 0 && operands.tile.end == kTileTokens;
}

/// Copies the scales of an int8 KV tile's tokens. Those outside [begin, end) stay as they were: nobody reads them.
static inline void produce_token_scales(const KvOperand& kv, const TileOperands& operands) {
  const KvTile& tile = operands.tile;
  for (int32_t t = tile.begin; t < tile.end;) {
    const Place place = place_of(kv, tile.first + t);
    const int32_t count = smaller(tile.end - t, kv.page_size - place.slot);
    copy_token_scales(kv, place.page, place.slot, t, count, operands.scales);
    t += count;
  }
  for (int32_t t = 0; t < kTileTokens; t += kLanes) {
    store(operands.scales.v + t, with_plain_nan(load<Vec>(operands.scales.v + t)));
  }
}

/// Transposes 16 x 16 words: out[i] lane j = in[j] lane i.
FOLIO_INLINE void transpose(IntVec* r) {
  IntVec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = FOLIO_SHUFFLE(r[2 * i], r[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[2 * i + 1] = FOLIO_SHUFFLE(r[2 * i], r[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const IntVec* const a = t + 4 * i;
    r[4 * i] = FOLIO_SHUFFLE(a[0], a[2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[4 * i + 1] = FOLIO_SHUFFLE(a[0], a[2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    r[4 * i + 2] = FOLIO_SHUFFLE(a[1], a[3], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[4 * i + 3] = FOLIO_SHUFFLE(a[1], a[3], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = FOLIO_SHUFFLE(r[i], r[4 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[4 + i] = FOLIO_SHUFFLE(r[i], r[4 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[8 + i] = FOLIO_SHUFFLE(r[8 + i], r[12 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[12 + i] = FOLIO_SHUFFLE(r[8 + i], r[12 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = FOLIO_SHUFFLE(t[i], t[8 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[8 + i] = FOLIO_SHUFFLE(t[i], t[8 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    r[4 + i] = FOLIO_SHUFFLE(t[4 + i], t[12 + i], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    r[12 + i] = FOLIO_SHUFFLE(t[4 + i], t[12 + i], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
}

/// Packs Q as the right operand of GEMM0: [row block][term][32 dims][dim / 2][row][2] (VNNI layout), with zeros for
/// missing rows and dimensions.
static inline void pack_q(const WorkTileParams& work, unsigned char* packed) {
  const bool split = work.q_dtype == DType::kFloat16;
  const int64_t term_bytes = int64_t{rounded_up(work.head_dim_qk, kMmaDims)} / kMmaDims * kTileBytes;
  for (int32_t r = 0; r < work.num_rows; r += kRowBlock, packed += split ? term_bytes : 0) {
    for (int32_t d = 0; d < work.head_dim_qk; d += kMmaDims, packed += kTileBytes) {
      const int32_t dims = smaller(work.head_dim_qk - d, kMmaDims);
      const auto taken = static_cast<__mmask32>(bit_range(0, dims));
      IntVec words[kRowBlock];
#pragma GCC unroll 16
      for (int i = 0; i < kRowBlock; ++i) {
        words[i] = IntVec{};
        if (r + i < work.num_rows) {
          words[i] = reinterpret_cast<IntVec>(_mm512_maskz_loadu_epi16(taken, work.rows[r + i].q + d * kBf16Bytes));
        }
      }
      if (split) {
        IntVec low[kRowBlock];
        for (int i = 0; i < kRowBlock; ++i) split_pairs(words[i], words[i], low[i]);
        transpose(low);
        for (int i = 0; i < kRowBlock; ++i) store(packed + term_bytes + i * 64, low[i]);
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kRowBlock; ++i) store(packed + i * 64, words[i]);
    }
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
