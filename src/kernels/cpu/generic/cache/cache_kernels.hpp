#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/kv_cache.hpp"
#include "kernels/cpu/generic/cache/convert_rows.hpp"
#include "kvcache/address.hpp"

/// Moving keys and values between tensors and caches. Arguments are checked by the callers (src/attention).
namespace folio::inline v0::kernels::generic {

/// A Scale made ready for look-ups.
struct ScaleTable {
  const float* data = nullptr;  ///< null: `value` for everything
  float value = 1.0f;
  int64_t request_stride = 0;
  int64_t head_stride = 0;

  float at(int64_t request, int64_t head) const noexcept {
    return data == nullptr ? value : data[request * request_stride + head * head_stride];
  }
};

ScaleTable scale_table(const Scale& scale) noexcept;

/// Rows of a tensor [tokens, heads, head_dim]; strides in bytes.
template <typename Byte>
struct TensorRows {
  Byte* data = nullptr;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  Byte* row(int64_t token, int64_t head) const noexcept { return data + token * token_stride + head * head_stride; }
};

struct WriteHalf {
  TensorRows<const std::byte> from;
  kvcache::CacheHalf to;
  int64_t head_dim = 0;
  RowConversion conversion;
  ScaleTable to_scale;
};

/// Tokens to be written into slots. The work is divided by heads and by groups of slots, never by tokens: two tokens of
/// one pair, or with one slot, always meet in one thread, which takes them in their order. The last one wins.
struct WriteParams {
  WriteHalf k;
  WriteHalf v;
  bool has_v = true;  ///< false: V aliases K
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;
  int64_t page_size = 0;
  int64_t num_groups = 1;
};

/// Writes the heads [head_begin, head_end) of the tokens whose slots belong to `group`, in [0, num_groups).
void write_slots(const WriteParams& params, int64_t group, int64_t head_begin, int64_t head_end) noexcept;

struct PageHalf {
  kvcache::CacheHalf from;
  kvcache::CacheHalf to;
  int64_t head_dim = 0;
  RowConversion conversion;
  ScaleTable from_scale;
  ScaleTable to_scale;
};

/// Pages that become other pages: page source[i] of `from` goes to page destination[i] of `to`.
struct PageParams {
  PageHalf k;
  PageHalf v;
  bool has_v = true;  ///< false: V aliases K in both
  const int32_t* source = nullptr;
  const int32_t* destination = nullptr;
  int64_t page_size = 0;
};

/// One head of one page.
void convert_page_head(const PageParams& params, int64_t index, int64_t head) noexcept;

struct GatherHalf {
  kvcache::CacheHalf from;
  TensorRows<std::byte> to;
  int64_t head_dim = 0;
  RowConversion conversion;
  ScaleTable from_scale;
};

struct GatherParams {
  GatherHalf k;
  GatherHalf v;
  PageTableView table;
  const int32_t* kv_len = nullptr;
  int64_t num_rows = 0;
  int64_t page_size = 0;
  int64_t num_heads = 0;
};

/// Output tokens [begin, end), counted over all rows.
void gather_tokens(const GatherParams& params, int64_t begin, int64_t end) noexcept;

}  // namespace folio::inline v0::kernels::generic
