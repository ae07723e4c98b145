#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "backends/token_pool/pool_test_util.hpp"
#include "device_home.hpp"

namespace folio::inline v0::backends::testing {

/// A fixture's step on a GPU.
class DeviceStep {
 public:
  DeviceStep(PoolFixture& fixture, const Context& context, Stream stream = {})
      : fixture_(fixture),
        config_(device_config()),
        pool_(device_pool()),
        batch_(device_batch()),
        backend_(context, config_),
        stream_(stream) {}

  TokenPoolBackend& backend() { return backend_; }
  ForwardBatch& batch() { return batch_; }
  template <typename T>
  std::span<const T> place(const std::vector<T>& values) {
    return home_.move_in(const_cast<std::vector<T>&>(values));
  }
  void init() { backend_.init_forward_metadata(batch_, stream_); }

  /// A layer's tensors on the GPU, the output without anything in it.
  struct Tensors {
    ConstTensorView q, k, v;
    TensorView out;
  };
  Tensors place(const RadixAttention& layer) {
    const auto moved = [this](ConstTensorView tensor, std::vector<std::byte>& memory) {
      tensor.data = home_.move_in(memory).data();
      return tensor;
    };
    fixture_.clear_output();
    TensorView out = fixture_.out;
    out.data = home_.move_in(fixture_.out_memory).data();
    const bool cross = layer.is_cross_attention;
    return {moved(fixture_.q, fixture_.q_memory),
            cross ? moved(fixture_.encoder_k, fixture_.encoder_k_memory) : moved(fixture_.k, fixture_.k_memory),
            cross ? moved(fixture_.encoder_v, fixture_.encoder_v_memory) : moved(fixture_.v, fixture_.v_memory), out};
  }

  void forward(const RadixAttention& layer, const Tensors& tensors) {
    layer.forward(backend_, tensors.q, tensors.k, tensors.v, batch_, tensors.out, true, stream_);
  }

  /// What is wrong with the output, and with the cache of a layer that writes decoder tokens.
  std::string wrong_forward(const RadixAttention& layer) {
    forward(layer, place(layer));
    return wrong_results(layer);
  }
  /// The same once the layer has run.
  std::string wrong_results(const RadixAttention& layer) {
    home_.finish();
    const auto* prefill = std::get_if<PrefillMetadata>(&backend_.forward_metadata());
    std::string wrong = fixture_.wrong_output(layer, prefill != nullptr && prefill->use_ragged);
    if (wrong.empty() && !layer.is_cross_attention) wrong = fixture_.wrong_cache(layer.layer_id);
    return wrong;
  }

 private:
  TokenPoolConfig device_config() {
    TokenPoolConfig config = fixture_.config();
    config.req_to_token.indices = home_.move_in(fixture_.table).data();
    return config;
  }
  KvPool device_pool() {
    const KvPoolConfig& config = fixture_.pool->config();
    std::vector<void*> k, v;
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      k.push_back(home_.move_in(fixture_.pool->view(layer).k, KvPool::k_bytes_per_layer(config)));
      v.push_back(home_.move_in(fixture_.pool->view(layer).v, KvPool::v_bytes_per_layer(config)));
    }
    KvPool pool(config, k, v);
    for (int32_t layer = 0; is_fp8(config.dtype) && layer < config.num_layers; ++layer) {
      pool.set_scales(layer, fixture_.pool->k_scale(layer), fixture_.pool->v_scale(layer));
    }
    return pool;
  }
  ForwardBatch device_batch() {
    ForwardBatch batch = fixture_.batch;
    batch.req_pool_indices = place(fixture_.rows);
    batch.seq_lens_cpu = fixture_.seq_lens;
    batch.seq_lens = place(fixture_.seq_lens);
    batch.out_cache_loc = place(fixture_.out_cache_loc);
    if (is_extend(batch.forward_mode)) {
      batch.extend_prefix_lens_cpu = fixture_.lengths.prefix;
      batch.extend_prefix_lens = place(fixture_.lengths.prefix);
      batch.extend_seq_lens_cpu = fixture_.lengths.fresh;
      batch.extend_seq_lens = place(fixture_.lengths.fresh);
    }
    if (fixture_.setup.encoder_decoder) {
      batch.encoder_lens_cpu = fixture_.lengths.encoder;
      batch.encoder_lens = place(fixture_.lengths.encoder);
      batch.encoder_out_cache_loc = place(fixture_.encoder_out_cache_loc);
    }
    batch.spec_info.tree_mask = place(fixture_.tree_mask);
    batch.spec_info.tree_mask_cpu = fixture_.tree_mask;
    batch.token_to_kv_pool = &pool_;
    return batch;
  }

  PoolFixture& fixture_;
  DeviceHome home_;
  TokenPoolConfig config_;
  KvPool pool_;
  ForwardBatch batch_;
  TokenPoolBackend backend_;
  Stream stream_;
};

}  // namespace folio::inline v0::backends::testing
