#include "replay/model_shape.hpp"

#include <fmt/format.h>

#include <array>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

// From the models' published configurations: config.json of the repository named last, on Hugging Face. Of it
// num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, sliding_window, layer_types,
// attn_logit_softcapping; of MLA kv_lora_rank and qk_rope_head_dim. A window of W tokens with the query itself is
// window_left = W - 1.
constexpr std::array kShapes = {
    ModelShape{"llama3-8b", 32, 8, 128, 128, -1, 0, 0.0f, "Llama 3 and 3.1 8B", 32, false, "meta-llama/Llama-3.1-8B"},
    ModelShape{"llama3-70b", 64, 8, 128, 128, -1, 0, 0.0f, "Llama 3 and 3.1 70B", 80, false,
               "meta-llama/Llama-3.1-70B"},
    ModelShape{"llama3.2-1b", 32, 8, 64, 64, -1, 0, 0.0f, "Llama 3.2 1B", 16, false, "meta-llama/Llama-3.2-1B"},
    ModelShape{"qwen2.5-7b", 28, 4, 128, 128, -1, 0, 0.0f, "Qwen2.5 7B", 28, false, "Qwen/Qwen2.5-7B"},
    ModelShape{"qwen3-30b-a3b", 32, 4, 128, 128, -1, 0, 0.0f, "Qwen3 30B-A3B", 48, false, "Qwen/Qwen3-30B-A3B"},
    ModelShape{"qwen3.5-27b", 24, 4, 256, 256, -1, 0, 0.0f, "Qwen3.5 27B: the full-attention layers, one in four", 16,
               false, "Qwen/Qwen3.5-27B"},
    ModelShape{"qwen3.5-35b-a3b", 16, 2, 256, 256, -1, 0, 0.0f,
               "Qwen3.5 35B-A3B: the full-attention layers, one in four", 10, false, "Qwen/Qwen3.5-35B-A3B"},
    ModelShape{"qwen3.5-397b-a17b", 32, 2, 256, 256, -1, 0, 0.0f,
               "Qwen3.5 397B-A17B: the full-attention layers, one in four", 15, false, "Qwen/Qwen3.5-397B-A17B"},
    ModelShape{"mistral-7b-v0.1", 32, 8, 128, 128, 4095, 0, 0.0f, "Mistral 7B v0.1: window 4096 in every layer", 32,
               false, "mistralai/Mistral-7B-v0.1"},
    ModelShape{"gemma2-9b", 16, 8, 256, 256, 4095, 2, 50.0f,
               "Gemma 2 9B: window 4096 in every other layer, logits capped at 50", 42, false, "google/gemma-2-9b"},
    ModelShape{"gemma3-12b", 16, 8, 256, 256, 1023, 6, 0.0f, "Gemma 3 12B: window 1024 in five layers of six", 48,
               false, "google/gemma-3-12b-it"},
    ModelShape{"gemma4-26b-a4b-window", 16, 8, 256, 256, 1023, 0, 0.0f,
               "Gemma 4 26B-A4B: the layers with window 1024, five of six", 25, false, "google/gemma-4-26B-A4B-it"},
    ModelShape{"gemma4-26b-a4b-global", 16, 2, 512, 512, -1, 0, 0.0f,
               "Gemma 4 26B-A4B: the layers without, which have other heads", 5, false, "google/gemma-4-26B-A4B-it"},
    ModelShape{"gemma4-31b-window", 32, 16, 256, 256, 1023, 0, 0.0f,
               "Gemma 4 31B: the layers with window 1024, five of six", 50, false, "google/gemma-4-31B-it"},
    ModelShape{"gemma4-31b-global", 32, 4, 512, 512, -1, 0, 0.0f,
               "Gemma 4 31B: the layers without, which have other heads", 10, false, "google/gemma-4-31B-it"},
    ModelShape{"gpt-oss-20b", 64, 8, 64, 64, 127, 2, 0.0f,
               "gpt-oss 20B: window 128 in every other layer; without its sinks", 24, false, "openai/gpt-oss-20b"},
    ModelShape{"gpt-oss-120b", 64, 8, 64, 64, 127, 2, 0.0f,
               "gpt-oss 120B: window 128 in every other layer; without its sinks", 36, false, "openai/gpt-oss-120b"},
    ModelShape{"glm-4.5", 96, 8, 128, 128, -1, 0, 0.0f, "GLM-4.5, 4.6 and 4.7", 92, false, "zai-org/GLM-4.5"},
    ModelShape{"glm-5-decode", 64, 1, 576, 512, -1, 0, 0.0f,
               "GLM-5 decode: MLA, latent 512 and 64 rotary; all keys, not the indexer's choice", 78, true,
               "zai-org/GLM-5"},
    ModelShape{"deepseek-v3-prefill", 128, 128, 192, 128, -1, 0, 0.0f,
               "DeepSeek-V3, keys and values expanded: 192 / 128", 61, false, "deepseek-ai/DeepSeek-V3"},
    ModelShape{"deepseek-v3-decode", 128, 1, 576, 512, -1, 0, 0.0f, "DeepSeek-V3 decode: MLA, latent 512 and 64 rotary",
               61, true, "deepseek-ai/DeepSeek-V3"},
    ModelShape{"kimi-k2-decode", 64, 1, 576, 512, -1, 0, 0.0f, "Kimi K2 and K2.5 decode: MLA, latent 512 and 64 rotary",
               61, true, "moonshotai/Kimi-K2-Instruct"},
    ModelShape{"tiny", 4, 2, 64, 64, -1, 0, 0.0f, "no model: for quick tries", 2, false, ""},
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
