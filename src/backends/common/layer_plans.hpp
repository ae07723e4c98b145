#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "folio/attention.hpp"
#include "folio/backends/window_plans.hpp"

namespace folio::inline v0::backends {

/// The keys that a layer's queries see to both sides of themselves; -1 = all.
struct LayerWindow {
  std::string_view layer_name;
  int32_t left = -1;
  int32_t right = -1;
};

/// The kernel of all layers of one window.
struct WindowOp {
  int32_t window_left;
  AttentionOp op;
};

/// Chooses a kernel for every window of a group's layers, in their order: `config` with that window. Throws what
/// `prepare` throws; kUnsupported beyond kMaxWindows windows, kInvalidArgument for two right sides of one left one.
std::vector<WindowOp> prepare_windows(const Context& context, AttentionConfig config,
                                      std::span<const LayerWindow> layers, const PrepareOptions& options);

/// What one step in flight needs: a plan buffer for every window, and the workspace its forwards use in turn.
class StepPlans {
 public:
  /// The ops are copied (they are handles). At least one.
  explicit StepPlans(std::span<const WindowOp> windows);

  /// A workspace of so many bytes at least, before there are plans.
  void reserve(size_t bytes) {
    if (bytes > workspace_.bytes()) reserve_workspace(bytes);
  }

  /// Plans a step for every window; earlier plans go stale. Allocates nothing once warm. Throws what `plan` throws.
  WindowPlans plan(const BatchView& batch, Stream stream) { return plan(batch, batch, stream); }
  /// The same, of layers without window another batch.
  WindowPlans plan(const BatchView& batch, const BatchView& without_window, Stream stream);

  /// Enough for every plan that `plan` has made; where a plan with shared segments needs more than it had, it moves.
  Workspace workspace() noexcept { return {workspace_.data(), workspace_.bytes()}; }

 private:
  struct Window {
    int32_t window_left;
    AttentionOp op;
    PlanBuffer buffer;
  };
  void reserve_workspace(size_t bytes);

  std::vector<Window> windows_;  ///< at most kMaxWindows
  ContextMemory workspace_;
};

/// The plan of the layers of that window. Throws kInvalidArgument where nothing was planned for it.
const AttentionPlan& plan_for_window(const WindowPlans& plans, int32_t window_left);

}  // namespace folio::inline v0::backends
