#pragma once

#include "kernels/cpu/amx/attention/step.hpp"

/// Where the tile loads of a tile's keys and values read: the cache itself, where 16 keys or 16 pairs of values lie in
/// one page and are whole tile rows, else copies. A copy has zeros for whatever is not the item's or is not finite
/// where some row must not see it: in a product, 0 times NaN would be NaN.
namespace folio::inline v0::kernels::cpu::FOLIO_ISA {

/// A token's or pair's place: the page, and the slot in it. Without pages, page 0 and the token itself.
struct Place {
  int64_t page;
  int32_t slot;
};

FOLIO_INLINE Place place_of(const ItemKeys& keys, int32_t local) {
  if (keys.pages == nullptr) return {0, local};
  const int32_t number = local / keys.page_size;
  return {keys.pages[number], local - number * keys.page_size};
}

FOLIO_INLINE const unsigned char* key_at(const ItemKeys& keys, int32_t local) {
  const Place place = place_of(keys, local);
  return keys.k + place.page * keys.k_page + place.slot * keys.k_token;
}

/// A token's values: packed, its pair; the token's components are then every second one, from local % 2 on.
FOLIO_INLINE const unsigned char* value_at(const ItemKeys& keys, int32_t local) {
  const Place place = place_of(keys, local);
  return keys.v + place.page * keys.v_page + (keys.packed_v ? place.slot / 2 : place.slot) * keys.v_token;
}

FOLIO_INLINE bool in_one_page(const ItemKeys& keys, int32_t local, int32_t count) {
  return keys.pages != nullptr && local / keys.page_size == (local + count - 1) / keys.page_size;
}

static inline void copy_keys(const ItemCall& call, int32_t first, int32_t begin, int32_t end, unsigned char* copy) {
  const int32_t bytes = call.head_dim_qk * kElement;
  const int32_t stride = rounded_up(call.head_dim_qk, kDimStep) * kElement;
  for (int32_t t = begin; t < end; ++t) {
    __builtin_memcpy(copy + t * stride, key_at(call.keys, first + t), static_cast<size_t>(bytes));
    __builtin_memset(copy + t * stride + bytes, 0, static_cast<size_t>(stride - bytes));
  }
}

/// Keys that no row sees need no copy and no zeros: their scores are never used.
static inline void locate_keys(const ItemCall& call, ReadyTokens& ready) {
  const ItemKeys& keys = call.keys;
  const bool whole_rows = call.head_dim_qk % kDimStep == 0;
  const int64_t copy_stride = int64_t{rounded_up(call.head_dim_qk, kDimStep)} * kElement;
  TileRow16 some{};
  for (int32_t g = 0; g < kTileTokens / kGroupTokens; ++g) {
    const int32_t first = g * kGroupTokens;
    const int32_t begin = larger(ready.tile.begin, first);
    const int32_t end = smaller(ready.tile.end, first + kGroupTokens);
    ready.keys[g] = {nullptr, 0};
    if (begin >= end) continue;
    const int32_t local = ready.tile.first + first;
    const bool all = end - begin == kGroupTokens;
    if (whole_rows && (keys.pages == nullptr ? all : in_one_page(keys, local, kGroupTokens))) {
      ready.keys[g] = {key_at(keys, local), keys.k_token};
    } else {
      copy_keys(call, ready.tile.first, begin, end, ready.key_copy);
      ready.keys[g] = {ready.key_copy + first * copy_stride, copy_stride};
    }
    some = ready.keys[g];
  }
  for (TileRow16& group : ready.keys) {
    if (group.at == nullptr) group = some;  // any readable memory
  }
}

/// Pairs of tokens [begin, end) of a half, interleaved, with zeros for all else.
static inline void copy_values(const ItemCall& call, int32_t first, int32_t begin, int32_t end, unsigned char* copy) {
  const ItemKeys& keys = call.keys;
  const int64_t stride = int64_t{rounded_up(call.head_dim_v, kDimTile)} * 2 * kElement;
  __builtin_memset(copy, 0, static_cast<size_t>(stride * kHalfTokens / 2));
  for (int32_t t = begin; t < end; ++t) {
    const unsigned char* const from = value_at(keys, first + t);
    unsigned char* const to = copy + t / 2 * stride;
    if (keys.packed_v && t % 2 == 0 && t + 1 < end) {
      __builtin_memcpy(to, from, static_cast<size_t>(call.head_dim_v * 2 * kElement));
      ++t;
      continue;
    }
    const int32_t step = keys.packed_v ? 2 : 1;
    const int32_t offset = keys.packed_v ? (first + t) % 2 : 0;
    for (int32_t d = 0; d < call.head_dim_v; ++d) {
      __builtin_memcpy(to + (2 * d + t % 2) * kElement, from + (d * step + offset) * kElement, kElement);
    }
  }
}

/// Infinite and NaN components among 16 pairs become zeros in the copy; their tokens are the result's bits.
static inline uint32_t clear_special(const ItemCall& call, unsigned char* copy) {
  const int32_t words = rounded_up(call.head_dim_v, kDimTile);
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  uint32_t tokens = 0;
  for (int32_t pair = 0; pair < kHalfTokens / 2; ++pair) {
    for (int32_t d = 0; d < words; d += kDimTile) {
      unsigned char* const at = copy + (pair * words + d) * 2 * kElement;
      const __m512i value = load<__m512i>(at);
      const __mmask32 special = _mm512_cmpeq_epi16_mask(_mm512_and_si512(value, exponent), exponent);
      if (special == 0) continue;
      store(at, _mm512_mask_mov_epi16(value, special, _mm512_setzero_si512()));
      if ((special & 0x55555555u) != 0) tokens |= uint32_t{1} << (2 * pair);
      if ((special & 0xaaaaaaaau) != 0) tokens |= uint32_t{2} << (2 * pair);
    }
  }
  return tokens;
}

static inline bool has_special(const ItemCall& call, const TileRow16& rows) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 special = 0;
  for (int32_t pair = 0; pair < kHalfTokens / 2; ++pair) {
    for (int32_t d = 0; d < call.head_dim_v; d += kDimTile) {
      const __m512i value = load<__m512i>(rows.at + pair * rows.stride + d * 2 * kElement);
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(value, exponent), exponent);
    }
  }
  return special != 0;
}

static inline void locate_values(const ItemCall& call, ReadyTokens& ready) {
  const ItemKeys& keys = call.keys;
  const int64_t copy_stride = int64_t{rounded_up(call.head_dim_v, kDimTile)} * 2 * kElement;
  for (int32_t h = 0; h < kTileTokens / kHalfTokens; ++h) {
    const int32_t first = h * kHalfTokens;
    const int32_t begin = larger(ready.tile.begin, first);
    const int32_t end = smaller(ready.tile.end, first + kHalfTokens);
    ready.values[h] = {nullptr, 0};
    if (begin >= end) continue;
    const int32_t local = ready.tile.first + first;
    unsigned char* const copy = ready.value_copy + first / 2 * copy_stride;
    const bool direct = keys.packed_v && call.head_dim_v % kDimTile == 0 && end - begin == kHalfTokens &&
                        in_one_page(keys, local, kHalfTokens);
    if (direct) {
      ready.values[h] = {value_at(keys, local), keys.v_token};
      if (ready.uniform || !has_special(call, ready.values[h])) continue;
    }
    copy_values(call, local, begin - first, end - first, copy);
    ready.values[h] = {copy, copy_stride};
    if (!ready.uniform) ready.special |= uint64_t{clear_special(call, copy)} << first;
  }
}

}  // namespace folio::inline v0::kernels::cpu::FOLIO_ISA
