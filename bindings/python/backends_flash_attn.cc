#include "folio/backends/flash_attn.hpp"

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_names.hpp"
#include "gil.hpp"
#include "integers.hpp"

namespace folio::python {
namespace flash_attn {
namespace {

using bk::AttentionType;

/// FlashAttentionImpl, with what its context and types are.
struct Impl {
  Context context;
  bk::FlashAttentionImpl impl;
  DType model_dtype;
  bool updates_in_forward;
};

/// FlashAttentionMetadataBuilder: built into and forwarded from by one thread at a time.
struct Builder {
  Context context;
  bk::FlashAttentionMetadataBuilder builder;
  AttentionType attn_type;
  int32_t page_size;
  DividedKeys keys;
  std::mutex mutex;
};

/// FlashAttentionMetadata, with the batch, the pages and the builder that it points into.
struct Metadata {
  bk::FlashAttentionMetadata view;
  std::shared_ptr<Builder> builder;
  nb::object batch;
  std::shared_ptr<const StepTable> table;
  nb::object block_table, slot_mapping;
  std::vector<Array> arrays;  ///< of update_block_table
  Numbers<int64_t> slots;     ///< likewise
};

/// None without a schedule, and on a GPU.
nb::object copy_of_schedule(const Metadata& metadata, std::span<const int32_t> made) {
  if (made.empty() || metadata.builder->context.device().type != DeviceType::kCpu) return nb::none();
  std::vector<int32_t> schedule;
  {
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(metadata.builder->mutex);
    schedule.assign(made.begin(), made.end());
  }
  return nb::cast(to_numpy(std::move(schedule)));
}

Impl make_impl(int32_t num_heads, int32_t head_size, float scale, int32_t num_kv_heads, nb::handle alibi_slopes,
               std::optional<int32_t> sliding_window, const std::string& kv_cache_dtype,
               std::optional<float> logits_soft_cap, AttentionType attn_type,
               const std::optional<std::string>& kv_sharing_target_layer_name, nb::handle sinks, DType model_dtype,
               bool update_kv_cache_in_forward, int32_t dcp_query_ranks, const bk::FlashAttentionFacts& facts,
               nb::handle log, const std::optional<Context>& given_context) {
  const Context context = context_or_default(given_context);
  const std::vector<float> slopes = to_slopes(alibi_slopes, "alibi_slopes");
  const std::optional<Tensor> sink_weights = to_sinks(sinks);
  bk::FlashAttentionLayerConfig config;
  config.num_heads = num_heads;
  config.head_size = head_size;
  config.scale = scale;
  config.num_kv_heads = num_kv_heads;
  config.dcp_query_ranks = dcp_query_ranks;
  config.alibi_slopes = slopes;
  config.sliding_window = sliding_window;
  config.kv_cache_dtype = kv_cache_dtype;
  config.model_dtype = model_dtype;
  config.logits_soft_cap = logits_soft_cap;
  config.attn_type = attn_type;
  config.kv_sharing_target_layer_name = kv_sharing_target_layer_name;
  if (sink_weights) config.sinks = sink_weights->view;
  config.update_kv_cache_in_forward = update_kv_cache_in_forward;
  return {context, bk::FlashAttentionImpl(context, config, facts, to_log(log)), model_dtype,
          update_kv_cache_in_forward};
}

void make_builder(Builder* self, const bk::AttentionSpec& spec, nb::handle layers, const bk::EngineConfig& engine,
                  const bk::FlashAttentionOptions& options, nb::handle dcp_group) {
  bk::EngineConfig config = engine;
  DividedKeys keys(dcp_group, config);
  const std::optional<GroupUse> in_use = keys.use();
  const auto given = to_layers<Impl>(layers, "FlashAttentionImpl");
  std::vector<bk::AttentionLayer<bk::FlashAttentionImpl>> group;
  for (const auto& [name, impl] : given) group.push_back({name, &impl->impl});
  const Context context = given.front().second->context;
  const AttentionType attn_type = given.front().second->impl.attn_type();
  bk::FlashAttentionMetadataBuilder builder = [&] {
    const ReleasedGil released;
    return bk::FlashAttentionMetadataBuilder(context, spec, group, config, options);
  }();
  new (self) Builder{context, std::move(builder), attn_type, spec.page_size, std::move(keys), {}};
}

bool reads_pages(AttentionType type) {
  return type == AttentionType::kDecoder || type == AttentionType::kEncoderDecoder;
}

/// Keys that a request has in the pages, on the host.
std::span<const int32_t> lengths_in_pages(const bk::CommonAttentionMetadata& batch, AttentionType type) {
  const bool crosses = type == AttentionType::kEncoderDecoder && !batch.encoder_seq_lens.empty();
  return (crosses ? batch.encoder_seq_lens : batch.seq_lens).first(static_cast<size_t>(batch.num_reqs));
}

enum class Purpose { kStep, kFastStep, kDrafting, kCapture };

Metadata build(std::shared_ptr<Builder> builder, int32_t common_prefix_len, nb::handle common_attn_metadata,
               Purpose purpose, nb::handle stream) {
  const CommonBatch* const batch = to_common_batch(common_attn_metadata);
  Metadata metadata;
  bk::CommonAttentionMetadata view = batch->with_spans();
  if (view.where == Where::kHost && batch->block_table && reads_pages(builder->attn_type)) {
    auto table =
        std::make_shared<StepTable>(copy_step_table(view.block_table, lengths_in_pages(view, builder->attn_type),
                                                    view.query_start_loc, builder->page_size, builder->keys.shard));
    view.block_table = table->view;
    metadata.table = std::move(table);
  }
  python::require_on(builder->context.device(), batch->device_arrays);
  const Stream queue = to_stream(stream, builder->context.device(), {&batch->device_arrays});
  {
    const std::optional<GroupUse> in_use = builder->keys.use();
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(builder->mutex);
    switch (purpose) {
      case Purpose::kDrafting: metadata.view = builder->builder.build_for_drafting(view, queue); break;
      case Purpose::kCapture: metadata.view = builder->builder.build_for_cudagraph_capture(view, queue); break;
      default: metadata.view = builder->builder.build(common_prefix_len, view, purpose == Purpose::kFastStep, queue);
    }
  }
  metadata.builder = std::move(builder);
  metadata.batch = nb::borrow(common_attn_metadata);
  metadata.block_table = batch->block_table_object;
  metadata.slot_mapping = batch->slot_mapping_object;
  return metadata;
}

Metadata update_block_table(const std::shared_ptr<Builder>& builder, const Metadata& given, nb::handle block_table,
                            nb::handle slot_mapping, nb::handle block_table_host) {
  if (given.builder != builder) refuse("metadata is another builder's");
  Metadata metadata = given;
  const Array table = borrow_block_table(block_table, "blk_table");
  bk::BlockTableView view = table_view(table);
  bk::BlockTableView host;
  metadata.slots = int64_numbers(slot_mapping, "slot_mapping");
  metadata.arrays = {table};
  if (!block_table_host.is_none()) {
    Array copy = borrow_block_table(block_table_host, "block_table_host");
    if (!copy.place.host) refuse("block_table_host lies on a GPU; it is read on the host");
    host = table_view(copy);
    metadata.arrays.push_back(std::move(copy));
  }
  python::require_on(builder->context.device(), table);
  if (table.place.host && metadata.table) {
    auto copy = std::make_shared<StepTable>(
        copy_step_table(view, given.view.seq_lens.first(static_cast<size_t>(given.view.num_reqs)),
                        given.view.query_start_loc_host, builder->page_size, builder->keys.shard));
    view = copy->view;
    metadata.table = std::move(copy);
  }
  {
    const ReleasedGil released;
    const std::lock_guard<std::mutex> lock(builder->mutex);
    metadata.view = builder->builder.update_block_table(given.view, view, metadata.slots.view(), host);
  }
  metadata.block_table = nb::borrow(block_table);
  metadata.slot_mapping = nb::borrow(slot_mapping);
  return metadata;
}

nb::object forward(const Impl& self, nb::handle layer, nb::handle query, nb::handle key, nb::handle value,
                   nb::handle kv_cache, nb::handle attn_metadata, nb::handle output, nb::handle output_scale,
                   nb::handle output_block_scale, nb::handle stream) {
  if (attn_metadata.is_none()) {
    if (output.is_none()) refuse("Output tensor must be provided.");
    const ForwardTensors tensors = to_profiling_output(self.context, output);
    const Stream queue = to_stream(stream, self.context.device(), {&tensors.arrays});
    const ReleasedGil released;
    self.impl.forward({}, {}, {}, {}, {}, nullptr, tensors.output, {}, queue);
  } else {
    const Metadata* metadata = nullptr;
    if (!nb::try_cast(attn_metadata, metadata, false) || metadata == nullptr) {
      refuse_kind("attn_metadata", "None or what FlashAttentionMetadataBuilder.build returns", attn_metadata);
    }
    ForwardTypes types;
    types.query = metadata->view.q_data_type;
    types.output = metadata->view.output_data_type;
    types.kv_cache = self.impl.kv_cache_dtype();
    types.model = self.model_dtype;
    types.num_kv_heads = self.impl.num_kv_heads();
    types.num_reqs = metadata->view.num_reqs;
    types.reads_cache = !self.impl.is_encoder();
    const auto& dcp_plan = metadata->view.dcp_plans.front();
    types.reads_keys =
        self.impl.is_encoder() || self.updates_in_forward || (dcp_plan && dcp_plan->plan.reads_new_tokens);
    types.writes_cache =
        self.updates_in_forward && !self.impl.is_encoder() && !self.impl.kv_sharing_target_layer_name();
    const ForwardTensors tensors = to_forward_tensors(
        self.context, {layer, query, key, value, kv_cache, output, output_scale, output_block_scale}, types);
    if (metadata->table && tensors.kv_cache.rank == 5) {
      metadata->table->require_pages(tensors.kv_cache.shape[1], self.impl.window_left());
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
  if (self.impl.is_encoder() || self.impl.kv_sharing_target_layer_name()) return;
  if (key.is_none() && value.is_none()) return;
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
      m, "FlashAttentionImpl",
      "One layer's attention. The arguments are vLLM's: sizes of one rank; sliding_window counts the "
      "query; alibi_slopes and sinks have num_heads values (sinks are read here, on a GPU copied to the "
      "host by their library), times dcp_query_ranks, the ranks whose query heads forward is given "
      "(ParallelConfig.dcp_replicated_queries). kv_cache_dtype is 'auto' (model_dtype), 'float32', 'float16', "
      "'bfloat16', "
      "'fp8', 'fp8_e4m3' or 'fp8_e5m2'. Without a context the process's CPU context is used. `log` is "
      "called with (LogLevel, text). Raises InvalidArgument and Error for what is not offered.");
  type.attr("can_return_lse_for_decode") = bk::FlashAttentionImpl::can_return_lse_for_decode;
  type.attr("supports_quant_query_input") = bk::FlashAttentionImpl::supports_quant_query_input;
  type.def(
          "__init__",
          [](Impl* self, int32_t num_heads, int32_t head_size, float scale, int32_t num_kv_heads,
             nb::object alibi_slopes, std::optional<int32_t> sliding_window, const std::string& kv_cache_dtype,
             std::optional<float> logits_soft_cap, AttentionType attn_type,
             const std::optional<std::string>& kv_sharing_target_layer_name, nb::object sinks, DType model_dtype,
             bool update_kv_cache_in_forward, int32_t dcp_query_ranks, const bk::FlashAttentionFacts& facts,
             nb::object log, const std::optional<Context>& context) {
            new (self) Impl(make_impl(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                                      kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks,
                                      model_dtype, update_kv_cache_in_forward, dcp_query_ranks, facts, log, context));
          },
          nb::arg("num_heads"), nb::arg("head_size"), nb::arg("scale"), nb::arg("num_kv_heads"),
          nb::arg("alibi_slopes") = nb::none(), nb::arg("sliding_window") = nb::none(),
          nb::arg("kv_cache_dtype") = "auto", nb::arg("logits_soft_cap") = nb::none(),
          nb::arg("attn_type") = AttentionType::kDecoder, nb::arg("kv_sharing_target_layer_name") = nb::none(),
          nb::arg("sinks") = nb::none(), nb::kw_only(), nb::arg("model_dtype") = DType::kBFloat16,
          nb::arg("update_kv_cache_in_forward") = false, nb::arg("dcp_query_ranks") = 1,
          nb::arg("facts") = bk::FlashAttentionFacts{}, nb::arg("log") = nb::none(), nb::arg("context") = nb::none())
      .def(
          "forward", &forward, nb::arg("layer").none(), nb::arg("query"), nb::arg("key").none(),
          nb::arg("value").none(), nb::arg("kv_cache").none(), nb::arg("attn_metadata").none(),
          nb::arg("output") = nb::none(), nb::arg("output_scale") = nb::none(),
          nb::arg("output_block_scale") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Attention of one layer into `output`, which is returned. query and output are [tokens, num_heads, "
          "head_size]; rows from attn_metadata.num_actual_tokens on are padding, neither read nor written. kv_cache is "
          "[2, pages, page_size, num_kv_heads, head_size] of any strides; uint8 where the cache is fp8. key and value "
          "are attended to by encoders; other types read the cache, which do_kv_cache_update writes. `layer` is None, "
          "an AttentionLayerScales, or an engine's layer with _k_scale_float or _k_scale. Without metadata the output "
          "is set to zero. output_scale (and output_block_scale, uint8, for NVFP4) are for builders with an "
          "output_dtype. Raises InvalidArgument before anything is written, Error STALE_PLAN for metadata whose "
          "memory was built into again.")
      .def("do_kv_cache_update", &do_kv_cache_update, nb::arg("layer").none(), nb::arg("key").none(),
           nb::arg("value").none(), nb::arg("kv_cache").none(), nb::arg("slot_mapping"), nb::kw_only(),
           nb::arg("stream") = nb::none(),
           "Writes the keys and values [tokens, num_kv_heads, head_size] of as many tokens as slot_mapping has into "
           "their slots; a negative slot is nowhere. Does nothing for encoders, for layers that share another layer's "
           "cache, and without key and value.")
      .def_prop_ro("num_heads", [](const Impl& self) { return self.impl.num_heads(); })
      .def_prop_ro("num_kv_heads", [](const Impl& self) { return self.impl.num_kv_heads(); })
      .def_prop_ro("dcp_query_ranks", [](const Impl& self) { return self.impl.dcp_query_ranks(); })
      .def_prop_ro("num_queries_per_kv", [](const Impl& self) { return self.impl.num_queries_per_kv(); })
      .def_prop_ro("head_size", [](const Impl& self) { return self.impl.head_size(); })
      .def_prop_ro("scale", [](const Impl& self) { return self.impl.scale(); })
      .def_prop_ro(
          "sliding_window",
          [](const Impl& self) {
            return nb::make_tuple(self.impl.sliding_window().left, self.impl.sliding_window().right);
          },
          "Keys left and right of a query that it sees, itself not counted; -1 is all.")
      .def_prop_ro("logits_soft_cap", [](const Impl& self) { return self.impl.logits_soft_cap(); })
      .def_prop_ro("kv_cache_dtype", [](const Impl& self) { return self.impl.kv_cache_dtype(); })
      .def_prop_ro("attn_type", [](const Impl& self) { return self.impl.attn_type(); })
      .def_prop_ro("context", [](const Impl& self) { return Context(self.context); })
      .def("__repr__", [](const Impl& self) {
        return "<folio.backends.FlashAttentionImpl: " + std::to_string(self.impl.num_heads()) + " heads over " +
               std::to_string(self.impl.num_kv_heads()) + " KV heads of " + std::to_string(self.impl.head_size()) +
               ", " + describe(self.context.device()) + ">";
      });
}

void bind_metadata(nb::module_& m) {
  nb::class_<Metadata>(m, "FlashAttentionMetadata",
                       "What one step's layers need: made by FlashAttentionMetadataBuilder.build. Valid until the "
                       "builder has built as many further steps as it keeps in flight.")
      .def_prop_ro("num_reqs", [](const Metadata& self) { return self.view.num_reqs; })
      .def_prop_ro("num_actual_tokens", [](const Metadata& self) { return self.view.num_actual_tokens; })
      .def_prop_ro("max_query_len", [](const Metadata& self) { return self.view.max_query_len; })
      .def_prop_ro("max_seq_len", [](const Metadata& self) { return self.view.max_seq_len; })
      .def_prop_ro("query_start_loc", [](const Metadata& self) { return nb::getattr(self.batch, "query_start_loc"); })
      .def_prop_ro("seq_lens", [](const Metadata& self) { return nb::getattr(self.batch, "seq_lens"); })
      .def_prop_ro("block_table", [](const Metadata& self) { return self.block_table; })
      .def_prop_ro("slot_mapping", [](const Metadata& self) { return self.slot_mapping; })
      .def_prop_ro("causal", [](const Metadata& self) { return self.view.causal; })
      .def_prop_ro(
          "use_cascade", [](const Metadata& self) { return self.view.use_cascade; },
          "Whether some keys are read once for several requests.")
      .def_prop_ro(
          "common_prefix_len", [](const Metadata& self) { return self.view.common_prefix_len; },
          "CascadeMode.HEURISTIC: tokens that all requests share.")
      .def_prop_ro(
          "num_cascade_levels", [](const Metadata& self) { return self.view.cascade.num_levels; },
          "CascadeMode.AUTO: shared prefixes that were found, inside each other.")
      .def_prop_ro("max_num_splits", [](const Metadata& self) { return self.view.max_num_splits; })
      .def_prop_ro(
          "scheduler_metadata",
          [](const Metadata& self) { return copy_of_schedule(self, self.view.scheduler_metadata); },
          "A copy of the schedule that was made ahead of time, of a divided cache for the cached keys; None without "
          "one, and on a GPU.")
      .def_prop_ro(
          "new_tokens_scheduler_metadata",
          [](const Metadata& self) { return copy_of_schedule(self, self.view.new_tokens_scheduler_metadata); },
          "Likewise, of a divided cache for the keys beside it; None elsewhere.")
      .def_prop_ro("max_dcp_context_kv_len", [](const Metadata& self) { return self.view.max_dcp_context_kv_len; })
      .def_prop_ro(
          "dcp_context_kv_lens",
          [](const Metadata& self) -> nb::object {
            if (!self.view.dcp_plans.front()) return nb::none();
            std::vector<int32_t> lens;
            {
              const ReleasedGil released;
              const std::lock_guard<std::mutex> lock(self.builder->mutex);
              lens.assign(self.view.dcp_context_kv_lens.begin(), self.view.dcp_context_kv_lens.end());
            }
            return nb::cast(to_numpy(std::move(lens)));
          },
          "A copy of this rank's share of each request's older tokens; None without context parallelism.")
      .def_prop_ro("attn_type", [](const Metadata& self) { return self.view.attn_type; })
      .def_prop_ro("q_data_type", [](const Metadata& self) { return self.view.q_data_type; })
      .def_prop_ro(
          "data_type", [](const Metadata& self) { return self.view.data_type; }, "Of the KV cache.")
      .def_prop_ro("output_data_type", [](const Metadata& self) { return self.view.output_data_type; })
      .def_prop_ro("page_size", [](const Metadata& self) { return self.view.page_size; })
      .def("__repr__", [](const Metadata& self) {
        return "<folio.backends.FlashAttentionMetadata: " + std::to_string(self.view.num_reqs) + " requests, " +
               std::to_string(self.view.num_actual_tokens) + " tokens>";
      });
}

void bind_builder(nb::module_& m) {
  nb::class_<Builder> type(
      m, "FlashAttentionMetadataBuilder",
      "Plans every step for one group of layers that share a KV cache format, page tables and kind of "
      "attention. `layers` is a dict of names and FlashAttentionImpl, whose context it runs on. Calls "
      "from several threads wait for each other. dcp_group: this rank's ProcessGroup, where the "
      "configuration's decode_context_parallel_size is above 1; build and forward then belong to one thread.");
  type.attr("supports_update_block_table") = bk::FlashAttentionMetadataBuilder::supports_update_block_table;
  type.def(
          "__init__",
          [](Builder* self, const bk::AttentionSpec& kv_cache_spec, nb::object layers, const bk::EngineConfig& config,
             const bk::FlashAttentionOptions& options,
             nb::object dcp_group) { make_builder(self, kv_cache_spec, layers, config, options, dcp_group); },
          nb::arg("kv_cache_spec"), nb::arg("layers"), nb::arg("config"),
          nb::arg("options") = bk::FlashAttentionOptions{}, nb::kw_only(), nb::arg("dcp_group") = nb::none())
      .def(
          "build",
          [](std::shared_ptr<Builder> self, int32_t common_prefix_len, nb::object common_attn_metadata, bool fast_build,
             nb::object stream) {
            return build(std::move(self), common_prefix_len, common_attn_metadata,
                         fast_build ? Purpose::kFastStep : Purpose::kStep, stream);
          },
          nb::arg("common_prefix_len"), nb::arg("common_attn_metadata"), nb::arg("fast_build") = false, nb::kw_only(),
          nb::arg("stream") = nb::none(),
          "Plans a step. common_prefix_len: tokens, whole pages, that all requests begin with and whose pages their "
          "rows share; they are read once under CascadeMode.HEURISTIC. fast_build makes no schedule ahead of time. "
          "Raises InvalidArgument for a batch that contradicts itself or the configuration, naming the field.")
      .def(
          "build_for_drafting",
          [](std::shared_ptr<Builder> self, nb::object common_attn_metadata, nb::object stream) {
            return build(std::move(self), 0, common_attn_metadata, Purpose::kDrafting, stream);
          },
          nb::arg("common_attn_metadata"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "For draft models: without prefix, fast.")
      .def(
          "build_for_cudagraph_capture",
          [](std::shared_ptr<Builder> self, nb::object common_attn_metadata, nb::object stream) {
            return build(std::move(self), 0, common_attn_metadata, Purpose::kCapture, stream);
          },
          nb::arg("common_attn_metadata"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "For the batches that an engine captures: without prefix.")
      .def("update_block_table", &update_block_table, nb::arg("metadata"), nb::arg("blk_table"),
           nb::arg("slot_mapping"), nb::arg("block_table_host") = nb::none(),
           "The same step for another KV cache group, whose layers differ in nothing but where their pages are.")
      .def(
          "get_cudagraph_support", [](const Builder& self) { return self.builder.get_cudagraph_support(); },
          "Which batches can be replayed from captured graphs.")
      .def_prop_ro(
          "reorder_batch_threshold", [](const Builder& self) { return self.builder.reorder_batch_threshold(); },
          "None: requests may stand in any order.")
      .def_prop_ro("aot_schedule", [](const Builder& self) { return self.builder.aot_schedule(); })
      .def_prop_ro("kv_cache_dtype", [](const Builder& self) { return self.builder.kv_cache_dtype(); })
      .def_prop_ro("q_data_type", [](const Builder& self) { return self.builder.q_data_type(); })
      .def_prop_ro("output_data_type", [](const Builder& self) { return self.builder.output_data_type(); })
      .def_prop_ro("kernel_name", [](const Builder& self) { return self.builder.kernel_name(); });
}

void bind_backend(nb::module_& m) {
  using Backend = bk::FlashAttentionBackend;
  using Facts = bk::FlashAttentionFacts;
  const nb::object impl = m.attr("FlashAttentionImpl");
  const nb::object builder = m.attr("FlashAttentionMetadataBuilder");
  nb::class_<Backend> backend(m, "FlashAttentionBackend",
                              "vLLM's FlashAttention backend: its name, what it takes and how its KV cache lies in "
                              "memory. Stateless; `facts` says whose answers are wanted (native: Folio's own).");
  backend.attr("accept_output_buffer") = Backend::accept_output_buffer;
  backend.attr("forward_includes_kv_cache_update") = Backend::forward_includes_kv_cache_update;
  backend.def(nb::init<>())
      .def_static(
          "get_name", [] { return std::string(Backend::get_name()); }, "'FLASH_ATTN'.")
      .def_static(
          "get_impl_cls", [impl] { return impl; }, "FlashAttentionImpl.")
      .def_static(
          "get_builder_cls", [builder] { return builder; }, "FlashAttentionMetadataBuilder.")
      .def_static("capability", &Backend::capability, nb::arg("facts") = Facts{},
                  "Everything that the backend takes, as values.")
      .def_static("validate_configuration", &Backend::validate_configuration, nb::arg("requirements"),
                  nb::arg("facts") = Facts{},
                  "Every reason why the requirements cannot be met, in vLLM's words; empty: they can.")
      .def_static(
          "supported_dtypes",
          [](bk::BackendProfile profile) {
            const auto all = Backend::supported_dtypes(profile);
            return std::vector<DType>(all.begin(), all.end());
          },
          nb::arg("profile") = bk::BackendProfile::kNative, "Model dtypes.")
      .def_static(
          "supported_kv_cache_dtypes",
          [](bk::BackendProfile profile) {
            const auto all = Backend::supported_kv_cache_dtypes(profile);
            return std::vector<std::string>(all.begin(), all.end());
          },
          nb::arg("profile") = bk::BackendProfile::kNative, "Names of cache dtypes that do not depend on the device.")
      .def_static("supports_kv_cache_dtype", &Backend::supports_kv_cache_dtype, nb::arg("kv_cache_dtype").none(),
                  nb::arg("facts") = Facts{}, "Whether caches of that name are taken; None: not asked.")
      .def_static("get_preferred_page_size", &Backend::get_preferred_page_size, nb::arg("default_page_size"),
                  nb::arg("facts") = Facts{}, "The default where it is supported; at least 64 on XPU.")
      .def_static("supports_head_size", &Backend::supports_head_size, nb::arg("head_size"), "Multiples of 8 up to 256.")
      .def_static("supports_attn_type", &Backend::supports_attn_type, nb::arg("attn_type"), "True: all four.")
      .def_static("supports_non_causal", &Backend::supports_non_causal, "True.")
      .def_static("supports_per_head_quant_scales", &Backend::supports_per_head_quant_scales,
                  nb::arg("facts") = Facts{}, "Whether scales per head are taken.")
      .def_static("supports_sink", &Backend::supports_sink, nb::arg("facts") = Facts{},
                  "Whether attention sinks are taken.")
      .def_static("get_cudagraph_support", &Backend::get_cudagraph_support, nb::arg("facts") = Facts{},
                  "Which batches can be replayed from captured graphs.")
      .def_static(
          "get_kv_cache_shape",
          [](int64_t num_blocks, int32_t block_size, int32_t num_kv_heads, int32_t head_size,
             bk::BackendProfile profile) {
            const auto shape = Backend::get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, profile);
            return nb::make_tuple(shape[0], shape[1], shape[2], shape[3], shape[4]);
          },
          nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("num_kv_heads"), nb::arg("head_size"),
          nb::arg("profile") = bk::BackendProfile::kNative,
          nb::sig(
              "def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, profile: "
              "BackendProfile | str = ...) -> tuple[int, int, int, int, int]"),
          "(2, num_blocks, block_size, num_kv_heads, head_size): K at index 0, V at 1; tokens of a page are a block.")
      .def_static("get_kv_cache_page_dim", &Backend::get_kv_cache_page_dim,
                  "1: which dimension of the shape counts pages.")
      .def_static("get_kv_cache_stride_order", &kv_cache_stride_order<Backend>,
                  nb::arg("layout") = bk::KvCacheLayout::kNhd, nb::arg("include_num_layers_dimension") = false,
                  "Which logical dimension stands at each physical position, outermost first.")
      .def_static(
          "get_fp8_dtype_for_flashattn",
          [](const std::string& name, bk::BackendProfile profile) {
            return Backend::get_fp8_dtype_for_flashattn(name, profile);
          },
          nb::arg("kv_cache_dtype"), nb::arg("profile") = bk::BackendProfile::kNative,
          "The element type of an fp8 cache's name. Raises InvalidArgument for other names.");
}

}  // namespace
}  // namespace flash_attn

void bind_flash_attn(nb::module_& m) {
  flash_attn::bind_impl(m);
  flash_attn::bind_metadata(m);
  flash_attn::bind_builder(m);
  flash_attn::bind_backend(m);
}

}  // namespace folio::python
