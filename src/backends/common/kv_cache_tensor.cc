#include "backends/common/kv_cache_tensor.hpp"

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

TensorView permuted_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape,
                           const std::array<int32_t, 5>& order) {
  TensorView tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = 5;
  tensor.shape = shape;
  int64_t stride = 1;
  for (size_t position = order.size(); position-- > 0;) {
    const auto dimension = static_cast<size_t>(order[position]);
    tensor.strides[dimension] = stride;
    stride *= shape[dimension];
  }
  return tensor;
}

KvCacheView view_of_cache_tensor(const TensorView& kv_cache, DType dtype, int32_t kv_dim, const char* shape_text) {
  core::require(kv_cache.rank == 5, "kv_cache has rank ", kv_cache.rank, "; its logical shape is ", shape_text);
  const auto kv = static_cast<size_t>(kv_dim);
  const size_t page = 1 - kv;
  core::require(kv_cache.shape[kv] == 2, "dimension ", kv_dim, " of kv_cache has ", kv_cache.shape[kv],
                " entries; it holds K and V");
  core::require(kv_cache.dtype == DType::kUnset || kv_cache.dtype == dtype, "kv_cache is ", kv_cache.dtype,
                "; the layer's cache dtype is ", dtype);
  core::require(kv_cache.strides[4] == 1, "kv_cache has stride ", kv_cache.strides[4],
                " between components; it must be 1");
  KvCacheView view;
  view.dtype = dtype;
  view.k = kv_cache.data;
  view.v = static_cast<std::byte*>(kv_cache.data) + kv_cache.strides[kv] * size_of(dtype);
  view.num_pages = kv_cache.shape[page];
  view.page_size = core::checked_cast<int32_t>(kv_cache.shape[2]);
  view.num_kv_heads = core::checked_cast<int32_t>(kv_cache.shape[3]);
  view.head_dim_qk = core::checked_cast<int32_t>(kv_cache.shape[4]);
  view.head_dim_v = view.head_dim_qk;
  view.k_strides = {kv_cache.strides[page], kv_cache.strides[2], kv_cache.strides[3]};
  view.v_strides = view.k_strides;
  return view;
}

void require_configured_layout(const TensorView& kv_cache, KvCacheLayout layout) {
  constexpr size_t kTokens = 2, kHeads = 3;
  // With one token or one head a page lies alike in both.
  if (kv_cache.rank != 5 || kv_cache.shape[kTokens] <= 1 || kv_cache.shape[kHeads] <= 1) return;
  const bool nhd = kv_cache.strides[kTokens] > kv_cache.strides[kHeads];
  const KvCacheLayout found = nhd ? KvCacheLayout::kNhd : KvCacheLayout::kHnd;
  core::require(found == layout, "kv_cache lies in memory as ", to_string(found), ", with strides ",
                kv_cache.strides[kTokens], " between tokens and ", kv_cache.strides[kHeads],
                " between heads; CacheConfig::layout is ", to_string(layout));
}

void require_layout(KvCacheLayout layout) {
  core::require(layout == KvCacheLayout::kNhd || layout == KvCacheLayout::kHnd, "Unknown cache layout format ",
                static_cast<int32_t>(layout), ".");
}

}  // namespace folio::inline v0::backends
