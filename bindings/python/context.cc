#include <nanobind/stl/vector.h>

#include "executor.hpp"
#include "fields.hpp"
#include "folio/context.hpp"
#include "gil.hpp"
#include "repr.hpp"

namespace folio::python {

void bind_context(nb::module_& m) {
  nb::class_<Context> context(
      m, "Context",
      "A device with its threads: Context.cpu() or Context.cuda(index). Immutable; safe to use from several threads at "
      "once. A forked child has none of the threads: make a new one there.");
  context.def_prop_ro("device", &Context::device, "Its folio.Device.")
      .def_prop_ro("concurrency", &Context::concurrency,
                   "Pieces of work that make progress at once: threads of a CPU, SMs of a GPU.");
  bind_repr(context);
  using O = ContextOptions;
  const auto options = fields_of<O>(
      "ContextOptions", "",
      field("num_threads", &O::num_threads,
            "a CPU's, the caller's included, at most 1024; 0: all that the process has"),
      field("force_kernel", &O::force_kernel, "the kernel that every op must use, by name; empty: the cheapest"),
      field("allow_fp8_mma", &O::allow_fp8_mma, "as PrepareOptions.allow_fp8_mma, for every op"),
      field("validate_tables", &O::validate_tables,
            "every run first checks the page ids that it will read; on a GPU it waits for that"),
      field("pinning", &O::pinning, "whether each of a CPU's own threads stays on one CPU, a ThreadPinning"));
  options.def_static<Executor>(
      context, "cpu",
      "The CPU; executor: an Executor, to compute on the engine's threads instead of num_threads of Folio's own. "
      "Raises "
      "InvalidArgument for absurd numbers of threads. Keywords:",
      [](const Executor& executor, O given) {
        given.executor = executor;
        const ReleasedGil released;
        return Context::cpu(given);
      },
      nb::arg("executor") = nb::none());
  options.def_static<int32_t>(
      context, "cuda",
      "CUDA device `index`, as the runtime counts them. Raises folio.Error: UNAVAILABLE without CUDA kernels, a driver "
      "or the device; DEVICE_ERROR where a kernel has failed before. Keywords:",
      [](int32_t index, const O& given) {
        const ReleasedGil released;
        return Context::cuda(index, given);
      },
      nb::arg("index"));
  m.def("cpu_features", &cpu_features,
        "The instruction sets that both the CPU and the OS grant this process: \"avx2\", \"amx_bf16\" and so on, "
        "sorted.");
}

}  // namespace folio::python
