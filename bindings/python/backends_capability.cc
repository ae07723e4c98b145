#include <string>

#include "backends.hpp"
#include "backends_names.hpp"
#include "fields.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/backends/flashinfer.hpp"
#include "folio/backends/selection.hpp"

namespace folio::python {
namespace {

template <typename Element>
std::vector<Element> listed(std::span<const Element> values) {
  return {values.begin(), values.end()};
}

void bind_devices(nb::module_& m) {
  bind_enum<bk::Platform>(m);
  bind_enum<bk::GraphSupport>(m);
  bind_enum<bk::KvCacheLayoutSource>(m);
  nb::class_<bk::DeviceCapability>(m, "DeviceCapability", "A GPU's compute capability; 9.0 is a Hopper.")
      .def(
          "__init__",
          [](bk::DeviceCapability* self, int32_t major, int32_t minor) {
            new (self) bk::DeviceCapability{major, minor};
          },
          nb::arg("major"), nb::arg("minor") = 0)
      .def_ro("major", &bk::DeviceCapability::major)
      .def_ro("minor", &bk::DeviceCapability::minor)
      .def("to_int", &bk::DeviceCapability::to_int, "90 for 9.0, 103 for 10.3.")
      .def("is_family", &bk::DeviceCapability::is_family, nb::arg("family"),
           "Whether it has the major number that `family` (90, 100, ...) begins with.")
      .def("__eq__", [](const bk::DeviceCapability& a, const bk::DeviceCapability& b) { return a == b; })
      .def("__lt__", [](const bk::DeviceCapability& a, const bk::DeviceCapability& b) { return a < b; })
      .def("__le__", [](const bk::DeviceCapability& a, const bk::DeviceCapability& b) { return a <= b; })
      .def("__hash__", [](const bk::DeviceCapability& self) { return self.major * 1000 + self.minor; })
      .def("__getstate__", [](const bk::DeviceCapability& self) { return nb::make_tuple(self.major, self.minor); })
      .def("__setstate__",
           [](bk::DeviceCapability* self, const std::pair<int32_t, int32_t>& state) {
             new (self) bk::DeviceCapability{state.first, state.second};
           })
      .def("__repr__", [](const bk::DeviceCapability& self) {
        return "DeviceCapability(" + std::to_string(self.major) + ", " + std::to_string(self.minor) + ")";
      });
  fields_of<bk::ComputeDevice>(
      "ComputeDevice",
      "The device that attention is to run on, as a fact that the caller states: nothing looks at the machine.",
      field("platform", &bk::ComputeDevice::platform, "Where it is."),
      field("capability", &bk::ComputeDevice::capability, "None where the platform has no such number."))
      .bind(m);
}

void bind_facts(nb::module_& m) {
  fields_of<bk::FlashAttentionPlatform>(
      "FlashAttentionPlatform", "What decides which FlashAttention an engine of a profile would run.",
      field("device", &bk::FlashAttentionPlatform::device, "Where attention is to run."),
      field("flash_attn_version", &bk::FlashAttentionPlatform::flash_attn_version,
            "The configuration's choice; None: the device's default."),
      field("has_version_2", &bk::FlashAttentionPlatform::has_version_2, "Whether the engine was built with it."),
      field("has_version_3", &bk::FlashAttentionPlatform::has_version_3, "Likewise."),
      field("has_version_4", &bk::FlashAttentionPlatform::has_version_4, "Likewise."))
      .bind(m);
  fields_of<bk::FlashAttentionFacts>(
      "FlashAttentionFacts", "What the FlashAttention backend's answers depend on.",
      field("profile", &bk::FlashAttentionFacts::profile, "Whose answers are wanted."),
      field("platform", &bk::FlashAttentionFacts::platform, "Where it is."),
      field("is_varlen_func_available", &bk::FlashAttentionFacts::is_varlen_func_available, "As vLLM finds it."),
      field("is_hybrid_model", &bk::FlashAttentionFacts::is_hybrid_model,
            "Attention layers and state-space layers share pages."),
      field("mamba_cache_dtype", &bk::FlashAttentionFacts::mamba_cache_dtype, "Of state-space layers."),
      field("mamba_ssm_cache_dtype", &bk::FlashAttentionFacts::mamba_ssm_cache_dtype, "Likewise."))
      .bind(m);
  fields_of<bk::FlashInferFacts>(
      "FlashInferFacts", "What the FlashInfer backend's answers depend on.",
      field("profile", &bk::FlashInferFacts::profile, "Whose answers are wanted."),
      field("device", &bk::FlashInferFacts::device, "Where attention is to run."),
      field("supports_block_table_kernels", &bk::FlashInferFacts::supports_block_table_kernels,
            "What supports_trtllm_attention answers."),
      field("use_block_table_kernels", &bk::FlashInferFacts::use_block_table_kernels, "Forced on or off."))
      .bind(m);
  fields_of<bk::FlashAttentionOptions>(
      "FlashAttentionOptions", "How FlashAttentionMetadataBuilder plans.",
      field("facts", &bk::FlashAttentionOptions::facts, "What the backend answers by."),
      field("quantize_query", &bk::FlashAttentionOptions::quantize_query,
            "Queries come as fp8 e4m3 with a q scale; needs an e4m3 cache."),
      field("output_dtype", &bk::FlashAttentionOptions::output_dtype,
            "fp8 or float4_e2m1fn_x2 (NVFP4): outputs are quantised in the kernel. None: the model's dtype."),
      field("aot_schedule", &bk::FlashAttentionOptions::aot_schedule,
            "Whether schedules are made ahead of time and handed out. None: as the profile has it."),
      field("max_num_splits_for_graphs", &bk::FlashAttentionOptions::max_num_splits_for_graphs,
            "Most KV splits of a query under DecodeGraphMode.FULL."),
      field("steps_in_flight", &bk::FlashAttentionOptions::steps_in_flight,
            "Steps whose metadata is valid at a time; >= 1."),
      field("force_kernel", &bk::FlashAttentionOptions::force_kernel, "A kernel by name; empty: the best."),
      field("plan_from_device_lengths", &bk::FlashAttentionOptions::plan_from_device_lengths,
            "On a GPU: build plans on the device and may be captured."),
      field("cascade", &bk::FlashAttentionOptions::cascade, "Who decides what shared prefixes are."),
      field("max_cascade_levels", &bk::FlashAttentionOptions::max_cascade_levels,
            "CascadeMode.AUTO: most shared prefixes inside each other."))
      .bind(m);
}

void bind_capability(nb::module_& m) {
  fields_of<bk::AttentionRequirements>(
      "AttentionRequirements", "What an engine asks of a backend for one group of layers.",
      field("head_size", &bk::AttentionRequirements::head_size, "Elements of a head."),
      field("dtype", &bk::AttentionRequirements::dtype, "The model's."),
      field("kv_cache_dtype", &bk::AttentionRequirements::kv_cache_dtype, "None: not asked."),
      field("page_size", &bk::AttentionRequirements::page_size, "Where the user chose it."),
      field("use_mla", &bk::AttentionRequirements::use_mla, "Multi-head latent attention."),
      field("has_sinks", &bk::AttentionRequirements::has_sinks, "Layers have attention sinks."),
      field("use_sparse", &bk::AttentionRequirements::use_sparse, "Sparse attention."),
      field("use_mm_prefix", &bk::AttentionRequirements::use_mm_prefix,
            "Full attention among the tokens of an image in a causal prompt."),
      field("use_per_head_quant_scales", &bk::AttentionRequirements::use_per_head_quant_scales, "Scales per head."),
      field("device", &bk::AttentionRequirements::device, "Where attention is to run."),
      field("attn_type", &bk::AttentionRequirements::attn_type, "What attention is for."),
      field("use_non_causal", &bk::AttentionRequirements::use_non_causal,
            "Non-causal attention over a paged cache in a decoder."),
      field("use_batch_invariant", &bk::AttentionRequirements::use_batch_invariant,
            "Bits may not depend on other requests."),
      field("use_kv_connector", &bk::AttentionRequirements::use_kv_connector, "Caches are moved between machines."))
      .bind(m);
  nb::class_<bk::BackendCapability>(m, "BackendCapability", "What one backend takes, as values.")
      .def_prop_ro("name", [](const bk::BackendCapability& self) { return std::string(self.name); })
      .def_prop_ro("dtypes", [](const bk::BackendCapability& self) { return listed(self.dtypes); })
      .def_prop_ro("kv_cache_dtypes",
                   [](const bk::BackendCapability& self) {
                     return std::vector<std::string>(self.kv_cache_dtypes.begin(), self.kv_cache_dtypes.end());
                   })
      .def_prop_ro("head_sizes", [](const bk::BackendCapability& self) { return listed(self.head_sizes); })
      .def_prop_ro(
          "page_sizes",
          [](const bk::BackendCapability& self) {
            std::vector<std::pair<int32_t, bool>> sizes;
            for (const bk::PageSizeRule& rule : self.page_sizes) sizes.emplace_back(rule.value, rule.multiples);
            return sizes;
          },
          "(value, whether its multiples are taken too); empty: any.")
      .def_prop_ro("attn_types", [](const bk::BackendCapability& self) { return listed(self.attn_types); })
      .def_ro("required_layout", &bk::BackendCapability::required_layout)
      .def("supports_head_size", &bk::BackendCapability::supports_head_size, nb::arg("head_size"),
           "Whether heads of that size are taken.")
      .def("supports_dtype", &bk::BackendCapability::supports_dtype, nb::arg("dtype"),
           "Whether models of that type are taken.")
      .def("supports_kv_cache_dtype", &bk::BackendCapability::supports_kv_cache_dtype, nb::arg("name").none(),
           "Whether caches of that name are taken; None: not asked.")
      .def("supports_page_size", &bk::BackendCapability::supports_page_size, nb::arg("page_size").none(),
           "Whether it is a multiple of any of the kernels' sizes.")
      .def("supports_attn_type", &bk::BackendCapability::supports_attn_type, nb::arg("attn_type"),
           "Whether layers of that kind are taken.")
      .def("supports_compute_capability", &bk::BackendCapability::supports_compute_capability, nb::arg("device"),
           "Whether the device is.")
      .def("get_preferred_page_size", &bk::BackendCapability::get_preferred_page_size, nb::arg("default_page_size"),
           "The default where it is supported, otherwise the smallest of the kernels' sizes.")
      .def("__repr__", [](const bk::BackendCapability& self) {
        return "<folio.backends.BackendCapability: " + std::string(self.name) + ">";
      });
  m.def("validate_configuration", &bk::validate_configuration, nb::arg("backend"), nb::arg("requirements"),
        "Every reason why the backend cannot serve the requirements, in vLLM's order and words; empty: it can.");
}

void bind_selection(nb::module_& m) {
  nb::class_<bk::SelectedBackend>(m, "SelectedBackend", "The backend that select_backend chose.")
      .def_ro("name", &bk::SelectedBackend::name)
      .def_ro("required_layout", &bk::SelectedBackend::required_layout)
      .def_ro("page_size", &bk::SelectedBackend::page_size)
      .def_prop_ro(
          "rejected",
          [](const bk::SelectedBackend& self) {
            std::vector<std::pair<std::string, std::vector<std::string>>> rejected;
            for (const bk::RejectedBackend& one : self.rejected) rejected.emplace_back(one.name, one.reasons);
            return rejected;
          },
          "(name, reasons) of those tried before it.")
      .def("__repr__",
           [](const bk::SelectedBackend& self) { return "<folio.backends.SelectedBackend: " + self.name + ">"; });
  m.def(
      "backend_priorities",
      [](const bk::ComputeDevice& device) {
        const auto names = bk::backend_priorities(device);
        return std::vector<std::string>(names.begin(), names.end());
      },
      nb::arg("device"), "The order in which vLLM tries its backends there.");
  m.def(
      "select_backend",
      [](const bk::AttentionRequirements& requirements, const nb::dict& candidates,
         const std::optional<std::string>& chosen) {
        std::vector<bk::BackendCandidate> given;
        for (const auto& [name, capability] : candidates) {
          bk::BackendCandidate candidate;
          candidate.name = nb::cast<std::string>(name);
          if (!capability.is_none()) candidate.capability = nb::cast<bk::BackendCapability>(capability);
          given.push_back(std::move(candidate));
        }
        return bk::select_backend(requirements, given, chosen);
      },
      nb::arg("requirements"), nb::arg("candidates"), nb::arg("chosen") = nb::none(),
      nb::sig(
          "def select_backend(requirements: AttentionRequirements, candidates: dict[str, BackendCapability | None], "
          "chosen: str | None = None) -> SelectedBackend"),
      "The first backend in order of priority that has no reason against the requirements. `candidates`: names and "
      "their capability, None for what is not installed. Raises InvalidArgument with every reason where none is left.");
  m.def(
      "resolve_kv_cache_layout",
      [](std::optional<bk::KvCacheLayout> required, std::optional<bk::KvCacheLayout> configured,
         std::optional<bk::KvCacheLayout> kv_connector) {
        const bk::ResolvedKvCacheLayout resolved = bk::resolve_kv_cache_layout({required, configured, kv_connector});
        return nb::make_tuple(resolved.layout, resolved.source, resolved.overrules_configured);
      },
      nb::kw_only(), nb::arg("required") = nb::none(), nb::arg("configured") = nb::none(),
      nb::arg("kv_connector") = nb::none(),
      nb::sig("def resolve_kv_cache_layout(*, required: KvCacheLayout | str | None = None, configured: KvCacheLayout | "
              "str | None = None, kv_connector: KvCacheLayout | str | None = None) -> tuple[KvCacheLayout, "
              "KvCacheLayoutSource, bool]"),
      "(layout, where it came from, whether the configured one is overruled): the strongest request; NHD without any.");
}

}  // namespace

void bind_backends_capability(nb::module_& m) {
  bind_devices(m);
  bind_facts(m);
  bind_capability(m);
  bind_selection(m);
  m.def(
      "get_flash_attn_version",
      [](const bk::FlashAttentionPlatform& platform, bool requires_alibi, std::optional<int32_t> head_size,
         nb::object log) { return bk::get_flash_attn_version(platform, requires_alibi, head_size, to_log(log)); },
      nb::arg("platform"), nb::arg("requires_alibi") = false, nb::arg("head_size") = nb::none(),
      nb::arg("log") = nb::none(), "The FlashAttention version that vLLM would run there; None: none.");
}

}  // namespace folio::python
