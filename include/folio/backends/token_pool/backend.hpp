#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>

#include "folio/backends/token_pool/forward_batch.hpp"
#include "folio/backends/token_pool/layer.hpp"
#include "folio/backends/token_pool/metadata.hpp"
#include "folio/context.hpp"
#include "folio/distributed/dcp_attention.hpp"
#include "folio/types/attention.hpp"

namespace folio::inline v0::backends {

/// How extends read the keys of their new tokens.
enum class ExtendPath : int32_t {
  kAuto = 0,    ///< whichever costs less for the batch; kPaged from Determinism::kBatchInvariant on
  kRagged = 1,  ///< from k and v, merged with the cached prefix
  kPaged = 2,   ///< from the cache, in which they have been written
};

/// Scratch memory of attention, for any number of backends whose forwards do not overlap. Grows as their kernels need
/// it: when a backend is made, or meets a mode for the first time.
class FOLIO_API TokenPoolWorkspace {
 public:
  explicit TokenPoolWorkspace(const Context& context);
  ~TokenPoolWorkspace();
  TokenPoolWorkspace(const TokenPoolWorkspace&) = delete;
  TokenPoolWorkspace& operator=(const TokenPoolWorkspace&) = delete;
  size_t bytes() const noexcept;  ///< what it has now

  struct State;
  State& state() const noexcept { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// All that the backend is told about the model and its pools.
struct TokenPoolConfig {
  int32_t num_heads = 0;     ///< query heads of this device
  int32_t num_kv_heads = 0;  ///< KV heads of this device
  int32_t head_dim = 0;      ///< of queries and keys
  int32_t v_head_dim = -1;   ///< of values; -1 = head_dim
  DType kv_cache_dtype = DType::kFloat16;
  DType q_dtype = DType::kFloat16;  ///< of q, k, v and out: float16, bfloat16 or float32
  KvFormat kv_format = KvFormat::kStrided;
  int32_t page_size =
      1;  ///< tokens of a page that the allocator keeps together; KvPool::view(layer, page_size) is read
  int32_t max_context_len = 0;  ///< tokens that a request can have
  /// The request table: dense, a slot per position, as ReqToTokenPool::table; on the context's device. Borrowed.
  PageTableView req_to_token;
  int32_t max_req_pool_size = 0;  ///< most requests (draft rows) of a batch: sizes kv_indptr and kv_last_page_len
  std::optional<int32_t> sliding_window_size;  ///< keys left of the query, itself not counted, of layers with a window
  /// With sliding_window_size: the same table in slots of a pool that only layers with the window use, as
  /// WindowTokenAllocator::to_window gives them. Rows may hold anything where no query's window reaches; for
  /// Determinism::kScheduleInvariant (on a CPU) any pages of that pool, such as to_window's: named, not read. Empty:
  /// one pool has all layers.
  PageTableView window_req_to_token;
  bool is_encoder_decoder = false;  ///< there are cross-attention layers; not with a window
  bool skip_prefill = false;        ///< decodes only
  /// Buffers that several backends share (multi-step drafts), on the context's device: at least max_req_pool_size + 1
  /// and max_req_pool_size entries. kv_last_page_len_buf must hold ones where page_size is 1, and is then only read.
  /// Empty: the backend's own. One wrapper only.
  std::span<int32_t> kv_indptr_buf;
  std::span<int32_t> kv_last_page_len_buf;
  std::shared_ptr<TokenPoolWorkspace> workspace;  ///< shared with other backends; null: a private one
  bool logit_cap = false;                         ///< some layers have one
  ExtendPath extend_path = ExtendPath::kAuto;
  Determinism determinism = Determinism::kRunToRun;
  std::optional<bool> force_tensor_core;  ///< what should_use_tensor_core is told

  /// The ranks that divide every request's keys by tokens, token p on rank
  /// (p / cp_kv_cache_interleave_size) % size; borrowed, for as long as there is a backend. They have the same KV heads
  /// and serve the same batches with the same calls. Pools, request tables and slots are then a rank's own; lengths are
  /// the whole sequences'. See docs/token_pool.md, "Over ranks". Null, or one rank: not divided.
  distributed::ProcessGroup* dcp_group = nullptr;
  int32_t cp_kv_cache_interleave_size = 1;  ///< neighbouring tokens that stay on one rank, whatever the page size
  std::string dcp_comm_backend = "ag_rs";   ///< how ranks combine their results: "ag_rs" or "a2a"
  distributed::DcpTransport dcp_transport = distributed::DcpTransport::kAuto;  ///< as DcpConfig::transport
  bool dcp_replicated_queries = false;  ///< q has the heads of all ranks, rank 0's first: none are gathered
  /// Outputs have the heads of all ranks on every rank. Needs dcp_replicated_queries and "ag_rs".
  bool dcp_all_heads_out = false;
  DType dcp_partial_dtype = DType::kUnset;  ///< as DcpConfig::partial_dtype: float32, or q_dtype where that has 16 bits

  int32_t value_head_dim() const noexcept { return v_head_dim < 0 ? head_dim : v_head_dim; }
};

/// What capture and replay are given besides lengths.
struct GraphBatchExtras {
  std::span<const int32_t> encoder_lens;      ///< [bs], of encoder-decoder models
  std::span<const int32_t> encoder_lens_cpu;  ///< (host)
  SpecInfo spec_info;
  /// The pools that forwards will read, where the caller knows them: slots are then held against their sizes. Capturing
  /// an encoder-decoder with pages over a pool that is not token-major needs token_to_kv_pool.
  const KvPool* token_to_kv_pool = nullptr;
  const KvPool* window_token_to_kv_pool = nullptr;
};

/// pymllm's and SGLang's FlashInfer attention backend: a step's metadata is made once from lengths and the request
/// table, and used by every layer's forward.
///
///     TokenPoolBackend backend(context, config);
///     backend.init_forward_metadata(batch);                             // once per step
///     backend.forward(q, k, v, layer, batch, out);                      // once per layer
///
/// New keys and values are stored in the layer's slots (out_cache_loc) before attention reads. Rows of the request
/// table must name the new tokens' slots before init_forward_metadata. With a sliding window there are two groups of
/// layers (WrapperDispatch), both exact: with soft caps, prefixes and extends of one token, whichever path is taken.
///
/// Over ranks (TokenPoolConfig::dcp_group) every forward is collective, on a GPU metadata too, and so is capturing.
///
/// On a GPU, lists are built and attention runs on `stream`; eager plans and trees' come from the (host) lengths, those
/// of captured decodes and chains from the device's, so that nothing waits. What the host knows is checked there before
/// anything is enqueued: lengths, rows' ends, pages. The device checks the rest: rows, slots, its own lengths. A
/// request that it cannot serve reads nothing of another's: it has no keys, or keys of the dummy page where the plan
/// was made on the host; and check_plans, or the next metadata, throws kInvalidArgument naming it, once. Within
/// captured graphs only forwards may run: capture's and replay's metadata are enqueued before them. Not thread-safe; a
/// step's forwards run one after the other.
class FOLIO_API TokenPoolBackend {
 public:
  /// Chooses kernels. Throws kInvalidArgument for contradictions, naming the field; kUnsupported for what no kernel
  /// takes.
  TokenPoolBackend(const Context& context, const TokenPoolConfig& config);
  ~TokenPoolBackend();
  TokenPoolBackend(TokenPoolBackend&&) noexcept;
  TokenPoolBackend& operator=(TokenPoolBackend&&) noexcept;

  /// Builds the step's lists and plans. O(R + slots of its requests); allocates nothing once warm. Throws
  /// kInvalidArgument for a batch that contradicts itself or the configuration, kUnsupported; there is then no
  /// metadata.
  void init_forward_metadata(const ForwardBatch& batch, Stream stream = {});

  /// A layer's attention over the present step. q is [tokens, num_heads, head_dim] or [tokens, num_heads * head_dim], k
  /// and v likewise with KV heads, out with v_head_dim; q and out have all ranks' heads where the configuration says
  /// so. k and v without data: read the cache only (a layer that shares another's). save_kv_cache false: k and v are in
  /// the cache already, or belong to an encoder-only layer. Everything is checked before anything is written. Allocates
  /// nothing once warm.
  void forward_extend(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out,
                      bool save_kv_cache = true, Stream stream = {});
  void forward_decode(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                      const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out,
                      bool save_kv_cache = true, Stream stream = {});
  /// forward_decode for decodes, zeros for idle batches, forward_extend otherwise.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out, bool save_kv_cache = true,
               Stream stream = {});

  /// Throws what kernels of earlier steps have reported, as far as they have run: kInvalidArgument naming the request,
  /// once. The next metadata throw it too. O(captured shapes); waits for nothing. On a CPU only that the ranks' group
  /// has failed.
  void check_plans();

  /// None before the first step, and after one that was refused.
  const std::variant<std::monostate, DecodeMetadata, PrefillMetadata>& forward_metadata() const noexcept;

  /// The length that padding requests of captured batches get: 1. Lengths of 0 are legal too (out = 0).
  int32_t get_cuda_graph_seq_len_fill_value() const noexcept { return 1; }

  /// Memory for captured batches of up to max_bs requests and max_num_tokens queries together. Each wrapper's lists lie
  /// in kv_indices_buf (one wrapper only) or in max_num_tokens * max_context_len entries of its own, an entry being a
  /// slot or a page. Forgets earlier captures.
  void init_cuda_graph_state(int32_t max_bs, int32_t max_num_tokens, std::span<int32_t> kv_indices_buf = {});

  /// Metadata for capturing batches of bs requests: decodes (num_tokens == bs, or a row for each of spec_info's), or
  /// target-verify (num_tokens == bs * draft_token_num). Fixes their plans' shape and memory; forwards that follow are
  /// those to capture. On a CPU they just run. Throws kInvalidArgument for other modes, besides what
  /// init_forward_metadata throws. On a GPU the arrays lie there, and plans are made there from what they hold, those
  /// of trees from seq_lens_cpu; captures may leave it out. With pages, self-attention of an encoder-decoder is
  /// captured reading slots (KvWrapper::page_size), because encoders may end inside a page.
  void init_forward_metadata_capture_cuda_graph(int32_t bs, int32_t num_tokens,
                                                std::span<const int32_t> req_pool_indices,
                                                std::span<const int32_t> seq_lens, ForwardMode forward_mode,
                                                const GraphBatchExtras& extras = {},
                                                std::span<const int32_t> seq_lens_cpu = {}, Stream stream = {});

  /// Metadata for replaying a captured batch: the same shape, other lengths and slots; padding requests have length 1
  /// (or 0) and a row of their own, best row 0. Call it before the graph is launched; on a CPU, forwards follow. Throws
  /// kInvalidArgument for a batch that was not captured, lengths beyond max_context_len, and a seq_lens_sum that is not
  /// the sum with padding. On a GPU seq_lens_cpu, and with it encoder_lens_cpu and kv_indptr_cpu, may be left empty:
  /// the device then checks what the host cannot (check_plans). Trees need it.
  void init_forward_metadata_replay_cuda_graph(int32_t bs, std::span<const int32_t> req_pool_indices,
                                               std::span<const int32_t> seq_lens, int64_t seq_lens_sum,
                                               ForwardMode forward_mode, std::span<const int32_t> seq_lens_cpu,
                                               const GraphBatchExtras& extras = {}, Stream stream = {});

  const TokenPoolConfig& config() const noexcept;
  WrapperDispatch dispatch_reason() const noexcept;
  int32_t num_wrappers() const noexcept;  ///< 1 or 2
  /// Which wrapper serves the layer. Throws kInvalidArgument for a layer that the configuration has no wrapper for: its
  /// window is another one, or it is cross attention of a decoder-only model.
  int32_t wrapper_index(const RadixAttention& layer) const;
  bool decode_use_tensor_cores() const noexcept;  ///< should_use_tensor_core of the configuration
  std::string kernel_name() const;                ///< which kernel decodes
  const std::shared_ptr<TokenPoolWorkspace>& workspace() const noexcept;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace folio::inline v0::backends
