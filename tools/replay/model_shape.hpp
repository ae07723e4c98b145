#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace folio::replay {

/// What attention sees of a model.
struct ModelShape {
  std::string_view name;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  int32_t window_left =
      -1;  ///< of the layers that have a window (keys to the left), in the model's own tokens; -1 = none
  int32_t full_every = 0;        ///< with a window: every full_every-th layer has none (0 = all layers have it)
  float logits_soft_cap = 0.0f;  ///< 0 = none
  std::string_view note;         ///< which model, and what the numbers leave out
  int32_t num_layers = 0;        ///< of the model that attend over such a cache
  bool latent = false;           ///< MLA as decode reads it: head_dim_qk = rank of the latent + rotary part, V inside K
  std::string_view source;       ///< where the numbers are public
};

/// The shapes known by name.
std::span<const ModelShape> model_shapes();

/// The shape called `name`. Throws folio::Error(kInvalidArgument) with the names that exist.
const ModelShape& find_model(std::string_view name);

}  // namespace folio::replay
