#include <unistd.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "backends.hpp"
#include "folio/distributed/context_parallel.hpp"
#include "folio/page_table.hpp"

namespace folio::python {
namespace {

[[noreturn]] void refuse_element(const std::string& name, const Array& array, const char* taken) {
  refuse(name + " is " + element_text(array.element) + "; " + taken + " are taken");
}

std::vector<uint8_t> listed_flags(nb::handle source, const std::string& name) {
  std::vector<uint8_t> flags;
  for (const nb::handle item : nb::tuple(nb::borrow(source))) {
    const std::string place = name + "[" + std::to_string(flags.size()) + "]";
    int64_t value = 0;
    if (!nb::try_cast(item, value, false)) refuse_kind(place, "a flag", item);
    if (value < 0 || value > std::numeric_limits<uint8_t>::max()) {
      refuse(place + " is " + std::to_string(value) + "; it does not fit into a flag");
    }
    flags.push_back(static_cast<uint8_t>(value));
  }
  return flags;
}

/// What an engine's layer says of one scale; 1 where it says nothing.
bool layer_scale(nb::handle layer, const std::string& field, ScaleArg& scale) {
  const std::string as_float = "_" + field + "_float";
  const std::string as_array = "_" + field;
  if (nb::hasattr(layer, as_float.c_str())) {
    scale = to_scale(layer.attr(as_float.c_str()), "layer." + as_float);
    return true;
  }
  if (!nb::hasattr(layer, as_array.c_str())) return false;
  const nb::object given = layer.attr(as_array.c_str());
  if (!nb::hasattr(given, "__dlpack__")) {
    scale = to_scale(given, "layer." + as_array);
    return true;
  }
  Array array = borrow(given, "layer." + as_array);
  if (array.dtype != DType::kFloat32) refuse_element(array.name, array, "float32 scales");
  if (array.rank() > 1)
    refuse(array.name + " has shape " + shape_text(array) + "; it must be one scale, or one a head");
  const bool single = array.rank() == 0 || array.size(0) == 1;
  if (!single && array.stride(0) != 1) refuse(array.name + " must be contiguous");
  if (single && array.place.host) {
    std::memcpy(&scale.scale.value, array.data, sizeof(float));
    return true;
  }
  scale.scale.data = static_cast<const float*>(array.data);
  scale.scale.granularity = single ? ScaleGranularity::kPerTensor : ScaleGranularity::kPerHead;
  scale.heads = single ? 1 : array.size(0);
  scale.array = std::move(array);
  return true;
}

}  // namespace

Numbers<uint8_t> flag_numbers(nb::handle source, const std::string& name) {
  Numbers<uint8_t> numbers;
  if (!source.is_valid() || source.is_none()) return numbers;
  if (nb::isinstance<nb::list>(source) || nb::isinstance<nb::tuple>(source)) {
    numbers.copy(listed_flags(source, name));
    return numbers;
  }
  Array array = borrow(source, name);
  if (array.rank() != 1) refuse(name + " has shape " + shape_text(array) + "; it must have one dimension");
  if (array.element != nb::dtype<uint8_t>() && array.element != nb::dtype<bool>()) {
    refuse_element(name, array, "bool and uint8");
  }
  if (!array.place.host) {
    if (array.size(0) > 1 && array.stride(0) != 1) {
      refuse(name + " has a stride of " + std::to_string(array.stride(0)) + " elements; it must be contiguous");
    }
    numbers.borrow(std::move(array));
    return numbers;
  }
  const auto* const given = static_cast<const uint8_t*>(array.data);
  std::vector<uint8_t> flags;
  for (int64_t i = 0; i < array.size(0); ++i) flags.push_back(given[i * array.stride(0)]);
  numbers.copy(std::move(flags));
  return numbers;
}

Tensor to_stored_tensor(nb::handle source, DType stored, const std::string& name, Access access) {
  const Tensor* given = nullptr;
  if (nb::try_cast(source, given, false) && given != nullptr) return to_tensor(source, name, access);
  Tensor tensor;
  tensor.array = borrow(source, name, access);
  const Array& array = tensor.array;
  const bool bits = array.element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) ||
                    array.element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
  tensor.view.dtype = array.dtype;
  if (array.dtype == DType::kUnset) {
    if (!bits || size_of(stored) * 8 != array.element.bits) {
      refuse(name + " is " + element_text(array.element) + "; it must be " + std::string(to_string(stored)));
    }
    tensor.view.dtype = stored;
  }
  if (array.rank() > kMaxRank) refuse(name + " has shape " + shape_text(array) + "; at most 5 dimensions are taken");
  tensor.view.data = array.data;
  tensor.view.rank = static_cast<int32_t>(array.rank());
  for (int64_t i = 0; i < array.rank(); ++i) {
    tensor.view.shape[static_cast<size_t>(i)] = array.size(i);
    tensor.view.strides[static_cast<size_t>(i)] = array.stride(i);
  }
  return tensor;
}

LayerScales to_layer_scales(nb::handle layer, int64_t num_kv_heads, int64_t num_requests) {
  LayerScales scales;
  if (layer.is_none()) return scales;
  const LayerScales* given = nullptr;
  if (nb::try_cast(layer, given, false) && given != nullptr) {
    scales = *given;
  } else {
    bool found = layer_scale(layer, "q_scale", scales.q);
    found = layer_scale(layer, "k_scale", scales.k) || found;
    found = layer_scale(layer, "v_scale", scales.v) || found;
    if (!found) {
      refuse_kind(
          "layer",
          "None, a folio.backends.AttentionLayerScales or an object with _k_scale_float or _k_scale (an engine's "
          "layer)",
          layer);
    }
  }
  for (const auto& [scale, name] : {std::pair(&scales.q, "layer.q"), {&scales.k, "layer.k"}, {&scales.v, "layer.v"}}) {
    require_extent(*scale, name, num_kv_heads, num_requests);
    if (scale->array) scales.arrays.push_back(*scale->array);
  }
  return scales;
}

QuantizedOutput to_quantized_output(nb::handle output_scale, nb::handle output_block_scale) {
  QuantizedOutput quantized;
  if (!output_scale.is_none()) {
    if (nb::try_cast(output_scale, quantized.value, true)) {
      quantized.has_value = true;
    } else {
      Array array = borrow(output_scale, "output_scale");
      const bool single = array.rank() == 0 || (array.rank() == 1 && array.size(0) == 1);
      if (array.dtype != DType::kFloat32 || !single) {
        refuse("output_scale is " + element_text(array.element) + " " + shape_text(array) + "; it must be one float32");
      }
      if (array.place.host) {
        std::memcpy(&quantized.value, array.data, sizeof(float));
        quantized.has_value = true;
      } else {
        quantized.view.scale = static_cast<const float*>(array.data);
        quantized.view.scale_where = Where::kDevice;
        quantized.arrays.push_back(std::move(array));
      }
    }
  }
  if (!output_block_scale.is_none()) {
    Tensor blocks = to_stored_tensor(output_block_scale, DType::kFloat8E4M3, "output_block_scale", Access::kWrite);
    quantized.view.block_scale = blocks.view;
    quantized.arrays.push_back(std::move(blocks.array));
  }
  return quantized;
}

Tensor to_output(nb::handle output, DType expected) {
  if (output.is_none()) refuse("Output tensor must be provided.");
  if (expected != DType::kFloat4E2M1x2) return to_stored_tensor(output, expected, "output", Access::kWrite);
  Tensor bytes = to_stored_tensor(output, DType::kFloat8E4M3, "output", Access::kWrite);
  bytes.view.dtype = DType::kFloat4E2M1x2;
  return bytes;
}

std::vector<float> to_slopes(nb::handle source, const std::string& name) {
  std::vector<float> slopes;
  if (source.is_none()) return slopes;
  const nb::object host = nb::hasattr(source, "tolist") ? source.attr("tolist")() : nb::borrow(source);
  if (!nb::try_cast(host, slopes, true)) refuse_kind(name, "a list or an array of floats, one a head", source);
  return slopes;
}

std::optional<Tensor> to_sinks(nb::handle source) {
  if (source.is_none()) return std::nullopt;
  Tensor sinks = to_tensor(source, "sinks", Access::kRead);
  if (sinks.array.place.host) return sinks;
  if (!nb::hasattr(source, "cpu")) refuse("sinks lie on " + describe(sinks.array.place) + "; give them on the host");
  return to_tensor(source.attr("cpu")(), "sinks", Access::kRead);
}

Context context_or_default(const std::optional<Context>& context) {
  if (context) return *context;
  // Never destroyed: joining threads while the process ends, or those of a parent that forked, would hang.
  struct Made {
    pid_t process;
    Context context;
  };
  static Made* made = nullptr;  // guarded by the GIL
  if (made == nullptr || made->process != getpid()) made = new Made{getpid(), Context::cpu()};
  return made->context;
}

bk::OnceLog to_log(nb::handle callable) {
  if (callable.is_none()) return {};
  if (!nb::isinstance<nb::callable>(callable)) refuse_kind("log", "a function of (level, text) or None", callable);
  const auto release = [](PyObject* object) {
    const nb::gil_scoped_acquire gil;
    Py_DECREF(object);
  };
  Py_INCREF(callable.ptr());
  const std::shared_ptr<PyObject> kept(callable.ptr(), release);
  return bk::OnceLog([kept](bk::LogLevel level, std::string_view text) {
    const nb::gil_scoped_acquire gil;
    try {
      nb::handle(kept.get())(level, nb::str(text.data(), text.size()));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("folio.backends' log");
    }
  });
}

ForwardTensors to_forward_tensors(const Context& context, const ForwardArguments& given, const ForwardTypes& types) {
  ForwardTensors tensors;
  const auto keep = [&tensors](Tensor tensor) {
    tensors.arrays.push_back(std::move(tensor.array));
    return tensor.view;
  };
  tensors.query = keep(to_stored_tensor(given.query, types.query, "query", Access::kRead));
  if (types.reads_keys && !given.key.is_none()) {
    tensors.key = keep(to_stored_tensor(given.key, types.model, "key", Access::kRead));
  }
  if (types.reads_keys && !given.value.is_none()) {
    tensors.value = keep(to_stored_tensor(given.value, types.model, "value", Access::kRead));
  }
  if (types.reads_cache) {
    tensors.kv_cache = keep(to_stored_tensor(given.kv_cache, types.kv_cache, "kv_cache",
                                             types.writes_cache ? Access::kWrite : Access::kWriteIfPossible));
  }
  tensors.output = keep(to_output(given.output, types.output));
  tensors.scales = to_layer_scales(given.layer, types.num_kv_heads, types.num_reqs);
  tensors.quantized = to_quantized_output(given.output_scale, given.output_block_scale);
  for (const auto* more : {&tensors.scales.arrays, &tensors.quantized.arrays}) {
    tensors.arrays.insert(tensors.arrays.end(), more->begin(), more->end());
  }
  require_on(context.device(), tensors.arrays);
  return tensors;
}

ForwardTensors to_profiling_output(const Context& context, nb::handle output) {
  ForwardTensors tensors;
  Array array = borrow(output, "output", Access::kWrite);
  const bool bytes = array.dtype == DType::kUnset && array.element.bits == 8;
  Tensor tensor = bytes || array.dtype != DType::kUnset
                      ? to_stored_tensor(output, DType::kFloat8E4M3, "output", Access::kWrite)
                      : to_stored_tensor(output, DType::kBFloat16, "output", Access::kWrite);
  if (bytes) tensor.view.dtype = DType::kUnset;
  tensors.output = tensor.view;
  tensors.arrays.push_back(std::move(tensor.array));
  require_on(context.device(), tensors.arrays);
  return tensors;
}

ForwardTensors to_write_tensors(const Context& context, nb::handle layer, nb::handle key, nb::handle value,
                                nb::handle kv_cache, DType stored, DType model, int32_t num_kv_heads) {
  ForwardTensors tensors;
  const auto keep = [&tensors](Tensor tensor) {
    tensors.arrays.push_back(std::move(tensor.array));
    return tensor.view;
  };
  if (!key.is_none()) tensors.key = keep(to_stored_tensor(key, model, "key", Access::kRead));
  if (!value.is_none()) tensors.value = keep(to_stored_tensor(value, model, "value", Access::kRead));
  tensors.kv_cache = keep(to_stored_tensor(kv_cache, stored, "kv_cache", Access::kWrite));
  tensors.scales = to_layer_scales(layer, num_kv_heads, -1);
  tensors.arrays.insert(tensors.arrays.end(), tensors.scales.arrays.begin(), tensors.scales.arrays.end());
  require_on(context.device(), tensors.arrays);
  return tensors;
}

bk::BlockTableView table_view(const std::optional<Array>& table) {
  if (!table) return {};
  bk::BlockTableView view;
  view.data = static_cast<const int32_t*>(table->data);
  view.num_rows = static_cast<int32_t>(table->size(0));
  view.num_columns = static_cast<int32_t>(table->size(1));
  view.row_stride = table->size(0) > 1 ? table->stride(0) : table->size(1);
  return view;
}

Array borrow_block_table(nb::handle source, const std::string& name) {
  Array table = borrow_int32(source, name, 2);
  for (const int64_t dimension : {0, 1}) {
    if (table.size(dimension) > std::numeric_limits<int32_t>::max()) refuse(name + " has shape " + shape_text(table));
  }
  if (table.size(1) > 1 && table.stride(1) != 1) refuse(name + ": a row's entries must be contiguous");
  if (table.size(0) > 1 && table.stride(0) < table.size(1)) refuse(name + ": its rows overlap");
  return table;
}

std::shared_ptr<Group> to_group(nb::handle dcp_group) {
  std::shared_ptr<Group> group;
  if (!dcp_group.is_none() && (!nb::try_cast(dcp_group, group, false) || group == nullptr)) {
    refuse_kind("dcp_group", "None or a folio.ProcessGroup", dcp_group);
  }
  return group;
}

std::optional<GroupUse> use(const std::shared_ptr<Group>& group) {
  std::optional<GroupUse> in_use;
  if (group) in_use.emplace(*group);
  return in_use;
}

DividedKeys::DividedKeys(nb::handle given, bk::EngineConfig& config) : group(to_group(given)) {
  const std::optional<GroupUse> in_use = use();
  config.parallel.dcp_group = in_use ? &**in_use : nullptr;
  const bk::ParallelConfig& parallel = config.parallel;
  if (parallel.decode_context_parallel_size > 1) {
    shard = {parallel.decode_context_parallel_size, parallel.decode_context_parallel_rank,
             parallel.cp_kv_cache_interleave_size};
  }
}

void StepTable::require_pages(int64_t num_pages, int32_t window_left) const {
  if (smallest >= 0 && largest < num_pages) return;
  for (size_t row = 0; row < lens.size(); ++row) {
    const int32_t first_key = window_left < 0 ? 0 : std::max(0, first_query[row] - window_left);
    const int32_t first_here = shard_len(first_key, shard.world, shard.rank, shard.interleave);
    const int32_t len_here = shard_len(lens[row], shard.world, shard.rank, shard.interleave);
    const int32_t* const entries = pages.data() + row * static_cast<size_t>(view.row_stride);
    for (int32_t column = first_here / page_size; int64_t{column} * page_size < len_here; ++column) {
      if (entries[column] >= 0 && entries[column] < num_pages) continue;
      refuse("block_table[" + std::to_string(row) + ", " + std::to_string(column) + "] is " +
             std::to_string(entries[column]) + "; the cache has " + std::to_string(num_pages) + " pages");
    }
  }
}

StepTable copy_step_table(const bk::BlockTableView& table, std::span<const int32_t> lens, std::span<const int32_t> cu_q,
                          int32_t page_size, const KvShard& shard) {
  StepTable step;
  step.page_size = page_size;
  step.shard = shard;
  const auto pages_of = [page_size](int32_t len) { return (int64_t{len} + page_size - 1) / page_size; };
  if (table.num_rows < static_cast<int64_t>(lens.size())) {
    refuse("block_table has " + std::to_string(table.num_rows) + " rows; there are " + std::to_string(lens.size()) +
           " requests");
  }
  int64_t columns = 0;
  for (size_t row = 0; row < lens.size(); ++row) {
    step.lens.push_back(std::max(lens[row], 0));  // negative ones are refused by the builder
    step.first_query.push_back(lens[row] - (cu_q[row + 1] - cu_q[row]));
    // A row has the pages of the rank that has most.
    const int64_t pages = pages_of(distributed::max_dcp_context_len(step.lens[row], shard.world, shard.interleave));
    if (pages > table.num_columns) {
      refuse("seq_lens[" + std::to_string(row) + "] is " + std::to_string(lens[row]) + "; a row of block_table has " +
             std::to_string(table.num_columns) + " pages of " + std::to_string(page_size) + " tokens" +
             (shard.world > 1 ? " on each of " + std::to_string(shard.world) + " ranks" : ""));
    }
    columns = std::max(columns, pages);
  }
  step.pages.assign(lens.size() * static_cast<size_t>(columns), 0);
  for (size_t row = 0; row < lens.size(); ++row) {
    const int32_t* const given = table.data + static_cast<int64_t>(row) * table.row_stride;
    int32_t* const copy = step.pages.data() + row * static_cast<size_t>(columns);
    const int64_t pages = pages_of(shard_len(step.lens[row], shard.world, shard.rank, shard.interleave));
    std::copy(given, given + pages, copy);
    for (int64_t column = 0; column < pages; ++column) {
      step.smallest = std::min(step.smallest, copy[column]);
      step.largest = std::max(step.largest, copy[column]);
    }
  }
  step.view = {step.pages.data(), static_cast<int32_t>(lens.size()), static_cast<int32_t>(columns), columns};
  return step;
}

}  // namespace folio::python
