#include "views.hpp"

namespace folio::python {

namespace {

void bind_attention_config(nb::module_& m) {
  const AttentionConfig standard;
  nb::class_<AttentionConfig>(m, "AttentionConfig",
                              "What an attention op is prepared for; the fields of folio::AttentionConfig.")
      .def(
          "__init__",
          [](AttentionConfig* self, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim_qk, int32_t head_dim_v,
             DType q, DType kv, DType ragged_kv, DType out, KvFormat kv_format, int32_t page_size, MaskKind mask,
             int32_t window_left, int32_t window_right, const Features& features, Determinism determinism) {
            new (self) AttentionConfig{num_q_heads, num_kv_heads, head_dim_qk,  head_dim_v, q,
                                       kv,          ragged_kv,    out,          kv_format,  page_size,
                                       mask,        window_left,  window_right, features,   determinism};
          },
          nb::kw_only(), nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim_qk"), nb::arg("head_dim_v"),
          nb::arg("q") = standard.q, nb::arg("kv") = standard.kv, nb::arg("ragged_kv").none() = standard.ragged_kv,
          nb::arg("out").none() = standard.out, nb::arg("kv_format") = standard.kv_format,
          nb::arg("page_size") = standard.page_size, nb::arg("mask") = standard.mask,
          nb::arg("window_left") = standard.window_left, nb::arg("window_right") = standard.window_right,
          nb::arg("features").none() = nb::none(), nb::arg("determinism") = standard.determinism)
      .def_rw("num_q_heads", &AttentionConfig::num_q_heads)
      .def_rw("num_kv_heads", &AttentionConfig::num_kv_heads)
      .def_rw("head_dim_qk", &AttentionConfig::head_dim_qk)
      .def_rw("head_dim_v", &AttentionConfig::head_dim_v)
      .def_rw("q", &AttentionConfig::q)
      .def_rw("kv", &AttentionConfig::kv)
      .def_rw("ragged_kv", &AttentionConfig::ragged_kv, nb::for_setter(nb::arg("ragged_kv").none()))
      .def_rw("out", &AttentionConfig::out, nb::for_setter(nb::arg("out").none()))
      .def_rw("kv_format", &AttentionConfig::kv_format)
      .def_rw("page_size", &AttentionConfig::page_size)
      .def_rw("mask", &AttentionConfig::mask)
      .def_rw("window_left", &AttentionConfig::window_left)
      .def_rw("window_right", &AttentionConfig::window_right)
      .def_prop_rw(
          "features", [](const AttentionConfig& self) { return self.features; },
          [](AttentionConfig& self, const Features& features) { self.features = features; },
          nb::for_setter(nb::arg("features").none()))
      .def_rw("determinism", &AttentionConfig::determinism);
}

void bind_options(nb::module_& m) {
  nb::class_<GraphBounds>(m, "GraphBounds", "Upper bounds of every batch of an op.")
      .def(
          "__init__",
          [](GraphBounds* self, int32_t max_requests, int32_t max_tokens, int32_t max_q_len, int32_t max_kv_len,
             int32_t max_shared_levels) {
            new (self) GraphBounds{max_requests, max_tokens, max_q_len, max_kv_len, max_shared_levels};
          },
          nb::kw_only(), nb::arg("max_requests"), nb::arg("max_tokens"), nb::arg("max_q_len"), nb::arg("max_kv_len"),
          nb::arg("max_shared_levels") = 0)
      .def_ro("max_requests", &GraphBounds::max_requests)
      .def_ro("max_tokens", &GraphBounds::max_tokens)
      .def_ro("max_q_len", &GraphBounds::max_q_len)
      .def_ro("max_kv_len", &GraphBounds::max_kv_len)
      .def_ro("max_shared_levels", &GraphBounds::max_shared_levels);
  nb::class_<PrepareOptions>(m, "PrepareOptions")
      .def(
          "__init__",
          [](PrepareOptions* self, std::optional<GraphBounds> bounds, std::string force_kernel, int32_t num_workers,
             bool allow_fp8_mma) {
            new (self) PrepareOptions{bounds, std::move(force_kernel), num_workers, allow_fp8_mma};
          },
          nb::kw_only(), nb::arg("bounds") = nb::none(), nb::arg("force_kernel") = "", nb::arg("num_workers") = 0,
          nb::arg("allow_fp8_mma") = false)
      .def_ro("bounds", &PrepareOptions::bounds)
      .def_ro("force_kernel", &PrepareOptions::force_kernel)
      .def_ro("num_workers", &PrepareOptions::num_workers)
      .def_ro("allow_fp8_mma", &PrepareOptions::allow_fp8_mma,
              "A permission, for speed before accuracy: fp8 may be multiplied as it is.");
  nb::class_<KvShard>(m, "KvShard", "A token-wise shard of a segment over `world` ranks.")
      .def(
          "__init__",
          [](KvShard* self, int32_t world, int32_t rank, int32_t interleave) {
            new (self) KvShard{world, rank, interleave};
          },
          nb::kw_only(), nb::arg("world") = 1, nb::arg("rank") = 0, nb::arg("interleave") = 1)
      .def_ro("world", &KvShard::world)
      .def_ro("rank", &KvShard::rank)
      .def_ro("interleave", &KvShard::interleave);
}

void bind_answers(nb::module_& m) {
  nb::class_<Device>(m, "Device", "A device: its type and, for GPUs, the CUDA ordinal.")
      .def_ro("type", &Device::type)
      .def_ro("index", &Device::index)
      .def("__repr__", [](const Device& self) { return "<folio.Device: " + describe(self) + ">"; });
  nb::class_<PlanSummary>(m, "PlanSummary", "What a plan holds.")
      .def_ro("num_workers", &PlanSummary::num_workers)
      .def_ro("num_work_tiles", &PlanSummary::num_work_tiles)
      .def_ro("num_partial_rows", &PlanSummary::num_partial_rows)
      .def_ro("num_combine_tiles", &PlanSummary::num_combine_tiles)
      .def_ro("kv_tokens_read", &PlanSummary::kv_tokens_read)
      .def_ro("qk_pairs", &PlanSummary::qk_pairs);
  nb::class_<KvFormatAdvice>(m, "KvFormatAdvice", "What an engine should allocate.")
      .def_ro("format", &KvFormatAdvice::format)
      .def_ro("page_size", &KvFormatAdvice::page_size);
  nb::class_<KernelAnswer>(m, "KernelAnswer", "One kernel's answer to a configuration.")
      .def_ro("name", &KernelAnswer::name)
      .def_ro("available", &KernelAnswer::available, "This machine can run it.")
      .def_ro("refusal", &KernelAnswer::refusal, "Why it cannot take the configuration; empty: it can.")
      .def("__repr__", [](const KernelAnswer& self) {
        return "<folio.KernelAnswer: " + self.name + ": " + (self.refusal.empty() ? "can" : self.refusal) + ">";
      });
}

}  // namespace

void bind_config(nb::module_& m) {
  bind_attention_config(m);
  bind_options(m);
  bind_answers(m);
}

}  // namespace folio::python
