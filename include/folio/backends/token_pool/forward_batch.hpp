#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "folio/kvcache/kv_pool.hpp"

namespace folio::inline v0::backends {

/// What a step does. The numbers of the first four are pymllm's; the last two are SGLang's modes of speculative
/// decoding, which pymllm names without having them.
enum class ForwardMode : int32_t {
  kExtend = 1,        ///< prefill: requests get new tokens behind their cached prefixes
  kDecode = 2,        ///< one new token a request
  kMixed = 3,         ///< extends and decodes together; a decode is an extend of one token
  kIdle = 4,          ///< nothing to do: outputs are zeros
  kTargetVerify = 5,  ///< draft_token_num drafts a request, verified at once: a chain or a tree
  kDraftExtend = 6,   ///< the draft model catches up with the accepted tokens: an extend that reads the cache
};

constexpr bool is_extend(ForwardMode mode) noexcept {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed || mode == ForwardMode::kDraftExtend;
}
constexpr bool is_prefill(ForwardMode mode) noexcept {
  return is_extend(mode);
}
constexpr bool is_decode(ForwardMode mode) noexcept {
  return mode == ForwardMode::kDecode;
}
constexpr bool is_mixed(ForwardMode mode) noexcept {
  return mode == ForwardMode::kMixed;
}
constexpr bool is_idle(ForwardMode mode) noexcept {
  return mode == ForwardMode::kIdle;
}
constexpr bool is_decode_or_idle(ForwardMode mode) noexcept {
  return is_decode(mode) || is_idle(mode);
}
constexpr bool is_target_verify(ForwardMode mode) noexcept {
  return mode == ForwardMode::kTargetVerify;
}
constexpr bool is_draft_extend(ForwardMode mode) noexcept {
  return mode == ForwardMode::kDraftExtend;
}

/// "extend", "decode", "mixed", "idle", "target_verify", "draft_extend"; "invalid" for any other value.
constexpr std::string_view to_string(ForwardMode mode) noexcept {
  switch (mode) {
    case ForwardMode::kExtend: return "extend";
    case ForwardMode::kDecode: return "decode";
    case ForwardMode::kMixed: return "mixed";
    case ForwardMode::kIdle: return "idle";
    case ForwardMode::kTargetVerify: return "target_verify";
    case ForwardMode::kDraftExtend: return "draft_extend";
  }
  return "invalid";
}

/// What speculative decoding adds to a batch.
struct SpecInfo {
  /// Target verify: tokens of each request's draft, the last accepted token (the root) included.
  int32_t draft_token_num = 0;
  /// Target verify of trees: for each request draft_token_num x draft_token_num bits, row-major, little-endian, from a
  /// byte of its own: bit (row, column) says that draft `row` sees draft `column`, which must be so for itself and its
  /// ancestors, and no others: a draft sees what its parent sees, and itself; all see draft 0, the root. Checked where
  /// the host has the bits. Tokens of the sequence are seen by all. Empty: chains, every draft sees those before it.
  std::span<const uint8_t> tree_mask;
  std::span<const uint8_t>
      tree_mask_cpu;  ///< (host) the same; on a GPU needed with a sliding window, else to be checked
  /// Decodes of a draft model with several branches a request (SGLang's multi-step draft): rows of slots that the
  /// engine has built, one a branch, in place of the request table. [rows + 1] and [kv_indptr[rows]]; both empty: none.
  std::span<const int32_t> kv_indptr;
  std::span<const int32_t> kv_indices;
  std::span<const int32_t> kv_indptr_cpu;  ///< (host) the same as kv_indptr; may be left empty on a CPU context
};

/// One step's batch. Every array is borrowed until the step's last forward. Those marked (host) lie in host memory; the
/// others on the context's device. On a CPU context a (host) array may be left empty where its twin is given.
struct ForwardBatch {
  ForwardMode forward_mode = ForwardMode::kIdle;
  int32_t batch_size = 0;                     ///< requests
  std::span<const int32_t> req_pool_indices;  ///< [batch_size], rows of the request table
  /// [batch_size], all tokens of each request that lie in the cache after this step; with target verify, those before
  /// its drafts.
  std::span<const int32_t> seq_lens;
  std::span<const int32_t> seq_lens_cpu;  ///< (host) the same: what is planned from, so that nothing waits for a GPU
  int64_t seq_lens_sum = -1;  ///< their sum, padding included, where the engine knows it: checked. -1: unknown
  /// [tokens], where each new token is stored: the slot that its row of the request table has at its position, on a CPU
  /// checked by the step's first forward that stores; negative: not stored. Decoder tokens. Over ranks this rank's: a
  /// token of another rank has a negative slot.
  std::span<const int64_t> out_cache_loc;

  std::span<const int32_t> extend_prefix_lens;      ///< extends: [batch_size], tokens that were cached before
  std::span<const int32_t> extend_prefix_lens_cpu;  ///< (host)
  std::span<const int32_t> extend_seq_lens;         ///< extends: [batch_size], new tokens; empty = the difference
  std::span<const int32_t> extend_seq_lens_cpu;     ///< (host)

  std::span<const int32_t> encoder_lens;           ///< cross attention: [batch_size], slots in front of the row
  std::span<const int32_t> encoder_lens_cpu;       ///< (host)
  std::span<const int64_t> encoder_out_cache_loc;  ///< where a cross-attention layer's new keys and values go; likewise

  SpecInfo spec_info;
  const KvPool* token_to_kv_pool = nullptr;  ///< the layers' keys and values
  /// Where TokenPoolConfig::window_req_to_token is given: the pool of the layers with a window (their layer_id counts
  /// in it), and where their new tokens are stored.
  const KvPool* window_token_to_kv_pool = nullptr;
  std::span<const int64_t> window_out_cache_loc;
};

}  // namespace folio::inline v0::backends
