#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "folio/folio.hpp"

/// What the tests of the cache functions share: pools of every layout, executors, and the contract written plainly.
namespace folio::inline v0::attention {

inline constexpr DType kCacheDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                                         DType::kFloat8E5M2};

enum class Layout {
  kNhd,             ///< K and V apart, [page][token][head][dim]
  kHnd,             ///< [page][head][token][dim]
  kInterleavedNhd,  ///< [page][K | V][token][head][dim]: vLLM's 5-D shape
  kInterleavedHnd,
  kSideBySide,  ///< [page][head][token][K | V]: vLLM's 4-D shape
  kPacked,
  kPackedInterleaved,  ///< [page][K | V], each packed
};
inline constexpr Layout kLayouts[] = {
    Layout::kNhd,        Layout::kHnd,    Layout::kInterleavedNhd,   Layout::kInterleavedHnd,
    Layout::kSideBySide, Layout::kPacked, Layout::kPackedInterleaved};

inline bool is_packed(Layout layout) {
  return layout == Layout::kPacked || layout == Layout::kPackedInterleaved;
}

inline bool exists(Layout layout, const KvCacheShape& shape) {
  return !is_packed(layout) || (shape.page_size % 2 == 0 && shape.page_size >= 16 && shape.dtype != DType::kFloat32);
}

/// A cache in memory full of noise, with noise around it. Copies have their own memory.
struct Pool {
  static constexpr size_t kMargin = 256;
  Layout layout;
  KvCacheShape shape;
  std::vector<std::byte> memory;

  Pool(Layout l, const KvCacheShape& s, uint32_t seed) : layout(l), shape(s) {
    const auto elements = static_cast<size_t>(k_elements(s) + v_elements(s));
    memory.resize(elements * static_cast<size_t>(size_of(s.dtype)) + 2 * kMargin);
    std::mt19937 random(seed);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }

  KvCacheView view() {
    std::byte* k = memory.data() + kMargin;
    std::byte* apart = k + k_elements(shape) * size_of(shape.dtype);
    if (layout == Layout::kNhd) return make_nhd_view(shape, k, apart);
    if (layout == Layout::kHnd) return make_hnd_view(shape, k, apart);
    if (layout == Layout::kPacked) return make_cpu_packed_view(shape, k, apart);
    const bool nhd = layout == Layout::kInterleavedNhd;
    KvCacheView cache = is_packed(layout) ? make_cpu_packed_view(shape, k, apart)
                        : nhd             ? make_nhd_view(shape, k, apart)
                                          : make_hnd_view(shape, k, apart);
    const int64_t both = int64_t{shape.head_dim_qk} + shape.head_dim_v;
    cache.v = k + cache.k_strides.page * size_of(shape.dtype);
    cache.k_strides.page = cache.v_strides.page = shape.page_size * shape.num_kv_heads * both;
    if (layout == Layout::kSideBySide) {
      cache.v = k + shape.head_dim_qk * size_of(shape.dtype);
      cache.k_strides.token = cache.v_strides.token = both;
      cache.k_strides.head = cache.v_strides.head = shape.page_size * both;
    }
    return cache;
  }
};

/// A cache full of numbers, of which fp8 can store most: conversions of NaN payloads are for tests of their own.
inline Pool pool_of_numbers(Layout layout, const KvCacheShape& shape, uint32_t seed) {
  Pool pool(layout, shape, seed);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 20.0f);
  const auto elements = static_cast<int64_t>(pool.memory.size()) / size_of(shape.dtype);
  for (int64_t i = 0; i < elements; ++i) store_from_float(pool.memory.data(), shape.dtype, i, normal(random));
  return pool;
}

/// For three heads.
inline const std::vector<float> kHeadScales{0.5f, 0.037f, 3.0f};

/// Where an element lies, as KvCacheView's comment says.
inline int64_t k_index(const KvCacheView& c, int64_t page, int64_t token, int64_t head, int64_t d) {
  return page * c.k_strides.page + token * c.k_strides.token + head * c.k_strides.head + d;
}
inline int64_t v_index(const KvCacheView& c, int64_t page, int64_t token, int64_t head, int64_t d) {
  if (c.format == KvFormat::kCpuPacked) {
    return page * c.v_strides.page + token / 2 * c.v_strides.token + head * c.v_strides.head + 2 * d + token % 2;
  }
  return page * c.v_strides.page + token * c.v_strides.token + head * c.v_strides.head + d;
}

inline float scale_of(const Scale& scale, int64_t request, int64_t head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerTensor: return scale.data[0];
    case ScaleGranularity::kPerHead: return scale.data[head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + head];
  }
  return 0.0f;
}

/// One element from one array to another, as the contract says: bits where the types and scales are equal.
inline void move_element(const void* from, DType from_type, int64_t from_index, float from_scale, void* to,
                         DType to_type, int64_t to_index, float to_scale) {
  const int64_t bytes = size_of(from_type);
  if (from_type == to_type && from_scale == to_scale) {
    std::memcpy(static_cast<std::byte*>(to) + to_index * bytes,
                static_cast<const std::byte*>(from) + from_index * bytes, static_cast<size_t>(bytes));
    return;
  }
  float value = load_as_float(from, from_type, from_index);
  if (is_fp8(from_type)) value *= from_scale;
  if (is_fp8(to_type)) value /= to_scale;
  store_from_float(to, to_type, to_index, value);
}

/// A tensor [tokens, heads, dim] of noise without NaNs, in rows that are `gap` elements longer than needed.
struct Rows {
  DType dtype;
  int64_t tokens, heads, dim, gap;
  std::vector<std::byte> memory;

  Rows(DType type, int64_t t, int64_t h, int64_t d, int64_t row_gap, uint32_t seed)
      : dtype(type), tokens(t), heads(h), dim(d), gap(row_gap) {
    memory.resize(static_cast<size_t>(t * (h * d + row_gap) * size_of(type)));
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (int64_t i = 0; i < t * (h * d + row_gap); ++i) store_from_float(memory.data(), type, i, normal(random));
  }

  TensorView view() {
    TensorView tensor(memory.data(), dtype, {tokens, heads, dim});
    tensor.strides[0] = heads * dim + gap;
    return tensor;
  }
  int64_t index(int64_t t, int64_t h, int64_t d) const { return t * (heads * dim + gap) + h * dim + d; }
};

/// Engines' executors: one call after the other, in order, reversed or shuffled.
class OrderedExecutor {
 public:
  enum class Order { kForward, kReverse, kShuffled };
  OrderedExecutor(Order order, int32_t concurrency) : order_(order), concurrency_(concurrency) {}

  Context context() {
    ContextOptions options;
    options.executor.self = this;
    options.executor.concurrency = concurrency_;
    options.executor.parallel_for = [](void* self, int64_t n, ParallelBody body, void* body_context) {
      auto& executor = *static_cast<OrderedExecutor*>(self);
      executor.most_items = std::max(executor.most_items, n);
      std::vector<int64_t> order(static_cast<size_t>(n));
      std::iota(order.begin(), order.end(), int64_t{0});
      if (executor.order_ == Order::kReverse) std::reverse(order.begin(), order.end());
      if (executor.order_ == Order::kShuffled) std::shuffle(order.begin(), order.end(), executor.random_);
      for (int64_t i : order) body(body_context, i);
    };
    return Context::cpu(options);
  }

  int64_t most_items = 0;

 private:
  Order order_;
  int32_t concurrency_;
  std::mt19937 random_{5};
};

}  // namespace folio::inline v0::attention
