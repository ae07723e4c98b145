#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "attention/op_state.hpp"
#include "distributed/peer_memory.hpp"
#include "folio/distributed/dcp_attention.hpp"
#include "kernels/cuda/common/merge_states/gather_header.hpp"

namespace folio::inline v0::distributed {

/// What ranks tell each other of a step on the host before any of them sends anything.
struct RankRecord {
  uint64_t digest = 0;
  uint64_t failed = 0;  ///< 1: the rank throws
};

/// What a DcpAttention has in a GPU's memory besides its plans; captured graphs keep the addresses.
struct DcpDeviceMemory {
  std::shared_ptr<void> memory;
  int32_t max_requests = -1;
  int32_t* indptr = nullptr;  ///< [R + 1]: rows of the new tokens
  // With lengths on the device: those of DcpState, [R], and what ranks compare of the whole batch's, [world].
  int32_t* first_pos = nullptr;
  int32_t* cached_len = nullptr;
  int32_t* fresh_len = nullptr;
  kernels::cuda::GatherHeader* headers = nullptr;

  void reserve(const attention::GpuBackend& gpu, int32_t num_requests, int32_t world);
};

/// What a GPU reports: in page-locked memory.
struct DcpStatus {
  kernels::cuda::HeaderFault plan;  ///< of lengths on the device
  kernels::cuda::HeaderFault run;
};

/// A DcpAttention's peer memory, and what is known of it.
struct DcpPeers {
  bool known = false;  ///< `access` is what the ranks have found
  PeerAccess access;   ///< why_not is not empty once memory could not be had
  int32_t tokens = 0;  ///< that `memory` has room for
  std::unique_ptr<PeerMemory> memory;
};

/// What a DcpAttention owns.
struct DcpState {
  Context context;
  ProcessGroup* group;
  DcpConfig config;
  AttentionOp cached_op;
  AttentionOp fresh_op;
  PlanBuffer cached_buffer;
  PlanBuffer fresh_buffer;
  uint64_t config_digest = 0;
  // Of the batch that was planned, [R]; they grow to the largest.
  std::vector<int32_t> first_pos{};     ///< global position of the first new token
  std::vector<int32_t> cached_len{};    ///< this rank's tokens of what is read from the cache
  std::vector<int32_t> fresh_len{};     ///< new tokens read from k and v
  std::vector<int32_t> indptr{};        ///< [R + 1]: cu_q, kept for `run`
  std::vector<int32_t> no_tokens{};     ///< [R + 1]: zeros, the indptr where no new token is read
  std::vector<RankRecord> records{};    ///< [world]
  DcpDeviceMemory device{};             ///< on a GPU
  std::shared_ptr<DcpStatus> status{};  ///< on a GPU
  DcpPeers peers{};                     ///< likewise
  /// On a GPU with several ranks: where partial results of a started layer are exchanged.
  std::unique_ptr<attention::GpuSideStream> exchange{};
  bool started = false;  ///< a layer, which is not finished
  bool forked = false;   ///< and `exchange` has not been joined

  int32_t heads() const { return config.attention.num_q_heads; }
  int32_t all_heads() const { return heads() * group->size(); }
  /// Of the results.
  int32_t out_heads() const { return config.all_heads_out ? all_heads() : heads(); }
  /// Queries need no arranging: the heads of each KV head stand together as they come.
  bool queries_are_in_order() const {
    return group->size() == 1 || (config.replicated_queries && config.attention.num_kv_heads == 1);
  }
  /// Of what this rank's shard gives. With one rank it stays here.
  DType partial_dtype() const { return group->size() > 1 ? config.partial_dtype : DType::kFloat32; }
  bool gathers() const { return group->size() > 1 && !config.replicated_queries; }
  /// Null on a CPU.
  const attention::GpuBackend* gpu() const { return context.state().gpu.get(); }
};

/// A tensor without what stands behind its first tokens.
template <typename Tensor>
Tensor first_tokens(Tensor tensor, int64_t tokens) {
  tensor.shape[0] = tokens;
  return tensor;
}

/// FNV-1a over 32-bit values: tells apart what ranks should have in common.
class Digest {
 public:
  explicit Digest(uint64_t start = 0xcbf29ce484222325u) : value_(start) {}
  template <typename Value>
  Digest& add(Value value) {
    value_ = (value_ ^ static_cast<uint64_t>(static_cast<int64_t>(value))) * 0x100000001b3u;
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_;
};

/// What ranks must have in common of their configurations.
uint64_t digest_of(const DcpConfig& config);

/// What this rank sends in front of a layer's queries. Scales in a GPU's memory are left out: q_scales_of says where
/// they are.
kernels::cuda::GatherHeader header_of(const DcpState& state, const DcpPlan& plan, const DcpArgs& args);

/// A layer's q scales in memory, of whichever device; without data where there are none.
kernels::cuda::QScales q_scales_of(const DcpState& state, const DcpPlan& plan, const DcpArgs& args);

/// Throws kInvalidArgument where what rank `r` sent differs from what rank `own` sent. `when` begins the message.
void check_header(const kernels::cuda::GatherHeader& mine, const kernels::cuda::GatherHeader& theirs, int32_t r,
                  int32_t own, const char* when);

/// Throws for what a GPU has found since the last report, and forgets it.
void report(DcpState& state);

/// Throws kInvalidArgument if a layer was started and is not finished.
void check_finished(const DcpState& state);

/// Throws kInvalidArgument where the group cannot be captured: its own calls would break the capture.
void check_capture(const DcpState& state, bool capturing);

/// Makes peer memory for every plan within the bounds, if configuration and machine allow it. Collective. Throws
/// kUnsupported on every rank where peer memory is forced and cannot be had.
void connect_peers(DcpState& state);

/// Whether a step of so many tokens goes over peer memory; the same on all ranks. Collective unless capturing, where it
/// takes what there is: peer memory is made, and grows. `stream` has what was enqueued before. Throws as connect_peers.
bool plan_over_peers(DcpState& state, int32_t num_tokens, bool capturing, Stream stream);

/// What is said of a rank that throws, and of one that differs: "rank 1 of the group <undone>".
struct Agreement {
  const char* undone;
  const char* differs;
};

/// Collective, by all_gather_host. Throws `failure`, if there is one; kInvalidArgument where another rank has one or
/// has another digest. `records` has room for every rank.
void agree(ProcessGroup& group, std::vector<RankRecord>& records, uint64_t digest, const std::exception_ptr& failure,
           const Agreement& what);

/// The parts of a run's workspace, as offsets. One rule for the size and for the carving. W ranks, H heads of one, O
/// of the results.
struct RunLayout {
  size_t send = 0;         ///< header, slopes and queries of this rank: `piece` bytes
  size_t gathered = 0;     ///< of all ranks: [W] pieces
  size_t queries = 0;      ///< [T, W * H, D], the heads of each KV head together
  size_t slopes = 0;       ///< [W * H], likewise
  size_t partial = 0;      ///< over this rank's shard, of the partial dtype: [T, W * H, Dv]
  size_t partial_lse = 0;  ///< [T, W * H]
  size_t combined = 0;     ///< over all shards: [T, O, Dv]
  size_t combined_lse = 0;
  size_t fresh = 0;  ///< over the new tokens: [T, O, Dv]
  size_t fresh_lse = 0;
  size_t combine = 0;  ///< workspace of the combine
  size_t combine_bytes = 0;
  size_t attention = 0;  ///< workspace of either pass
  size_t attention_bytes = 0;
  size_t total = 0;
  size_t piece = 0;
  size_t slopes_in_piece = 0;  ///< offset
  size_t queries_in_piece = 0;
};
RunLayout run_layout(const DcpState& state, const DcpPlan& plan);
/// Of any plan within the bounds.
RunLayout largest_run_layout(const DcpState& state);

/// Throws kInvalidArgument unless the tensor is [rows or more, heads, dim] of the dtype, with memory.
void check_rows(const char* name, const ConstTensorView& tensor, DType dtype, int64_t rows, int64_t heads, int64_t dim);

}  // namespace folio::inline v0::distributed
