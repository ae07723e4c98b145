#pragma once

#include <nanobind/stl/pair.h>

#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "array.hpp"
#include "folio/backends/attention_layer.hpp"
#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/batch_order.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/backends/output_quantization.hpp"
#include "integers.hpp"
#include "process_group.hpp"
#include "views.hpp"

/// What the bindings of the engine backends share.
namespace folio::python {

namespace bk = folio::backends;

/// None (empty), a list of flags, or an array of bool or uint8. Throws Error(kInvalidArgument), naming the argument.
Numbers<uint8_t> flag_numbers(nb::handle source, const std::string& name);

/// Memory whose elements are `stored`, whether the array says so or has bits of that size (an engine's uint8).
Tensor to_stored_tensor(nb::handle source, DType stored, const std::string& name, Access access);

/// The quantisation scales of one layer: an AttentionLayerScales, None (all 1), or an engine's layer, of which
/// `_q_scale_float`, `_k_scale_float`, `_v_scale_float` are read, or `_q_scale`, `_k_scale`, `_v_scale`.
struct LayerScales {
  ScaleArg q, k, v;
  std::vector<Array> arrays;

  bk::AttentionLayerScales view() const { return {q.scale, k.scale, v.scale}; }
};
LayerScales to_layer_scales(nb::handle layer, int64_t num_kv_heads, int64_t num_requests);

/// A quantised output's scale and block scales.
struct QuantizedOutput {
  float value = 1.0f;
  bk::OutputQuantization view;  ///< complete but for a scale that is `value`, which it points to: see with_value
  bool has_value = false;
  std::vector<Array> arrays;

  bk::OutputQuantization with_value() const {
    bk::OutputQuantization whole = view;
    if (has_value) whole.scale = &value;
    return whole;
  }
};
QuantizedOutput to_quantized_output(nb::handle output_scale, nb::handle output_block_scale);

/// An output: of its own float type, or bytes for a quantised one.
Tensor to_output(nb::handle output, DType expected);

/// Per-head constants of a layer, on the host: a list or an array of floats. None: empty.
std::vector<float> to_slopes(nb::handle source, const std::string& name);
/// Sinks [num_heads], float32, float16 or bfloat16; those on a GPU are copied to the host by their library.
std::optional<Tensor> to_sinks(nb::handle source);

/// The context given, or the process's CPU context, which is made when it is first needed.
Context context_or_default(const std::optional<Context>& context);

/// A Python callable (i, j), to be called while its caller holds it.
bk::SwapStates to_swap(nb::handle swap_states);

/// A Python callable (level, text), or None.
bk::OnceLog to_log(nb::handle callable);

/// Python's CommonAttentionMetadata.
struct CommonBatch {
  bk::CommonAttentionMetadata view;  ///< all but the spans
  Numbers<int32_t> query_start_loc, seq_lens, query_start_loc_host, seq_lens_host, upper_bound;
  Numbers<int32_t> encoder_seq_lens, encoder_seq_lens_host, logits_indices, dcp_local_seq_lens;
  Numbers<int64_t> slot_mapping, positions;
  Numbers<uint8_t> causal_per_request, is_prefilling;
  std::vector<bk::BidirectionalRange> ranges;
  std::optional<Array> block_table, block_table_host;
  nb::object query_start_loc_object, seq_lens_object, block_table_object, slot_mapping_object;
  std::vector<Array> device_arrays;  ///< those borrowed on a GPU

  /// With spans into this object, which must stay where it is.
  bk::CommonAttentionMetadata with_spans() const;
};

/// A builder's argument common_attn_metadata. Throws nb::type_error for anything else; `source` keeps it alive.
const CommonBatch* to_common_batch(nb::handle source);

/// A builder's argument layers: a dict from names to implementations, or a sequence of such pairs. `kind`: Impl's name.
template <typename Impl>
std::vector<std::pair<std::string, const Impl*>> to_layers(nb::handle source, const std::string& kind) {
  std::vector<std::pair<std::string, const Impl*>> layers;
  const nb::object items = nb::isinstance<nb::dict>(source) ? source.attr("items")() : nb::borrow(source);
  for (const nb::handle item : nb::iter(items)) {
    std::pair<std::string, const Impl*> layer;
    const bool is_pair = nb::isinstance<nb::tuple>(item) && nb::len(nb::borrow<nb::tuple>(item)) == 2;
    if (!is_pair || !nb::try_cast(item[0], layer.first, false) || !nb::try_cast(item[1], layer.second, false) ||
        layer.second == nullptr) {
      refuse_kind("layers", "a dict of names and " + kind + ", or pairs of them", item);
    }
    layers.push_back(std::move(layer));
  }
  if (layers.empty()) refuse("layers is empty; a builder is for a group of layers");
  return layers;
}

bk::BlockTableView table_view(const std::optional<Array>& table);
Array borrow_block_table(nb::handle source, const std::string& name);

/// The pages that a step reads, copied out of the engine's block table on a CPU, so that what was checked is what is
/// read. Entries before a window may hold anything: engines give those pages away.
struct StepTable {
  bk::BlockTableView view;
  std::vector<int32_t> pages;
  std::vector<int32_t> lens;         ///< keys of each row
  std::vector<int32_t> first_query;  ///< position of each row's first query
  int32_t page_size = 0;
  KvShard shard;                       ///< the rank whose pages these are; `lens` and `first_query` are of all ranks
  int32_t smallest = 0, largest = -1;  ///< page ids

  /// Throws Error(kInvalidArgument) where a page that a layer with this window reads is none of the cache's. O(1) where
  /// all entries are pages.
  void require_pages(int64_t num_pages, int32_t window_left) const;
};
/// `lens`: keys of each row, over all ranks; `cu_q` [rows + 1]: its queries, the last ones. Throws
/// Error(kInvalidArgument) for rows that are too short.
StepTable copy_step_table(const bk::BlockTableView& table, std::span<const int32_t> lens, std::span<const int32_t> cu_q,
                          int32_t page_size, const KvShard& shard = {});

/// dcp_group as an argument: a ProcessGroup, or None, which is null.
std::shared_ptr<Group> to_group(nb::handle dcp_group);
/// The group for one call, if there is one; with the GIL.
std::optional<GroupUse> use(const std::shared_ptr<Group>& group);

/// The ranks that a builder's keys are divided over.
struct DividedKeys {
  std::shared_ptr<Group> group;  ///< null: they are not
  KvShard shard;

  /// `group` is a ProcessGroup or None; it becomes the configuration's.
  DividedKeys(nb::handle given, bk::EngineConfig& config);
  std::optional<GroupUse> use() const { return python::use(group); }
};

/// One layer's tensors, as both backends' `forward` takes them.
struct ForwardTensors {
  ConstTensorView query, key, value;
  TensorView kv_cache, output;
  LayerScales scales;
  QuantizedOutput quantized;
  std::vector<Array> arrays;
};
struct ForwardArguments {
  nb::handle layer, query, key, value, kv_cache, output, output_scale, output_block_scale;
};
/// What a layer's step is: the types that its tensors have, and which of them are looked at.
struct ForwardTypes {
  DType query = DType::kUnset;
  DType kv_cache = DType::kUnset;
  DType output = DType::kUnset;
  DType model = DType::kUnset;  ///< of key and value
  int32_t num_kv_heads = 0;
  int32_t num_reqs = 0;
  bool reads_keys = false;  ///< key and value are looked at
  bool reads_cache = true;  ///< kv_cache is
  bool writes_cache = false;
};
ForwardTensors to_forward_tensors(const Context& context, const ForwardArguments& given, const ForwardTypes& types);

/// The output of a call without metadata (a profiling run).
ForwardTensors to_profiling_output(const Context& context, nb::handle output);

/// key, value and the cache of a write.
ForwardTensors to_write_tensors(const Context& context, nb::handle layer, nb::handle key, nb::handle value,
                                nb::handle kv_cache, DType stored, DType model, int32_t num_kv_heads);

/// Logical dimensions by their physical position, outermost first.
template <typename Backend>
nb::tuple kv_cache_stride_order(bk::KvCacheLayout layout, bool include_num_layers_dimension) {
  nb::list order;
  const auto append = [&order](const auto& dimensions) {
    for (const int32_t dimension : dimensions) order.append(dimension);
  };
  if (include_num_layers_dimension) {
    append(Backend::get_layered_kv_cache_stride_order(layout));
  } else {
    append(Backend::get_kv_cache_stride_order(layout));
  }
  return nb::tuple(order);
}

/// Ends the names that `from folio._folio import *` takes.
void end_public_names(nb::module_& m);

void bind_backends_batch(nb::module_& m);
void bind_backends_config(nb::module_& m);
void bind_virtual_batches(nb::module_& m);
void bind_merge_attn_states(nb::module_& m);
void bind_backends_capability(nb::module_& m);
void bind_backends_dispatch(nb::module_& m);
void bind_flash_attn(nb::module_& m);
void bind_flashinfer(nb::module_& m);
void bind_flashinfer_wrappers(nb::module_& m);
void bind_token_pool(nb::module_& m);
void bind_draft_trees(nb::module_& m);

}  // namespace folio::python
