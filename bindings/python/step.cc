#include "step.hpp"

#include <new>
#include <string>

#include "gil.hpp"
#include "integers.hpp"
#include "masks.hpp"
#include "repr.hpp"

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

/// The mask's bits, packed where bools are given.
void bind_mask(Step& step, const Plan& plan, nb::handle source) {
  nb::object given = nb::borrow(source);
  if (is_unpacked_mask(source)) {
    if (plan.batch.view().where != Where::kHost) {
      refuse("custom_mask has bools, and the plan's lengths lie on a GPU: give the bits of folio.pack_custom_mask");
    }
    const std::vector<MaskShape> wanted = mask_shapes(plan.batch.view());
    given = pack_mask(source, "custom_mask", &wanted).bits;
  }
  Array bits = borrow_bytes(given, "custom_mask");
  step.custom_mask = static_cast<const uint8_t*>(bits.data);
  step.custom_mask_bytes = bits.size(0);
  step.arrays.push_back(std::move(bits));
}

/// The buffer's own workspace, grown to what the plan needs. Its layers run one at a time.
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
  if (!nb::try_cast(source, scratch, false)) refuse_kind("workspace", "a folio.Workspace or None", source);
  return scratch;
}

void make_step(Step* self, nb::object plan_object, nb::handle tables, nb::handle workspace, nb::handle slot_mapping,
               nb::handle custom_mask, nb::handle stream) {
  if (!nb::isinstance<Plan>(plan_object)) refuse_kind("plan", "a folio.AttentionPlan", plan_object);
  auto step = std::make_unique<Step>();
  if (!workspace.is_none()) step->workspace = given_workspace(workspace);
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
  if (!custom_mask.is_none()) bind_mask(*step, plan, custom_mask);
  require_on(device, step->arrays);
  if (!slot_mapping.is_none()) step->slots.emplace(slot_mapping, device);
  if (step->workspace == nullptr) step->workspace = own_workspace(plan);
  require_on(device, *step->workspace);
  if (!stream.is_none()) step->stream = to_stream(stream, device, {});
  if (device.type == DeviceType::kCpu) {
    step->segments = step->copies.copy(plan.batch, plan.buffer->op.config().page_size,
                                       std::span<const SegmentArg>(step->segment_args));
  } else {
    for (const SegmentArg& segment : step->segment_args) step->segment_views.push_back(segment.view);
    step->segments = step->segment_views;
  }
  new (self) Step(std::move(*step));
}

}  // namespace

Slots::Slots(nb::handle source, const Device& device) : array_(borrow_int64(source, "slot_mapping")) {
  require_on(device, array_);
  count_ = array_.size(0);
  copied_ = device.type == DeviceType::kCpu;
  const auto* from = static_cast<const int64_t*>(array_.data);
  if (copied_) values_.assign(from, from + count_);
}

std::string text_of(const Step& step) {
  return text_of(step.plan());
}

void bind_step(nb::module_& m) {
  nb::class_<Step> step(
      m, "Step",
      "One step of a batch: a plan with what all layers of its group share. Make it once a step, after the plan.\n\n"
      "tables: one entry a segment of the plan. A paged segment takes a PageTableView or page ids [rows, columns]; a "
      "ragged one takes offsets [rows + 1] into the keys and values that each layer's call gives. A plan of one "
      "segment "
      "takes an array or PageTableView without a list. Ids, offsets and slots are int32 or int64; those of the width "
      "that Folio does not read are converted here, once. workspace: None on a CPU is memory of the plan's buffer. "
      "slot_mapping: [tokens], for Layer.write. custom_mask: where the op's mask is CUSTOM, bools [queries, columns] a "
      "request, or their bits, uint8. stream: of all layers' calls; None is each call's own, as current_stream "
      "says.\n\n"
      "On a CPU page ids, offsets and slots are copied here: what is written into those arrays afterwards does not "
      "reach this step. On a GPU they are read when the kernels run: what the stream writes before is seen, and they "
      "must stay until it has passed. Lengths are the plan's in both.\n\n"
      "Raises InvalidArgument for tables that do not fit the plan, and for arrays of another device.");
  bind_repr(step);
  step.def("__init__", &make_step, nb::arg("plan"), nb::arg("tables"), nb::arg("workspace") = nb::none(), nb::kw_only(),
           nb::arg("slot_mapping") = nb::none(), nb::arg("custom_mask") = nb::none(), nb::arg("stream") = nb::none(),
           nb::sig("def __init__(self, plan: AttentionPlan, tables: object, workspace: Workspace | None = None, *, "
                   "slot_mapping: object | None = None, custom_mask: object | None = None, "
                   "stream: object | None = None) -> None"))
      .def_prop_ro(
          "plan", [](const Step& self) { return self.plan_object; }, nb::sig("def plan(self, /) -> AttentionPlan"),
          "The plan that it was made of.")
      .def_prop_ro(
          "op", [](const Step& self) { return AttentionOp(self.plan().buffer->op); },
          "The op that planned it: its layers are those of this op.")
      .def_prop_ro(
          "num_requests", [](const Step& self) { return self.plan().batch.view().num_requests; },
          "Requests of the plan, padding too.")
      .def_prop_ro(
          "num_tokens", [](const Step& self) { return self.plan().batch.view().num_tokens; },
          "Rows of q and out, padding too.");
}

}  // namespace folio::python
