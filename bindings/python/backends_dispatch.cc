#include <nanobind/stl/function.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_names.hpp"
#include "folio/backends/dispatch.hpp"

namespace folio::python {
namespace {

template <typename Function>
std::function<Function> to_probe(nb::handle source, const char* name) {
  if (source.is_none()) return {};
  if (!nb::isinstance<nb::callable>(source)) refuse_kind(name, "a function or None", source);
  return nb::cast<std::function<Function>>(source);
}

}  // namespace

void bind_backends_dispatch(nb::module_& m) {
  using bk::DispatchFacts;
  using bk::KernelDispatch;
  bind_enum<bk::KernelFamily>(m);
  nb::class_<KernelDispatch>(
      m, "KernelDispatch",
      "Which optional kernels there are, and which a batch uses. Every family is looked up once. The native profile "
      "asks "
      "Folio's own table and takes no probes; vLLM's follow their original's rules over what the probes say: "
      "has_module(name), has_attribute(module, name), has_nvcc(), probe_artifactory(timeout_s) -> HTTP status. `log` "
      "is "
      "called with (LogLevel, text), each text once.")
      .def(
          "__init__",
          [](KernelDispatch* self, bk::BackendProfile profile, const bk::ComputeDevice& device, bool batch_invariant,
             std::optional<bool> use_block_table_kernels, bool has_flashinfer_cubin,
             bool use_flashinfer_fp8_blockscale_gemm, const nb::object& has_module, const nb::object& has_attribute,
             const nb::object& has_nvcc, const nb::object& probe_artifactory, nb::object log) {
            DispatchFacts facts;
            facts.profile = profile;
            facts.device = device;
            facts.batch_invariant = batch_invariant;
            facts.use_block_table_kernels = use_block_table_kernels;
            facts.has_flashinfer_cubin = has_flashinfer_cubin;
            facts.use_flashinfer_fp8_blockscale_gemm = use_flashinfer_fp8_blockscale_gemm;
            facts.has_module = to_probe<bool(std::string_view)>(has_module, "has_module");
            facts.has_attribute = to_probe<bool(std::string_view, std::string_view)>(has_attribute, "has_attribute");
            facts.has_nvcc = to_probe<bool()>(has_nvcc, "has_nvcc");
            facts.probe_artifactory = to_probe<int32_t(int32_t)>(probe_artifactory, "probe_artifactory");
            if (!log.is_none()) facts.log = bk::LogCallback(to_log(log));
            new (self) KernelDispatch(std::move(facts));
          },
          nb::kw_only(), nb::arg("profile") = bk::BackendProfile::kNative, nb::arg("device") = bk::ComputeDevice{},
          nb::arg("batch_invariant") = false, nb::arg("use_block_table_kernels") = nb::none(),
          nb::arg("has_flashinfer_cubin") = false, nb::arg("use_flashinfer_fp8_blockscale_gemm") = true,
          nb::arg("has_module") = nb::none(), nb::arg("has_attribute") = nb::none(), nb::arg("has_nvcc") = nb::none(),
          nb::arg("probe_artifactory") = nb::none(), nb::arg("log") = nb::none())
      .def_prop_ro("profile", &KernelDispatch::profile)
      .def_prop_ro("device", [](const KernelDispatch& self) { return bk::ComputeDevice(self.device()); })
      .def_prop_ro("batch_invariant", &KernelDispatch::batch_invariant)
      .def(
          "query",
          [](const KernelDispatch& self, bk::KernelFamily family) {
            const bk::FamilyAnswer& answer = self.query(family);
            return std::pair(answer.available, answer.reason);
          },
          nb::arg("family"), "(whether the family can be used, and if not, why).")
      .def("has_flashinfer", &KernelDispatch::has_flashinfer, "Whether the library is there.")
      .def("supports_trtllm_attention", &KernelDispatch::supports_trtllm_attention,
           "Whether kernels that take block tables are there.")
      .def("force_use_trtllm_attention", &KernelDispatch::force_use_trtllm_attention,
           "What the configuration forces; None: nothing.")
      .def("can_use_trtllm_attention", &KernelDispatch::can_use_trtllm_attention, nb::arg("num_qo_heads"),
           nb::arg("num_kv_heads"), "Supported, not forced off, and query heads a multiple of KV heads.")
      .def(
          "use_trtllm_attention",
          [](const KernelDispatch& self, int32_t num_qo_heads, int32_t num_kv_heads, int32_t num_tokens,
             int32_t max_seq_len, int32_t dcp_world_size, const std::string& kv_cache_dtype, DType q_dtype,
             bool is_prefill, std::optional<bool> force_use_trtllm, bool has_sinks, bool has_spec) {
            return self.use_trtllm_attention({num_qo_heads, num_kv_heads, num_tokens, max_seq_len, dcp_world_size,
                                              kv_cache_dtype, q_dtype, is_prefill, force_use_trtllm, has_sinks,
                                              has_spec});
          },
          nb::arg("num_qo_heads"), nb::arg("num_kv_heads"), nb::arg("num_tokens"), nb::arg("max_seq_len"),
          nb::arg("dcp_world_size") = 1, nb::arg("kv_cache_dtype") = "auto", nb::arg("q_dtype") = DType::kBFloat16,
          nb::arg("is_prefill") = false, nb::arg("force_use_trtllm") = nb::none(), nb::arg("has_sinks") = false,
          nb::arg("has_spec") = false, "Whether a batch goes to the kernels that take block tables.")
      .def("has_submodule", &KernelDispatch::has_submodule, nb::arg("module"),
           "Whether that module of the library is there.")
      .def("has_entry_point", &KernelDispatch::has_entry_point, nb::arg("module"), nb::arg("attribute"),
           "Whether the library, that module and that function of it are there.");
}

}  // namespace folio::python
