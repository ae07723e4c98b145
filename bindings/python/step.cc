#include "step.hpp"

#include <new>
#include <string>

#include "gil.hpp"

namespace folio::python {
namespace {

std::string table_name(size_t segment) {
  return "tables[" + std::to_string(segment) + "]";
}

/// A ragged segment's offsets, or a paged one's table.
SegmentArg bind_segment(nb::handle source, size_t segment, KvSource kind) {
  SegmentArg bound;
  const std::string name = table_name(segment);
  if (kind == KvSource::kRagged) {
    Array offsets = borrow_int32(source, name);
    bound.ragged_offsets = offsets.size(0);
    bound.view.ragged.indptr = static_cast<const int32_t*>(offsets.data);
    bound.arrays = {std::move(offsets)};
    return bound;
  }
  Table table = to_table(source, name);
  bound.view.table = table.view;
  bound.table_columns = table.columns;
  bound.arrays = std::move(table.arrays);
  return bound;
}

std::vector<nb::object> to_list(nb::handle tables) {
  std::vector<nb::object> list;
  if (nb::isinstance<nb::list>(tables) || nb::isinstance<nb::tuple>(tables)) {
    for (const nb::handle one : tables) list.push_back(nb::borrow(one));
  } else {
    list.push_back(nb::borrow(tables));
  }
  return list;
}

void require_enough_offsets(const Step& step, const BatchCopy& batch) {
  for (size_t i = 0; i < step.segment_args.size(); ++i) {
    const int64_t offsets = step.segment_args[i].ragged_offsets;
    if (step.is_ragged(i) && offsets <= batch.rows(i)) {
      refuse(table_name(i) + " has " + std::to_string(offsets) + " entries; the plan's " +
             std::to_string(batch.rows(i)) + " rows need one more than rows");
    }
  }
}

/// The buffer's own workspace, grown to what the plan needs. Its layers' runs take turns with it.
std::shared_ptr<Scratch> own_workspace(const Plan& plan) {
  Buffer& buffer = *plan.buffer;
  if (buffer.op.context().device().type != DeviceType::kCpu) {
    refuse("workspace is None, and the context is a GPU's: give a folio.Workspace of an array that lies there");
  }
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(buffer.mutex);
  const size_t needed = workspace_size(plan.plan);
  const std::lock_guard<std::mutex> one_run(buffer.workspace_mutex);
  if (buffer.workspace == nullptr || buffer.workspace->view.bytes < needed) {
    auto scratch = std::make_shared<Scratch>(make_scratch(std::max(needed, workspace_size(buffer.op))));
    init_workspace(buffer.op, scratch->view);
    buffer.workspace = std::move(scratch);
  }
  return buffer.workspace;
}

std::shared_ptr<Scratch> given_workspace(nb::handle source) {
  std::shared_ptr<Scratch> scratch;
  if (!nb::try_cast(source, scratch, false)) refuse("workspace must be a folio.Workspace or None");
  return scratch;
}

void make_step(Step* self, nb::object plan_object, nb::handle tables, nb::handle workspace, nb::handle slot_mapping,
               nb::handle custom_mask, nb::handle stream) {
  if (!nb::isinstance<Plan>(plan_object)) refuse("plan must be a folio.AttentionPlan");
  auto step = std::make_unique<Step>();
  step->plan_object = std::move(plan_object);
  const Plan& plan = step->plan();
  const Device device = step->device();
  const std::vector<nb::object> list = to_list(tables);
  const std::span<const KvSegment> planned = plan.batch.segments();
  if (list.size() != planned.size()) {
    refuse("tables has " + std::to_string(list.size()) + " entries; the plan has " + std::to_string(planned.size()) +
           " segments");
  }
  for (size_t i = 0; i < list.size(); ++i) {
    step->segment_args.push_back(bind_segment(list[i], i, planned[i].source));
    for (const Array& array : step->segment_args.back().arrays) step->arrays.push_back(array);
  }
  require_enough_offsets(*step, plan.batch);
  if (!custom_mask.is_none()) {
    Array bits = borrow_bytes(custom_mask, "custom_mask");
    step->custom_mask = static_cast<const uint8_t*>(bits.data);
    step->custom_mask_bytes = bits.size(0);
    step->arrays.push_back(std::move(bits));
  }
  require_on(device, step->arrays);
  if (!slot_mapping.is_none()) step->slots.emplace(slot_mapping, device);
  step->workspace = workspace.is_none() ? own_workspace(plan) : given_workspace(workspace);
  require_on(device, *step->workspace);
  step->stream = to_stream(stream, device, {&step->arrays, &plan.lengths, &step->workspace->arrays});
  if (device.type == DeviceType::kCpu) {
    step->segments = step->copies.copy(plan.batch, plan.buffer->op.config().page_size,
                                       std::span<const SegmentArg>(step->segment_args));
  } else {
    for (const SegmentArg& segment : step->segment_args) step->segment_views.push_back(segment.view);
    step->segments = step->segment_views;
  }
  new (self) Step(std::move(*step));
}

std::string step_text(const Step& step) {
  const BatchView batch = step.plan().batch.view();
  return "folio.Step(num_requests=" + std::to_string(batch.num_requests) +
         ", num_tokens=" + std::to_string(batch.num_tokens) + ", segments=" + std::to_string(step.segments.size()) +
         ", device=" + describe(step.device()) + ")";
}

}  // namespace

Slots::Slots(nb::handle source, const Device& device) : array_(borrow_int64(source, "slot_mapping")) {
  require_on(device, array_);
  count_ = array_.size(0);
  copied_ = device.type == DeviceType::kCpu;
  const auto* from = static_cast<const int64_t*>(array_.data);
  if (copied_) values_.assign(from, from + count_);
}

void bind_step(nb::module_& m) {
  nb::class_<Step>(
      m, "Step",
      "One step of a batch: a plan with what all layers of its group share. Make it once a step, after the plan.\n\n"
      "tables: one entry a segment of the plan. A paged segment takes a PageTableView or an int32 array [rows, "
      "columns] "
      "of page ids; a ragged one takes int32 offsets [rows + 1] into the keys and values that each layer's call gives. "
      "A plan of one segment takes its entry without a list. workspace: None on a CPU is memory of the plan's buffer. "
      "slot_mapping: int64 [tokens], for Layer.write. custom_mask: the bits, uint8, where the op's mask is CUSTOM. "
      "stream: of all layers; None is the one that current_stream says now.\n\n"
      "On a CPU page ids, offsets and slots are copied here: what the caller writes into those arrays afterwards does "
      "not matter to this step. On a GPU they are read when the kernels run: what the stream writes before is seen, "
      "and "
      "they must stay until it has passed. Lengths are the plan's in both.\n\n"
      "Raises InvalidArgument for tables that do not fit the plan, and for arrays of another device.")
      .def("__init__", &make_step, nb::arg("plan"), nb::arg("tables"), nb::arg("workspace") = nb::none(), nb::kw_only(),
           nb::arg("slot_mapping") = nb::none(), nb::arg("custom_mask") = nb::none(), nb::arg("stream") = nb::none())
      .def_prop_ro("plan", [](const Step& self) { return self.plan_object; })
      .def_prop_ro("op", [](const Step& self) { return AttentionOp(self.plan().buffer->op); })
      .def_prop_ro("num_requests", [](const Step& self) { return self.plan().batch.view().num_requests; })
      .def_prop_ro("num_tokens", [](const Step& self) { return self.plan().batch.view().num_tokens; })
      .def_prop_ro(
          "stream", [](const Step& self) { return reinterpret_cast<uintptr_t>(self.stream.handle); },
          "The cudaStream_t of its layers' calls, as an integer; 0 on a CPU.")
      .def("__repr__", &step_text);
}

}  // namespace folio::python
