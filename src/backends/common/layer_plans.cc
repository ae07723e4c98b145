#include "backends/common/layer_plans.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::backends {

std::vector<WindowOp> prepare_windows(const Context& context, AttentionConfig config,
                                      std::span<const LayerWindow> layers, const PrepareOptions& options) {
  std::vector<WindowOp> windows;
  for (const LayerWindow& layer : layers) {
    const auto found = std::ranges::find(windows, layer.left, &WindowOp::window_left);
    if (found != windows.end()) {
      const int32_t right = found->op.config().window_right;
      core::require(right == layer.right, "layer ", layer.layer_name, " has the window (", layer.left, ", ",
                    layer.right, "); another of its group has (", layer.left, ", ", right, ")");
      continue;
    }
    if (windows.size() == kMaxWindows) {
      core::fail(ErrorCode::kUnsupported, "layer ", layer.layer_name, " has another window than ", kMaxWindows,
                 " layers before it; a group may have up to ", kMaxWindows, " different ones");
    }
    config.window_left = layer.left;
    config.window_right = layer.right;
    windows.push_back({layer.left, prepare(context, config, options)});
  }
  return windows;
}

StepPlans::StepPlans(std::span<const WindowOp> windows) : workspace_(windows.front().op.context().device()) {
  size_t workspace_bytes = 0;
  for (const WindowOp& window : windows) {
    windows_.push_back({window.window_left, window.op, make_plan_buffer(window.op)});
    workspace_bytes = std::max(workspace_bytes, workspace_size(window.op));
  }
  reserve_workspace(workspace_bytes);
}

void StepPlans::reserve_workspace(size_t bytes) {
  workspace_.reserve(bytes);
  for (const Window& window : windows_) init_workspace(window.op, workspace());
}

WindowPlans StepPlans::plan(const BatchView& batch, const BatchView& without_window, Stream stream) {
  WindowPlans plans;
  size_t workspace_bytes = 0;
  for (size_t i = 0; i < windows_.size(); ++i) {
    Window& window = windows_[i];
    const AttentionConfig& config = window.op.config();
    const bool has_window = config.window_left >= 0 || config.window_right >= 0;
    plans[i] = WindowPlan{window.window_left,
                          folio::plan(window.op, has_window ? batch : without_window, window.buffer, stream)};
    workspace_bytes = std::max(workspace_bytes, workspace_size(plans[i]->plan));
  }
  if (workspace_bytes > workspace_.bytes()) reserve_workspace(workspace_bytes);
  return plans;
}

const AttentionPlan& plan_for_window(const WindowPlans& plans, int32_t window_left) {
  for (const std::optional<WindowPlan>& planned : plans) {
    if (planned && planned->window_left == window_left) return planned->plan;
  }
  std::string windows;
  for (const std::optional<WindowPlan>& planned : plans) {
    if (planned) windows += core::message(' ', planned->window_left);
  }
  core::fail(ErrorCode::kInvalidArgument, "the layer's window_left is ", window_left, "; the metadata was planned for",
             windows);
}

}  // namespace folio::inline v0::backends
