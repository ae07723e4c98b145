#include "folio/backends/flashinfer.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_names.hpp"
#include "fields.hpp"
#include "gil.hpp"
#include "integers.hpp"

namespace folio::python {
namespace flashinfer {
namespace {

using bk::BackendProfile;

/// FlashInferImpl, with its context and the sinks that it may be told to read again.
struct Impl {
  Context context;
  bk::FlashInferImpl impl;
  DType model_dtype;
  std::optional<Tensor> sinks;
};

/// FlashInferMetadataBuilder: built into and forwarded from by one thread at a time.
struct Builder {
  Context context;
  bk::FlashInferMetadataBuilder builder;
  DividedKeys keys;
  std::mutex mutex;
};

/// FlashInferMetadata, with the batch, the pages and the builder that it points into.
struct Metadata {
  bk::FlashInferMetadata view;
  std::shared_ptr<Builder> builder;
  nb::object batch;
  std::shared_ptr<const StepTable> table;
};

struct LayerArguments {
  int32_t num_heads, head_size;
  float scale;
  int32_t num_kv_heads;
  nb::handle alibi_slopes;
  std::optional<int32_t> sliding_window;
  const std::string& kv_cache_dtype;
  std::optional<float> logits_soft_cap;
  bk::AttentionType attn_type;
  const std::optional<std::string>& kv_sharing_target_layer_name;
  nb::handle sinks;
  DType model_dtype;
  BackendProfile profile;
  const std::optional<bk::KernelDispatch>& dispatch;
  bool disable_q_quantization;
  int32_t dcp_query_ranks;
  nb::handle log;
};

Impl make_impl(const LayerArguments& given, const std::optional<Context>& given_context) {
  const Context context = context_or_default(given_context);
  const std::vector<float> slopes = to_slopes(given.alibi_slopes, "alibi_slopes");
  std::optional<Tensor> sinks = to_sinks(given.sinks);
  bk::FlashInferLayerConfig config;
  config.num_heads = given.num_heads;
  config.head_size = given.head_size;
  config.scale = given.scale;
  config.num_kv_heads = given.num_kv_heads;
  config.alibi_slopes = slopes;
  config.sliding_window = given.sliding_window;
  config.kv_cache_dtype = given.kv_cache_dtype;
  config.model_dtype = given.model_dtype;
  config.logits_soft_cap = given.logits_soft_cap;
  config.attn_type = given.attn_type;
  config.kv_sharing_target_layer_name = given.kv_sharing_target_layer_name;
  if (sinks) config.sinks = sinks->view;
  config.profile = given.profile;
  config.dispatch = given.dispatch;
  config.disable_q_quantization = given.disable_q_quantization;
  config.dcp_query_ranks = given.dcp_query_ranks;
  config.log = to_log(given.log);
  return {context, bk::FlashInferImpl(context, config), given.model_dtype, std::move(sinks)};
}

void make_builder(Builder* self, const bk::AttentionSpec& spec, nb::handle layers, const bk::EngineConfig& engine,
                  const bk::FlashInferOptions& options, const std::optional<bk::KernelDispatch>& dispatch,
                  nb::handle log, nb::handle dcp_group) {
  bk::EngineConfig config = engine;
  DividedKeys keys(dcp_group, config);
  const std::optional<GroupUse> in_use = keys.use();
  const auto given = to_layers<Impl>(layers, "FlashInferImpl");
  std::vector<bk::AttentionLayer<bk::FlashInferImpl>> group;
  for (const auto& [name, impl] : given) group.push_back({name, &impl->impl});
  const Context context = given.front().second->context;
  bk::FlashInferOptions whole = options;
  whole.dispatch = dispatch;
  whole.log = to_log(log);
  bk::FlashInferMetadataBuilder builder = [&] {
    const ReleasedGil released;
    return bk::FlashInferMetadataBuilder(context, spec, group, config, whole);
  }();
  new (self) Builder{context, std::move(builder), std::move(keys), {}};
}

Metadata build(std::shared_ptr<Builder> builder, int32_t common_prefix_len, nb::handle common_attn_metadata,
               nb::handle stream) {
  const CommonBatch* const batch = to_common_batch(common_attn_metadata);
  Metadata metadata;
  bk::CommonAttentionMetadata view = batch->with_spans();
  if (view.where == Where::kHost && batch->block_table) {
    auto table = std::make_shared<StepTable>(
        copy_step_table(view.block_table, view.seq_lens.first(static_cast<size_t>(view.num_reqs)), view.query_start_loc,
                        builder->builder.page_size(), builder->keys.shard));
    view.block_table = table->view;
    metadata.table = std::move(table);
  }
  python::require_on(builder->context.device(), batch->device_arrays);
  const Stream queue = to_stream(stream, builder->context.device(), {&batch->device_arrays});
  {
    const std::optional<GroupUse> in_use = builder->keys.use();
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(builder->mutex);
    metadata.view = builder->builder.build(common_prefix_len, view, queue);
  }
  metadata.builder = std::move(builder);
  metadata.batch = nb::borrow(common_attn_metadata);
  return metadata;
}

ForwardTypes types_of(const Impl& self, const bk::FlashInferMetadata& metadata, nb::handle output_scale,
                      nb::handle output_block_scale) {
  ForwardTypes types;
  types.query = metadata.q_data_type;
  types.kv_cache = self.impl.kv_cache_dtype();
  types.output = metadata.output_data_type;
  if (!output_block_scale.is_none()) {
    types.output = DType::kFloat4E2M1x2;
  } else if (!output_scale.is_none()) {
    types.output = DType::kFloat8E4M3;
  }
  types.model = self.model_dtype;
  types.num_kv_heads = self.impl.num_kv_heads();
  types.num_reqs = metadata.num_reqs;
  types.writes_cache = bk::FlashInferBackend::forward_includes_kv_cache_update(self.impl.profile()) &&
                       !self.impl.kv_sharing_target_layer_name();
  const auto& dcp_plan = metadata.dcp_plans.front();
  types.reads_keys = types.writes_cache || (dcp_plan && dcp_plan->plan.reads_new_tokens);
  return types;
}

nb::object forward(const Impl& self, nb::handle layer, nb::handle query, nb::handle key, nb::handle value,
                   nb::handle kv_cache, nb::handle attn_metadata, nb::handle output, nb::handle output_scale,
                   nb::handle output_block_scale, nb::handle stream) {
  if (output.is_none()) refuse("Output tensor must be provided.");
  if (attn_metadata.is_none()) {
    const ForwardTensors tensors = to_profiling_output(self.context, output);
    const QuantizedOutput quantized = to_quantized_output(output_scale, output_block_scale);
    const Stream queue = to_stream(stream, self.context.device(), {&tensors.arrays});
    const ReleasedGil released;
    self.impl.forward({}, {}, {}, {}, {}, nullptr, tensors.output, quantized.with_value(), queue);
  } else {
    const Metadata* metadata = nullptr;
    if (!nb::try_cast(attn_metadata, metadata, false) || metadata == nullptr) {
      refuse_kind("attn_metadata", "None or what FlashInferMetadataBuilder.build returns", attn_metadata);
    }
    const ForwardTensors tensors =
        to_forward_tensors(self.context, {layer, query, key, value, kv_cache, output, output_scale, output_block_scale},
                           types_of(self, metadata->view, output_scale, output_block_scale));
    if (metadata->table && tensors.kv_cache.rank == 5) {
      metadata->table->require_pages(tensors.kv_cache.shape[0], self.impl.window_left());
    }
    const Stream queue = to_stream(stream, self.context.device(), {&tensors.arrays});
    const std::optional<GroupUse> in_use = metadata->builder->keys.use();
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(metadata->builder->mutex);
    self.impl.forward(tensors.scales.view(), tensors.query, tensors.key, tensors.value, tensors.kv_cache,
                      &metadata->view, tensors.output, tensors.quantized.with_value(), queue);
  }
  return nb::borrow(output);
}

void do_kv_cache_update(const Impl& self, nb::handle layer, nb::handle key, nb::handle value, nb::handle kv_cache,
                        nb::handle slot_mapping, nb::handle stream) {
  if (self.impl.kv_sharing_target_layer_name()) return;
  const ForwardTensors tensors = to_write_tensors(self.context, layer, key, value, kv_cache, self.impl.kv_cache_dtype(),
                                                  self.model_dtype, self.impl.num_kv_heads());
  const Numbers<int64_t> slots = int64_numbers(slot_mapping, "slot_mapping");
  if (slots.on_device()) python::require_on(self.context.device(), *slots.array());
  const Stream queue = to_stream(stream, self.context.device(), {&tensors.arrays});
  const ReleasedGil released;
  self.impl.do_kv_cache_update(tensors.scales.view(), tensors.key, tensors.value, tensors.kv_cache, slots.view(),
                               queue);
}

void bind_impl(nb::module_& m) {
  nb::class_<Impl> type(
      m, "FlashInferImpl",
      "One layer's attention, for decoders. The arguments are vLLM's: sizes of one rank; sliding_window "
      "counts the query; alibi_slopes and sinks have num_heads values (sinks are read here, on a GPU "
      "copied to the host by their library), times dcp_query_ranks, the ranks whose query heads forward is given "
      "(ParallelConfig.dcp_replicated_queries). kv_cache_dtype is 'auto' (model_dtype), 'float32', 'float16', "
      "'bfloat16', 'fp8', 'fp8_e4m3' or 'fp8_e5m2'. Without a context the process's CPU context is used. "
      "Raises InvalidArgument, and Error for what is not offered.");
  type.attr("can_return_lse_for_decode") = bk::FlashInferImpl::can_return_lse_for_decode;
  type.def(
          "__init__",
          [](Impl* self, int32_t num_heads, int32_t head_size, float scale, int32_t num_kv_heads,
             nb::object alibi_slopes, std::optional<int32_t> sliding_window, const std::string& kv_cache_dtype,
             std::optional<float> logits_soft_cap, bk::AttentionType attn_type,
             const std::optional<std::string>& kv_sharing_target_layer_name, nb::object sinks, DType model_dtype,
             BackendProfile profile, const std::optional<bk::KernelDispatch>& dispatch, bool disable_q_quantization,
             int32_t dcp_query_ranks, nb::object log, const std::optional<Context>& context) {
            new (self) Impl(make_impl({num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                                       kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks,
                                       model_dtype, profile, dispatch, disable_q_quantization, dcp_query_ranks, log},
                                      context));
          },
          nb::arg("num_heads"), nb::arg("head_size"), nb::arg("scale"), nb::arg("num_kv_heads"),
          nb::arg("alibi_slopes") = nb::none(), nb::arg("sliding_window") = nb::none(),
          nb::arg("kv_cache_dtype") = "auto", nb::arg("logits_soft_cap") = nb::none(),
          nb::arg("attn_type") = bk::AttentionType::kDecoder, nb::arg("kv_sharing_target_layer_name") = nb::none(),
          nb::arg("sinks") = nb::none(), nb::kw_only(), nb::arg("model_dtype") = DType::kBFloat16,
          nb::arg("profile") = BackendProfile::kNative, nb::arg("dispatch") = nb::none(),
          nb::arg("disable_q_quantization") = false, nb::arg("dcp_query_ranks") = 1, nb::arg("log") = nb::none(),
          nb::arg("context") = nb::none())
      .def("forward", &forward, nb::arg("layer").none(), nb::arg("query"), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("kv_cache").none(), nb::arg("attn_metadata").none(),
           nb::arg("output") = nb::none(), nb::arg("output_scale") = nb::none(),
           nb::arg("output_block_scale") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
           "Writes the new keys and values into the cache (not where another layer's is shared, nor under "
           "VLLM_2026_03), then attends, into `output`, which is returned. query and output are [tokens, num_heads, "
           "head_size], key and value [tokens, num_kv_heads, head_size]; rows from attn_metadata.num_actual_tokens on "
           "are padding, neither read nor written. kv_cache is [pages, 2, page_size, num_kv_heads, head_size] of any "
           "strides; uint8 where the cache is fp8. `layer` is None, an AttentionLayerScales, or an engine's layer with "
           "_k_scale_float or _k_scale. output_scale asks for an fp8 e4m3 output, with output_block_scale (uint8) for "
           "NVFP4. Without metadata the output is set to zero. Raises InvalidArgument before anything is written, "
           "Error STALE_PLAN for metadata of an earlier build.")
      .def("do_kv_cache_update", &do_kv_cache_update, nb::arg("layer").none(), nb::arg("key"), nb::arg("value"),
           nb::arg("kv_cache"), nb::arg("slot_mapping"), nb::kw_only(), nb::arg("stream") = nb::none(),
           "Writes keys and values [tokens, num_kv_heads, head_size] of as many tokens as slot_mapping has into their "
           "slots; a negative slot is nowhere. For profiles whose forward leaves the cache as it is.")
      .def(
          "set_sinks",
          [](Impl& self, nb::object sinks) {
            std::optional<Tensor> weights = to_sinks(sinks);
            if (!weights) refuse("sinks is None; an array is needed");
            self.impl.set_sinks(weights->view);
            self.sinks = std::move(weights);
          },
          nb::arg("sinks"), "Replaces the sinks of a layer that was made with some; not while it is in use.")
      .def(
          "process_weights_after_loading", [](Impl& self) { self.impl.process_weights_after_loading(); },
          "Reads the sinks given before again: their weights may have been loaded since.")
      .def(
          "fused_output_quant_supported",
          [](const Impl& self, bk::QuantKey quant_key) { return self.impl.fused_output_quant_supported(quant_key); },
          nb::arg("quant_key"), "Whether forward takes outputs quantised like that.")
      .def(
          "supports_quant_query_input", [](const Impl& self) { return self.impl.supports_quant_query_input(); },
          "Whether queries may come as fp8 e4m3.")
      .def_prop_ro("support_trtllm_attn", [](const Impl& self) { return self.impl.support_trtllm_attn(); })
      .def_prop_ro("num_heads", [](const Impl& self) { return self.impl.num_heads(); })
      .def_prop_ro("num_kv_heads", [](const Impl& self) { return self.impl.num_kv_heads(); })
      .def_prop_ro("dcp_query_ranks", [](const Impl& self) { return self.impl.dcp_query_ranks(); })
      .def_prop_ro("num_queries_per_kv", [](const Impl& self) { return self.impl.num_queries_per_kv(); })
      .def_prop_ro("head_size", [](const Impl& self) { return self.impl.head_size(); })
      .def_prop_ro("scale", [](const Impl& self) { return self.impl.scale(); })
      .def_prop_ro(
          "window_left", [](const Impl& self) { return self.impl.window_left(); },
          "Keys left of a query that it sees, itself not counted; -1 is all.")
      .def_prop_ro("logits_soft_cap", [](const Impl& self) { return self.impl.logits_soft_cap(); })
      .def_prop_ro("kv_cache_dtype", [](const Impl& self) { return self.impl.kv_cache_dtype(); })
      .def_prop_ro("profile", [](const Impl& self) { return self.impl.profile(); })
      .def_prop_ro("context", [](const Impl& self) { return Context(self.context); })
      .def("__repr__", [](const Impl& self) {
        return "<folio.backends.FlashInferImpl: " + std::to_string(self.impl.num_heads()) + " heads over " +
               std::to_string(self.impl.num_kv_heads()) + " KV heads of " + std::to_string(self.impl.head_size()) +
               ", " + describe(self.context.device()) + ">";
      });
}

/// The page tables of a step in FlashInfer's form: (indptr, indices, last_page_len, seq_lens).
nb::tuple paged_kv_arrays(const std::shared_ptr<Builder>& self, const Metadata& metadata, nb::handle stream) {
  if (metadata.builder != self) refuse("metadata is another builder's");
  const Device device = self->context.device();
  if (device.type != DeviceType::kCpu) {
    throw Error(ErrorCode::kUnsupported, "paged_kv_arrays copies to the host; on a GPU the pages stay in its memory");
  }
  const Stream queue = to_stream(stream, device, {});
  std::vector<int32_t> indptr, indices, last_page_len, seq_lens;
  {
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(self->mutex);
    const bk::PagedKvArrays arrays = self->builder.paged_kv_arrays(metadata.view, queue);
    indptr.assign(arrays.indptr.begin(), arrays.indptr.end());
    indices.assign(arrays.indices.begin(), arrays.indices.end());
    last_page_len.assign(arrays.last_page_len.begin(), arrays.last_page_len.end());
    seq_lens.assign(arrays.seq_lens.begin(), arrays.seq_lens.end());
  }
  return nb::make_tuple(to_numpy(std::move(indptr)), to_numpy(std::move(indices)), to_numpy(std::move(last_page_len)),
                        to_numpy(std::move(seq_lens)));
}

void bind_metadata(nb::module_& m) {
  nb::class_<Metadata>(m, "FlashInferMetadata",
                       "What one step's layers need: made by FlashInferMetadataBuilder.build. Valid until the builder "
                       "builds again.")
      .def_prop_ro("num_reqs", [](const Metadata& self) { return self.view.num_reqs; })
      .def_prop_ro("num_actual_tokens", [](const Metadata& self) { return self.view.num_actual_tokens; })
      .def_prop_ro("num_decodes", [](const Metadata& self) { return self.view.split.num_decodes; })
      .def_prop_ro("num_prefills", [](const Metadata& self) { return self.view.split.num_prefills; })
      .def_prop_ro("num_decode_tokens", [](const Metadata& self) { return self.view.split.num_decode_tokens; })
      .def_prop_ro("num_prefill_tokens", [](const Metadata& self) { return self.view.split.num_prefill_tokens; })
      .def_prop_ro("max_q_len", [](const Metadata& self) { return self.view.max_q_len; })
      .def_prop_ro(
          "max_q_len_prefill", [](const Metadata& self) { return self.view.max_q_len_prefill; },
          "The longest query among the prefills.")
      .def_prop_ro("max_seq_len", [](const Metadata& self) { return self.view.max_seq_len; })
      .def_prop_ro("seq_lens", [](const Metadata& self) { return nb::getattr(self.batch, "seq_lens"); })
      .def_prop_ro("block_table", [](const Metadata& self) { return nb::getattr(self.batch, "block_table"); })
      .def_prop_ro("slot_mapping", [](const Metadata& self) { return nb::getattr(self.batch, "slot_mapping"); })
      .def_prop_ro("q_data_type", [](const Metadata& self) { return self.view.q_data_type; })
      .def_prop_ro(
          "data_type", [](const Metadata& self) { return self.view.data_type; }, "Of the KV cache.")
      .def_prop_ro("output_data_type", [](const Metadata& self) { return self.view.output_data_type; })
      .def_prop_ro("page_size", [](const Metadata& self) { return self.view.page_size; })
      .def_prop_ro("prefill_use_trtllm", [](const Metadata& self) { return self.view.prefill_use_trtllm; })
      .def_prop_ro("decode_use_trtllm", [](const Metadata& self) { return self.view.decode_use_trtllm; })
      .def_prop_ro(
          "use_cascade", [](const Metadata& self) { return self.view.use_cascade; },
          "Whether some keys are read once for several requests.")
      .def_prop_ro(
          "common_prefix_len", [](const Metadata& self) { return self.view.common_prefix_len; },
          "CascadeMode.HEURISTIC: tokens that all share, whole pages that every request has computed.")
      .def_prop_ro(
          "num_cascade_levels", [](const Metadata& self) { return self.view.cascade.num_levels; },
          "CascadeMode.AUTO: shared prefixes that were found, inside each other.")
      .def_prop_ro(
          "num_padded_reqs", [](const Metadata& self) { return self.view.num_padded_reqs; },
          "Rows of the captured batch that this one is padded to; 0: no graph.")
      .def("__repr__", [](const Metadata& self) {
        return "<folio.backends.FlashInferMetadata: " + std::to_string(self.view.num_reqs) + " requests (" +
               std::to_string(self.view.split.num_decodes) + " decodes), " +
               std::to_string(self.view.num_actual_tokens) + " tokens>";
      });
}

void bind_builder(nb::module_& m) {
  nb::class_<Builder>(
      m, "FlashInferMetadataBuilder",
      "Plans every step for one group of layers that share a KV cache format and page tables. `layers` "
      "is a dict of names and FlashInferImpl, whose context it runs on. `dispatch` is what vLLM's profiles ask "
      "which kernels there are. `log` is called with (LogLevel, "
      "text), each text once. Calls from several threads wait for each other. dcp_group: this rank's ProcessGroup, "
      "where the configuration's decode_context_parallel_size is above 1; build and forward then belong to one thread.")
      .def(
          "__init__",
          [](Builder* self, const bk::AttentionSpec& kv_cache_spec, nb::object layers, const bk::EngineConfig& config,
             const bk::FlashInferOptions& options, const std::optional<bk::KernelDispatch>& dispatch, nb::object log,
             nb::object dcp_group) {
            make_builder(self, kv_cache_spec, layers, config, options, dispatch, log, dcp_group);
          },
          nb::arg("kv_cache_spec"), nb::arg("layers"), nb::arg("config"), nb::arg("options") = bk::FlashInferOptions{},
          nb::kw_only(), nb::arg("dispatch") = nb::none(), nb::arg("log") = nb::none(),
          nb::arg("dcp_group") = nb::none())
      .def("build", &build, nb::arg("common_prefix_len"), nb::arg("common_attn_metadata"), nb::kw_only(),
           nb::arg("stream") = nb::none(),
           "Plans a step, whose decodes stand in front (reorder_batch). common_prefix_len: tokens, whole pages, that "
           "all requests begin with and whose pages their rows share; they are read once under CascadeMode.HEURISTIC. "
           "Raises InvalidArgument for a batch that contradicts itself or the configuration, naming the field.")
      .def(
          "reorder_batch",
          [](const std::shared_ptr<Builder>& self, nb::object num_scheduled_tokens, nb::object num_computed_tokens,
             const nb::object& swap_states) {
            const Numbers<int32_t> scheduled = int32_numbers(num_scheduled_tokens, "num_scheduled_tokens");
            const Numbers<int32_t> computed = int32_numbers(num_computed_tokens, "num_computed_tokens");
            if (scheduled.on_device() || computed.on_device()) refuse("the numbers of tokens are read on the host");
            const bk::SwapStates swap = to_swap(swap_states);
            const ReleasedGil released;
            const std::lock_guard<std::mutex> lock(self->mutex);
            return self->builder.reorder_batch(scheduled.view(), computed.view(), swap);
          },
          nb::arg("num_scheduled_tokens"), nb::arg("num_computed_tokens"), nb::arg("swap_states"),
          "Brings the engine's batch into the order that build expects, by calls of swap_states(i, j), which may not "
          "call this builder. True if requests were swapped.")
      .def("paged_kv_arrays", &paged_kv_arrays, nb::arg("metadata"), nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::sig("def paged_kv_arrays(self, metadata: FlashInferMetadata, *, stream: object | None = None) -> "
                   "tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]"),
           "The page tables of a step as FlashInfer has them: int32 arrays (indptr, indices, last_page_len, seq_lens). "
           "Copies; on a CPU.")
      .def(
          "use_cascade_attention",
          [](const Builder& self, int32_t common_prefix_len, nb::object query_lens, int32_t num_query_heads,
             int32_t num_kv_heads, bool use_alibi, bool use_sliding_window, bool use_local_attention, int32_t num_sms,
             int32_t dcp_world_size) {
            const Numbers<int32_t> lens = int32_numbers(query_lens, "query_lens");
            if (lens.on_device()) refuse("query_lens lies on a GPU; it is read on the host");
            return self.builder.use_cascade_attention({common_prefix_len, lens.view(), num_query_heads, num_kv_heads,
                                                       use_alibi, use_sliding_window, use_local_attention, num_sms,
                                                       dcp_world_size});
          },
          nb::arg("common_prefix_len"), nb::arg("query_lens"), nb::arg("num_query_heads"), nb::arg("num_kv_heads"),
          nb::arg("use_alibi"), nb::arg("use_sliding_window"), nb::arg("use_local_attention"), nb::arg("num_sms"),
          nb::arg("dcp_world_size") = 1, "Whether a batch's shared prefix should go to build, by the profile's rule.")
      .def_prop_ro(
          "reorder_batch_threshold", [](const Builder& self) { return self.builder.reorder_batch_threshold(); },
          "Requests of at most this many tokens are decodes.")
      .def_prop_ro("num_qo_heads", [](const Builder& self) { return self.builder.num_qo_heads(); })
      .def_prop_ro("num_kv_heads", [](const Builder& self) { return self.builder.num_kv_heads(); })
      .def_prop_ro("head_dim", [](const Builder& self) { return self.builder.head_dim(); })
      .def_prop_ro("page_size", [](const Builder& self) { return self.builder.page_size(); })
      .def_prop_ro("kv_cache_dtype", [](const Builder& self) { return self.builder.kv_cache_dtype(); })
      .def_prop_ro("q_data_type", [](const Builder& self) { return self.builder.q_data_type(); })
      .def_prop_ro("kernel_name", [](const Builder& self) { return self.builder.kernel_name(); })
      .def_prop_ro("use_trtllm_decode_attention",
                   [](const Builder& self) { return self.builder.use_trtllm_decode_attention(); })
      .def_prop_ro(
          "decode_cudagraph_max_bs", [](const Builder& self) { return self.builder.decode_cudagraph_max_bs(); },
          "The largest batch that is padded for a graph; 0: no graphs.")
      .def_prop_ro("workspace_buffer_size", [](const Builder& self) { return self.builder.workspace_buffer_size(); });
}

void bind_backend(nb::module_& m) {
  using Backend = bk::FlashInferBackend;
  using Facts = bk::FlashInferFacts;
  const nb::object impl = m.attr("FlashInferImpl");
  const nb::object builder = m.attr("FlashInferMetadataBuilder");
  nb::class_<Backend> type(m, "FlashInferBackend",
                           "vLLM's FlashInfer backend: its name, what it takes and how its KV cache lies in memory. "
                           "Stateless; `profile` and `facts` say whose answers are wanted (native: Folio's own).");
  type.attr("accept_output_buffer") = Backend::accept_output_buffer;
  type.def(nb::init<>())
      .def_static(
          "get_name", [](BackendProfile profile) { return std::string(Backend::get_name(profile)); },
          nb::arg("profile") = BackendProfile::kNative, "'FLASHINFER'; 'FLASHINFER_VLLM_V1' in July 2025.")
      .def_static(
          "get_impl_cls", [impl] { return impl; }, "FlashInferImpl.")
      .def_static(
          "get_builder_cls", [builder] { return builder; }, "FlashInferMetadataBuilder.")
      .def_static("forward_includes_kv_cache_update", &Backend::forward_includes_kv_cache_update,
                  nb::arg("profile") = BackendProfile::kNative,
                  "Whether forward writes the new keys and values; VLLM_2026_03: a call of its own.")
      .def_static("capability", &Backend::capability, nb::arg("facts") = Facts{},
                  "Everything that the backend takes, as values.")
      .def_static("validate_configuration", &Backend::validate_configuration, nb::arg("requirements"),
                  nb::arg("facts") = Facts{},
                  "Every reason why the requirements cannot be met, in vLLM's words; empty: they can.")
      .def_static(
          "supported_dtypes",
          [](BackendProfile profile) {
            const auto all = Backend::supported_dtypes(profile);
            return std::vector<DType>(all.begin(), all.end());
          },
          nb::arg("profile") = BackendProfile::kNative, "Model dtypes.")
      .def_static(
          "supported_kv_cache_dtypes",
          [](BackendProfile profile) {
            const auto all = Backend::supported_kv_cache_dtypes(profile);
            return std::vector<std::string>(all.begin(), all.end());
          },
          nb::arg("profile") = BackendProfile::kNative, "Names of cache dtypes.")
      .def_static(
          "get_supported_head_sizes",
          [](BackendProfile profile) {
            const auto all = Backend::get_supported_head_sizes(profile);
            return std::vector<int32_t>(all.begin(), all.end());
          },
          nb::arg("profile") = BackendProfile::kNative, "Head sizes that are taken.")
      .def_static("supports_head_size", &Backend::supports_head_size, nb::arg("head_size"),
                  nb::arg("profile") = BackendProfile::kNative, "Whether heads of that size are taken.")
      .def_static("supports_page_size", &Backend::supports_page_size, nb::arg("page_size"),
                  nb::arg("profile") = BackendProfile::kNative, "Whether it is a multiple of a kernel page.")
      .def_static("get_preferred_page_size", &Backend::get_preferred_page_size, nb::arg("default_page_size"),
                  nb::arg("profile") = BackendProfile::kNative,
                  "The default where it is supported, otherwise the smallest kernel page.")
      .def_static("supports_sink", &Backend::supports_sink, nb::arg("facts") = Facts{},
                  "Whether attention sinks are taken.")
      .def_static("supports_attn_type", &Backend::supports_attn_type, nb::arg("attn_type"), "Decoders only.")
      .def_static("get_required_kv_cache_layout", &Backend::get_required_kv_cache_layout, nb::arg("facts") = Facts{},
                  "What the layout must be; None: any.")
      .def_static(
          "get_cudagraph_support",
          [](const Facts& facts, int32_t num_qo_heads, const std::vector<int32_t>& num_kv_heads) {
            return Backend::get_cudagraph_support(facts, num_qo_heads, num_kv_heads);
          },
          nb::arg("facts"), nb::arg("num_qo_heads"), nb::arg("num_kv_heads"),
          "Which batches can be replayed; num_kv_heads has an entry for each group of layers.")
      .def_static("validate_head_size", &Backend::validate_head_size, nb::arg("head_size"),
                  nb::arg("profile") = BackendProfile::kNative,
                  "Raises InvalidArgument for a head size that is not taken.")
      .def_static(
          "get_kv_cache_shape",
          [](int64_t num_blocks, int32_t block_size, int32_t num_kv_heads, int32_t head_size) {
            const auto shape = Backend::get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size);
            return nb::make_tuple(shape[0], shape[1], shape[2], shape[3], shape[4]);
          },
          nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("head_size"),
          nb::sig("def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> "
                  "tuple[int, int, int, int, int]"),
          "(num_blocks, 2, block_size, num_kv_heads, head_size): K at index 0, V at 1 of the second dimension.")
      .def_static("get_kv_cache_page_dim", &Backend::get_kv_cache_page_dim,
                  "0: which dimension of the shape counts pages.")
      .def_static("get_kv_cache_stride_order", &kv_cache_stride_order<Backend>,
                  nb::arg("layout") = bk::KvCacheLayout::kNhd, nb::arg("include_num_layers_dimension") = false,
                  "Which logical dimension stands at each physical position, outermost first.")
      .def_static(
          "get_fp8_dtype_for_flashinfer",
          [](const std::string& name) { return Backend::get_fp8_dtype_for_flashinfer(name); },
          nb::arg("kv_cache_dtype"),
          "The element type of an fp8 cache's name. Raises InvalidArgument for other names.");
}

void bind_options(nb::module_& m) {
  fields_of<bk::FlashInferOptions>(
      "FlashInferOptions", "How FlashInferMetadataBuilder plans.",
      field("profile", &bk::FlashInferOptions::profile, "Whose limits apply."),
      field("quantize_query", &bk::FlashInferOptions::quantize_query,
            "Native: queries come as fp8 e4m3 with a q scale; needs an e4m3 cache."),
      optional_dtype("output_dtype", &bk::FlashInferOptions::output_dtype,
                     "Native: float8_e4m3fn or float4_e2m1fn_x2, which every forward then writes. None: the model's."),
      field("disable_q_quantization", &bk::FlashInferOptions::disable_q_quantization, "As the layers'."),
      field("force_tensor_cores", &bk::FlashInferOptions::force_tensor_cores, "VLLM_2025_07 only."),
      field("force_kernel", &bk::FlashInferOptions::force_kernel, "A kernel by name; empty: the best."),
      field("capture_sizes", &bk::FlashInferOptions::capture_sizes,
            "DecodeGraphMode.FULL: tokens of the captured batches, ascending; empty: vLLM's."),
      field("workspace_buffer_size", &bk::FlashInferOptions::workspace_buffer_size,
            "Bytes that plans begin with; 0: what ordinary steps need."),
      field("cascade", &bk::FlashInferOptions::cascade, "Who decides what shared prefixes are."),
      field("max_cascade_levels", &bk::FlashInferOptions::max_cascade_levels,
            "CascadeMode.AUTO: most shared prefixes inside each other."))
      .bind(m);
}

}  // namespace
}  // namespace flashinfer

void bind_flashinfer(nb::module_& m) {
  bind_enum<bk::QuantKey>(m);
  flashinfer::bind_options(m);
  flashinfer::bind_impl(m);
  flashinfer::bind_metadata(m);
  flashinfer::bind_builder(m);
  flashinfer::bind_backend(m);
}

}  // namespace folio::python
