#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "attention/cache_test_util.hpp"
#include "core/aligned_buffer.hpp"

/// What the tests of int8 caches share: pools with token scales, and the arguments of a write.
namespace folio::inline v0::attention {

enum class Int8Layout { kNhd, kHnd, kPacked, kAlias, kInline };
inline constexpr Int8Layout kInt8Layouts[] = {Int8Layout::kNhd, Int8Layout::kHnd, Int8Layout::kPacked,
                                              Int8Layout::kAlias, Int8Layout::kInline};

/// A cache of 7s with scales of NaN.
struct Int8Pool {
  Int8Pool(Int8Layout layout, int64_t pages, int32_t page_size, int32_t heads, int32_t dim_qk, int32_t dim_v)
      : shape{pages, page_size, heads, dim_qk, dim_v, DType::kInt8},
        scales(static_cast<size_t>(2 * token_scale_elements(shape)), std::numeric_limits<float>::quiet_NaN()) {
    const int64_t rows = pages * page_size * heads;
    const int32_t row_bytes = dim_qk + dim_v + 2 * int32_t{sizeof(float)};  // kInline: K, V, their scales
    values = core::AlignedBuffer(static_cast<size_t>(rows * row_bytes), 64);
    auto* const k = values.data();
    std::memset(k, 7, values.bytes());
    std::byte* const v = k + k_elements(shape);
    float* const v_scales = scales.data() + token_scale_elements(shape);
    switch (layout) {
      case Int8Layout::kNhd: view = make_nhd_view(shape, k, v, scales.data(), v_scales); break;
      case Int8Layout::kHnd: view = make_hnd_view(shape, k, v, scales.data(), v_scales); break;
      case Int8Layout::kPacked: view = make_cpu_packed_view(shape, k, v, scales.data(), v_scales); break;
      case Int8Layout::kAlias:
        view = make_nhd_view(shape, k, v, scales.data(), v_scales);
        view.v = view.k;
        view.v_strides = view.k_strides;
        view.v_token_scales = view.k_token_scales;
        break;
      case Int8Layout::kInline: {
        view = make_nhd_view(shape, k, v, scales.data(), v_scales);
        view.v = k + dim_qk;
        view.k_strides =
            view.v_strides = {int64_t{page_size} * heads * row_bytes, int64_t{heads} * row_bytes, row_bytes};
        for (TokenScales* const half : {&view.k_token_scales, &view.v_token_scales}) {
          half->strides = {view.k_strides.page / 4, view.k_strides.token / 4, row_bytes / 4};
        }
        view.k_token_scales.data = reinterpret_cast<float*>(k + dim_qk + dim_v);
        view.v_token_scales.data = view.k_token_scales.data + 1;
        break;
      }
    }
  }

  float scale(bool is_k, int64_t slot, int64_t head) const {
    const TokenScales& half = is_k ? view.k_token_scales : view.v_token_scales;
    const KvStrides& s = half.strides;
    return half.data[slot / shape.page_size * s.page + slot % shape.page_size * s.token + head * s.head];
  }
  float stored(bool is_k, int64_t slot, int64_t head, int64_t d) const {
    const int64_t page = slot / shape.page_size;
    const int64_t token = slot % shape.page_size;
    const int64_t at = is_k ? k_index(view, page, token, head, d) : v_index(view, page, token, head, d);
    return load_as_float(is_k ? view.k : view.v, DType::kInt8, at);
  }

  KvCacheShape shape;
  std::vector<float> scales;
  core::AlignedBuffer values;
  KvCacheView view;
};

inline CacheWriteArgs write_args(Rows& k, Rows& v, const std::vector<int64_t>& slots, const Int8Pool& pool) {
  CacheWriteArgs args;
  args.k = k.view();
  args.v = v.view();
  if (pool.view.v == pool.view.k) args.v.data = nullptr;
  args.slot_mapping = slots.data();
  args.num_slots = static_cast<int64_t>(slots.size());
  args.cache = pool.view;
  return args;
}

}  // namespace folio::inline v0::attention
