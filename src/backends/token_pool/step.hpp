#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "folio/backends/token_pool/backend.hpp"

namespace folio::inline v0::backends::token_pool {

/// A step as the backend plans it: the batch checked, its lengths copied to the host.
struct Step {
  ForwardMode mode = ForwardMode::kIdle;
  int32_t num_requests = 0;  ///< rows of queries: requests, or draft rows
  int32_t num_tokens = 0;
  int32_t draft_token_num = 0;  ///< target verify
  bool no_prefix = false;       ///< extends: nothing was cached before
  bool extend = false;          ///< there are prefix_lens; else each request has as many queries as the others
  /// The host has the step's lengths; else only the device has, and the vectors below are empty: captured shapes on a
  /// GPU, other than trees.
  bool lengths_known = true;
  bool stand_in_lengths = false;  ///< the host's lengths were made up for a capture; the device's may differ
  std::vector<int32_t> cu_q;      ///< [R + 1]
  std::vector<int32_t> seq_lens, prefix_lens, encoder_lens;
  int64_t seq_lens_sum = -1;     ///< as given
  int64_t num_slots = 0;         ///< of the pool; 0 = unknown
  int64_t num_window_slots = 0;  ///< of the pool that layers with a window read

  // On the context's device, the batch's own.
  std::span<const int32_t> rows;
  const int32_t* device_seq_lens = nullptr;
  const int32_t* device_prefix_lens = nullptr;
  const int32_t* device_encoder_lens = nullptr;
  SpecInfo spec_info;

  bool has_draft_rows() const { return !spec_info.kv_indptr.empty(); }
  int32_t queries() const { return mode == ForwardMode::kTargetVerify ? draft_token_num : 1; }
  int32_t drafts() const { return mode == ForwardMode::kTargetVerify ? draft_token_num : 0; }

  /// Takes a batch over, checking it against the configuration. `on_host`: everything lies in host memory. `captured`:
  /// a captured shape, which is planned from the device's lengths and may leave the host's out. Throws kInvalidArgument
  /// naming the field, kUnsupported.
  void read(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host, bool captured);

  /// Throws kInvalidArgument, naming the token, unless every new token is stored where its row of the request table
  /// says, or nowhere (negative), as those of other ranks. Host memory; `name` is the argument's. O(tokens).
  void check_new_slots(const SlotTable& table, const KvShard& shard, std::span<const int64_t> slots,
                       const char* name) const;

 private:
  void read_lengths(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host);
  void check_queries() const;
  void read_encoders(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host);
  void read_draft_rows(const TokenPoolConfig& config, const ForwardBatch& batch, bool on_host);
  void read_extends(const ForwardBatch& batch, bool on_host);
};

}  // namespace folio::inline v0::backends::token_pool
