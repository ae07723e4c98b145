#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/op_state.hpp"
#include "distributed/dcp_state.hpp"
#include "folio/distributed/pcp_attention.hpp"

namespace folio::inline v0::distributed {

/// Tokens of a page of the gathered new tokens.
inline constexpr int32_t kFreshPage = 64;
/// Floats of a partial row behind its values: the LSE, padded so that rows stay aligned to 16 bytes.
inline constexpr int32_t kLsePadding = 4;

/// Rows of a batch whose requests are chunks: one op's plan over a part of the step. Memory grows to the largest.
struct ChunkRows {
  std::vector<int32_t> cu_q;      ///< [N + 1]
  std::vector<int32_t> q_first;   ///< [N], global position of the first query
  std::vector<int32_t> kv_first;  ///< [N], global position of the segments' first token
  std::vector<int32_t> request;   ///< [N], of the undivided batch
  void clear();
  void add(int32_t q_len, int32_t first_query, int32_t first_key, int32_t of_request);
  int32_t size() const { return static_cast<int32_t>(request.size()); }
};

/// Keys of one segment for every row of a ChunkRows, in pages.
struct ChunkKeys {
  std::vector<int32_t> kv_len;   ///< [N]
  std::vector<int32_t> indptr;   ///< [N + 1], pages
  std::vector<int32_t> indices;  ///< empty where `run` fills them in, from the table it is given
  void clear();
  void add(int32_t tokens, int32_t page_size);
  void add(int32_t tokens, int32_t page_size, int32_t first_page);
};

/// A step's arrays where runs read them: one image, on a GPU in its memory.
class StepImage {
 public:
  void clear() { bytes_.clear(); }
  /// Returns the array's offset.
  template <typename T>
  size_t add(const std::vector<T>& values) {
    const size_t begin = (bytes_.size() + alignof(int64_t) - 1) / alignof(int64_t) * alignof(int64_t);
    bytes_.resize(begin + values.size() * sizeof(T));
    std::copy_n(reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(T), bytes_.data() + begin);
    return begin;
  }
  /// So many bytes will do from here on: the memory does not move while images are no larger.
  void reserve(const attention::GpuBackend& gpu, size_t bytes);
  /// To be called once all arrays are there.
  void place(const attention::GpuBackend* gpu, Stream stream);
  template <typename T>
  const T* at(size_t offset) const {
    return reinterpret_cast<const T*>(memory_ + offset);
  }

 private:
  std::vector<std::byte> bytes_;
  std::shared_ptr<void> device_;  ///< grows to the largest
  size_t capacity_ = 0;
  const std::byte* memory_ = nullptr;
};

/// Where arrays stand in a StepImage.
struct StepArrays {
  size_t own_slots = 0;
  size_t fresh_slots = 0;
  size_t fresh_indptr = 0;
  size_t fresh_indices = 0;
  size_t table_row = 0;    ///< of the table that `run` is given: which rows are read,
  size_t table_first = 0;  ///< from which column on
  size_t table_indptr = 0;
  size_t older_len = 0;
  struct Table {
    size_t indptr = 0;
    size_t indices = 0;
  };
  std::vector<Table> gathered{};  ///< [W]
};

/// The most tokens of a rank in any batch within the bounds: of a request a rank has two chunks, rounded up.
int32_t max_rank_tokens(const GraphBounds& bounds, int32_t world);

/// What a PcpAttention owns.
struct PcpState {
  Context context;
  ProcessGroup* group;
  PcpConfig config;
  AttentionOp fresh_op;
  AttentionOp shard_op;
  AttentionOp gathered_op;
  PlanBuffer fresh_buffer;
  PlanBuffer shard_buffer;
  PlanBuffer gathered_buffer;
  uint64_t config_digest = 0;
  bool can_pass_kv = false;  ///< the cache's rows can be gathered as they are, and there are segments enough

  // Of the step that was planned.
  uint64_t step = 0;
  std::vector<int32_t> q_len{};  ///< [R]
  int32_t fresh_pages = 0;       ///< of the new tokens in order of their positions
  int64_t older_tokens = 0;      ///< kPassKv: tokens of one rank's piece
  ChunkRows own{};               ///< this rank's two chunks of every request
  ChunkRows all{};               ///< kPassQ: those of all ranks, each followed by the rows that pad it to max_tokens
  std::vector<int32_t> first_new{};     ///< for `own`: position of the request's first new token
  ChunkKeys fresh{};                    ///< for `own`
  ChunkKeys shard{};                    ///< kPassQ: for `all`, in this rank's cache
  std::vector<ChunkKeys> gathered{};    ///< kPassKv, [W]: for `own`, in each rank's piece
  std::vector<int64_t> fresh_slots{};   ///< [W * piece_rows]: where gathered rows of k and v go; -1 = nowhere
  std::vector<int64_t> own_slots{};     ///< 0, 1, 2 ...: this rank's rows of its piece
  std::vector<int32_t> older_first{};   ///< [R], local token of this rank's shard that reading begins with: a page's
  std::vector<int32_t> older_len{};     ///< [R], tokens of the shard from there on, in whole pages
  std::vector<int32_t> older_indptr{};  ///< [R + 1], their pages
  std::vector<int32_t> table_row{};     ///< which rows of the caches' table are read: kPassQ [all], kPassKv [R]
  std::vector<int32_t> table_first{};   ///< from which column on
  StepImage image{};
  StepArrays arrays{};
  std::vector<RankRecord> records{};     ///< [W]
  std::vector<KvSegment> segments{};     ///< [W], scratch of `plan`
  std::vector<SegmentArgs> arguments{};  ///< [W], scratch of `run`

  /// Null on a CPU.
  const attention::GpuBackend* gpu() const { return context.state().gpu.get(); }
  int32_t world() const { return group->size(); }
  const AttentionConfig& attention() const { return config.attention; }
  /// Bytes of a new token's keys and values.
  int64_t fresh_row() const;
  /// Rows of the piece that one rank sends of k and v: its tokens, padded, and rows that hold its PcpHeader.
  int64_t piece_rows(int32_t max_tokens) const;
  bool bounded() const { return config.bounds.has_value(); }
  int32_t max_rank_tokens() const { return distributed::max_rank_tokens(*config.bounds, world()); }
  /// Rows of a rank's tensors that runs of the plan touch.
  int32_t rows(const PcpPlan& plan) const { return bounded() ? plan.max_tokens : plan.num_tokens; }
  /// With bounds, of any step of so many requests and tokens a rank: pages of its new tokens, and entries that are read
  /// of the caches' table.
  int32_t max_fresh_pages(int32_t num_requests, int32_t max_tokens) const;
  int32_t max_table_pages(int32_t num_requests) const;
  /// The rows that meet older tokens.
  const ChunkRows& older_rows(PcpExchange exchange) const { return exchange == PcpExchange::kPassQ ? all : own; }
  /// [table_row's entries + 1], pages that are read of the caches' table.
  const std::vector<int32_t>& table_indptr(PcpExchange exchange) const {
    return exchange == PcpExchange::kPassQ ? shard.indptr : older_indptr;
  }
  /// Floats of a partial result's token: H rows with their LSEs.
  int64_t partial_row() const { return int64_t{attention().num_q_heads} * (attention().head_dim_v + kLsePadding); }
};

/// What ranks must have in common of their configurations.
uint64_t digest_of(const PcpConfig& config);

/// What every rank sends behind its new tokens: what it must have in common with the others.
struct PcpHeader {
  uint64_t digest = 0;  ///< PcpPlan::digest
  uint64_t slopes = 0;  ///< digests of the values
  uint64_t q_scale = 0;
  uint64_t k_scale = 0;  ///< kPassKv: each rank scales the keys of all
  uint64_t v_scale = 0;
  float sm_scale = 0.0f;  ///< with the default resolved
  float logits_soft_cap = 0.0f;
};

/// The parts of a run's workspace, as offsets. One rule for the size and for the carving. W ranks, Tp = max_tokens.
struct PcpLayout {
  size_t pieces = 0;        ///< [W * piece_rows, Hkv, Dqk + Dv]: new tokens of all ranks; this rank's part is sent
  size_t fresh = 0;         ///< the same in pages, in order of their positions: K's half, then V's
  size_t queries = 0;       ///< kPassQ: [W * Tp, H, Dqk]; this rank's part is sent
  size_t table = 0;         ///< pages of the older keys; kPassQ: of every row, kPassKv: of every request
  size_t sent = 0;          ///< kPassQ: [W * Tp, H, Dv + 4] over this rank's shard, for all ranks
  size_t older = 0;         ///< kPassKv: [W] pieces of keys, then values; this rank's part is sent
  size_t older_piece = 0;   ///< bytes
  size_t older_values = 0;  ///< offset of the values in a piece
  size_t states = 0;        ///< [S, Tp, H, Dv + 4]: partial results of this rank's queries; new tokens' come last
  int32_t num_states = 0;
  size_t own_q_scale = 0;  ///< scales per request, for every row of a plan and KV head: of the own queries
  size_t row_scales = 0;   ///< q's, k's and v's for the rows that meet older tokens: [3, N, Hkv]
  size_t attention = 0;    ///< workspace of either pass
  size_t attention_bytes = 0;
  size_t total = 0;
};
PcpLayout pcp_layout(const PcpState& state, const PcpPlan& plan);
/// Of any plan within the bounds.
PcpLayout pcp_layout(const PcpState& state);

}  // namespace folio::inline v0::distributed
