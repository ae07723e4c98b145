#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_names.hpp"
#include "fields.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"
#include "gil.hpp"

namespace folio::python {
namespace wrappers {
namespace {

using Options = bk::WrapperPlanOptions;

/// WrapperPages, with its arrays.
struct Pages {
  Numbers<int32_t> indptr, indices, last_page_len;

  bk::WrapperPages view() const {
    return {indptr.view(), indices.view(), last_page_len.view(), indices.on_device() ? Where::kDevice : Where::kHost};
  }
};

Pages make_pages(nb::handle indptr, nb::handle indices, nb::handle last_page_len) {
  Pages pages{int32_numbers(indptr, "indptr"), int32_numbers(indices, "indices"),
              int32_numbers(last_page_len, "last_page_len")};
  for (const auto& [name, numbers] : {std::pair("indptr", &pages.indptr), {"last_page_len", &pages.last_page_len}}) {
    if (numbers->on_device()) refuse(std::string(name) + " lies on a GPU; plan reads it on the host");
  }
  return pages;
}

/// A custom mask, as bools or packed.
struct Mask {
  Numbers<uint8_t> bools, packed;
  bk::WrapperMask view() const { return {bools.view(), packed.view()}; }
};

Mask to_mask(nb::handle custom_mask, nb::handle packed_custom_mask) {
  Mask mask{flag_numbers(custom_mask, "custom_mask"), flag_numbers(packed_custom_mask, "packed_custom_mask")};
  if (mask.bools.on_device() || mask.packed.on_device())
    refuse("the custom mask lies on a GPU; plan reads it on the host");
  return mask;
}

/// A wrapper, with what its present plan was made for. One call at a time.
template <typename Wrapper>
struct Planned {
  template <typename... Arguments>
  explicit Planned(const Context& given, Arguments... arguments) : context(given), wrapper(given, arguments...) {}

  Context context;
  Wrapper wrapper;
  Options options;
  int32_t smallest_page = 0, largest_page = -1;
  int64_t ragged_tokens = 0;
  std::vector<Array> arrays;  ///< page ids on a GPU
  std::mutex mutex;

  void planned(const Options& made_for, std::initializer_list<const Pages*> all) {
    options = made_for;
    smallest_page = 0;
    largest_page = -1;
    arrays.clear();
    for (const Pages* pages : all) note(*pages);
  }

  void note(const Pages& pages) {
    if (pages.indices.on_device()) {
      arrays.push_back(*pages.indices.array());
      return;
    }
    const std::span<const int32_t> indptr = pages.indptr.view();
    const std::span<const int32_t> ids = pages.indices.view();
    const size_t begin = indptr.empty() ? 0 : static_cast<size_t>(std::max(indptr.front(), 0));
    const size_t end = indptr.empty() ? 0 : std::min(ids.size(), static_cast<size_t>(std::max(indptr.back(), 0)));
    for (size_t i = begin; i < end; ++i) {
      smallest_page = std::min(smallest_page, ids[i]);
      largest_page = std::max(largest_page, ids[i]);
    }
  }

  /// Throws Error(kInvalidArgument) where the plan's pages are none of the cache's.
  void require_pages(int64_t num_pages) const {
    if (smallest_page >= 0 && largest_page < num_pages) return;
    refuse("the plan's page indices are from " + std::to_string(smallest_page) + " to " + std::to_string(largest_page) +
           "; paged_kv_cache has " + std::to_string(num_pages) + " pages");
  }
};

void require_indices_on(const Device& device, const Pages& pages) {
  if (pages.indices.on_device()) python::require_on(device, *pages.indices.array());
}

struct RunArguments {
  nb::handle q, out, lse, sinks;
  float q_scale, k_scale, v_scale;
};

/// What a run takes, held until it has returned.
struct Run {
  ConstTensorView q, k, v;
  TensorView out;
  bk::WrapperRunArgs args;
  nb::object output;
  std::vector<Array> arrays;

  TensorView keep(Tensor tensor) {
    arrays.push_back(std::move(tensor.array));
    return tensor.view;
  }
};

nb::object output_like(nb::handle q, const Options& options, int64_t tokens) {
  if (options.o_data_type != DType::kUnset && options.o_data_type != options.q_data_type) {
    refuse("out must be given where o_data_type is not q_data_type");
  }
  const int32_t width = options.head_dim_vo > 0 ? options.head_dim_vo : options.head_dim_qk;
  const nb::tuple shape = nb::make_tuple(tokens, options.num_qo_heads, width);
  if (nb::hasattr(q, "new_empty")) return q.attr("new_empty")(shape);
  return nb::module_::import_("numpy").attr("empty")(shape, nb::getattr(q, "dtype", nb::none()));
}

Run make_run(const Options& options, const RunArguments& given) {
  Run run;
  run.q = run.keep(to_stored_tensor(given.q, options.q_data_type, "q", Access::kRead));
  const int64_t tokens = run.q.rank > 0 ? run.q.shape[0] : 0;
  run.output = given.out.is_none() ? output_like(given.q, options, tokens) : nb::borrow(given.out);
  const DType o = options.o_data_type != DType::kUnset ? options.o_data_type : options.q_data_type;
  run.out = run.keep(to_stored_tensor(run.output, o, "out", Access::kWrite));
  run.args.q_scale = given.q_scale;
  run.args.k_scale = given.k_scale;
  run.args.v_scale = given.v_scale;
  if (!given.sinks.is_none()) {
    Array sinks = borrow_float32(given.sinks, "sinks");
    if (sinks.size(0) != options.num_qo_heads) {
      refuse("sinks has " + std::to_string(sinks.size(0)) + " entries; there are " +
             std::to_string(options.num_qo_heads) + " q heads");
    }
    run.args.sinks = static_cast<const float*>(sinks.data);
    run.arrays.push_back(std::move(sinks));
  }
  if (!given.lse.is_none()) {
    Array lse = borrow(given.lse, "lse", Access::kWrite);
    const bool packed = lse.rank() == 2 && lse.size(0) == tokens && lse.size(1) == options.num_qo_heads &&
                        (lse.size(1) <= 1 || lse.stride(1) == 1) &&
                        (lse.size(0) <= 1 || lse.stride(0) == options.num_qo_heads);
    if (lse.dtype != DType::kFloat32 || !packed) {
      refuse("lse is " + element_text(lse.element) + " " + shape_text(lse) + "; it must be packed float32 [" +
             std::to_string(tokens) + ", " + std::to_string(options.num_qo_heads) + "]");
    }
    run.args.lse = static_cast<float*>(lse.data);
    run.arrays.push_back(std::move(lse));
  }
  return run;
}

/// One tensor [pages, 2, ...], or a pair of them for K and V.
bk::WrapperKvCache to_cache(nb::handle source, const Options& options, Run& run) {
  const DType stored = options.kv_data_type != DType::kUnset ? options.kv_data_type : options.q_data_type;
  if (nb::isinstance<nb::tuple>(source)) {
    if (nb::len(source) != 2) refuse_kind("paged_kv_cache", "one tensor or (k_cache, v_cache)", source);
    const TensorView k = run.keep(to_stored_tensor(source[0], stored, "k_cache", Access::kRead));
    const TensorView v = run.keep(to_stored_tensor(source[1], stored, "v_cache", Access::kRead));
    return {k, v};
  }
  const ConstTensorView whole = run.keep(to_stored_tensor(source, stored, "paged_kv_cache", Access::kRead));
  return bk::WrapperKvCache(whole);
}

template <typename Wrapper>
nb::object run_paged(Planned<Wrapper>& self, nb::handle q, nb::handle paged_kv_cache, nb::handle out, nb::handle lse,
                     float q_scale, float k_scale, float v_scale, nb::handle sinks, nb::handle stream) {
  Run run = make_run(self.options, {q, out, lse, sinks, q_scale, k_scale, v_scale});
  const bk::WrapperKvCache cache = to_cache(paged_kv_cache, self.options, run);
  python::require_on(self.context.device(), run.arrays);
  self.require_pages(cache.k.rank > 0 ? cache.k.shape[0] : 0);
  const Stream queue = to_stream(stream, self.context.device(), {&run.arrays});
  {
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(self.mutex);
    self.wrapper.run(run.q, cache, run.out, run.args, queue);
  }
  return run.output;
}

constexpr const char* kRunPaged =
    "Attention of one layer into `out`, or a new array of q's library, which is returned. q is [tokens, num_qo_heads, "
    "head_dim_qk]. paged_kv_cache is one tensor [pages, 2, ...] or (k, v), each in the layout's order. lse: packed "
    "float32 [tokens, num_qo_heads], written in base 2. Scales multiply stored values. sinks: float32 [num_qo_heads].";

template <typename Wrapper, typename... Extra>
void def_run_paged(nb::class_<Planned<Wrapper>>& type) {
  type.def("run", &run_paged<Wrapper>, nb::arg("q"), nb::arg("paged_kv_cache"), nb::arg("out") = nb::none(),
           nb::kw_only(), nb::arg("lse") = nb::none(), nb::arg("q_scale") = 1.0f, nb::arg("k_scale") = 1.0f,
           nb::arg("v_scale") = 1.0f, nb::arg("sinks") = nb::none(), nb::arg("stream") = nb::none(), kRunPaged);
}

template <typename Wrapper>
void def_answers(nb::class_<Planned<Wrapper>>& type) {
  type.def_prop_ro(
          "workspace_size", [](const Planned<Wrapper>& self) { return self.wrapper.workspace_size(); },
          "Bytes of workspace that the present plan uses.")
      .def_prop_ro("kernel_name", [](const Planned<Wrapper>& self) { return self.wrapper.kernel_name(); });
}

void bind_plans(nb::module_& m) {
  fields_of<Options>(
      "WrapperPlanOptions", "What every wrapper's plan takes besides lengths and tables.",
      required("num_qo_heads", &Options::num_qo_heads, "Query heads."),
      required("num_kv_heads", &Options::num_kv_heads, "KV heads."),
      required("head_dim_qk", &Options::head_dim_qk, "Of queries and keys."),
      field("head_dim_vo", &Options::head_dim_vo, "Of values and outputs; 0: head_dim_qk."),
      field("page_size", &Options::page_size, "Tokens of a page, of paged KV."),
      field("causal", &Options::causal, "Right-aligned: row i of q_len sees key j iff j + q_len <= kv_len + i."),
      field("pos_encoding_mode", &Options::pos_encoding_mode, "Positions that the kernel applies."),
      field("sm_scale", &Options::sm_scale, "0: 1 / sqrt(head_dim_qk)."),
      field("window_left", &Options::window_left, "Keys left of the query that it sees; -1: all."),
      field("logits_soft_cap", &Options::logits_soft_cap, "0: off."),
      field("rope_scale", &Options::rope_scale, "Divides positions; with ROPE_LLAMA."),
      field("rope_theta", &Options::rope_theta, "The angles' base."),
      field("sinks", &Options::sinks, "`run` will be given sinks."),
      field("q_data_type", &Options::q_data_type, "Of queries."),
      optional_dtype("kv_data_type", &Options::kv_data_type, "None: q_data_type."),
      optional_dtype("o_data_type", &Options::o_data_type, "None: q_data_type, bfloat16 for fp8 queries."),
      field("determinism", &Options::determinism, "In place of fixed_split_size and disable_split_kv."))
      .bind(m);
  nb::class_<Pages>(m, "WrapperPages",
                    "A batch's pages: request r has indices[indptr[r]:indptr[r + 1]], of the last one last_page_len[r] "
                    "tokens. int32; indptr and last_page_len on the host, indices there or on the wrapper's GPU.")
      .def(
          "__init__",
          [](Pages* self, nb::object indptr, nb::object indices, nb::object last_page_len) {
            new (self) Pages(make_pages(indptr, indices, last_page_len));
          },
          nb::arg("indptr"), nb::arg("indices"), nb::arg("last_page_len"));
}

void bind_prefill(nb::module_& m) {
  using Paged = Planned<bk::BatchPrefillWithPagedKVCacheWrapper>;
  nb::class_<Paged> paged(m, "BatchPrefillWithPagedKVCacheWrapper", "FlashInfer's wrapper of that name.");
  paged
      .def(
          "__init__",
          [](Paged* self, bk::KvCacheLayout kv_layout, const std::optional<Context>& context) {
            new (self) Paged(context_or_default(context), kv_layout);
          },
          nb::arg("kv_layout") = bk::KvCacheLayout::kNhd, nb::kw_only(), nb::arg("context") = nb::none())
      .def(
          "plan",
          [](Paged& self, nb::object qo_indptr, const Pages& pages, const Options& options, nb::object custom_mask,
             nb::object packed_custom_mask, nb::object stream) {
            const Numbers<int32_t> starts = int32_numbers(qo_indptr, "qo_indptr");
            if (starts.on_device()) refuse("qo_indptr lies on a GPU; plan reads it on the host");
            require_indices_on(self.context.device(), pages);
            const Mask mask = to_mask(custom_mask, packed_custom_mask);
            const Stream queue = to_stream(stream, self.context.device(), {&self.arrays});
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.mutex);
              self.wrapper.plan(starts.view(), pages.view(), options, mask.view(), queue);
            }
            self.planned(options, {&pages});
          },
          nb::arg("qo_indptr"), nb::arg("pages"), nb::arg("options"), nb::arg("custom_mask") = nb::none(),
          nb::arg("packed_custom_mask") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Plans a step. qo_indptr [R + 1], from 0. A custom mask replaces causal: one bool for every (row, key) of "
          "request after request, or the same packed, every request from a byte of its own.");
  def_run_paged(paged);
  def_answers(paged);
  using Ragged = Planned<bk::BatchPrefillWithRaggedKVCacheWrapper>;
  nb::class_<Ragged> ragged(m, "BatchPrefillWithRaggedKVCacheWrapper", "FlashInfer's wrapper of that name.");
  ragged
      .def(
          "__init__",
          [](Ragged* self, const std::optional<Context>& context) { new (self) Ragged(context_or_default(context)); },
          nb::kw_only(), nb::arg("context") = nb::none())
      .def(
          "plan",
          [](Ragged& self, nb::object qo_indptr, nb::object kv_indptr, const Options& options, nb::object custom_mask,
             nb::object packed_custom_mask, nb::object stream) {
            const Numbers<int32_t> starts = int32_numbers(qo_indptr, "qo_indptr");
            const Numbers<int32_t> keys = int32_numbers(kv_indptr, "kv_indptr");
            if (starts.on_device() || keys.on_device()) refuse("qo_indptr and kv_indptr are read on the host");
            const Mask mask = to_mask(custom_mask, packed_custom_mask);
            const Stream queue = to_stream(stream, self.context.device(), {});
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.mutex);
              self.wrapper.plan(starts.view(), keys.view(), options, mask.view(), queue);
            }
            self.planned(options, {});
            self.ragged_tokens = keys.view().back();
          },
          nb::arg("qo_indptr"), nb::arg("kv_indptr"), nb::arg("options"), nb::arg("custom_mask") = nb::none(),
          nb::arg("packed_custom_mask") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Plans a step. kv_indptr [R + 1]: tokens of k and v.")
      .def(
          "run",
          [](Ragged& self, nb::object q, nb::object k, nb::object v, nb::object out, nb::object lse, float q_scale,
             float k_scale, float v_scale, nb::object sinks, nb::object stream) {
            Run run = make_run(self.options, {q, out, lse, sinks, q_scale, k_scale, v_scale});
            const DType stored =
                self.options.kv_data_type != DType::kUnset ? self.options.kv_data_type : self.options.q_data_type;
            run.k = run.keep(to_stored_tensor(k, stored, "k", Access::kRead));
            run.v = run.keep(to_stored_tensor(v, stored, "v", Access::kRead));
            for (const auto& [name, tensor] : {std::pair("k", &run.k), {"v", &run.v}}) {
              if (tensor->rank == 3 && tensor->shape[0] >= self.ragged_tokens) continue;
              refuse(std::string(name) + " must be [tokens, num_kv_heads, head_dim] with at least " +
                     std::to_string(self.ragged_tokens) + " tokens");
            }
            python::require_on(self.context.device(), run.arrays);
            const Stream queue = to_stream(stream, self.context.device(), {&run.arrays});
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.mutex);
              self.wrapper.run(run.q, run.k, run.v, run.out, run.args, queue);
            }
            return run.output;
          },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out") = nb::none(), nb::kw_only(),
          nb::arg("lse") = nb::none(), nb::arg("q_scale") = 1.0f, nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f,
          nb::arg("sinks") = nb::none(), nb::arg("stream") = nb::none(),
          "As the paged wrapper's, with k [tokens, num_kv_heads, head_dim_qk] and v [tokens, num_kv_heads, "
          "head_dim_vo].");
  def_answers(ragged);
}

void bind_decode(nb::module_& m) {
  using Decode = Planned<bk::BatchDecodeWithPagedKVCacheWrapper>;
  nb::class_<Decode> decode(m, "BatchDecodeWithPagedKVCacheWrapper",
                            "FlashInfer's wrapper of that name: every request has q_len_per_req queries, the last of "
                            "its tokens. With fixed_batch_size and max_num_pages it is the form for graphs.");
  decode
      .def(
          "__init__",
          [](Decode* self, bk::KvCacheLayout kv_layout, std::optional<int32_t> fixed_batch_size,
             std::optional<int64_t> max_num_pages, const std::optional<Context>& context) {
            if (fixed_batch_size.has_value() != max_num_pages.has_value()) {
              refuse("fixed_batch_size and max_num_pages are both given, or both left out");
            }
            if (fixed_batch_size) {
              new (self) Decode(context_or_default(context), kv_layout, *fixed_batch_size, *max_num_pages);
            } else {
              new (self) Decode(context_or_default(context), kv_layout);
            }
          },
          nb::arg("kv_layout") = bk::KvCacheLayout::kNhd, nb::kw_only(), nb::arg("fixed_batch_size") = nb::none(),
          nb::arg("max_num_pages") = nb::none(), nb::arg("context") = nb::none())
      .def_prop_ro("is_cuda_graph_enabled", [](const Decode& self) { return self.wrapper.is_cuda_graph_enabled(); })
      .def_prop_ro("fixed_batch_size", [](const Decode& self) { return self.wrapper.fixed_batch_size(); })
      .def(
          "plan",
          [](Decode& self, const Pages& pages, const Options& options, int32_t q_len_per_req, nb::object stream) {
            require_indices_on(self.context.device(), pages);
            const Stream queue = to_stream(stream, self.context.device(), {&self.arrays});
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.mutex);
              self.wrapper.plan(pages.view(), options, q_len_per_req, queue);
            }
            self.planned(options, {&pages});
          },
          nb::arg("pages"), nb::arg("options"), nb::arg("q_len_per_req") = 1, nb::kw_only(),
          nb::arg("stream") = nb::none(), "Plans a step.");
  def_run_paged(decode);
  def_answers(decode);
  m.def(
      "fast_plan_decode",
      [](Decode& wrapper, const Pages& pages, const Options& options, nb::object stream) {
        require_indices_on(wrapper.context.device(), pages);
        const Stream queue = to_stream(stream, wrapper.context.device(), {&wrapper.arrays});
        {
          const ReleasedGil released;
          const std::lock_guard<std::mutex> lock(wrapper.mutex);
          bk::fast_plan_decode(wrapper.wrapper, pages.view(), options, queue);
        }
        wrapper.planned(options, {&pages});
      },
      nb::arg("wrapper"), nb::arg("pages"), nb::arg("options"), nb::kw_only(), nb::arg("stream") = nb::none(),
      "`plan` of a decode wrapper in a step's hot path: from the second call of a graph wrapper on its shape is "
      "fixed.");
}

void bind_cascade(nb::module_& m) {
  using Cascade = Planned<bk::MultiLevelCascadeAttentionWrapper>;
  nb::class_<Cascade> cascade(m, "MultiLevelCascadeAttentionWrapper",
                              "FlashInfer's wrapper of that name: level 0 is shared by most queries, the last level is "
                              "each request's own.");
  cascade
      .def(
          "__init__",
          [](Cascade* self, int32_t num_levels, bk::KvCacheLayout kv_layout, const std::optional<Context>& context) {
            new (self) Cascade(context_or_default(context), num_levels, kv_layout);
          },
          nb::arg("num_levels"), nb::arg("kv_layout") = bk::KvCacheLayout::kNhd, nb::kw_only(),
          nb::arg("context") = nb::none())
      .def(
          "plan",
          [](Cascade& self, const nb::sequence& qo_indptr_arr, const nb::sequence& pages_arr, const Options& options,
             nb::object stream) {
            std::vector<Numbers<int32_t>> starts;
            for (const nb::handle level : qo_indptr_arr) {
              starts.push_back(int32_numbers(level, "qo_indptr_arr[" + std::to_string(starts.size()) + "]"));
              if (starts.back().on_device()) refuse("qo_indptr_arr is read on the host");
            }
            std::vector<Pages> pages;
            for (const nb::handle level : pages_arr) {
              const Pages* one = nullptr;
              if (!nb::try_cast(level, one, false) || one == nullptr) refuse_kind("pages_arr", "WrapperPages", level);
              require_indices_on(self.context.device(), *one);
              pages.push_back(*one);
            }
            std::vector<std::span<const int32_t>> spans;
            for (const auto& level : starts) spans.push_back(level.view());
            std::vector<bk::WrapperPages> views;
            for (const Pages& level : pages) views.push_back(level.view());
            const Stream queue = to_stream(stream, self.context.device(), {&self.arrays});
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.mutex);
              self.wrapper.plan(spans, views, options, queue);
            }
            self.planned(options, {});
            for (const Pages& level : pages) self.note(level);
          },
          nb::arg("qo_indptr_arr"), nb::arg("pages_arr"), nb::arg("options"), nb::kw_only(),
          nb::arg("stream") = nb::none(),
          "Plans a step. qo_indptr_arr[l]: which tokens share each row of level l; pages_arr[l]: those rows' pages.");
  def_run_paged(cascade);
  def_answers(cascade);
}

}  // namespace
}  // namespace wrappers

void bind_flashinfer_wrappers(nb::module_& m) {
  bind_enum<bk::PosEncodingMode>(m);
  wrappers::bind_plans(m);
  wrappers::bind_prefill(m);
  wrappers::bind_decode(m);
  wrappers::bind_cascade(m);
}

}  // namespace folio::python
