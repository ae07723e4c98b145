#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "folio/backends/attention_layer.hpp"
#include "folio/backends/output_quantization.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

struct FlashInferMetadata;

/// One layer's attention as the model defines it. Sizes are those of one rank.
struct FlashInferLayerConfig {
  int32_t num_heads = 0;
  int32_t head_size = 0;
  float scale = 0.0f;  ///< multiplies q . k; finite and above 0
  int32_t num_kv_heads = 0;
  std::span<const float> alibi_slopes;    ///< [num_heads]; empty = none. Copied
  std::optional<int32_t> sliding_window;  ///< keys a query sees, its own included; >= 1
  std::string kv_cache_dtype = "auto";    ///< see kv_cache_dtype_from_name
  DType model_dtype = DType::kBFloat16;   ///< what "auto" means
  std::optional<float> logits_soft_cap;   ///< none or 0 = off
  AttentionType attn_type = AttentionType::kDecoder;
  std::optional<std::string> kv_sharing_target_layer_name;  ///< the earlier layer whose cache this one reads
  ConstTensorView
      sinks;  ///< [num_heads], float32, float16 or bfloat16, on the host; data null = none. Copied as float32
};

/// One layer's attention. Immutable but for set_sinks; `forward` keeps no state, so that layers may share an
/// implementation.
class FOLIO_API FlashInferImpl {
 public:
  static constexpr bool can_return_lse_for_decode = true;

  /// Throws kInvalidArgument for sizes and lengths that contradict each other, kUnsupported for attention types other
  /// than decoder self-attention.
  FlashInferImpl(const Context& context, const FlashInferLayerConfig& config);

  /// Replaces the sinks after their weights have been loaded: [num_heads], converted to float32. Only for layers that
  /// were constructed with sinks, because kernels have been chosen since.
  void set_sinks(const ConstTensorView& sinks);

  /// Attention of one layer: writes the new keys and values into the cache (not where another layer's cache is shared),
  /// then attends. T = metadata->num_actual_tokens.
  /// - query [>= T, num_heads, head_size], of the metadata's q dtype; key and value [>= slots, num_kv_heads,
  /// head_size];
  ///   output [>= T, num_heads, head_size], of the model's dtype: any token and head strides. Rows from T on are
  ///   padding: neither read nor written.
  /// - kv_cache is the logical tensor of FlashInferBackend with any strides; its dtype may be kUnset.
  /// - Without metadata (a profiling run) the whole output is set to zero and nothing else is looked at.
  /// Returns `output`, as long as it was given. Allocates nothing.
  /// Throws kInvalidArgument, and kUnsupported for output quantisation, before anything is written.
  TensorView forward(const AttentionLayerScales& layer, const ConstTensorView& query, const ConstTensorView& key,
                     const ConstTensorView& value, const TensorView& kv_cache, const FlashInferMetadata* metadata,
                     const TensorView& output, const OutputQuantization& output_quantization = {},
                     Stream stream = {}) const;

  /// What q . k of stored values is multiplied with in all: scale x k scale, and x q scale where queries are fp8.
  /// For scales given as host values; throws kInvalidArgument for arrays.
  float bmm1_scale(const AttentionLayerScales& layer, DType query_dtype) const;
  /// What probabilities x stored V are multiplied with: the v scale.
  float bmm2_scale(const AttentionLayerScales& layer) const;

  PerLayerParameters per_layer_parameters() const noexcept;
  int32_t num_heads() const noexcept { return num_heads_; }
  int32_t num_kv_heads() const noexcept { return num_kv_heads_; }
  int32_t num_queries_per_kv() const noexcept { return num_heads_ / num_kv_heads_; }
  int32_t head_size() const noexcept { return head_size_; }
  float scale() const noexcept { return scale_; }
  int32_t window_left() const noexcept { return window_left_; }  ///< sliding_window - 1, or -1
  float logits_soft_cap() const noexcept { return logits_soft_cap_; }
  DType kv_cache_dtype() const noexcept { return kv_cache_dtype_; }
  std::span<const float> alibi_slopes() const noexcept { return alibi_slopes_; }
  std::span<const float> sinks() const noexcept { return sinks_; }
  const std::optional<std::string>& kv_sharing_target_layer_name() const noexcept {
    return kv_sharing_target_layer_name_;
  }

 private:
  Context context_;
  int32_t num_heads_;
  int32_t head_size_;
  float scale_;
  int32_t num_kv_heads_;
  std::vector<float> alibi_slopes_;
  int32_t window_left_;
  DType kv_cache_dtype_;
  float logits_soft_cap_;
  std::optional<std::string> kv_sharing_target_layer_name_;
  std::vector<float> sinks_;
};

}  // namespace folio::inline v0::backends
