#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "host_copies.hpp"

/// What a plan and its workspace are in Python: the C++ handles, with what they need alive and a lock.
namespace folio::python {

struct FreeMemory {
  void operator()(void* memory) const noexcept { std::free(memory); }
};

/// Workspace: memory of its own on the host, or an array's.
struct Scratch {
  Workspace view;
  std::unique_ptr<void, FreeMemory> owned;
  std::vector<Array> arrays;
};

/// PlanBuffer, safe to share between Python's threads: planning waits for the runs that read its plans, and they for
/// it.
struct Buffer {
  explicit Buffer(const AttentionOp& made_for) : op(made_for), buffer(make_plan_buffer(made_for)) {}
  AttentionOp op;
  PlanBuffer buffer;
  std::shared_mutex mutex;
  std::mutex workspace_mutex;          ///< held by runs of layers: they run one at a time
  std::shared_ptr<Scratch> workspace;  ///< of steps that are given none; made when the first of them is
};

/// AttentionPlan. Keeps its buffer, its batch, and on a GPU the lengths that the stream may still have to read.
struct Plan {
  AttentionPlan plan;
  std::shared_ptr<Buffer> buffer;
  BatchCopy batch;
  std::vector<Array> lengths;
};

/// As repr.hpp's.
std::string text_of(const Buffer& buffer);
std::string text_of(const Plan& plan);
std::string text_of(const Scratch& scratch);

/// Host memory of at least so many bytes, 256-byte aligned; not yet passed through init_workspace.
Scratch make_scratch(size_t bytes);

/// Throws Error(kInvalidArgument) unless the workspace lies where a function on `device` can use it.
void require_on(const Device& device, const Scratch& scratch);

}  // namespace folio::python
