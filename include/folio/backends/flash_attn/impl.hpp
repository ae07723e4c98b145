#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "folio/backends/attention_layer.hpp"
#include "folio/backends/flash_attn/backend.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/backends/output_quantization.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

struct FlashAttentionMetadata;

/// One layer's attention as the model defines it. Sizes are those of one rank.
struct FlashAttentionLayerConfig {
  int32_t num_heads = 0;
  int32_t head_size = 0;
  float scale = 0.0f;  ///< multiplies q . k; finite and above 0
  int32_t num_kv_heads = 0;
  /// Ranks whose query heads each call is given, rank 0's first: decode_context_parallel_size under
  /// ParallelConfig::dcp_replicated_queries, for layers that read a cache; otherwise 1. >= 1.
  int32_t dcp_query_ranks = 1;
  std::span<const float> alibi_slopes;  ///< [num_heads * dcp_query_ranks]; empty = none. Copied
  /// Keys a query sees, its own included: >= 1. Encoders see as many to the right as to the left, in vLLM's profile
  /// only encoder-only layers.
  std::optional<int32_t> sliding_window;
  std::string kv_cache_dtype = "auto";   ///< see kv_cache_dtype_from_name
  DType model_dtype = DType::kBFloat16;  ///< what "auto" means
  std::optional<float> logits_soft_cap;  ///< none or 0 = off
  AttentionType attn_type = AttentionType::kDecoder;
  std::optional<std::string> kv_sharing_target_layer_name;  ///< the earlier layer whose cache this one reads
  ConstTensorView sinks;  ///< [num_heads * dcp_query_ranks], float32, float16 or bfloat16, on the host; data null =
                          ///< none. Copied as float32
  /// Whether `forward` writes the new keys and values itself. As in the original it does not: the engine calls
  /// do_kv_cache_update before it.
  bool update_kv_cache_in_forward = false;
};

/// The keys that a query sees to both sides of itself; -1 = all.
struct SlidingWindow {
  int32_t left = -1;
  int32_t right = -1;
  friend bool operator==(const SlidingWindow&, const SlidingWindow&) = default;
};

/// One layer's attention, of any type. Immutable; `forward` keeps no state, so that layers may share an implementation.
class FOLIO_API FlashAttentionImpl {
 public:
  static constexpr bool can_return_lse_for_decode = true;
  static constexpr bool supports_quant_query_input = true;

  /// Throws kInvalidArgument for sizes and lengths that contradict each other. The profile kVllm2026_03 refuses, with
  /// the original's words, fp8 caches (kUnsupported) and sinks (kInvalidArgument) where its kernels have none, and says
  /// to `log` which version it found.
  FlashAttentionImpl(const Context& context, const FlashAttentionLayerConfig& config,
                     const FlashAttentionFacts& facts = {}, const OnceLog& log = {});

  /// Writes the keys and values of `slot_mapping.size()` tokens into the cache, those with a negative slot nowhere.
  /// - key and value [>= slots, num_kv_heads, head_size]; rows from the number of slots on are padding and not read.
  /// - kv_cache is the logical tensor of FlashAttentionBackend with any strides; its dtype may be kUnset.
  /// Does nothing for encoders, which have no cache, for layers that share another layer's, and where key and value
  /// have no data (cross attention after the first call). Throws kInvalidArgument before anything is written.
  void do_kv_cache_update(const AttentionLayerScales& layer, const ConstTensorView& key, const ConstTensorView& value,
                          const TensorView& kv_cache, std::span<const int64_t> slot_mapping, Stream stream = {}) const;

  /// Attention of one layer. T = metadata->num_actual_tokens.
  /// - query [>= T, num_heads, head_size], of the metadata's q dtype; output [>= T, num_heads, head_size], of its
  ///   output dtype: any token and head strides. Rows from T on are padding: neither read nor written. The query has
  ///   dcp_query_ranks times the heads, and so has the output under ParallelConfig::dcp_all_heads_out.
  /// - key and value [>= T, num_kv_heads, head_size] are attended to by encoders; other types read the cache (and look
  ///   at them only under update_kv_cache_in_forward).
  /// - Without metadata (a profiling run) the whole output is set to zero and nothing else is looked at.
  /// - output_quantization is for builders with an fp8 or NVFP4 output_dtype, which need its scale (finite, positive;
  ///   on a GPU it may lie there); NVFP4 its block_scale too, whose row 0 is token 0's: fp8_e4m3 or kUnset, packed
  ///   [>= round_up(T, 128), round_up(num_heads * head_size / 16, 4)]. An NVFP4 output is [>= T, num_heads,
  ///   head_size / 2] bytes, kFloat4E2M1x2 or kUnset.
  /// Returns `output`, as long as it was given. Allocates nothing.
  /// Throws kInvalidArgument and kUnsupported before anything is written, kStalePlan for metadata whose memory has been
  /// built into again.
  TensorView forward(const AttentionLayerScales& layer, const ConstTensorView& query, const ConstTensorView& key,
                     const ConstTensorView& value, const TensorView& kv_cache, const FlashAttentionMetadata* metadata,
                     const TensorView& output, const OutputQuantization& output_quantization = {},
                     Stream stream = {}) const;

  PerLayerParameters per_layer_parameters() const noexcept;
  int32_t num_heads() const noexcept { return num_heads_; }
  int32_t num_kv_heads() const noexcept { return num_kv_heads_; }
  int32_t dcp_query_ranks() const noexcept { return dcp_query_ranks_; }
  int32_t num_queries_per_kv() const noexcept { return num_heads_ / num_kv_heads_; }
  int32_t head_size() const noexcept { return head_size_; }
  float scale() const noexcept { return scale_; }
  /// Decoders and cross attention: (w - 1, 0); encoders: (w - 1, w - 1), in vLLM's profile only kEncoderOnly ones;
  /// without a window (-1, -1).
  SlidingWindow sliding_window() const noexcept { return window_; }
  int32_t window_left() const noexcept { return window_.left; }
  float logits_soft_cap() const noexcept { return logits_soft_cap_; }
  DType kv_cache_dtype() const noexcept { return kv_cache_dtype_; }
  AttentionType attn_type() const noexcept { return attn_type_; }
  bool is_encoder() const noexcept {
    return attn_type_ == AttentionType::kEncoder || attn_type_ == AttentionType::kEncoderOnly;
  }
  std::span<const float> alibi_slopes() const noexcept { return alibi_slopes_; }
  std::span<const float> sinks() const noexcept { return sinks_; }
  const std::optional<std::string>& kv_sharing_target_layer_name() const noexcept {
    return kv_sharing_target_layer_name_;
  }
  BackendProfile profile() const noexcept { return profile_; }
  /// The version that the profile's original would run: 3 in the native profile. None: not detected.
  std::optional<int32_t> flash_attn_version() const noexcept { return version_; }

 private:
  KvCacheView cache_view(const TensorView& kv_cache) const;
  void check_scales(const AttentionLayerScales& layer) const;

  Context context_;
  int32_t num_heads_;
  int32_t head_size_;
  float scale_;
  int32_t num_kv_heads_;
  int32_t dcp_query_ranks_;
  std::vector<float> alibi_slopes_;
  SlidingWindow window_;
  std::string kv_cache_dtype_name_;
  DType kv_cache_dtype_;
  float logits_soft_cap_;
  AttentionType attn_type_;
  std::optional<std::string> kv_sharing_target_layer_name_;
  bool update_in_forward_;
  BackendProfile profile_;
  std::optional<int32_t> version_;
  std::vector<float> sinks_;
  std::shared_ptr<float> gpu_alibi_slopes_;  ///< null on a CPU, like the next
  std::shared_ptr<float> gpu_sinks_;
};

}  // namespace folio::inline v0::backends
