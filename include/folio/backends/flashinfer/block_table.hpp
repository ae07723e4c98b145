#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>

#include "folio/backends/attention_metadata.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

/// The block-table family: attention over dense page tables with two scales, by the names that engines know from
/// TensorRT-LLM's kernels in FlashInfer (flashinfer/decode.py, prefill.py). Folio offers it on every device that
/// `prepare` has a kernel for, over any strides (NHD and HND), with sinks, windows, soft caps, ALiBi, several tokens a
/// decode and outputs quantised in the kernel's epilogue.
namespace folio::inline v0::backends {

/// An NVFP4 output: two values a byte, and a scale factor for every 16.
struct FP4Tensor {
  TensorView data;   ///< [tokens, num_qo_heads, head_dim / 2], kFloat4E2M1x2 or kUnset (an engine's uint8)
  TensorView scale;  ///< [>= round_up(rows, 128), round_up(num_qo_heads * head_dim / 16, 4)], packed; kFloat8E4M3 or
                     ///< kUnset; in the order of folio/types/nvfp4.hpp
  int64_t scale_start_index = 0;            ///< the row of `scale` that the first token of `data` is
  std::array<int64_t, 3> original_shape{};  ///< of the values: [tokens, num_qo_heads, head_dim]
};

/// What calls of the family plan and compute in: kernels by configuration, plans, scratch memory. One call at a time.
/// Calls with the lengths of the call before (a step's layers) use its plan; warm calls allocate nothing.
class FOLIO_API BlockTableWorkspace {
 public:
  /// On a GPU, `memory` may be device memory for the calls (workspace_size says how much they need); where it is empty,
  /// and on a CPU, where it must be, memory is had here and grows.
  explicit BlockTableWorkspace(const Context& context, Determinism determinism = Determinism::kRunToRun,
                               const std::string& force_kernel = {}, Workspace memory = {});
  BlockTableWorkspace(BlockTableWorkspace&&) noexcept;
  BlockTableWorkspace& operator=(BlockTableWorkspace&&) noexcept;
  ~BlockTableWorkspace();

  size_t workspace_size() const;       ///< bytes that the largest call so far needed
  int64_t num_plans() const noexcept;  ///< how often a call has planned; for tests and curious engineers

  struct State;
  State& state() const noexcept { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// What both calls take. B = seq_lens.size(). Lengths are host memory, the rest lies on the context's device.
struct BlockTableArgs {
  ConstTensorView query;              ///< [tokens, num_qo_heads, head_dim]; 16-bit, float32 or fp8 e4m3
  KvCacheView kv_cache;               ///< any strides; see FlashInferBackend::kv_cache_view
  BlockTableView block_tables;        ///< [>= B, columns]
  std::span<const int32_t> seq_lens;  ///< [B], with the new tokens
  int32_t max_seq_len = 0;            ///< an upper bound of seq_lens; 0 = computed
  float bmm1_scale = 0.0f;            ///< q_scale * k_scale * sm_scale: multiplies q . k; finite, not 0
  float bmm2_scale = 1.0f;            ///< v_scale (fp8 outputs: / o_scale): multiplies the result
  int32_t window_left = -1;           ///< keys left of the query that it sees; -1 = all
  const float* sinks = nullptr;       ///< [num_qo_heads], natural units
  float logits_soft_cap = 0.0f;
  const float* alibi_slopes = nullptr;      ///< [num_qo_heads]
  std::variant<TensorView, FP4Tensor> out;  ///< [tokens, num_qo_heads, head_dim]; fp8 saturates
  float o_sf_scale = 0.0f;                  ///< an FP4Tensor's global scale factor, positive; 0 for other outputs
  LseView lse;                              ///< [tokens, num_qo_heads]; with its base
  /// Scales apart from those factors, for arrays on the context's device and scales per head or request: they multiply
  /// stored values (out_scale divides fp8 outputs, and is an FP4Tensor's global scale factor where it is an array and
  /// o_sf_scale is 0). What is given here is left out of the factors; with a v_scale array bmm2_scale is 1.
  Scale q_scale;  ///< fp8 queries
  Scale k_scale;
  Scale v_scale;
  Scale out_scale;
};

/// Decodes of `q_len_per_req` tokens a request, the last of its tokens, causal among them; 0 = tokens / B.
/// Throws kInvalidArgument, also where the tokens do not divide ("TRTLLM decode requires uniform query lengths per
/// request. ..."), kUnsupported, before anything is written.
FOLIO_API void trtllm_batch_decode_with_kv_cache(BlockTableWorkspace& workspace, const BlockTableArgs& args,
                                                 int32_t q_len_per_req = 0, Stream stream = {});

/// Prefills: request i has the query tokens [cum_seq_lens_q[i], cum_seq_lens_q[i + 1]) (host memory, [B + 1]; counted
/// from its first entry, so that it may be part of a longer array), the last of its tokens; causal. `max_q_len`: an
/// upper bound; 0 = computed. Throws as above.
FOLIO_API void trtllm_batch_context_with_kv_cache(BlockTableWorkspace& workspace, const BlockTableArgs& args,
                                                  std::span<const int32_t> cum_seq_lens_q, int32_t max_q_len = 0,
                                                  Stream stream = {});

}  // namespace folio::inline v0::backends
