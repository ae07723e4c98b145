#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "folio/backends/attention_layer.hpp"
#include "folio/backends/dispatch.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/backends/output_quantization.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

struct FlashInferMetadata;

/// A quantisation of the output that a compiler pass would fuse into attention.
enum class QuantKey : int32_t {
  kFp8StaticTensorSym = 0,   ///< e4m3, one scale known beforehand
  kNvfp4 = 1,                ///< e2m1 with a factor for every 16 values
  kFp8DynamicTensorSym = 2,  ///< e4m3, a scale found from the values
  kFp8DynamicTokenSym = 3,   ///< e4m3, likewise for every token
};

/// One layer's attention as the model defines it. Sizes are those of one rank.
struct FlashInferLayerConfig {
  int32_t num_heads = 0;
  int32_t head_size = 0;
  float scale = 0.0f;  ///< multiplies q . k; finite and above 0
  int32_t num_kv_heads = 0;
  /// Ranks whose query heads each call is given, rank 0's first: decode_context_parallel_size under
  /// ParallelConfig::dcp_replicated_queries, otherwise 1. >= 1.
  int32_t dcp_query_ranks = 1;
  std::span<const float> alibi_slopes;    ///< [num_heads * dcp_query_ranks]; empty = none. Copied
  std::optional<int32_t> sliding_window;  ///< keys a query sees, its own included; >= 1
  std::string kv_cache_dtype = "auto";    ///< see kv_cache_dtype_from_name
  DType model_dtype = DType::kBFloat16;   ///< what "auto" means
  std::optional<float> logits_soft_cap;   ///< none or 0 = off
  AttentionType attn_type = AttentionType::kDecoder;
  std::optional<std::string> kv_sharing_target_layer_name;  ///< the earlier layer whose cache this one reads
  /// [num_heads * dcp_query_ranks], float32, float16 or bfloat16, on the host; data null = none. Copied as float32;
  /// process_weights_after_loading reads it again.
  ConstTensorView sinks;

  /// The next three are facts of the whole group: its builder refuses layers that say otherwise than its own options.
  BackendProfile profile = BackendProfile::kNative;
  std::optional<KernelDispatch> dispatch;  ///< what the vLLM profiles ask; none: block tables are not served
  bool disable_q_quantization = false;     ///< VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION
  bool use_irope = false;                  ///< kVllm2025_07: taken with a warning. Elsewhere no parameter: refused
  bool blocksparse_params = false;         ///< kVllm2025_07 took and ignored them: refused
  OnceLog log;                             ///< takes that warning: once for all layers that are given copies of one log
};

/// One layer's attention. Immutable but for its sinks; `forward` keeps no state, so that layers may share an
/// implementation.
class FOLIO_API FlashInferImpl {
 public:
  static constexpr bool can_return_lse_for_decode = true;

  /// Throws kInvalidArgument for sizes and lengths that contradict each other and for a dispatch of another profile,
  /// kUnsupported for attention types other than decoder self-attention.
  FlashInferImpl(const Context& context, const FlashInferLayerConfig& config);

  /// Replaces the sinks, on the host, after their weights have been loaded: as many as before, converted to float32.
  /// Only for layers that were constructed with sinks, because kernels have been chosen since. On a GPU their address
  /// there stays, so that captured graphs read the new ones; the call waits until they are there, and copies of this
  /// object share them. No run of theirs may be in flight: nothing orders the write behind it.
  void set_sinks(const ConstTensorView& sinks);
  /// Reads the sinks given to the constructor, or to set_sinks, again, as float32: their weights may have been loaded
  /// since. That memory must still be there.
  void process_weights_after_loading();

  /// Whether `forward` takes outputs quantised like that. vLLM: static fp8 and NVFP4, over fp8 caches where kernels
  /// that take block tables can serve these heads; July 2025: none. Native: static fp8, and NVFP4 where head_size is a
  /// multiple of 16, over any cache.
  bool fused_output_quant_supported(QuantKey key) const noexcept;
  /// Whether queries may come as fp8 e4m3. vLLM: where kernels that take block tables can serve these heads; native:
  /// over e4m3 caches, whatever type the builder plans for. Not where disable_q_quantization is set.
  bool supports_quant_query_input() const noexcept;
  /// Whether kernels that take block tables can serve these heads.
  bool support_trtllm_attn() const noexcept { return support_trtllm_attn_; }

  /// Writes the keys and values of `slot_mapping.size()` tokens into the cache, those with a negative slot nowhere: key
  /// and value [>= slots, num_kv_heads, head_size], kv_cache as in `forward`. Does nothing for a layer that shares
  /// another's cache. For profiles whose `forward` leaves the cache as it is, see
  /// FlashInferBackend::forward_includes_kv_cache_update. Throws kInvalidArgument before anything is written.
  void do_kv_cache_update(const AttentionLayerScales& layer, const ConstTensorView& key, const ConstTensorView& value,
                          const TensorView& kv_cache, std::span<const int64_t> slot_mapping, Stream stream = {}) const;

  /// Attention of one layer: writes the new keys and values into the cache (not where another layer's cache is shared,
  /// nor under kVllm2026_03), then attends. T = metadata->num_actual_tokens.
  /// - query [>= T, num_heads, head_size], of the metadata's q dtype (native: or e4m3 where
  /// supports_quant_query_input);
  ///   key and value [>= slots, num_kv_heads, head_size]; output [>= T, num_heads, head_size], of the metadata's output
  ///   dtype: any token and head strides. Rows from T on are padding: neither read nor written. The query has
  ///   dcp_query_ranks times the heads, and so has the output under ParallelConfig::dcp_all_heads_out.
  /// - output_quantization: output is fp8 e4m3 (stored = real / scale) or NVFP4 [>= T, num_heads, head_size / 2]
  ///   (kFloat4E2M1x2 or kUnset; `scale` is the global scale factor, `block_scale` as FP4Tensor::scale). It happens in
  ///   the kernel. The vLLM profiles take it for fp8 queries in batches that their block-table kernels serve.
  /// - Native, queries and outputs of other types than the builder planned for (FlashInferOptions::quantize_query and
  ///   output_dtype) are computed by block-table kernels, planned at the step's first such layer. These read shared
  ///   prefixes once a request, which FlashInferOptions::log is told, and are refused under decode context parallelism.
  /// - kv_cache is the logical tensor of FlashInferBackend with any strides; its dtype may be kUnset.
  /// - Without metadata (a profiling run) the whole output is set to zero and nothing else is looked at; under
  ///   kVllm2025_07, which refuses output_quantization here too, it is left as it is.
  /// Returns `output`, as long as it was given. Allocates nothing.
  /// Throws kInvalidArgument and kUnsupported before anything is written.
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
  int32_t dcp_query_ranks() const noexcept { return dcp_query_ranks_; }
  int32_t num_queries_per_kv() const noexcept { return num_heads_ / num_kv_heads_; }
  int32_t head_size() const noexcept { return head_size_; }
  float scale() const noexcept { return scale_; }
  int32_t window_left() const noexcept { return window_left_; }  ///< sliding_window - 1, or -1
  float logits_soft_cap() const noexcept { return logits_soft_cap_; }
  DType kv_cache_dtype() const noexcept { return kv_cache_dtype_; }
  BackendProfile profile() const noexcept { return profile_; }
  bool disable_q_quantization() const noexcept { return disable_q_quantization_; }
  std::span<const float> alibi_slopes() const noexcept { return alibi_slopes_; }
  std::span<const float> sinks() const noexcept { return sinks_; }
  const std::optional<std::string>& kv_sharing_target_layer_name() const noexcept {
    return kv_sharing_target_layer_name_;
  }

 private:
  struct Call;
  void check_output_quantization(const OutputQuantization& quantization, const FlashInferMetadata& metadata,
                                 const TensorView& output) const;
  void check_cache_scales(const AttentionLayerScales& layer) const;
  void check_paths(const Call& call) const;
  void write_cache(const AttentionLayerScales& layer, const ConstTensorView& key, const ConstTensorView& value,
                   const KvCacheView& cache, std::span<const int64_t> slot_mapping, Stream stream) const;
  BlockScaleArgs planned_block_scale(const Call& call) const;
  void run_planned(const Call& call, Stream stream) const;
  void run_block_tables(const Call& call, bool check_only, Stream stream) const;

  Context context_;
  int32_t num_heads_;
  int32_t head_size_;
  float scale_;
  int32_t num_kv_heads_;
  int32_t dcp_query_ranks_;
  std::vector<float> alibi_slopes_;
  int32_t window_left_;
  DType kv_cache_dtype_;
  float logits_soft_cap_;
  std::optional<std::string> kv_sharing_target_layer_name_;
  std::vector<float> sinks_;
  std::shared_ptr<float> gpu_alibi_slopes_;  ///< null on a CPU, like the next
  std::shared_ptr<float> gpu_sinks_;
  ConstTensorView sinks_source_;
  BackendProfile profile_;
  bool support_trtllm_attn_;
  bool disable_q_quantization_;
};

}  // namespace folio::inline v0::backends
