#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "folio/kv_cache.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0 {

/// How a layer's slots lie in memory.
enum class KvPoolLayout : int32_t {
  kTokenMajor = 0,  ///< [slots, KV heads, head dim], NHD: pages of any size that divides the slots are views of it
  kHeadMajor = 1,   ///< [pages, KV heads, page_size, head dim], HND: pages of page_size only
  kCpuPacked = 2,   ///< KvFormat::kCpuPacked: pages of page_size only
};

struct KvPoolConfig {
  int32_t num_slots = 0;  ///< tokens that the pool is for, without the dummy page; a multiple of page_size
  int32_t page_size = 1;
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  DType dtype = DType::kFloat16;  ///< float32, float16, bfloat16 or fp8
  KvPoolLayout layout = KvPoolLayout::kTokenMajor;
};

/// The keys and values of every layer, as slots that a TokenAllocator of the same num_slots and page_size hands out.
///
///     KvPool pool({.num_slots = 4096, .num_layers = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_v = 128,
///                  .dtype = DType::kFloat8E4M3});
///     pool.set_scales(layer, {.value = 0.5f}, {.value = 0.25f});
///     write_kv_cache(context, pool.write_args(layer, k, v, out_cache_loc));  // set_kv_buffer
///     args.segments[0].cache = pool.view(layer);                             // get_kv_buffer
///
/// A layer's slots 0 to page_size - 1 are the dummy page, which takes the writes of padding tokens; then come the
/// num_slots others. A pool holds memory, views and scales and touches no values after construction: writes go through
/// write_kv_cache, on the CPU and on a GPU. Const calls are safe from several threads.
class FOLIO_API KvPool {
 public:
  /// Host memory of its own, zeroed. Throws kInvalidArgument and kUnsupported as the makers of views do
  /// (folio/kv_cache.hpp), kOutOfMemory.
  explicit KvPool(const KvPoolConfig& config);

  /// Borrowed memory, one address a layer for K and for V, on whichever device the contexts used with it are: each
  /// k_bytes_per_layer(config) or v_bytes_per_layer(config), aligned to elements. It must outlive the pool. Throws
  /// kInvalidArgument for other numbers of addresses, besides the above.
  KvPool(const KvPoolConfig& config, std::span<void* const> k, std::span<void* const> v);

  ~KvPool();
  KvPool(KvPool&&) noexcept;
  KvPool& operator=(KvPool&&) noexcept;

  static size_t k_bytes_per_layer(const KvPoolConfig& config);
  static size_t v_bytes_per_layer(const KvPoolConfig& config);

  const KvPoolConfig& config() const noexcept;
  int32_t num_slots() const noexcept;   ///< as configured
  int64_t buffer_len() const noexcept;  ///< slots of a layer with the dummy page: num_slots + page_size

  /// The layer as pages of config().page_size. Throws kInvalidArgument for a layer that the pool does not have, as all
  /// calls below do.
  const KvCacheView& view(int32_t layer) const;

  /// The layer as pages of another size: slot s is slot s % page_size of page s / page_size whatever it is. Throws
  /// kInvalidArgument for sizes that do not divide buffer_len(), kUnsupported for pools that are not token-major.
  KvCacheView view(int32_t layer, int32_t page_size) const;

  /// The live memory as [buffer_len(), num_kv_heads, head_dim]; no copy. Throws kUnsupported for pools that are not
  /// token-major: a slot's heads have no common stride there.
  TensorView key_buffer(int32_t layer) const;
  TensorView value_buffer(int32_t layer) const;

  /// Quantisation scales of a layer's keys and values, 1 at first: stored = real / scale. One value, or an array per
  /// tensor or per head that is borrowed. Throws kInvalidArgument for pools that are not fp8, for values that are not
  /// finite and above 0 and for arrays per request.
  void set_scales(int32_t layer, const Scale& k, const Scale& v);
  const Scale& k_scale(int32_t layer) const;
  const Scale& v_scale(int32_t layer) const;

  /// What write_kv_cache takes to store token t of `k` and `v` in slots[t] of the layer, with its scales. k is
  /// [..., num_kv_heads, head_dim_qk] or [..., num_kv_heads * head_dim_qk], v likewise with head_dim_v; their leading
  /// dimensions, whatever their number, are the tokens in row-major order, as many as `slots`. Negative slots are
  /// skipped, the dummy page's take what nobody reads. Throws kInvalidArgument for other shapes and for leading
  /// dimensions whose strides do not flatten. O(1); slots and values are read by write_kv_cache.
  CacheWriteArgs write_args(int32_t layer, const ConstTensorView& k, const ConstTensorView& v,
                            std::span<const int64_t> slots) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0
