#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/op_state.hpp"
#include "distributed/pcp_state.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::distributed {

/// Scales of the host.
bool is_per_request(const Scale& scale);
float scale_of(const Scale& scale, int64_t request, int32_t head);

/// What this rank sends behind a layer's new tokens.
PcpHeader header_of(const PcpState& state, const PcpPlan& plan, const PcpArgs& args);

/// Throws kInvalidArgument where what rank `r` sent differs from what rank `own` sent.
void check_header(const PcpHeader& mine, const PcpHeader& theirs, int32_t r, int32_t own);

/// One call of `run`: gather the new tokens, attend to them, reach the older ones, merge. Its parts stand in pcp_run.cc
/// and pcp_exchange.cc.
class PcpRun {
 public:
  /// Throws for arguments that the plan cannot run with.
  PcpRun(PcpState& state, const PcpPlan& plan, const PcpArgs& args, Workspace workspace, Stream stream);

  /// Everything that only this rank knows to be wrong is found here, before the others wait for it.
  void pack();
  void fresh_pass();
  void older_pass();
  void merge();

 private:
  int64_t tokens() const { return state_.rows(plan_); }
  int64_t rank() const { return state_.group->rank(); }
  int64_t head_stride() const { return config_.head_dim_v + kLsePadding; }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(memory_ + offset); }
  Workspace scratch() const { return {memory_ + layout_.attention, layout_.attention_bytes}; }
  size_t piece_bytes() const { return static_cast<size_t>(state_.piece_rows(plan_.max_tokens) * state_.fresh_row()); }
  std::byte* piece(int64_t of_rank) const { return memory_ + layout_.pieces + of_rank * ssize(piece_bytes()); }
  std::byte* older_piece(int64_t of_rank) const {
    return memory_ + layout_.older + of_rank * ssize(layout_.older_piece);
  }
  static int64_t ssize(size_t size) { return static_cast<int64_t>(size); }
  const int32_t* ints(size_t array) const { return state_.image.at<int32_t>(array); }
  int32_t* table_memory() const { return reinterpret_cast<int32_t*>(memory_ + layout_.table); }
  size_t query_bytes() const {
    return static_cast<size_t>(int64_t{config_.num_q_heads} * config_.head_dim_qk * size_of(config_.q));
  }
  std::byte* own_queries() const {
    return memory_ + layout_.queries + rank() * plan_.max_tokens * ssize(query_bytes());
  }

  // pcp_run.cc: checks, arguments.
  void check_scale(const char* name, const Scale& scale) const;
  /// A scale per request as one per row of a plan; others are themselves.
  Scale for_rows_of(const ChunkRows& rows, const Scale& scale, float* memory) const;
  void expand_scales();
  void check_capture() const;
  void check(Workspace workspace);
  AttentionArgs common_args() const;
  /// Results as rows with their LSEs behind them: `rows` of them from `begin` on.
  void set_out(AttentionArgs& args, float* begin, int64_t rows) const;
  /// This rank's queries, into one of the states.
  AttentionArgs own_args(int32_t state, std::span<const SegmentArgs> segments) const;
  /// A row for every entry of `indptr` but the last, which lies at `array`. With bounds there may be `most` indices in
  /// later steps: what is captured must not know this step's number.
  PageTableView table_of(const std::vector<int32_t>& indptr, size_t array, const int32_t* indices, int32_t most) const {
    const int32_t entries = state_.bounded() ? most : indptr.back();
    return csr_table({indices, static_cast<size_t>(entries)}, {ints(array), indptr.size()});
  }
  PageTableView table_of(const std::vector<int32_t>& indptr, size_t array, const int32_t* indices) const {
    return csr_table({indices, static_cast<size_t>(indptr.back())}, {ints(array), indptr.size()});
  }

  // pcp_exchange.cc: the all-gather of new tokens, pass-Q and pass-KV.
  /// The pieces' rows of new tokens, k's or v's, from rank 0's first on.
  ConstTensorView piece_tensor(int64_t first_element, int64_t dim) const;
  /// This rank's piece as a cache of one page, in which each token's keys precede its values.
  KvCacheView own_piece() const;
  /// Pages of the model's KV heads.
  KvCacheShape shape_of(int64_t pages, int32_t page_size, DType dtype) const;
  KvCacheView fresh_cache() const;
  SegmentArgs fresh_segment() const;
  void pack_fresh();
  /// Brings all new tokens to pages in order of their positions, and checks that the ranks run the same.
  void gather_fresh();
  void check_headers() const;
  /// The pages of older tokens, from the table that this layer is given: for every chunk of every rank (pass-Q), or for
  /// every request.
  void read_table() const;
  SegmentArgs shard_segment() const;
  /// The queries of all ranks, padded, into what is sent back.
  AttentionArgs shard_args(std::span<const SegmentArgs> segments) const;
  void pack_queries() const;
  void pass_q();
  /// Pass-KV: this rank's pages with older tokens, to its piece.
  void pack_older();
  std::span<const SegmentArgs> gathered_segments() const;
  void pass_kv();

  PcpState& state_;
  const AttentionConfig& config_;
  const PcpPlan& plan_;
  const PcpArgs& args_;
  const PcpLayout layout_;
  std::byte* memory_;
  Stream stream_;
  Scale own_q_scale_, row_q_scale_, row_k_scale_, row_v_scale_;  ///< for the rows of plans
};

}  // namespace folio::inline v0::distributed
