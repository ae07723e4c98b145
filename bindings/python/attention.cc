#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "folio/reference.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "masks.hpp"
#include "plan.hpp"
#include "repr.hpp"

namespace folio::python {
namespace {

Scratch borrow_scratch(nb::handle memory) {
  Scratch scratch;
  Array array = borrow(memory, "workspace", Access::kWrite);
  if (array.element != nb::dtype<uint8_t>() || array.rank() != 1 || (array.size(0) > 1 && array.stride(0) != 1)) {
    refuse("workspace must be a contiguous array of uint8");
  }
  scratch.view = {array.data, static_cast<size_t>(array.size(0))};
  scratch.arrays = {std::move(array)};
  return scratch;
}

/// Lengths may lie on the host for a GPU too; what lies on a device must lie on this one.
void require_reachable(const Device& device, const Batch& batch) {
  if (device.type == DeviceType::kCpu || batch.view.where == Where::kDevice) python::require_on(device, batch.arrays);
}

Plan make_plan(const AttentionOp& op, const Batch& batch, std::shared_ptr<Buffer> buffer, nb::handle stream) {
  const Device device = op.context().device();
  require_reachable(device, batch);
  const Stream queue = to_stream(stream, device, {&batch.arrays});
  BatchCopy copy(batch);
  const AttentionPlan plan = [&] {
    const ReleasedGil released;
    const std::unique_lock<std::shared_mutex> lock(buffer->mutex);
    return folio::plan(op, copy.view(), buffer->buffer, queue);
  }();
  std::vector<Array> lengths;
  if (device.type != DeviceType::kCpu) lengths = batch.arrays;
  return {plan, std::move(buffer), std::move(copy), std::move(lengths)};
}

/// What views without sizes cannot say: the C++ API takes these arrays by their address.
void check_extents(const AttentionConfig& config, const BatchCopy& batch, const Args& args) {
  const auto heads = int64_t{config.num_q_heads};
  const int32_t num_requests = batch.view().num_requests;
  require_offsets(batch, args);
  require_lse(args.lse, batch.view().num_tokens, heads);
  require_heads(args.alibi_slopes, heads);
  require_heads(args.sinks, heads);
  if (!args.mask_shapes.empty() && batch.view().where == Where::kHost) {
    require_equal_shapes(mask_shapes(batch.view()), args.mask_shapes, "custom_mask");
  }
  require_extent(args.q_scale, "q_scale", config.num_kv_heads, num_requests);
  require_extent(args.out_scale, "out_scale", config.num_kv_heads, num_requests);
  for (const SegmentArg& segment : args.segments) {
    require_extent(segment.k_scale, "k_scale", config.num_kv_heads, num_requests);
    require_extent(segment.v_scale, "v_scale", config.num_kv_heads, num_requests);
  }
}

void check_run(const Plan& plan, const Args& args) {
  const AttentionOp& op = plan.buffer->op;
  if (args.view.out.rank == 0) refuse("out is None; only reference_attention goes without");
  python::require_on(op.context().device(), args.arrays);
  check_extents(op.config(), plan.batch, args);
}

void run_plan(const Plan& plan, const Args& args, const Scratch& workspace, nb::handle stream) {
  check_run(plan, args);
  const Device device = plan.buffer->op.context().device();
  require_on(device, workspace);
  const Stream queue = to_stream(stream, device, {&args.arrays, &workspace.arrays});
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
  if (device.type != DeviceType::kCpu) {
    folio::run(plan.plan, args.with_segments(), workspace.view, queue);
    return;
  }
  // Next to reading the pages, copying their ids costs nothing, and a bad one must not end a Python process.
  thread_local TableCopies tables;
  const AttentionArgs& checked = tables.copy(plan.batch, plan.buffer->op.config().page_size, args);
  if (!tables.ids_are_pages()) folio::validate(plan.plan, checked);
  folio::run(plan.plan, checked, workspace.view, queue);
}

void validate_run(const Plan& plan, const Args& args) {
  check_run(plan, args);
  const AttentionOp& op = plan.buffer->op;
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
  if (op.context().device().type != DeviceType::kCpu) {
    folio::validate(plan.plan, args.with_segments());
    return;
  }
  TableCopies tables;
  folio::validate(plan.plan, tables.copy(plan.batch, op.config().page_size, args));
}

template <typename Function>
auto with_plan(const Plan& plan, Function function) {
  const ReleasedGil released;
  const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
  return function(plan.plan);
}

/// The oracle trusts its arguments, so they are first planned and checked as for `run`. Returns the checked copy, which
/// `tables` holds.
AttentionArgs check_reference(const AttentionConfig& config, const BatchCopy& copy, const Args& given,
                              TableCopies& tables) {
  ContextOptions one_thread;
  one_thread.num_threads = 1;
  const AttentionOp op = prepare(Context::cpu(one_thread), config);
  PlanBuffer buffer = make_plan_buffer(op);
  const BatchView batch = copy.view();
  const AttentionPlan plan = folio::plan(op, batch, buffer);
  const AttentionArgs& checked = tables.copy(copy, op.config().page_size, given);
  AttentionArgs args = checked;
  std::vector<std::byte> out;
  if (args.out.rank == 0) {
    const DType dtype = op.config().out;
    out.resize(static_cast<size_t>(batch.num_tokens) * static_cast<size_t>(config.num_q_heads) *
               static_cast<size_t>(config.head_dim_v) * static_cast<size_t>(size_of(dtype)));
    args.out = TensorView(out.data(), dtype, {batch.num_tokens, config.num_q_heads, config.head_dim_v});
  }
  folio::validate(plan, args);
  return checked;
}

nb::tuple reference_attention(const AttentionConfig& config, const Batch& batch, const Args& args) {
  python::require_on(Device{}, batch.arrays);
  python::require_on(Device{}, args.arrays);
  const BatchCopy copy(batch);
  check_extents(config, copy, args);
  const BatchView lengths = copy.view();
  std::vector<double> out, lse;
  {
    const ReleasedGil released;
    TableCopies tables;
    const AttentionArgs view = check_reference(config, copy, args, tables);
    const auto rows = static_cast<size_t>(lengths.num_tokens) * static_cast<size_t>(config.num_q_heads);
    const auto width = static_cast<size_t>(config.head_dim_v);
    out.assign(rows * width, 0.0);
    lse.assign(rows, -std::numeric_limits<double>::infinity());
    for (int32_t token = 0; token < lengths.cu_q[lengths.num_requests]; ++token) {
      for (int32_t head = 0; head < config.num_q_heads; ++head) {
        const size_t row =
            static_cast<size_t>(token) * static_cast<size_t>(config.num_q_heads) + static_cast<size_t>(head);
        lse[row] = verify::reference_row(config, lengths, view, token, head, {out.data() + row * width, width});
      }
    }
  }
  const auto tokens = static_cast<size_t>(lengths.num_tokens);
  const auto heads = static_cast<size_t>(config.num_q_heads);
  return nb::make_tuple(to_numpy(std::move(out), {tokens, heads, static_cast<size_t>(config.head_dim_v)}),
                        to_numpy(std::move(lse), {tokens, heads}));
}

void bind_handles(nb::module_& m) {
  nb::class_<AttentionOp> op(m, "AttentionOp", "A kernel chosen for a configuration; made by prepare. Immutable.");
  op.def_prop_ro(
        "config", [](const AttentionOp& self) { return AttentionConfig(self.config()); },
        "A copy of the configuration, with what was left to a default filled in.")
      .def_prop_ro("kernel_name", &AttentionOp::kernel_name, "The kernel's name, as force_kernel takes it.")
      .def_prop_ro("p_dtype", &AttentionOp::p_dtype,
                   "What probabilities are rounded to before they meet V; float32: not.")
      .def_prop_ro("kv_dtype", &AttentionOp::kv_dtype,
                   "What keys and values of FP8_DS_MLA are rounded to behind their scales; float32: not.")
      .def_prop_ro("fp8_mma", &AttentionOp::fp8_mma, "Whether fp8 is multiplied as it is.")
      .def_prop_ro(
          "context", [](const AttentionOp& self) { return Context(self.context()); }, "Its Context.")
      .def(
          "__eq__",
          [](const AttentionOp& op, const nb::object& other) {
            const AttentionOp* second = nullptr;
            return nb::try_cast(other, second, false) && second != nullptr &&
                   op.shared_state() == second->shared_state();
          },
          nb::arg("other").none(), "Whether both are of one call of prepare.")
      .def("__hash__", [](const AttentionOp& op) { return reinterpret_cast<intptr_t>(op.shared_state().get()) >> 4; });
  bind_repr(op);
  nb::class_<Buffer> buffer(
      m, "PlanBuffer", "Memory that plans are made into: one per op and plan in flight; made by make_plan_buffer.");
  bind_repr(buffer);
  nb::class_<Plan> plan(m, "AttentionPlan", "One step's work, valid until its buffer is planned into again.");
  plan.def_prop_ro(
          "num_requests", [](const Plan& self) { return self.batch.view().num_requests; }, "Requests of the batch.")
      .def_prop_ro(
          "num_tokens", [](const Plan& self) { return self.batch.view().num_tokens; }, "Rows of q and out.");
  bind_repr(plan);
  nb::class_<Scratch> workspace(
      m, "Workspace",
      "Scratch memory of run, 256-byte aligned: a number of bytes allocates it on the host; a uint8 array is borrowed. "
      "On a GPU it must be an array there. Runs that may overlap need one each. See workspace_size.");
  bind_repr(workspace);
  workspace
      .def(
          "__init__", [](Scratch* self, size_t bytes) { new (self) Scratch(make_scratch(bytes)); }, nb::arg("bytes"))
      .def(
          "__init__", [](Scratch* self, nb::object memory) { new (self) Scratch(borrow_scratch(memory)); },
          nb::arg("memory"))
      .def_prop_ro(
          "bytes", [](const Scratch& self) { return self.view.bytes; }, "Its size in bytes.");
}

void bind_choice(nb::module_& m) {
  m.def(
      "prepare",
      [](const Context& context, const AttentionConfig& config, const PrepareOptions& options) {
        return prepare(context, config, options);
      },
      nb::arg("context"), nb::arg("config"), nb::arg("options") = PrepareOptions{},
      "Picks the kernel for a configuration. Slow, microseconds to milliseconds; once per group of layers. Raises "
      "InvalidArgument where no configuration is like this, folio.Error (UNSUPPORTED) with every kernel's reason where "
      "none takes it.");
  m.def("explain", &explain, nb::arg("context"), nb::arg("config"), nb::arg("mix") = WorkloadMix{},
        "A KernelAnswer of every kernel for the context's device, in order of preference, on a CPU for `mix`. Raises "
        "InvalidArgument for invalid configurations and mixes.");
  m.def("recommended_kv_format", &recommended_kv_format, nb::arg("config"), nb::arg("context"),
        nb::arg("mix") = WorkloadMix{},
        "The KV format and page size that take the least time for a WorkloadMix here, a KvFormatAdvice: what an engine "
        "should allocate. Raises InvalidArgument for invalid configurations and mixes.");
}

}  // namespace

std::string text_of(const Buffer& buffer) {
  return "plans of " + python::text_of(buffer.op);
}

std::string text_of(const Plan& plan) {
  const BatchView batch = plan.batch.view();
  return count_of(batch.num_requests, "request") + ", " + count_of(batch.num_tokens, "token") + ", " +
         count_of(static_cast<int64_t>(batch.segments.size()), "segment") + ", of " + python::text_of(plan.buffer->op);
}

std::string text_of(const Scratch& scratch) {
  return count_of(static_cast<int64_t>(scratch.view.bytes), "byte") +
         (scratch.owned != nullptr ? " of its own, on the CPU" : ", on " + describe(scratch.arrays.front().place));
}

Scratch make_scratch(size_t bytes) {
  constexpr size_t kWorkspaceAlignment = 256;
  Scratch scratch;
  const size_t rounded = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  if (rounded >= bytes) {
    scratch.owned.reset(std::aligned_alloc(kWorkspaceAlignment, std::max(rounded, kWorkspaceAlignment)));
  }
  if (scratch.owned == nullptr) {
    throw Error(ErrorCode::kOutOfMemory, "no host memory for a workspace of " + std::to_string(bytes) + " bytes");
  }
  scratch.view = {scratch.owned.get(), bytes};
  return scratch;
}

void require_on(const Device& device, const Scratch& scratch) {
  if (scratch.owned != nullptr && device.type != DeviceType::kCpu) {
    refuse("workspace is host memory; the context is " + describe(device) + ": give an array that lies there");
  }
  require_on(device, scratch.arrays);
}

void bind_attention(nb::module_& m) {
  bind_handles(m);
  bind_choice(m);
  m.def(
      "make_plan_buffer", [](const AttentionOp& op) { return std::make_shared<Buffer>(op); }, nb::arg("op"),
      "Memory for plans of this op, a PlanBuffer: it holds one plan at a time.");
  m.def(
      "plan", &make_plan, nb::arg("op"), nb::arg("batch"), nb::arg("buffer"), nb::arg("stream") = nb::none(),
      "Plans one step of a BatchView into `buffer`: an AttentionPlan for all layers. Reads lengths only, O(requests). "
      "Plans made into the buffer before become stale. On a GPU a plan and its runs belong to one stream: see "
      "current_stream for the one that is left out. Raises InvalidArgument with the request's number.");
  m.def(
      "check_plans",
      [](Buffer& buffer) {
        const ReleasedGil released;
        const std::unique_lock<std::shared_mutex> lock(buffer.mutex);
        check_plans(buffer.buffer);
      },
      nb::arg("buffer"),
      "Raises InvalidArgument if a plan of device lengths met a request that it could not plan: wrong lengths, or "
      "beyond the op's bounds. Its results are zeros. The error names the request and is raised once; the next plan "
      "raises it too. Waits for nothing: it knows what the GPU has done so far, so synchronise first to know about a "
      "replay. On a CPU there is nothing to report.");
  m.def(
      "summary", [](const Plan& plan) { return with_plan(plan, [](const AttentionPlan& p) { return summary(p); }); },
      nb::arg("plan"),
      "A PlanSummary of what a plan holds. Raises folio.Error: STALE_PLAN, or UNSUPPORTED for a plan made on a GPU.");
  m.def(
      "workspace_size", [](const AttentionOp& op) { return workspace_size(op); }, nb::arg("op"),
      "Bytes that suffice for every plan of this op without shared segments; with bounds, for every plan within them.");
  m.def(
      "workspace_size",
      [](const Plan& plan) { return with_plan(plan, [](const AttentionPlan& p) { return workspace_size(p); }); },
      nb::arg("plan"), "Bytes of workspace that this plan needs.");
  m.def(
      "init_workspace",
      [](const AttentionOp& op, const Scratch& workspace, nb::object stream) {
        require_on(op.context().device(), workspace);
        init_workspace(op, workspace.view, to_stream(stream, op.context().device(), {&workspace.arrays}));
      },
      nb::arg("op"), nb::arg("workspace"), nb::arg("stream") = nb::none(),
      "To be called once on fresh workspace memory, before the first run.");
  m.def("run", &run_plan, nb::arg("plan"), nb::arg("args"), nb::arg("workspace"), nb::arg("stream") = nb::none(),
        "Attention of one layer: AttentionArgs, into their out and lse. Nothing is allocated. On a CPU page ids are "
        "checked too, and the ids that were checked are used, whatever other threads write meanwhile. On a GPU tables "
        "and offsets (ragged.indptr) are trusted, and the arrays must stay as they are until the stream has passed; a "
        "stream left out is current_stream's. Raises InvalidArgument naming the argument, folio.Error (STALE_PLAN, "
        "WORKSPACE_TOO_SMALL).");
  m.def(
      "validate", &validate_run, nb::arg("plan"), nb::arg("args"),
      "Checks every page id that run would read, and that tables and offsets are long enough. On a GPU it copies the "
      "tables to the host and waits; plans of device lengths are refused. Raises InvalidArgument naming the first bad "
      "entry.");
  m.def("reference_attention", &reference_attention, nb::arg("config"), nb::arg("batch"), nb::arg("args"),
        "The float64 oracle: (out [tokens, q heads, head_dim_v], lse [tokens, q heads] in base e) as numpy arrays; 0 "
        "and -inf for padding. For checking results; slow. Takes what prepare and run take.");
}

}  // namespace folio::python
