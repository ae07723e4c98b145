#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/token_pool/device_faults.hpp"
#include "folio/types/export.hpp"

/// Trees of draft tokens, as a target model verifies them: which tokens are taken, who is whose parent, where each
/// stands, and the masks of attention over them.
///
/// A batch has B requests with n = draft_token_num nodes each; node 0 is the root, the request's last verified token,
/// whose keys and values are not cached yet. Arrays of nodes are [B, n], request after request. `parents` is what the
/// functions share: the parent's node number, -1 for the root, and smaller than the node's own for all others.
///
/// Behaviour after SGLang's organize_draft_results and build_tree_kernel_efficient. Host memory, unless a function
/// takes DeviceFaults; nothing is allocated, and errors (kInvalidArgument naming the request and the node) come before
/// anything is written. On a device a node whose parent is none before it hangs off the root, and is reported.
namespace folio::inline v0::backends {

/// The shape of the draft. Its candidates are numbered as SGLang's draft steps produce them: the first step has topk,
/// children of the root; every later one extends topk of the candidates so far, chosen by the engine, by topk each.
struct DraftTreeShape {
  int32_t topk = 1;
  int32_t spec_steps = 1;       ///< steps of the draft
  int32_t draft_token_num = 2;  ///< nodes of a tree, the root included; 1 or more
};

/// topk + (spec_steps - 1) * topk^2. O(1). Throws kInvalidArgument for fields below 1 and numbers beyond 32 bits.
FOLIO_API int64_t draft_candidates(const DraftTreeShape& shape);

/// Entries of a request's parent_list: topk * (spec_steps - 1) + 1, none for one step. O(1). Throws as above.
FOLIO_API int64_t draft_parent_list_len(const DraftTreeShape& shape);

/// Takes the draft_token_num - 1 candidates with the highest scores of every request: of equal ones those with the
/// lower number. A tree results wherever no candidate scores higher than its parent, as products of probabilities.
/// - scores, tokens: [B, draft_candidates]; scores may be infinite, a NaN is refused.
/// - bonus_tokens: [B], the roots.
/// - selected_index: [B, n - 1], written: candidates' numbers, ascending within a request.
/// - draft_tokens: [B, n], written: the root's token, then those of the selected candidates.
/// O(B * candidates * n) at worst, O(B * candidates) for scores that fall.
FOLIO_API void select_draft_tokens(std::span<const float> scores, std::span<const int64_t> tokens,
                                   std::span<const int64_t> bonus_tokens, const DraftTreeShape& shape,
                                   std::span<int64_t> selected_index, std::span<int64_t> draft_tokens);
/// The same on the device of `faults`. A NaN counts as the lowest score. O(candidates^2) a request, in parallel.
FOLIO_API void select_draft_tokens(std::span<const float> scores, std::span<const int64_t> tokens,
                                   std::span<const int64_t> bonus_tokens, const DraftTreeShape& shape,
                                   std::span<int64_t> selected_index, std::span<int64_t> draft_tokens,
                                   DeviceFaults& faults, Stream stream = {});

/// The parents of the selected candidates.
/// - parent_list: [B, draft_parent_list_len]: entry e of a request is the candidate that its e-th extension extends,
///   entry 0 standing for the root (-1 in SGLang; not read). Candidate c belongs to extension c / topk.
/// - selected_index: [B, n - 1], ascending, as select_draft_tokens gives it.
/// - parents: [B, n], written.
/// A candidate whose parent is not selected is refused (SGLang prints a warning and loses the token, or loops for
/// ever). O(B * n * log n).
FOLIO_API void draft_tree_parents(std::span<const int64_t> parent_list, std::span<const int64_t> selected_index,
                                  const DraftTreeShape& shape, std::span<int32_t> parents);
/// The same on the device of `faults`. What would be refused hangs off the root.
FOLIO_API void draft_tree_parents(std::span<const int64_t> parent_list, std::span<const int64_t> selected_index,
                                  const DraftTreeShape& shape, std::span<int32_t> parents, DeviceFaults& faults,
                                  Stream stream = {});

/// positions[i] = seq_lens[request] + depth, the root at the sequence's end. seq_lens: [B], tokens already cached.
/// positions: [B, n], written. O(B * n).
FOLIO_API void draft_tree_positions(std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                                    std::span<int32_t> positions);
/// The same on the device of `faults`. A length out of range counts as 0.
FOLIO_API void draft_tree_positions(std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                                    std::span<int32_t> positions, DeviceFaults& faults, Stream stream = {});

/// The tree as SGLang's verification walks it: retrieve_index is a node's place in the batch (request * n + node),
/// next_token its first child, next_sibling its parent's next child, both node numbers of the request, -1 for none;
/// children in ascending order. Each [B, n], written. O(B * n).
FOLIO_API void draft_tree_links(std::span<const int32_t> parents, int32_t draft_token_num,
                                std::span<int32_t> retrieve_index, std::span<int32_t> next_token,
                                std::span<int32_t> next_sibling);
/// The same on the device of `faults`. O(n) a node, in parallel.
FOLIO_API void draft_tree_links(std::span<const int32_t> parents, int32_t draft_token_num,
                                std::span<int32_t> retrieve_index, std::span<int32_t> next_token,
                                std::span<int32_t> next_sibling, DeviceFaults& faults, Stream stream = {});

/// How a mask of visible keys is written. Node i sees the cached tokens, its ancestors and itself. Rows are nodes.
enum class TreeMaskForm : int32_t {
  kFullMask = 0,  ///< SGLang's FULL_MASK: a byte (0, 1) for each of the seq_len + n keys; requests packed, B * n rows
  kQlenOnly = 1,  ///< SGLang's QLEN_ONLY: a byte for each of the n nodes
  kQlenOnlyBitpacking = 2,  ///< SGLang's: a row is one little-endian word of 8, 16 or 32 bits for up to 8, 16, 32 nodes
  kFullBits = 3,  ///< CustomMaskScope::kAll, and FlashInfer's packed_custom_mask: bits, each request on a byte
  kTailBits = 4,  ///< CustomMaskScope::kTail with n as every tail_len: the same for the n nodes alone
};

/// Bytes of a mask. O(B) for the full forms, O(1) for others. Throws kInvalidArgument for negative lengths and
/// draft_token_num < 1; kUnsupported for kQlenOnlyBitpacking with more than 32 nodes.
FOLIO_API int64_t tree_mask_bytes(TreeMaskForm form, std::span<const int32_t> seq_lens, int32_t draft_token_num);

/// Writes the first tree_mask_bytes of `mask`; the bits that fill a request's last byte are 0. parents: [B, n];
/// seq_lens: [B], tokens already cached, before the root. O(bytes + B * n * depth).
///
/// window_left >= 0 (full forms only; kUnsupported for others): a node sees the window_left tokens before it on its own
/// path, ancestors and cached ones, and itself. The op's own windows know no paths: they take node i to be at position
/// seq_len + i, so that an op that verifies trees keeps window_left -1 and leaves the window to the mask. Lists cut off
/// in front (window_prefix_ranges) work the same way: seq_lens are then their lengths.
FOLIO_API void fill_tree_mask(TreeMaskForm form, std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                              int32_t draft_token_num, std::span<uint8_t> mask, int32_t window_left = -1);
/// The same on the device of `faults`. The mask has room for the batch whatever its lengths: B * n * (longest + n)
/// cells for the full forms; what does not fit is not written. A negative length counts as 0.
FOLIO_API void fill_tree_mask(TreeMaskForm form, std::span<const int32_t> parents, std::span<const int32_t> seq_lens,
                              int32_t draft_token_num, std::span<uint8_t> mask, DeviceFaults& faults,
                              int32_t window_left = -1, Stream stream = {});

}  // namespace folio::inline v0::backends
