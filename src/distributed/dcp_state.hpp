#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/op_state.hpp"
#include "folio/distributed/dcp_attention.hpp"

namespace folio::inline v0::distributed {

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
  std::vector<int32_t> first_pos;   ///< global position of the first new token
  std::vector<int32_t> cached_len;  ///< this rank's tokens of what is read from the cache
  std::vector<int32_t> fresh_len;   ///< new tokens read from k and v
  std::vector<int32_t> indptr;      ///< [R + 1]: cu_q, kept for `run`
  std::vector<int32_t> no_tokens;   ///< [R + 1]: zeros, the indptr where no new token is read
  std::vector<float> q_scales;      ///< on a GPU: the host's copy of the scales that ranks compare

  int32_t heads() const { return config.attention.num_q_heads; }
  int32_t all_heads() const { return heads() * group->size(); }
  /// Of the results.
  int32_t out_heads() const { return config.all_heads_out ? all_heads() : heads(); }
  /// Queries need no arranging: the heads of each KV head stand together as they come.
  bool queries_are_in_order() const {
    return group->size() == 1 || (config.replicated_queries && config.attention.num_kv_heads == 1);
  }
  bool gathers() const { return group->size() > 1 && !config.replicated_queries; }
  /// Null on a CPU.
  const attention::GpuBackend* gpu() const { return context.state().gpu.get(); }
};

/// What every rank sends in front of its slopes and queries: what it must have in common with the others.
struct GatherHeader {
  uint64_t digest = 0;    ///< DcpPlan::digest
  uint64_t q_scales = 0;  ///< digest of granularity and values
  float q_scale = 1.0f;   ///< the first value, for a message
  float sm_scale = 0.0f;  ///< with the default resolved
  float logits_soft_cap = 0.0f;
};

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

/// The parts of a run's workspace, as offsets. One rule for the size and for the carving. W ranks, H heads of one, O
/// of the results.
struct RunLayout {
  size_t send = 0;         ///< header, slopes and queries of this rank: `piece` bytes
  size_t gathered = 0;     ///< of all ranks: [W] pieces
  size_t queries = 0;      ///< [T, W * H, D], the heads of each KV head together
  size_t slopes = 0;       ///< [W * H], likewise
  size_t partial = 0;      ///< over this rank's shard, float32: [T, W * H, Dv]
  size_t partial_lse = 0;  ///< [T, W * H]
  size_t combined = 0;     ///< over all shards: [T, O, Dv]
  size_t combined_lse = 0;
  size_t fresh = 0;  ///< over the new tokens: [T, O, Dv]
  size_t fresh_lse = 0;
  size_t indptr = 0;   ///< on a GPU: rows of the new tokens, [R + 1]
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

}  // namespace folio::inline v0::distributed
