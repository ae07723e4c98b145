#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0 {

namespace detail {
struct PagedAttentionState;
}

/// One layer over one batch, as PagedAttention takes it. R = seq_lens.size(). On a GPU everything lies in its memory
/// except `seq_lens` and `cu_q`, which the host reads. Nothing is copied; all is borrowed, as by `run`.
struct PagedAttentionArgs {
  ConstTensorView q = {};  ///< [tokens, num_q_heads, head_dim_qk], the requests' tokens one after the other
  /// Of any format (make_nhd_view and its neighbours). The batch's own keys and values have been written
  /// (write_kv_cache).
  KvCacheView cache = {};
  PageTableView page_table = {};           ///< a row a request or more: dense_table or csr_table
  std::span<const int32_t> seq_lens = {};  ///< [R]: keys of each request, those of its tokens in q included
  /// [R + 1]: request r has the tokens [cu_q[r], cu_q[r + 1]) of q, as in BatchView; tokens from cu_q[R] on are
  /// padding. Empty: every request has one token (decode).
  std::span<const int32_t> cu_q = {};
  TensorView out = {};           ///< [tokens, num_q_heads, head_dim_v]; its dtype is the output's
  LseView lse = {};              ///< [tokens, num_q_heads]; null data = not wanted
  float sm_scale = 0.0f;         ///< multiplies q . k; 0 = 1 / sqrt(head_dim_qk)
  bool causal = true;            ///< a request's last token stands at its last key and sees the keys at or before it
  int32_t window_left = -1;      ///< a token also sees no key further back than this; -1 = unbounded
  int32_t window_right = -1;     ///< nor further ahead; for causal = false. -1 = unbounded
  float logits_soft_cap = 0.0f;  ///< c: logits become c * tanh(logits / c); 0 = off
  const float* alibi_slopes = nullptr;  ///< [num_q_heads]; null = off
  const float* sinks = nullptr;         ///< [num_q_heads], as AttentionArgs; null = off
  Scale k_scale = {};                   ///< real keys are the stored ones times this
  Scale v_scale = {};
  Scale q_scale = {};    ///< for fp8 q
  Scale out_scale = {};  ///< for fp8 out: stored = real / scale
  Determinism determinism = Determinism::kRunToRun;
};

/// Attention in one call, for decode, prefill and both in one batch: the configuration is read off the tensors,
/// `prepare` is called once for each, and the plan's memory and the workspace are kept here.
///
///     folio::PagedAttention attention(folio::Context::cpu());
///     attention({.q = q, .cache = cache, .page_table = table, .seq_lens = seq_lens, .out = out});
///
/// **What a call costs** beside `run`: comparing the lengths with those of the last plan of its configuration,
/// O(R), and `plan` where one differs. So all layers of a step share one plan, whatever their windows: each
/// configuration has its own. On a CPU the page ids are checked, O(pages); on a GPU they are trusted, as `run` does
/// (ContextOptions::validate_tables). A new configuration costs `prepare` and memory. A warm call allocates nothing.
/// `prepare`, `plan` and `run` of folio/attention.hpp are what remains for CUDA graphs, lengths on a device, ragged or
/// shared keys, custom masks and NVFP4 outputs.
///
/// **Memory.** The plan's grows with the batch. The workspace is workspace_size(op) of the configuration that needs
/// most. The 16 configurations that were used last are kept.
///
/// Not safe for simultaneous use by several threads; objects of one context are independent. On a GPU a call is
/// enqueued on the object's stream and returns; one object serves one stream, which outlives it. What it frees, when it
/// grows, forgets a configuration or ends, waits for the device.
class FOLIO_API PagedAttention {
 public:
  static constexpr int32_t kMaxConfigs = 16;

  /// Throws kInvalidArgument for a stream with a CPU's context.
  explicit PagedAttention(const Context& context, Stream stream = {});
  PagedAttention(PagedAttention&&) noexcept;
  PagedAttention& operator=(PagedAttention&&) noexcept;
  ~PagedAttention();

  /// Writes `out`, and `lse` if it is wanted. Everything is checked first: after an error nothing was written, and the
  /// object is as usable as before. Throws kInvalidArgument, kUnsupported (no kernel takes this; a stream that is being
  /// captured), kOutOfMemory.
  void operator()(const PagedAttentionArgs& args);

  /// The plan that the last call ran, valid until the next one: its op says which kernel, `summary` how the work was
  /// divided. Throws kInvalidArgument before the first.
  AttentionPlan plan() const;

 private:
  std::unique_ptr<detail::PagedAttentionState> state_;
};

}  // namespace folio::inline v0
