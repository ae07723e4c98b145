#include "folio/kvcache/kv_pool.hpp"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0 {
namespace {

struct Layer {
  KvCacheView view;
  Scale k_scale;
  Scale v_scale;
};

KvCacheShape shape_of(const KvPoolConfig& config) {
  core::require(config.page_size >= 1, "page_size is ", config.page_size, "; it must be 1 or more");
  core::require(config.num_slots >= 0 && config.num_slots % config.page_size == 0 &&
                    config.num_slots <= INT32_MAX - config.page_size,
                "num_slots is ", config.num_slots, "; it must be a multiple of page_size (", config.page_size,
                ") in [0, 2^31 - 1 - page_size]");
  core::require(config.num_layers >= 1, "num_layers is ", config.num_layers, "; it must be 1 or more");
  core::require(config.dtype != DType::kInt8, "dtype is int8; pools hold no token scales, make the views of an int8 ",
                "cache with make_nhd_view, make_hnd_view or make_cpu_packed_view");
  KvCacheShape shape;
  shape.num_pages = int64_t{config.num_slots / config.page_size} + 1;
  shape.page_size = config.page_size;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim_qk = config.head_dim_qk;
  shape.head_dim_v = config.head_dim_v;
  shape.dtype = config.dtype;
  return shape;
}

KvCacheView make_view(KvPoolLayout layout, const KvCacheShape& shape, void* k, void* v) {
  switch (layout) {
    case KvPoolLayout::kTokenMajor: return make_nhd_view(shape, k, v);
    case KvPoolLayout::kHeadMajor: return make_hnd_view(shape, k, v);
    case KvPoolLayout::kCpuPacked: return make_cpu_packed_view(shape, k, v);
  }
  core::fail(ErrorCode::kInvalidArgument, "layout is ", static_cast<int32_t>(layout),
             "; token-major (0), head-major (1) and CPU-packed (2) are offered");
}

size_t bytes_of(int64_t elements, DType dtype) {
  return static_cast<size_t>(core::checked_mul(elements, int64_t{size_of(dtype)}));
}

void check_scale(const char* name, const Scale& scale, DType dtype) {
  const bool is_default = scale.value == 1.0f && scale.data == nullptr;
  core::require(is_fp8(dtype) || is_default, name, " is given for a pool of ", dtype, "; only fp8 pools have scales");
  core::require(std::isfinite(scale.value) && scale.value > 0, name, " is ", scale.value,
                "; it must be finite and above 0");
  core::require(scale.data == nullptr || scale.value == 1.0f, name, " has both an array and the value ", scale.value,
                "; the value must be left at 1");
  core::require(scale.granularity == ScaleGranularity::kPerTensor || scale.granularity == ScaleGranularity::kPerHead,
                name, " is per request; slots are shared by requests: per tensor and per head are offered");
}

/// [tokens, heads, dim] of a tensor [..., heads, dim] or [..., heads * dim].
ConstTensorView flatten(const char* name, const ConstTensorView& tensor, int64_t heads, int64_t dim, size_t tokens) {
  const auto size = [&](int32_t i) { return tensor.shape[static_cast<size_t>(i)]; };
  const auto stride = [&](int32_t i) { return tensor.strides[static_cast<size_t>(i)]; };
  const int32_t rank = tensor.rank;
  core::require(rank >= 1 && rank <= kMaxRank, name, " has rank ", rank, "; ranks 1 to ", kMaxRank, " are offered");
  const bool apart = rank >= 2 && size(rank - 1) == dim && size(rank - 2) == heads;
  const bool fused = !apart && size(rank - 1) == heads * dim;
  core::require(apart || fused, name, " ends in a dimension of ", size(rank - 1), "; it must end in [", heads, ", ",
                dim, "] or in [", heads * dim, "]");
  core::require(stride(rank - 1) == 1 || size(rank - 1) == 1, name, " has a stride of ", stride(rank - 1),
                " in its last dimension; it must be contiguous");
  const int32_t leading = rank - (apart ? 2 : 1);
  int64_t count = 1;
  int64_t token_stride = heads * dim;
  bool any = false;
  for (int32_t i = leading - 1; i >= 0; --i) {
    if (size(i) == 1) continue;
    core::require(!any || stride(i) == count * token_stride, name, " has a stride of ", stride(i), " in dimension ", i,
                  "; its leading dimensions flatten into tokens only if it is ", count * token_stride);
    if (!any) token_stride = stride(i);
    any = true;
    count = core::checked_mul(count, size(i));
  }
  core::require(count >= 0 && static_cast<size_t>(count) == tokens, name, " has ", count, " tokens, slots has ",
                tokens);
  ConstTensorView flat;
  flat.data = tensor.data;
  flat.dtype = tensor.dtype;
  flat.rank = 3;
  flat.shape = {count, heads, dim};
  flat.strides = {token_stride, apart ? stride(rank - 2) : dim, 1};
  return flat;
}

}  // namespace

struct KvPool::State {
  KvPoolConfig config;
  int64_t buffer_len = 0;
  std::vector<Layer> layers;
  std::vector<core::AlignedBuffer> memory;

  State(const KvPoolConfig& pool, std::span<void* const> k, std::span<void* const> v) : config(pool) {
    const KvCacheShape shape = shape_of(pool);
    core::require(k.size() == static_cast<size_t>(pool.num_layers) && v.size() == k.size(), "there are ", k.size(),
                  " addresses for keys and ", v.size(), " for values; the pool has ", pool.num_layers, " layers");
    buffer_len = shape.num_pages * shape.page_size;
    layers.resize(k.size());
    for (size_t i = 0; i < layers.size(); ++i) layers[i].view = make_view(pool.layout, shape, k[i], v[i]);
  }

  const Layer& at(int32_t layer) const {
    core::require(layer >= 0 && layer < config.num_layers, "layer ", layer, " is not of this pool; it has layers 0 to ",
                  config.num_layers - 1);
    return layers[static_cast<size_t>(layer)];
  }

  void check_token_major(const char* what) const {
    if (config.layout == KvPoolLayout::kTokenMajor) return;
    core::fail(ErrorCode::kUnsupported, what, " of a ",
               config.layout == KvPoolLayout::kHeadMajor ? "head-major" : "CPU-packed",
               " pool; token-major pools offer it, and view(layer) has every pool's own pages");
  }

  TensorView buffer(void* data, int32_t head_dim) const {
    return TensorView(data, config.dtype, {buffer_len, config.num_kv_heads, head_dim});
  }
};

size_t KvPool::k_bytes_per_layer(const KvPoolConfig& config) {
  return bytes_of(k_elements(shape_of(config)), config.dtype);
}

size_t KvPool::v_bytes_per_layer(const KvPoolConfig& config) {
  return bytes_of(v_elements(shape_of(config)), config.dtype);
}

KvPool::KvPool(const KvPoolConfig& config) {
  // A view over nothing checks the rest of the configuration before memory is asked for.
  KvCacheShape checked = shape_of(config);
  checked.num_pages = 0;
  make_view(config.layout, checked, nullptr, nullptr);
  const size_t layers = static_cast<size_t>(config.num_layers);
  const size_t k_bytes = k_bytes_per_layer(config);
  const size_t v_bytes = v_bytes_per_layer(config);
  std::vector<core::AlignedBuffer> memory;
  std::vector<void*> k(layers);
  std::vector<void*> v(layers);
  for (size_t i = 0; i < 2 * layers; ++i) {
    const size_t bytes = i % 2 == 0 ? k_bytes : v_bytes;
    memory.emplace_back(bytes);
    std::memset(memory.back().data(), 0, bytes);
    (i % 2 == 0 ? k : v)[i / 2] = memory.back().data();
  }
  state_ = std::make_unique<State>(config, k, v);
  state_->memory = std::move(memory);
}

KvPool::KvPool(const KvPoolConfig& config, std::span<void* const> k, std::span<void* const> v)
    : state_(std::make_unique<State>(config, k, v)) {}

KvPool::~KvPool() = default;
KvPool::KvPool(KvPool&&) noexcept = default;
KvPool& KvPool::operator=(KvPool&&) noexcept = default;

const KvPoolConfig& KvPool::config() const noexcept {
  return state_->config;
}

int32_t KvPool::num_slots() const noexcept {
  return state_->config.num_slots;
}

int64_t KvPool::buffer_len() const noexcept {
  return state_->buffer_len;
}

const KvCacheView& KvPool::view(int32_t layer) const {
  return state_->at(layer).view;
}

KvCacheView KvPool::view(int32_t layer, int32_t page_size) const {
  const KvCacheView& own = view(layer);
  if (page_size == own.page_size) return own;
  state_->check_token_major("pages of another size");
  core::require(page_size >= 1 && buffer_len() % page_size == 0, "page_size is ", page_size,
                "; it must divide the layer's ", buffer_len(), " slots");
  KvCacheShape shape = shape_of(state_->config);
  shape.num_pages = buffer_len() / page_size;
  shape.page_size = page_size;
  return make_nhd_view(shape, own.k, own.v);
}

TensorView KvPool::key_buffer(int32_t layer) const {
  const KvCacheView& own = view(layer);
  state_->check_token_major("key_buffer");
  return state_->buffer(own.k, own.head_dim_qk);
}

TensorView KvPool::value_buffer(int32_t layer) const {
  const KvCacheView& own = view(layer);
  state_->check_token_major("value_buffer");
  return state_->buffer(own.v, own.head_dim_v);
}

void KvPool::set_scales(int32_t layer, const Scale& k, const Scale& v) {
  state_->at(layer);
  check_scale("k_scale", k, state_->config.dtype);
  check_scale("v_scale", v, state_->config.dtype);
  Layer& changed = state_->layers[static_cast<size_t>(layer)];
  changed.k_scale = k;
  changed.v_scale = v;
}

const Scale& KvPool::k_scale(int32_t layer) const {
  return state_->at(layer).k_scale;
}

const Scale& KvPool::v_scale(int32_t layer) const {
  return state_->at(layer).v_scale;
}

CacheWriteArgs KvPool::write_args(int32_t layer, const ConstTensorView& k, const ConstTensorView& v,
                                  std::span<const int64_t> slots) const {
  const Layer& mine = state_->at(layer);
  CacheWriteArgs args;
  args.k = flatten("k", k, mine.view.num_kv_heads, mine.view.head_dim_qk, slots.size());
  args.v = flatten("v", v, mine.view.num_kv_heads, mine.view.head_dim_v, slots.size());
  args.slot_mapping = slots.data();
  args.num_slots = static_cast<int64_t>(slots.size());
  args.cache = mine.view;
  args.k_scale = mine.k_scale;
  args.v_scale = mine.v_scale;
  return args;
}

}  // namespace folio::inline v0
