#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>

#include "block_scale.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"
#include "repr.hpp"
#include "step.hpp"

/// A layer's call: everything but q, out and ragged keys and values is bound before, to the layer or to the step.
namespace folio::python {
namespace {

struct Layer {
  AttentionOp op;
  Device device;
  std::vector<Cache> caches;  ///< none, one for all paged segments, or one for each
  AttentionArgs view;         ///< without q, out, LSE, segments and custom mask
  ScaleArg k_scale, v_scale, ragged_k_scale, ragged_v_scale, q_scale, out_scale;
  std::vector<Array> arrays;  ///< those that runs read, the caches' too

  const KvCacheView& cache(size_t paged_segment) const { return caches[caches.size() == 1 ? 0 : paged_segment].view; }
};

void require_cache_of(const AttentionConfig& config, const KvCacheView& cache, const std::string& name) {
  const auto agree = [&](const char* what, int64_t has, int64_t wanted) {
    if (has == wanted) return;
    refuse(name + " has " + what + " " + std::to_string(has) + "; the op was prepared for " + std::to_string(wanted));
  };
  if (cache.format != config.kv_format) refuse(name + "'s format is not the op's kv_format");
  if (cache.dtype != config.kv) {
    refuse(name + " is " + std::string(to_string(cache.dtype)) + "; the op was prepared for " +
           std::string(to_string(config.kv)));
  }
  agree("page_size", cache.page_size, config.page_size);
  agree("num_kv_heads", cache.num_kv_heads, config.num_kv_heads);
  agree("head_dim_qk", cache.head_dim_qk, config.head_dim_qk);
  agree("head_dim_v", cache.head_dim_v, config.head_dim_v);
}

/// A cache, a sequence of them, or None.
std::vector<Cache> to_caches(nb::handle source) {
  std::vector<Cache> caches;
  const Cache* one = nullptr;
  if (source.is_none()) return caches;
  if (nb::try_cast(source, one, false)) return {*one};
  if (!nb::try_cast(source, caches, false)) refuse_kind("cache", "a folio.KvCacheView, a list of them or None", source);
  return caches;
}

const float* per_head(Layer& layer, nb::handle source, const std::string& name) {
  if (source.is_none()) return nullptr;
  const std::optional<Array> values = borrow_float32(source, name);
  require_heads(values, layer.op.config().num_q_heads);
  layer.arrays.push_back(*values);
  return static_cast<const float*>(values->data);
}

ScaleArg keep_scale(Layer& layer, nb::handle source, const std::string& name) {
  ScaleArg scale = to_scale(source, name);
  require_extent(scale, name, layer.op.config().num_kv_heads, -1);
  if (scale.array) layer.arrays.push_back(*scale.array);
  return scale;
}

void require_requests(const Layer& layer, int64_t requests) {
  const int64_t heads = layer.op.config().num_kv_heads;
  require_extent(layer.k_scale, "k_scale", heads, requests);
  require_extent(layer.v_scale, "v_scale", heads, requests);
  require_extent(layer.ragged_k_scale, "ragged_k_scale", heads, requests);
  require_extent(layer.ragged_v_scale, "ragged_v_scale", heads, requests);
  require_extent(layer.q_scale, "q_scale", heads, requests);
  require_extent(layer.out_scale, "out_scale", heads, requests);
}

/// Makes [tokens, heads, dim] of [batch, queries, heads, dim] and the like, where one stride covers the leading
/// dimensions.
void join_tokens(Tensor& tensor) {
  TensorView& view = tensor.view;
  while (view.rank > 3) {
    const bool joins = view.shape[0] <= 1 || view.shape[1] <= 1 || view.strides[0] == view.shape[1] * view.strides[1];
    if (!joins) {
      refuse(tensor.array.name + " has strides " + std::to_string(view.strides[0]) + " and " +
             std::to_string(view.strides[1]) + " in its leading dimensions; one stride must cover " +
             shape_text(tensor.array) + " up to its heads");
    }
    const int64_t stride = view.shape[1] > 1 ? view.strides[1] : view.strides[0];
    view.shape[1] *= view.shape[0];
    view.strides[1] = stride;
    --view.rank;
    for (size_t i = 0; i < static_cast<size_t>(view.rank); ++i) {
      view.shape[i] = view.shape[i + 1];
      view.strides[i] = view.strides[i + 1];
    }
  }
}

/// The keys and values of one ragged segment after the other, from a pair (k, v) or a list of pairs.
class RaggedPairs {
 public:
  explicit RaggedPairs(nb::handle source) {
    if (source.is_none()) return;
    if (nb::isinstance<nb::tuple>(source)) {
      add(source);
    } else if (nb::isinstance<nb::list>(source)) {
      for (const nb::handle pair : nb::borrow<nb::list>(source)) add(pair);
    } else {
      refuse_kind("ragged", "a tuple (k, v) or a list of them", source);
    }
  }

  void fill(size_t segment, RaggedKvView& view) {
    if (next_ + 2 > tensors_.size()) {
      refuse("ragged has " + std::to_string(tensors_.size() / 2) + " pairs (k, v); segment " + std::to_string(segment) +
             " of the plan is ragged too");
    }
    view.k = tensors_[next_++].view;
    view.v = tensors_[next_++].view;
  }
  void require_used() const {
    if (next_ != tensors_.size()) {
      refuse("ragged has " + std::to_string(tensors_.size() / 2) + " pairs (k, v); the plan has " +
             std::to_string(next_ / 2) + " ragged segments");
    }
  }
  void require_on(const Device& device) const {
    for (const Tensor& tensor : tensors_) python::require_on(device, tensor.array);
  }

 private:
  void add(nb::handle pair) {
    if (!nb::isinstance<nb::tuple>(pair) || nb::len(pair) != 2)
      refuse_kind("ragged", "a tuple (k, v) or a list of them", pair);
    const auto both = nb::borrow<nb::tuple>(pair);
    tensors_.push_back(to_tensor(both[0], "ragged k", Access::kRead));
    tensors_.push_back(to_tensor(both[1], "ragged v", Access::kRead));
    join_tokens(tensors_[tensors_.size() - 2]);
    join_tokens(tensors_.back());
  }

  std::vector<Tensor> tensors_;
  size_t next_ = 0;
};

/// The step's segments with this layer's memory. Whether `validate` would find nothing is said by `checked`.
std::span<const SegmentArgs> layer_segments(const Layer& layer, const Step& step, RaggedPairs& pairs, bool* checked) {
  thread_local std::vector<SegmentArgs> segments;  // a warm one allocates nothing
  segments.assign(step.segments.begin(), step.segments.end());
  size_t paged = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    SegmentArgs& segment = segments[i];
    const bool ragged = step.is_ragged(i);
    segment.k_scale = (ragged ? layer.ragged_k_scale : layer.k_scale).scale;
    segment.v_scale = (ragged ? layer.ragged_v_scale : layer.v_scale).scale;
    if (ragged) {
      pairs.fill(i, segment.ragged);
      continue;
    }
    if (layer.caches.empty()) refuse("the layer has no cache; segment " + std::to_string(i) + " of the plan is paged");
    if (layer.caches.size() > 1 && paged >= layer.caches.size()) {
      refuse("the layer has " + std::to_string(layer.caches.size()) + " caches; the plan has more paged segments");
    }
    segment.cache = layer.cache(paged++);
    *checked = *checked && step.ids_are_pages(i, segment.cache.num_pages);
  }
  if (layer.caches.size() > 1 && paged != layer.caches.size()) {
    refuse("the layer has " + std::to_string(layer.caches.size()) + " caches; the plan has " + std::to_string(paged) +
           " paged segments");
  }
  pairs.require_used();
  return segments;
}

/// Bytes of bare arrays are 4-bit values where there are block scales.
Tensor output_of(nb::handle out, bool has_block_scale) {
  if (!has_block_scale || nb::isinstance<Tensor>(out)) return to_tensor(out, "out", Access::kWrite);
  return make_tensor(out, DType::kFloat4E2M1x2, "out", Access::kWrite);
}

nb::object call_layer(const Layer& layer, const Step& step, nb::handle q, nb::handle out, nb::handle lse,
                      nb::handle ragged, const BlockScale* out_block_scale) {
  const Plan& plan = step.plan();
  if (plan.buffer->op.shared_state() != layer.op.shared_state()) {
    refuse("the step's plan was made by another op than the layer's");
  }
  Tensor queries = to_tensor(q, "q", Access::kRead);
  Tensor outputs = output_of(out, out_block_scale != nullptr);
  join_tokens(queries);
  join_tokens(outputs);
  const Lse sums = to_lse(lse, "lse");
  RaggedPairs pairs(ragged);
  require_on(layer.device, queries.array);
  require_on(layer.device, outputs.array);
  if (sums.array) require_on(layer.device, *sums.array);
  pairs.require_on(layer.device);
  const BatchView batch = plan.batch.view();
  require_lse(sums.array, batch.num_tokens, layer.op.config().num_q_heads);
  require_requests(layer, batch.num_requests);

  AttentionArgs args = layer.view;
  args.q = queries.view;
  args.out = outputs.view;
  args.lse = sums.view;
  if (out_block_scale != nullptr) {
    const BlockScale factors = block_scale_of(*out_block_scale, args.out, "out_block_scale", Access::kWrite);
    require_on(layer.device, factors.array);
    args.out_block_scale = {factors.array.data, factors.first_row};
  }
  bool checked = true;
  args.segments = layer_segments(layer, step, pairs, &checked);
  args.custom_mask = step.custom_mask;
  args.custom_mask_bytes = step.custom_mask_bytes;
  const std::vector<Array> arrays = {std::move(queries.array), std::move(outputs.array)};
  const Stream stream = step.stream_of(arrays);
  {
    const ReleasedGil released;
    const std::shared_lock<std::shared_mutex> lock(plan.buffer->mutex);
    const std::lock_guard<std::mutex> one_run(plan.buffer->workspace_mutex);
    if (!checked) folio::validate(plan.plan, args);
    folio::run(plan.plan, args, step.workspace->view, stream);
  }
  return nb::borrow(out);
}

/// `target` is a step with slots, or an array of slots.
void write_layer(const Layer& layer, nb::handle target, nb::handle k, nb::handle v) {
  if (layer.caches.size() != 1) {
    refuse("the layer has " + std::to_string(layer.caches.size()) + " caches; write takes a layer with one");
  }
  const Cache& cache = layer.caches.front();
  require_writable(cache);
  Tensor keys = to_tensor(k, "k", Access::kRead);
  Tensor values;
  if (!v.is_none()) values = to_tensor(v, "v", Access::kRead);
  require_on(layer.device, keys.array);
  if (!v.is_none()) require_on(layer.device, values.array);
  CacheWriteArgs args;
  args.k = keys.view;
  args.v = values.view;
  args.cache = cache.view;
  args.k_scale = layer.k_scale.scale;
  args.v_scale = layer.v_scale.scale;
  Slots given;
  const Slots* slots = &given;
  std::vector<Array> arrays;
  arrays.push_back(std::move(keys.array));
  Stream stream;
  const Step* step = nullptr;
  if (nb::try_cast(target, step, false)) {
    if (!step->slots) refuse("the step has no slot_mapping: give one to folio.Step, or slots to write");
    if (step->device() != layer.device) refuse("the step and the layer are of different devices");
    slots = &*step->slots;
    stream = step->stream_of(arrays);
  } else {
    given = Slots(target, layer.device);
    stream = to_stream(nb::none(), layer.device, {&arrays});
  }
  args.slot_mapping = slots->data();
  args.num_slots = slots->count();
  const ReleasedGil released;
  folio::write_kv_cache(layer.op.context(), args, stream);
}

void make_layer(Layer* self, const AttentionOp& op, nb::handle cache, float sm_scale, float logits_soft_cap,
                nb::handle alibi_slopes, nb::handle sinks, nb::handle k_scale, nb::handle v_scale, nb::handle q_scale,
                nb::handle out_scale, nb::handle ragged_k_scale, nb::handle ragged_v_scale, const RopeArgs& rope) {
  Layer layer{op, op.context().device(), to_caches(cache), {}, {}, {}, {}, {}, {}, {}, {}};
  for (size_t i = 0; i < layer.caches.size(); ++i) {
    const std::string name = layer.caches.size() == 1 ? "cache" : "cache[" + std::to_string(i) + "]";
    require_cache_of(op.config(), layer.caches[i].view, name);
    for (Array array : layer.caches[i].arrays) {
      array.name = name + "." + array.name;
      layer.arrays.push_back(std::move(array));
    }
  }
  layer.view.sm_scale = sm_scale;
  layer.view.logits_soft_cap = logits_soft_cap;
  layer.view.rope = rope;
  layer.view.alibi_slopes = per_head(layer, alibi_slopes, "alibi_slopes");
  layer.view.sinks = per_head(layer, sinks, "sinks");
  layer.k_scale = keep_scale(layer, k_scale, "k_scale");
  layer.v_scale = keep_scale(layer, v_scale, "v_scale");
  layer.q_scale = keep_scale(layer, q_scale, "q_scale");
  layer.out_scale = keep_scale(layer, out_scale, "out_scale");
  layer.ragged_k_scale = keep_scale(layer, ragged_k_scale, "ragged_k_scale");
  layer.ragged_v_scale = keep_scale(layer, ragged_v_scale, "ragged_v_scale");
  layer.view.q_scale = layer.q_scale.scale;
  layer.view.out_scale = layer.out_scale.scale;
  require_on(layer.device, layer.arrays);
  new (self) Layer(std::move(layer));
}

std::string text_of(const Layer& layer) {
  return python::text_of(layer.op) + ", " + count_of(static_cast<int64_t>(layer.caches.size()), "cache");
}

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Layer> layer(
      m, "Layer",
      "One attention layer of a model: an op with the layer's own cache, sinks, slopes and scales, which are borrowed "
      "and checked once. Make it when the cache is made; call it once a step.\n\n"
      "cache: a KvCacheView for every paged segment of a plan, a list of them (one a paged segment, in order), or None "
      "where all segments are ragged. sm_scale: multiplies q . k; 0 is 1 / sqrt(head_dim_qk). logits_soft_cap: 0 is "
      "off. alibi_slopes, sinks: float32 [q heads]. k_scale, v_scale: of paged segments and of write; ragged_k_scale, "
      "ragged_v_scale: of ragged ones. Scales are numbers or folio.Scale. rope: for Feature.ROPE_LLAMA.\n\n"
      "Raises InvalidArgument for a cache that is not as the op was prepared, and for arrays of another device.");
  bind_repr(layer);
  layer
      .def("__init__", &make_layer, nb::arg("op"), nb::arg("cache") = nb::none(), nb::kw_only(),
           nb::arg("sm_scale") = 0.0f, nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(),
           nb::arg("sinks") = nb::none(), nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f,
           nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f, nb::arg("ragged_k_scale") = 1.0f,
           nb::arg("ragged_v_scale") = 1.0f, nb::arg("rope") = RopeArgs{},
           nb::sig("def __init__(self, op: AttentionOp, cache: KvCacheView | list[KvCacheView] | None = None, *, "
                   "sm_scale: float = 0.0, logits_soft_cap: float = 0.0, alibi_slopes: object | None = None, "
                   "sinks: object | None = None, k_scale: object = 1.0, v_scale: object = 1.0, "
                   "q_scale: object = 1.0, out_scale: object = 1.0, "
                   "ragged_k_scale: object = 1.0, ragged_v_scale: object = 1.0, rope: RopeArgs = ...) -> "
                   "None"))
      .def(
          "__call__", &call_layer, nb::arg("step"), nb::arg("q").none(), nb::arg("out").none(),
          nb::arg("lse") = nb::none(), nb::arg("ragged") = nb::none(), nb::arg("out_block_scale") = nb::none(),
          nb::sig("def __call__(self, step: Step, q: object, out: object, lse: object | None = None, "
                  "ragged: tuple[object, object] | list[tuple[object, object]] | None = None, "
                  "out_block_scale: BlockScaleArgs | None = None) -> object"),
          "Attention of this layer in this step, written into `out`, which is returned.\n\n"
          "q: [tokens, q heads, head_dim_qk]; out: [tokens, q heads, head_dim_v]; lse: float32 [tokens, q heads] or "
          "an LseView. ragged: (k, v), each [kv tokens, kv heads, head_dim], where the plan has a ragged segment; a "
          "list of such pairs where it has several. Tokens of q, out and ragged may have two or more dimensions, as in "
          "[batch, queries, heads, head_dim], where one stride covers them. out_block_scale: where the op's out is "
          "NVFP4, which packs two values a byte. Calls with plans of one buffer run one at a time.\n\n"
          "Raises InvalidArgument for wrong arguments, a step of another op, and on a CPU a page id that the cache "
          "does not have; Error with STALE_PLAN once the step's buffer has been planned into again.")
      .def("write", &write_layer, nb::arg("slots").none(), nb::arg("k").none(), nb::arg("v").none(),
           nb::sig("def write(self, slots: Step | object, k: object, v: object | None) -> None"),
           "Writes new tokens into the layer's cache, before the call that reads them.\n\n"
           "slots: a Step with a slot_mapping, or an array of slots [tokens], int64 or int32: token i goes to page "
           "slot / page_size, "
           "offset slot % page_size; a negative one is left out. k: [tokens or more, kv heads, head_dim_qk]; v "
           "likewise, None where the cache's V is a part of its K. fp8 caches divide by k_scale and v_scale.\n\n"
           "Raises InvalidArgument, on a CPU also for a slot that the cache does not have; nothing is then written.")
      .def_prop_ro(
          "op", [](const Layer& self) { return AttentionOp(self.op); }, "The op that it was made of.");
}

}  // namespace folio::python
