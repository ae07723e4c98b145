#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "folio/attention.hpp"
#include "folio/context.hpp"
#include "folio/distributed/lse_combine.hpp"
#include "folio/distributed/process_group.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

struct DcpState;

/// By what ranks bring each other queries and partial results in `run`. The results are the same up to rounding.
enum class DcpTransport : int32_t {
  kAuto =
      0,  ///< peer memory where it can be had, each rank has a GPU of its own and a layer's bytes are few; else kGroup
  kGroup = 1,  ///< the process group's operations
  kPeer = 2,   ///< peer memory: GPUs of one host store to each other's memory, and their kernels wait for flags
};

/// "auto", "group" and "peer". Throws kInvalidArgument for other names.
FOLIO_API DcpTransport dcp_transport_from_name(std::string_view name);
FOLIO_API std::string_view to_string(DcpTransport transport);

/// The most bytes of one layer that a rank sends by peer memory under DcpTransport::kAuto.
inline constexpr int64_t kMostAutoPeerBytes = int64_t{16} << 20;

/// What attention over a divided KV cache is prepared for. Equal on all ranks, except for the kernel and the workers.
struct DcpConfig {
  /// One rank's attention: its own q heads, the KV heads that all ranks of the group share, the page size and format of
  /// its cache. q head h of any rank reads KV head h / (num_q_heads / num_kv_heads). No custom masks, no kRopeLlama.
  AttentionConfig attention;
  int32_t interleave = 1;  ///< neighbouring tokens that lie on one rank (KvShard), whatever the page size
  DcpCombine combine = DcpCombine::kAllGatherReduceScatter;
  bool replicated_queries = false;  ///< every rank has the queries of all ranks' heads: none are gathered
  /// Every rank gets the results of all ranks' heads. Needs replicated_queries and, with several ranks,
  /// kAllGatherReduceScatter, whose sums then go to all.
  bool all_heads_out = false;
  /// kPeer is for GPUs of one host that reach each other's memory (peer access, in other processes CUDA IPC), 8 ranks
  /// at most; several ranks may share a GPU. Elsewhere it is refused on every rank. Both combines move the same then.
  DcpTransport transport = DcpTransport::kAuto;
  /// What partial results travel in; kUnset: float32. Or attention.out's dtype, where that is float16 or bfloat16: half
  /// the bytes, by one all-to-all whatever `combine` is. LSEs stay float32, and so does the merge. One more rounding to
  /// that dtype, of each rank's partial result; two with all_heads_out over the group. One rank rounds nothing.
  DType partial_dtype = DType::kUnset;
  std::string force_kernel;   ///< as PrepareOptions::force_kernel
  int32_t num_workers = 0;    ///< as PrepareOptions::num_workers
  int32_t max_kv_splits = 0;  ///< as PrepareOptions::max_kv_splits
  /// Of one step, over all ranks: max_kv_len bounds DcpBatch::seq_lens. Larger batches are refused. On a GPU steps may
  /// then be captured, and lengths may lie in its memory (DcpBatch::where). A captured `run` serves later plans of as
  /// many requests; padding requests have no queries. max_shared_levels is 0.
  std::optional<GraphBounds> bounds;
};

/// One step's batch, the same on all ranks. Borrowed until `plan` returns. R = num_requests, T = cu_q[R].
struct DcpBatch {
  int32_t num_requests = 0;
  const int32_t* cu_q = nullptr;      ///< [R + 1], non-decreasing, cu_q[0] == 0
  const int32_t* seq_lens = nullptr;  ///< [R], tokens of the request over all ranks, the new ones included
                                      ///< (cross attention: the encoder's)
  /// The first requests' new tokens are read from the cache, where they have been written: decodes, which then take one
  /// pass. The others' are read from DcpArgs::k and v, where they are not rounded to the cache's dtype, and of the
  /// cache only what is older. Under Determinism::kScheduleInvariant all requests read the cache.
  int32_t num_cached = 0;
  bool all_visible = false;  ///< this batch has neither mask nor window (SegmentMask::kAllVisible)
  /// Keys are an encoder's, all of them in the cache, and may be fewer than the queries: the last query stands at the
  /// last key. num_cached must be num_requests.
  bool cross_attention = false;
  /// kDevice: cu_q and seq_lens lie in the GPU's memory, and what they hold when the device comes to it is planned: in
  /// a graph's replay the lengths of that moment. Needs DcpConfig::bounds. They stay as they are until then.
  Where where = Where::kHost;
  /// kDevice: T, rows of the step, padding included; at least cu_q[R]. On the host 0, as cu_q says it.
  int32_t num_tokens = 0;
};

/// A step's plan on this rank. A small copyable handle, valid until the DcpAttention plans again; `run` on an older one
/// throws kStalePlan. Either pass's plan may be replaced by what a SealedPlan of its op has made of it.
struct DcpPlan {
  std::optional<AttentionPlan> cached;  ///< keys of this rank's shard; none where no request has any on any rank
  std::optional<AttentionPlan> fresh;   ///< new tokens and sinks; none where neither takes part
  int32_t num_requests = 0;
  int32_t num_tokens = 0;         ///< T; with lengths on the device, padding included
  bool reads_new_tokens = false;  ///< some request's new tokens are read from DcpArgs::k and v
  bool over_peer_memory = false;  ///< queries and partial results go over peer memory; the same on all ranks
  uint64_t digest = 0;            ///< of configuration and batch, but for lengths on the device
};

/// One layer's arguments on this rank. Tensors have T rows or more; those from T on are neither read nor written. With
/// lengths on the device, rows of `out` and `lse` from cu_q[R] to T get any values.
struct DcpArgs {
  ConstTensorView
      q;  ///< [T.., num_q_heads, head_dim_qk]; replicated: all ranks' heads, rank r's from r * num_q_heads on
  ConstTensorView k;    ///< [T.., num_kv_heads, head_dim_qk]: new tokens, of config.ragged_kv; looked at only
                        ///< if DcpPlan::reads_new_tokens
  ConstTensorView v;    ///< [T.., num_kv_heads, head_dim_v]
  KvCacheView cache;    ///< this rank's shard: local token j of a request at page j / page_size of its row
  PageTableView table;  ///< [>= R]
  Scale k_scale;        ///< of the cache
  Scale v_scale;
  Scale q_scale;    ///< fp8 queries: of any granularity (heads are KV heads), with equal values on all ranks
  TensorView out;   ///< [T.., num_q_heads, head_dim_v], all_heads_out: of all ranks' heads; must not overlap any input
  Scale out_scale;  ///< fp8 outputs, as merge_state's
  LseView lse;      ///< as many heads as `out`; null data = not wanted
  float sm_scale = 0.0f;                ///< as AttentionArgs; equal on all ranks
  float logits_soft_cap = 0.0f;         ///< likewise
  const float* alibi_slopes = nullptr;  ///< [num_q_heads] of this rank; replicated: of all ranks
  const float* sinks = nullptr;         ///< of the heads of `out`
};

/// Attention of this rank's heads over the KV of all ranks of a group (decode context parallelism): the queries of all
/// ranks are gathered and attend to this rank's shard, the ranks combine these partial results, and those of the new
/// tokens, which every rank has, are merged with them. One merge rule and one LSE base throughout, partial results in
/// float32 unless DcpConfig::partial_dtype says otherwise. Masks, windows and ALiBi see global positions, so that
/// results are those of the undivided cache, for several tokens a request too. A shard without keys contributes
/// nothing; a sink counts once.
///
/// One for each group of layers with one window. Owns the plans' memory, and allocates none once warm. Not safe for
/// simultaneous use by several threads; the group must outlive it.
///
/// On a GPU everything in DcpArgs and the workspace is device memory, and so are the group's buffers
/// (ThreadGroupOptions::context). `plan` and `run` take the same stream. `run` enqueues kernels and the group's
/// operations, allocates nothing and waits for nothing itself: where the group's operations are enqueued
/// (ProcessGroup::enqueues) or go over peer memory, it returns at once and may be captured. Sizes that must agree are
/// compared by `plan`, so that no rank waits for another size. Values that `run` compares are compared on the device.
class FOLIO_API DcpAttention {
 public:
  /// Chooses kernels. Collective with DcpConfig::bounds, if the group has more than one rank: the ranks compare their
  /// configurations, by ProcessGroup::all_gather_host, and all throw where one differs or throws. Otherwise not. Throws
  /// kInvalidArgument and kUnsupported, as `prepare` does, for what DcpConfig rules out and for a group over another
  /// device's memory. With bounds it makes the peer memory of any plan within them, and never more.
  DcpAttention(const Context& context, ProcessGroup& group, const DcpConfig& config);
  DcpAttention(DcpAttention&&) noexcept;
  DcpAttention& operator=(DcpAttention&&) noexcept;
  ~DcpAttention();

  /// Plans one step. O(R + work tiles). Throws kInvalidArgument with the request's number.
  ///
  /// On a CPU not collective. On a GPU collective, if the group has more than one rank: the ranks compare their batches
  /// and configurations, by ProcessGroup::all_gather_host, and all throw kInvalidArgument where one differs or throws,
  /// naming it. Lengths on the device are compared there. `plan` begins with `check`, which it throws for. Without
  /// bounds, peer memory is made here and grows to the largest batch: the ranks then wait for each other's streams.
  ///
  /// Under capture, which takes lengths on the device and a group that enqueues, nothing is compared on the host: the
  /// ranks capture the same batches, whose sizes an earlier `plan` of the same sizes has compared.
  DcpPlan plan(const DcpBatch& batch, Stream stream = {});

  /// Throws kInvalidArgument if the device has found, since the last report, that ranks ran other arguments or lengths
  /// (what `run` on a CPU throws), or a request that could not be planned (check_plans), and forgets it; kUnavailable
  /// if the group has failed (ProcessGroup::check), and, from then on, if a rank has not come to an exchange over peer
  /// memory within ProcessGroup::timeout: the error names it, and the group fails. Such a run's results are NaN. Waits
  /// for nothing: it knows what the device has done so far. For engines that replay graphs. On a CPU there is never
  /// anything to report but the group's failure.
  void check();

  /// Bytes of workspace (256-byte aligned) that a run of this plan needs. Contents never carry over.
  size_t workspace_size(const DcpPlan& plan) const;
  /// Bytes that any plan within DcpConfig::bounds needs: a graph's workspace. Throws kInvalidArgument without bounds.
  size_t workspace_size() const;

  /// One layer. Collective where the group has more than one rank and any request has keys in the cache (with lengths
  /// on the device: where there are requests). Arguments are checked before anything is sent or written. Throws
  /// kInvalidArgument; kStalePlan, kWorkspaceTooSmall; kUnavailable where the group fails.
  ///
  /// Where queries are gathered, ranks compare what they run: digest, sm_scale, logits_soft_cap and q_scale. On a CPU
  /// all ranks throw kInvalidArgument, naming the one that differs. On a GPU the device compares; `check` and the next
  /// `plan` throw. Each rank's results are then those of the queries of all ranks with its own arguments.
  void run(const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream = {});

  /// `run` in two steps, with equal results. On a GPU what is enqueued on `stream` between the two, and `start`'s own
  /// pass over new tokens, run beside the exchange of partial results, which waits on a stream of this object: give
  /// work that needs nothing of `out` and `lse`. `finish` makes its stream wait for them, and takes the stream of
  /// `start` unless the caller has ordered another behind it. Both belong to one capture, or to none. On a CPU, and
  /// where nothing is exchanged, `start` does it all. A group whose operations wait on the host waits in `start`.
  ///
  /// One layer at a time: from `start` to `finish`, `start`, `run` and `plan` throw kInvalidArgument, and workspace and
  /// arguments stay as they are. A `start` that throws has started nothing. Of several objects that exchange over peer
  /// memory, one rank starts one layer at a time.
  void start(const DcpPlan& plan, const DcpArgs& args, Workspace workspace, Stream stream = {});
  /// Throws kInvalidArgument if no layer was started.
  void finish(Stream stream = {});

  const DcpConfig& config() const noexcept;       ///< with the defaults (kUnset dtypes) resolved
  const AttentionOp& cached_op() const noexcept;  ///< over the shard: the heads of all ranks, once
  const AttentionOp& fresh_op() const noexcept;   ///< over the new tokens: this rank's heads
  const ProcessGroup& group() const noexcept;

 private:
  std::unique_ptr<DcpState> state_;
};

}  // namespace folio::inline v0::distributed
