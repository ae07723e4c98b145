#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "folio/distributed/pcp_tokens.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

struct PcpState;

/// What travels so that queries on one rank meet older keys on another.
enum class PcpExchange : int32_t {
  kAutomatic =
      0,        ///< by the bytes of each step; under Determinism::kBatchInvariant kPassQ, as the batch may not decide
  kPassQ = 1,   ///< queries go to all ranks, which attend over their shards; partial results come back
  kPassKv = 2,  ///< older keys and values go to all ranks, which attend with their own queries
};

/// What attention over divided queries is prepared for. Equal on all ranks, except for the kernel and the workers.
struct PcpConfig {
  /// Every rank's attention: all heads. No custom masks, spans, request-causal, kv_start or kRopeLlama; not
  /// Determinism::kScheduleInvariant.
  AttentionConfig attention;
  int32_t interleave = 1;  ///< neighbouring tokens of the cache that lie on one rank (KvShard); divides the page size
  PcpExchange exchange = PcpExchange::kAutomatic;
  std::string force_kernel;  ///< as PrepareOptions::force_kernel
  int32_t num_workers = 0;   ///< as PrepareOptions::num_workers
  /// Of one step, over all ranks: max_tokens and max_q_len bound the new tokens, max_kv_len PcpBatch::seq_lens. Larger
  /// batches are refused. Older tokens are then reached by kPassQ, whatever the batch, and on a GPU a captured `run`
  /// serves later plans of as many requests and the same PcpBatch::max_tokens. Padding requests have no queries.
  /// max_shared_levels is 0; kPassKv, whose bytes are the batch's, is refused.
  std::optional<GraphBounds> bounds;
};

/// One step's undivided batch, the same on all ranks. Borrowed until `plan` returns. R = num_requests.
struct PcpBatch {
  int32_t num_requests = 0;
  const int32_t* cu_q = nullptr;      ///< [R + 1], non-decreasing, cu_q[0] == 0: new tokens, over all ranks
  const int32_t* seq_lens = nullptr;  ///< [R], tokens of the request over all ranks, the new ones included
  bool all_visible = false;           ///< this batch has neither mask nor window (SegmentMask::kAllVisible)
  /// With PcpConfig::bounds: rows that every rank's tensors have, padding included; at least max_pcp_tokens of the
  /// batch, and as large as the captured step's. 0: max_pcp_tokens. At most max_tokens / world + 2 * max_requests of
  /// the bounds.
  int32_t max_tokens = 0;
};

/// A step's plan on this rank. A small copyable handle, valid until the PcpAttention plans again; `run` on an older one
/// throws kStalePlan.
struct PcpPlan {
  std::optional<AttentionPlan> fresh;  ///< this rank's queries over all new tokens; none where it has no query
  std::optional<AttentionPlan> older;  ///< over older tokens; none where no request has any, or none in the window
  PcpExchange exchange = PcpExchange::kAutomatic;  ///< how older tokens are reached; kAutomatic where there are none
  int32_t num_requests = 0;
  int32_t num_tokens = 0;  ///< of this rank: rows of q, k, v and out (pcp_tokens)
  int32_t max_tokens = 0;  ///< the most of any rank, or PcpBatch::max_tokens
  /// What one rank sends to each other one for the older tokens, a layer. Pass-Q: max_tokens * H * (Dqk * bytes of q +
  /// 4 * (Dv + 4)): queries, then float32 outputs and LSEs. Pass-KV: the older tokens that the batch sees, on the rank
  /// that has most of them, in whole pages, * Hkv * (Dqk + Dv) * bytes of the cache's dtype. kAutomatic takes the
  /// smaller, at equal bytes kPassQ.
  int64_t pass_q_bytes = 0;
  int64_t pass_kv_bytes = 0;
  uint64_t digest = 0;  ///< of batch and configuration; `run` compares the ranks'
  uint64_t step = 0;    ///< which plan of its PcpAttention it is
};

/// One layer's arguments on this rank. Tensors have num_tokens rows or more, in the order of pcp_tokens; those behind
/// are neither read nor written. With PcpConfig::bounds they have PcpPlan::max_tokens rows or more; of `out` and `lse`
/// those from num_tokens to max_tokens get any values.
struct PcpArgs {
  ConstTensorView q;  ///< [num_tokens.., num_q_heads, head_dim_qk]
  ConstTensorView k;  ///< [num_tokens.., num_kv_heads, head_dim_qk]: of these tokens, of config.ragged_kv
  ConstTensorView v;  ///< [num_tokens.., num_kv_heads, head_dim_v]
  KvCacheView cache;  ///< this rank's shard of all tokens: local token j of a request at page j / page_size of its row
  PageTableView table;  ///< [>= R]
  Scale k_scale;        ///< of the cache; under kPassKv equal on all ranks
  Scale v_scale;
  Scale q_scale;          ///< fp8 queries: of any granularity (heads are KV heads), with equal values on all ranks
  TensorView out;         ///< [num_tokens.., num_q_heads, head_dim_v]; must not overlap any input
  Scale out_scale;        ///< fp8 outputs, as merge_state's
  LseView lse;            ///< null data = not wanted
  float sm_scale = 0.0f;  ///< as AttentionArgs; equal on all ranks
  float logits_soft_cap = 0.0f;         ///< likewise
  const float* alibi_slopes = nullptr;  ///< [num_q_heads], likewise
  const float* sinks = nullptr;         ///< [num_q_heads]
};

/// Attention whose queries are divided over the ranks of a group (prefill context parallelism), over a KV cache that is
/// divided like DcpAttention's. Every rank has all heads, and the queries, keys and values of its own new tokens
/// (pcp_tokens), whose share of causal work is even. The new tokens' keys and values are gathered and put in order of
/// their positions; older tokens are reached by PcpExchange. Partial results are float32 and merged by merge_states'
/// rule. Masks, windows and ALiBi see global positions. A sink counts once, with the new tokens.
///
/// New tokens are read from PcpArgs::k and v alone, where they are not rounded to the cache's dtype: whether they are
/// in the cache already does not matter. Of the cache, pages are read that older tokens in the window lie in.
///
/// One for each group of layers with one window. Owns the plans' memory, and allocates none once warm. Not safe for
/// simultaneous use by several threads; the group must outlive it.
///
/// On a GPU a batch's lengths are the host's; everything in PcpArgs and the workspace is device memory, and so are the
/// group's buffers (ThreadGroupOptions::context). `plan` and `run` take the same stream. `run` enqueues kernels and the
/// group's operations, and waits for nothing itself. With PcpConfig::bounds, over a group that enqueues
/// (ProcessGroup::enqueues), it may be captured; `plan`, which is made on the host, is not: before each replay a step
/// is planned on the same stream.
class FOLIO_API PcpAttention {
 public:
  /// Chooses kernels. Not collective. Throws kInvalidArgument and kUnsupported, as `prepare` does, for what PcpConfig
  /// rules out, and for kPassKv with a cache that has scales of its own (int8, kFp8DsMla), with bounds, or on more than
  /// 8 GPUs.
  PcpAttention(const Context& context, ProcessGroup& group, const PcpConfig& config);
  PcpAttention(PcpAttention&&) noexcept;
  PcpAttention& operator=(PcpAttention&&) noexcept;
  ~PcpAttention();

  /// Plans one step. On a CPU not collective. On a GPU collective, if the group has more than one rank: the ranks
  /// compare their batches and configurations, by ProcessGroup::all_gather_host, and all throw kInvalidArgument where
  /// one differs or throws. O(T + R * world + pages + work tiles), T the tokens of the batch. Throws kInvalidArgument
  /// with the request's number.
  PcpPlan plan(const PcpBatch& batch, Stream stream = {});

  /// Bytes of workspace (256-byte aligned) that a run of this plan needs. Contents never carry over. Throws kStalePlan.
  size_t workspace_size(const PcpPlan& plan) const;
  /// Bytes that any plan within PcpConfig::bounds needs: a graph's workspace. Throws kInvalidArgument without bounds.
  size_t workspace_size() const;

  /// One layer. Collective where the batch has any new token, for ranks without one too. Arguments are checked before
  /// anything is sent or written. Throws kInvalidArgument, also where the ranks run different batches or configurations
  /// or have another sm_scale, logits_soft_cap, slopes or scales (on a GPU `plan` compares, and arguments are not
  /// compared); kUnsupported for scales per request on a GPU; kStalePlan, kWorkspaceTooSmall; kUnavailable where the
  /// group fails.
  void run(const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream = {});

  const PcpConfig& config() const noexcept;         ///< with the defaults (kUnset dtypes) resolved
  const AttentionOp& fresh_op() const noexcept;     ///< over the new tokens
  const AttentionOp& shard_op() const noexcept;     ///< over this rank's shard: kPassQ
  const AttentionOp& gathered_op() const noexcept;  ///< over the gathered shards: kPassKv
  const ProcessGroup& group() const noexcept;

 private:
  std::unique_ptr<PcpState> state_;
};

}  // namespace folio::inline v0::distributed
