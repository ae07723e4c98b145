#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "folio/backends/attention_metadata.hpp"
#include "folio/cascade.hpp"

namespace folio::inline v0::backends {

/// Who decides whether a batch's shared prefixes are read once for all who share them.
enum class CascadeMode : int32_t {
  kOff = 0,        ///< nobody: every request reads its whole KV
  kHeuristic = 1,  ///< vLLM's rule (use_cascade_attention) about the common_prefix_len that the engine passes; the
                   ///< metadata builders leave it to the engine to ask the rule, as vLLM does, and share what `build`
                   ///< is given
  kAuto = 2,       ///< Folio: prefixes found in the block table, at several levels, taken where they save bytes
};

/// "off", "heuristic", "auto".
FOLIO_API std::string_view to_string(CascadeMode mode);
/// The same back; anything else throws kInvalidArgument.
FOLIO_API CascadeMode cascade_mode_from_name(std::string_view name);

struct StepCascadeOptions {
  CascadeMode mode = CascadeMode::kAuto;
  int32_t max_levels = 4;            ///< kAuto: see CascadePlanner
  int32_t num_sms = 1;               ///< kHeuristic: processors that its waves run on, >= 1
  bool use_local_attention = false;  ///< kHeuristic: a layer attends to chunks
};

/// What a metadata builder asks once per step: the batch's keys as segments, for the plans of all its layers. Keeps its
/// memory and allocates nothing once warm. For causal decoders whose KV is not divided over ranks.
class FOLIO_API StepCascade {
 public:
  /// `ops`: of all layers of the group, one for each window; they agree in all but the window. kAuto weighs with the
  /// widest window, in which sharing pays most: with others it is as exact. Throws kInvalidArgument for no ops, options
  /// out of range, and what CascadePlanner throws.
  StepCascade(std::span<const AttentionOp> ops, const StepCascadeOptions& options);
  StepCascade(StepCascade&&) noexcept;
  StepCascade& operator=(StepCascade&&) noexcept;
  ~StepCascade();

  /// `common_prefix_len`: tokens that all requests have in common, by the engine's own books; >= 0. kHeuristic cuts it
  /// to whole pages that were computed before this step, asks the rule and checks the block table. kAuto reads the same
  /// off the table, and kOff leaves the batch as it is. The result holds until the next call, and refers to the batch's
  /// arrays. With determinism at kBatchInvariant or above it never has a shared segment. Of ops on a GPU the table is
  /// looked at in block_table_host, laid out like block_table. Throws kInvalidArgument for lengths that contradict each
  /// other, arrays of another device than the ops', copies on the host that are missing and, with kHeuristic, tables
  /// that differ within the prefix.
  const Cascade& plan(int32_t common_prefix_len, const CommonAttentionMetadata& batch, Stream stream = {});
  /// The same of a batch with any page table.
  const Cascade& plan(int32_t common_prefix_len, const CascadeBatch& batch, Stream stream = {});
  /// `prefix_tokens` that all requests share, whoever agrees; 0: nothing. In the form that `plan` gives: of ops on a
  /// GPU with GraphBounds always as many segments (see CascadePlanner). On a GPU no page is looked at.
  const Cascade& share(int32_t prefix_tokens, const CommonAttentionMetadata& batch, Stream stream = {});

  const StepCascadeOptions& options() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The shared prefixes that a builder found for one step (CascadeMode::kAuto), as its metadata carries them: the
/// plan's segments, shared ones first, outermost first, then the rest of each request's own keys, and the page table
/// that `forward` reads each of them by. Pointers go into the builder's memory and into the engine's block table; they
/// hold as long as the metadata.
struct StepCascadeLevels {
  int32_t num_levels = 0;  ///< segments that share something; 0 = nothing is shared
  /// Of the plan: num_levels + 1; under captured graphs of any batch on a GPU always the most, those between without
  /// keys. 0 = one plain segment, and nothing below counts.
  int32_t num_segments = 0;
  std::array<KvSegment, kMaxCascadeLevels + 1> segments{};    ///< the first num_segments
  std::array<PageTableView, kMaxCascadeLevels + 1> tables{};  ///< as many
  int64_t bytes_saved = 0;  ///< what is expected of one layer's every KV head; see Cascade::bytes_saved
};

}  // namespace folio::inline v0::backends
