#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "backends/token_pool/reading.hpp"
#include "folio/backends/token_pool/backend.hpp"

namespace folio::inline v0::backends {

struct TokenPoolWorkspace::State {
  ContextMemory memory;
  ContextMemory over_ranks;  ///< other memory: what attention over ranks leaves behind is not what ops expect
};

namespace token_pool {

/// Which of a wrapper's readings.
struct ReadingChoice {
  bool ragged = false;
  MaskKind mask = MaskKind::kCausal;
  bool primary = true;  ///< the metadata's; others are planned by the layers that need them, in memory of their own
};

/// A group of layers in one set of steps.
struct Wrapper {
  WrapperRole role = WrapperRole::kFull;
  ListMemory memory;
  struct Entry {
    ReadingChoice choice;
    std::unique_ptr<KvReading> reading;
  };
  std::vector<Entry> readings;
};

/// An array of new tokens' slots that has been held against the request table.
struct CheckedSlots {
  uint64_t step = 0;  ///< its number; 0 = none
  std::span<const int64_t> slots;
};

/// Steps that share memory: all eager ones, or those of one captured shape.
struct StepSet {
  Step step;
  uint64_t number = 0;   ///< of the present step
  ReadingChoice choice;  ///< of the present step's metadata
  std::vector<Wrapper> wrappers;
  CheckedSlots checked, checked_window;  ///< of either pool
  /// Self-attention behind encoders reads slots, not pages: what stands behind an encoder need not begin with a page.
  bool self_by_slots = false;
  std::optional<FixedShape> shape;
  std::shared_ptr<ContextMemory> workspace;  ///< of captured shapes: never moves; null: the backend's
};

/// One captured shape.
struct GraphSet {
  int32_t bs = 0;
  ForwardMode mode = ForwardMode::kDecode;
  int32_t num_tokens = 0;
  bool tree = false;
  bool draft_rows = false;
  StepSet set;
};

/// What init_cuda_graph_state has taken, and the shapes captured since.
struct Graphs {
  int32_t max_bs = 0;
  int32_t max_num_tokens = 0;
  std::vector<ContextMemory> own_indices;      ///< per wrapper
  std::vector<std::span<int32_t>> kv_indices;  ///< per wrapper
  std::vector<std::shared_ptr<ContextMemory>> workspaces;
  std::vector<std::unique_ptr<GraphSet>> captured;
};

/// Whether a pool's slots can be read one by one, whatever its pages are; a null pool's are taken to be.
bool may_read_slots(const TokenPoolConfig& config, const KvPool* pool);

}  // namespace token_pool

struct TokenPoolBackend::State {
  State(const Context& context_, const TokenPoolConfig& config_);

  Context context;
  TokenPoolConfig config;
  bool on_host;
  WrapperDispatch dispatch = WrapperDispatch::kNone;
  std::vector<token_pool::WrapperRole> roles;
  std::shared_ptr<TokenPoolWorkspace> workspace;
  token_pool::StepSet eager;

  std::optional<token_pool::Graphs> graphs;
  std::shared_ptr<token_pool::ListReport> report;  ///< of a GPU's lists; null on a CPU

  token_pool::StepSet* current = nullptr;  ///< whose step the forwards belong to
  std::vector<KvWrapper> wrappers;         ///< what the metadata shows
  std::variant<std::monostate, DecodeMetadata, PrefillMetadata> metadata;

  void add_wrappers(token_pool::StepSet& set, bool graph);
  token_pool::KvReading& reading(token_pool::StepSet& set, size_t wrapper, const token_pool::ReadingChoice& choice);
  /// The reading, planned for the set's present step.
  token_pool::KvReading& planned(token_pool::StepSet& set, size_t wrapper, const token_pool::ReadingChoice& choice,
                                 Stream stream);
  /// Plans every wrapper for a step that set.step has been read into, and makes it the present one.
  void plan_step(token_pool::StepSet& set, Stream stream);
  int32_t page_size_of(const token_pool::StepSet& set, size_t wrapper) const;
  /// Throws what kernels have reported.
  void check_reports();
  /// The workspace of steps that are not captured.
  ContextMemory& shared_memory() const;
  Workspace workspace_of(const token_pool::StepSet& set) const;
};

}  // namespace folio::inline v0::backends
