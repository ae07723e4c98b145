#include "replay/mapped_kv_pool.hpp"

#include <vector>

namespace folio::replay {

MappedKvPool::MappedKvPool(const Context& context, const StackConfig& config, KvFormat format, int32_t num_layers,
                           int32_t num_pages) {
  KvPoolConfig sizes;
  sizes.num_slots = num_pages * config.page_size;
  sizes.page_size = config.page_size;
  sizes.num_layers = num_layers;
  sizes.num_kv_heads = config.num_kv_heads;
  sizes.head_dim_qk = config.head_dim_qk;
  sizes.head_dim_v = config.head_dim_v;
  sizes.dtype = config.kv;
  if (config.layout == KvLayout::kStridedHnd) sizes.layout = KvPoolLayout::kHeadMajor;
  if (format == KvFormat::kCpuPacked) sizes.layout = KvPoolLayout::kCpuPacked;
  const size_t k_bytes = KvPool::k_bytes_per_layer(sizes);
  const size_t v_bytes = KvPool::v_bytes_per_layer(sizes);
  memory_ = MappedMemory::of_cache_on(context, static_cast<size_t>(num_layers) * (k_bytes + v_bytes));
  std::vector<void*> k, v;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    k.push_back(memory_.data() + static_cast<size_t>(layer) * (k_bytes + v_bytes));
    v.push_back(memory_.data() + static_cast<size_t>(layer) * (k_bytes + v_bytes) + k_bytes);
  }
  pool_.emplace(sizes, k, v);
  for (int32_t layer = 0; is_fp8(config.kv) && layer < num_layers; ++layer)
    pool_->set_scales(layer, cache_scale(config.kv), cache_scale(config.kv));
}

}  // namespace folio::replay
