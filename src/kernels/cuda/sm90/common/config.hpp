#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Limits of Hopper, places of tokens and mask bounds, for host and device.
namespace folio::inline v0::kernels::cuda::sm90 {

constexpr int32_t kMaxSmemBytes = 227 * 1024;  ///< shared memory that one CTA may have
constexpr int32_t kElementsPer16B = 8;         ///< 16-bit elements of a 16-byte access

/// Where some neighbouring tokens of one page lie. A ragged segment has page 0 and the token of the whole tensor.
struct alignas(8) TokenPlace {
  int32_t page;
  int32_t in_page;  ///< negative: no row sees any of the tokens, and they must not be read
};
static_assert(sizeof(TokenPlace) == 8);

/// Elements of keys and values in shared memory: a 16-bit type, or fp8 data.
enum class Fp8 : int32_t { kNone, kE4M3, kE5M2 };

constexpr int32_t element_bytes(Fp8 fp8) {
  return fp8 == Fp8::kNone ? 2 : 1;
}

/// Which local tokens of a segment the rows of a work tile attend to.
struct alignas(16) VisibleRange {
  int32_t any_begin;  ///< all tokens that at least one row sees lie in [any_begin, any_end)
  int32_t any_end;
  int32_t all_begin;  ///< every row sees every token in [all_begin, all_end)
  int32_t all_end;
};

/// Whether a row does not see some token of the KV tile [first, first + tokens).
FOLIO_HOST_DEVICE constexpr bool needs_mask(const VisibleRange& range, int32_t first, int32_t tokens) {
  return first < range.all_begin || first + tokens > range.all_end;
}
/// Whether no row sees some token of the KV tile. Its values may be anything, and 0 * NaN is NaN: they must be zeroed.
FOLIO_HOST_DEVICE constexpr bool has_invisible(const VisibleRange& range, int32_t first, int32_t tokens) {
  return first < range.any_begin || first + tokens > range.any_end;
}
/// Whether some rows see a token of the KV tile and others do not. Its NaN and Inf must not reach the others.
FOLIO_HOST_DEVICE constexpr bool is_mixed(const VisibleRange& range, int32_t first, int32_t tokens) {
  const int32_t begin = first > range.any_begin ? first : range.any_begin;
  const int32_t end = first + tokens < range.any_end ? first + tokens : range.any_end;
  return begin < end && (begin < range.all_begin || end > range.all_end);
}

}  // namespace folio::inline v0::kernels::cuda::sm90
