#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "executor.hpp"
#include "folio/reference.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"
#include "plan.hpp"

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

using HostArray = nb::ndarray<nb::numpy, double>;

HostArray to_numpy(std::vector<double>&& values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<double>(std::move(values));
  const nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<double>*>(memory); });
  return HostArray(kept->data(), shape, owner);
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

ContextOptions context_options(int32_t num_threads, const std::string& force_kernel, bool allow_fp8_mma,
                               bool validate_tables) {
  ContextOptions options;
  options.num_threads = num_threads;
  options.force_kernel = force_kernel;
  options.allow_fp8_mma = allow_fp8_mma;
  options.validate_tables = validate_tables;
  return options;
}

void bind_handles(nb::module_& m) {
  nb::class_<Context>(m, "Context", "A device with its threads. Immutable; safe to use from several threads at once.")
      .def_static(
          "cpu",
          [](const Executor& executor, int32_t num_threads, const std::string& force_kernel, bool allow_fp8_mma,
             bool validate_tables) {
            ContextOptions options = context_options(num_threads, force_kernel, allow_fp8_mma, validate_tables);
            options.executor = executor;
            const ReleasedGil released;
            return Context::cpu(options);
          },
          nb::kw_only(), nb::arg("executor").none() = nb::none(), nb::arg("num_threads") = 0,
          nb::arg("force_kernel") = "", nb::arg("allow_fp8_mma") = false, nb::arg("validate_tables") = false,
          "executor: an Executor, to run on the engine's threads; without one, a pool of num_threads.")
      .def_static(
          "cuda",
          [](int32_t index, int32_t num_threads, const std::string& force_kernel, bool allow_fp8_mma,
             bool validate_tables) {
            const ReleasedGil released;
            return Context::cuda(index, context_options(num_threads, force_kernel, allow_fp8_mma, validate_tables));
          },
          nb::arg("index"), nb::kw_only(), nb::arg("num_threads") = 0, nb::arg("force_kernel") = "",
          nb::arg("allow_fp8_mma") = false, nb::arg("validate_tables") = false,
          "validate_tables: every run first checks, on the device, the page ids that it will read, and waits for that.")
      .def_prop_ro("device", &Context::device)
      .def_prop_ro("concurrency", &Context::concurrency);
  nb::class_<AttentionOp>(m, "AttentionOp", "A kernel chosen for a configuration; made by prepare.")
      .def_prop_ro("config", [](const AttentionOp& op) { return AttentionConfig(op.config()); })
      .def_prop_ro("kernel_name", &AttentionOp::kernel_name)
      .def_prop_ro("fp8_mma", &AttentionOp::fp8_mma, "Whether fp8 is multiplied as it is.")
      .def_prop_ro("context", [](const AttentionOp& op) { return Context(op.context()); })
      .def(
          "__eq__",
          [](const AttentionOp& op, const nb::object& other) {
            const AttentionOp* second = nullptr;
            return nb::try_cast(other, second, false) && second != nullptr &&
                   op.shared_state() == second->shared_state();
          },
          nb::arg("other").none(), "Whether both are of one call of prepare.")
      .def("__hash__", [](const AttentionOp& op) { return reinterpret_cast<intptr_t>(op.shared_state().get()) >> 4; });
  nb::class_<Buffer>(m, "PlanBuffer", "Memory that plans are made into: one per op and plan in flight.");
  nb::class_<Plan>(m, "AttentionPlan", "One step's work, valid until its buffer is planned into again.")
      .def_prop_ro("num_requests", [](const Plan& plan) { return plan.batch.view().num_requests; })
      .def_prop_ro("num_tokens", [](const Plan& plan) { return plan.batch.view().num_tokens; });
  nb::class_<Scratch>(m, "Workspace",
                      "Scratch memory of run, 256-byte aligned: a number of bytes allocates it on the host; a uint8 "
                      "array is borrowed. Runs that may overlap need one each.")
      .def(
          "__init__", [](Scratch* self, size_t bytes) { new (self) Scratch(make_scratch(bytes)); }, nb::arg("bytes"))
      .def(
          "__init__", [](Scratch* self, nb::object memory) { new (self) Scratch(borrow_scratch(memory)); },
          nb::arg("memory"))
      .def_prop_ro("bytes", [](const Scratch& self) { return self.view.bytes; });
}

void bind_choice(nb::module_& m) {
  m.def(
      "prepare",
      [](const Context& context, const AttentionConfig& config, const PrepareOptions& options) {
        return prepare(context, config, options);
      },
      nb::arg("context"), nb::arg("config"), nb::arg("options") = PrepareOptions{},
      "Picks the kernel for a configuration. Slow; once per group of layers.");
  m.def("explain", &explain, nb::arg("context"), nb::arg("config"),
        "Every kernel, in order of preference, and what it says to the configuration.");
  m.def("recommended_kv_format", &recommended_kv_format, nb::arg("config"), nb::arg("context"),
        "The KV format and page size that run fastest here.");
  m.def("cpu_features", &cpu_features, "The instruction sets that both the CPU and the OS grant this process.");
}

}  // namespace

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
      "make_plan_buffer", [](const AttentionOp& op) { return std::make_shared<Buffer>(op); }, nb::arg("op"));
  m.def("plan", &make_plan, nb::arg("op"), nb::arg("batch"), nb::arg("buffer"), nb::arg("stream") = nb::none(),
        "Plans one step; reads lengths only. Plans made into the buffer before become stale. On a GPU a plan and its "
        "runs belong to one stream: see current_stream for the one that is left out.");
  m.def(
      "check_plans",
      [](Buffer& buffer) {
        const ReleasedGil released;
        const std::unique_lock<std::shared_mutex> lock(buffer.mutex);
        check_plans(buffer.buffer);
      },
      nb::arg("buffer"),
      "Raises InvalidArgument if a plan of device lengths met a request that it could not plan: wrong lengths, or "
      "beyond "
      "the op's bounds. Its results are zeros. The error names the request and is raised once; the next plan raises it "
      "too. Waits for nothing: it knows what the GPU has done so far, so synchronise first to know about a replay. On "
      "a "
      "CPU there is nothing to report.");
  m.def(
      "summary", [](const Plan& plan) { return with_plan(plan, [](const AttentionPlan& p) { return summary(p); }); },
      nb::arg("plan"));
  m.def(
      "workspace_size", [](const AttentionOp& op) { return workspace_size(op); }, nb::arg("op"),
      "Bytes that suffice for every plan of this op without shared segments; with bounds, for every plan within them.");
  m.def(
      "workspace_size",
      [](const Plan& plan) { return with_plan(plan, [](const AttentionPlan& p) { return workspace_size(p); }); },
      nb::arg("plan"));
  m.def(
      "init_workspace",
      [](const AttentionOp& op, const Scratch& workspace, nb::object stream) {
        require_on(op.context().device(), workspace);
        init_workspace(op, workspace.view, to_stream(stream, op.context().device(), {&workspace.arrays}));
      },
      nb::arg("op"), nb::arg("workspace"), nb::arg("stream") = nb::none(),
      "To be called once on fresh workspace memory.");
  m.def(
      "run", &run_plan, nb::arg("plan"), nb::arg("args"), nb::arg("workspace"), nb::arg("stream") = nb::none(),
      "Attention of one layer, into args.out. On a CPU page ids are checked too, and the ids that were checked are "
      "used, whatever other threads write meanwhile. On a GPU tables and offsets (ragged.indptr) are trusted, and the "
      "arrays must stay as they are until the stream has passed; a stream left out is current_stream's.");
  m.def("validate", &validate_run, nb::arg("plan"), nb::arg("args"),
        "Checks every page id that run would read, and that tables and offsets are long enough. On a GPU it copies the "
        "tables to the host and waits; plans of device lengths are refused.");
  m.def("reference_attention", &reference_attention, nb::arg("config"), nb::arg("batch"), nb::arg("args"),
        "The float64 oracle: (out [tokens, q heads, head_dim_v], lse [tokens, q heads] in base e) as numpy arrays; 0 "
        "and -inf for padding. For checking results; slow. Takes what prepare and run take.");
}

}  // namespace folio::python
