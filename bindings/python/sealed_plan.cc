#include "folio/sealed_plan.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "folio/types/error.hpp"
#include "gil.hpp"
#include "plan.hpp"

/// Plans written out as integers.
namespace folio::python {
namespace {

/// SealedPlan, as the buffer of the plan that was sealed last. On a CPU `run` executes memory of its own, and the
/// caller's is a copy to hold against it: another thread may write there.
struct Sealed : Buffer {
  explicit Sealed(const AttentionOp& made_for) : Buffer(made_for), sealed(made_for) {}
  SealedPlan sealed;
  std::optional<BatchCopy> batch;
  std::vector<Array> lengths;
  Scratch own;                      ///< on a CPU
  std::span<const int32_t> used;    ///< of `own`, or on a GPU of the caller's array
  const int32_t* handed = nullptr;  ///< where the caller's array begins
  std::vector<Array> memory;        ///< the caller's
};

Array borrow_schedule(const Device& device, nb::handle source, const std::string& name, Access access) {
  Array array = borrow(source, name, access);
  if (array.element != nb::dtype<int32_t>() || array.rank() != 1 || (array.size(0) > 1 && array.stride(0) != 1)) {
    refuse(name + " is " + element_text(array.element) + " " + shape_text(array) +
           "; it must be a contiguous vector of int32");
  }
  python::require_on(device, array);
  return array;
}

BatchCopy copy_of(const BatchCopy& batch) {
  Batch again;
  again.view = batch.view();
  again.segment_views.assign(batch.segments().begin(), batch.segments().end());
  return BatchCopy(again);
}

int64_t sealed_size(const Plan& plan) {
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
  return SealedPlan::size(plan.plan);
}

int64_t seal(const std::shared_ptr<Sealed>& self, const Plan& plan, nb::handle memory, nb::handle stream) {
  const Device device = self->op.context().device();
  if (plan.buffer == self) refuse("plan is this SealedPlan's own");
  const std::vector<Array> arrays = {borrow_schedule(device, memory, "memory", Access::kWrite)};
  const std::span<int32_t> target(static_cast<int32_t*>(arrays[0].data), arrays[0].memory.size());
  const Stream queue = to_stream(stream, device, {&arrays});
  const bool on_cpu = device.type == DeviceType::kCpu;
  BatchCopy batch = copy_of(plan.batch);
  const int64_t size = sealed_size(plan);
  if (size > static_cast<int64_t>(target.size())) {
    refuse("memory has " + std::to_string(target.size()) + " entries; the plan takes " + std::to_string(size));
  }
  {
    const ReleasedGil released;
    const std::shared_lock<std::shared_mutex> reading(plan.buffer->mutex);
    const std::unique_lock<std::shared_mutex> writing(self->mutex);
    std::span<int32_t> place = target;
    if (on_cpu) {
      const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
      if (self->own.view.bytes < bytes) self->own = make_scratch(bytes);
      place = {static_cast<int32_t*>(self->own.view.data), static_cast<size_t>(size)};
    }
    self->used = self->sealed.seal(plan.plan, place, queue);
    self->handed = target.data();
    if (on_cpu) std::ranges::copy(self->used, target.begin());
    self->batch.emplace(std::move(batch));
  }
  self->lengths = plan.lengths;
  self->memory = arrays;
  return static_cast<int64_t>(self->used.size());
}

Plan sealed_plan(const std::shared_ptr<Sealed>& self) {
  std::vector<Array> lengths = self->lengths;
  const auto [plan, batch] = [&] {
    const ReleasedGil released;
    const std::shared_lock<std::shared_mutex> lock(self->mutex);
    if (!self->batch) throw Error(ErrorCode::kStalePlan, "nothing has been sealed");
    return std::pair(self->sealed.plan(), copy_of(*self->batch));
  }();
  return {plan, self, copy_of(batch), std::move(lengths)};
}

void check(const Plan& plan, nb::handle handed, nb::handle stream) {
  const Device device = plan.buffer->op.context().device();
  const std::vector<Array> arrays = {borrow_schedule(device, handed, "handed", Access::kRead)};
  const std::span<const int32_t> given(static_cast<const int32_t*>(arrays[0].data), arrays[0].memory.size());
  const Stream queue = to_stream(stream, device, {&arrays});
  const Sealed* const sealed = is_sealed(plan.plan) ? static_cast<const Sealed*>(plan.buffer.get()) : nullptr;
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
  if (sealed == nullptr || device.type != DeviceType::kCpu) {
    check_sealed(plan.plan, given, queue);
    return;
  }
  check_sealed(plan.plan, sealed->used);
  if (given.data() != sealed->handed || given.size() != sealed->used.size()) {
    refuse("handed is not the memory that the plan was sealed into, whole");
  }
  if (!std::ranges::equal(given, sealed->used)) refuse("handed was changed after the plan had been sealed into it");
}

}  // namespace

void bind_sealed_plan(nb::module_& m) {
  nb::class_<Sealed>(m, "SealedPlan",
                     "A plan of host lengths written out as integers, for engines that hold the schedule in an "
                     "array of their own, as FlashAttention-3's scheduler_metadata.")
      .def(nb::init<const AttentionOp&>(), nb::arg("op"))
      .def_static("size", &sealed_size, nb::arg("plan"), "Integers that this plan takes sealed.")
      .def_static("max_size", &SealedPlan::max_size, nb::arg("op"),
                  "Integers that suffice for any plan of the op, which must have bounds.")
      .def(
          "seal", &seal, nb::arg("plan"), nb::arg("memory"), nb::arg("stream") = nb::none(),
          "Writes a plan of the op to memory, int32 [n], and returns how many of its entries were used. The plan's own "
          "buffer is free afterwards. On a GPU memory begins at a multiple of 256 bytes and is what run executes. "
          "Raises InvalidArgument where the plan does not fit, and where a GPU found an earlier schedule changed.")
      .def("plan", &sealed_plan, "What was sealed last, as run takes it; stale with the next seal.")
      .def(
          "report",
          [](Sealed& self) {
            const ReleasedGil released;
            const std::unique_lock<std::shared_mutex> lock(self.mutex);
            self.sealed.report();
          },
          "Raises InvalidArgument if a GPU has found a schedule changed since it was last asked.")
      .def(
          "invalidate",
          [](Sealed& self) {
            const ReleasedGil released;
            const std::unique_lock<std::shared_mutex> lock(self.mutex);
            self.sealed.invalidate();
          },
          "Makes the plan stale without sealing another.")
      .def("__repr__",
           [](const Sealed& self) { return "<folio.SealedPlan: " + std::to_string(self.used.size()) + " integers>"; });
  m.def(
      "is_sealed", [](const Plan& plan) { return is_sealed(plan.plan); }, nb::arg("plan"),
      "Whether the plan is a SealedPlan's.");
  m.def(
      "check_sealed", &check, nb::arg("plan"), nb::arg("handed"), nb::arg("stream") = nb::none(),
      "Raises InvalidArgument unless `handed` is the memory that the plan was sealed into, its used part whole and as "
      "it was then. On a GPU that is found out there: runs behind it compute nothing from a changed schedule, and the "
      "next seal raises.");
}

}  // namespace folio::python
