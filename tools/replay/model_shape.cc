#include "replay/model_shape.hpp"

#include <fmt/format.h>

#include <array>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

// From the models' published configurations (config.json): num_attention_heads, num_key_value_heads, head_dim,
// sliding_window, attn_logit_softcapping. A window of W tokens with the query itself is window_left = W - 1.
constexpr std::array kShapes = {
    ModelShape{"llama3-8b", 32, 8, 128, 128, -1, 0, 0.0f, "Llama 3 and 3.1 8B"},
    ModelShape{"llama3-70b", 64, 8, 128, 128, -1, 0, 0.0f, "Llama 3 and 3.1 70B"},
    ModelShape{"llama3.2-1b", 32, 8, 64, 64, -1, 0, 0.0f, "Llama 3.2 1B"},
    ModelShape{"qwen2.5-7b", 28, 4, 128, 128, -1, 0, 0.0f, "Qwen2.5 7B"},
    ModelShape{"qwen3-30b-a3b", 32, 4, 128, 128, -1, 0, 0.0f, "Qwen3 30B-A3B"},
    ModelShape{"mistral-7b-v0.1", 32, 8, 128, 128, 4095, 0, 0.0f, "Mistral 7B v0.1: window 4096 in every layer"},
    ModelShape{"gemma2-9b", 16, 8, 256, 256, 4095, 2, 50.0f,
               "Gemma 2 9B: window 4096 in every other layer, logits capped at 50"},
    ModelShape{"gemma3-12b", 16, 8, 256, 256, 1023, 6, 0.0f, "Gemma 3 12B: window 1024 in five layers of six"},
    ModelShape{"deepseek-v3-prefill", 128, 128, 192, 128, -1, 0, 0.0f,
               "DeepSeek-V3, keys and values expanded: 192 / 128"},
    ModelShape{"tiny", 4, 2, 64, 64, -1, 0, 0.0f, "no model: for quick tries"},
};

}  // namespace

std::span<const ModelShape> model_shapes() {
  return kShapes;
}

const ModelShape& find_model(std::string_view name) {
  std::string names;
  for (const ModelShape& shape : kShapes) {
    if (shape.name == name) return shape;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", shape.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("model is '{}'; known are {} (or give --num-q-heads, --num-kv-heads, "
                          "--head-dim)",
                          name, names));
}

}  // namespace folio::replay
