#pragma once

#include <cstdint>

#include "folio/types/device.hpp"
#include "folio/types/export.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

struct ForwardBatch;
class TokenPoolBackend;

/// Which keys a layer's queries see.
enum class RadixAttentionType : int32_t {
  kDecoder = 0,               ///< those at or before them
  kDecoderBidirectional = 1,  ///< all keys of the request, also those of new tokens behind them
  kEncoderOnly = 2,           ///< all new tokens of the request; nothing is cached
};

/// One attention layer of a model.
struct RadixAttention {
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  float scaling = 0.0f;  ///< multiplies q . k; 0 = 1 / sqrt(head_dim)
  int32_t num_kv_heads = 0;
  int32_t layer_id = 0;              ///< the pool's layer
  float logit_cap = 0.0f;            ///< c: logits become c * tanh(logits / c); 0 = off
  int32_t v_head_dim = -1;           ///< -1 = head_dim
  int32_t sliding_window_size = -1;  ///< keys left of the query that it sees, itself not counted; -1 = all
  bool is_cross_attention = false;
  RadixAttentionType attn_type = RadixAttentionType::kDecoder;

  int32_t qk_head_dim() const noexcept { return head_dim; }
  int32_t value_head_dim() const noexcept { return v_head_dim < 0 ? head_dim : v_head_dim; }

  /// backend.forward with this layer. k and v are both given or both empty (read the cache only).
  FOLIO_API void forward(TokenPoolBackend& backend, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, const ForwardBatch& batch, const TensorView& out,
                         bool save_kv_cache = true, Stream stream = {}) const;
};

}  // namespace folio::inline v0::backends
