#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "folio/pools.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "pools.hpp"
#include "token_allocators.hpp"
#include "views.hpp"

template <>
struct folio::python::Names<folio::KvPoolLayout> {
  static constexpr const char* kName = "KvPoolLayout";
  static constexpr const char* kDoc = "How a layer's slots lie in a KvPool.";
  static constexpr Enumerator<KvPoolLayout> kAll[] = {
      {"TOKEN_MAJOR", KvPoolLayout::kTokenMajor, "NHD: pages of any size that divides the slots are views of it."},
      {"HEAD_MAJOR", KvPoolLayout::kHeadMajor, "HND: pages of page_size only."},
      {"CPU_PACKED", KvPoolLayout::kCpuPacked, "As KvFormat.CPU_PACKED: pages of page_size only."}};
};
FOLIO_PYTHON_ENUM(folio::KvPoolLayout);

/// Bookkeeping of slots. It takes a microsecond or a few and keeps the GIL, which makes its objects safe to share
/// between Python's threads.
namespace folio::python {
namespace {

/// A layer of a pool's own memory.
Array own_layer(const std::shared_ptr<KvPool>& pool, void* data, size_t bytes, const char* name) {
  Array array;
  array.name = name;
  array.data = data;
  array.dtype = pool->config().dtype;
  array.element = element_of(array.dtype);
  const size_t elements = bytes / static_cast<size_t>(size_of(array.dtype));
  array.memory = nb::ndarray<nb::ro>(data, {elements}, keeper_of(pool), {}, array.element, nb::device::cpu::value);
  array.place.host = true;
  array.place.dlpack_type = nb::device::cpu::value;
  array.writable = true;
  return array;
}

Pool make_pool(const KvPoolConfig& config) {
  Pool made;
  {
    const ReleasedGil released;
    made.pool = std::make_shared<KvPool>(config);
  }
  const auto layers = static_cast<size_t>(config.num_layers);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const KvCacheView& view = made.pool->view(layer);
    made.k.push_back(own_layer(made.pool, view.k, KvPool::k_bytes_per_layer(config), "k"));
    made.v.push_back(own_layer(made.pool, view.v, KvPool::v_bytes_per_layer(config), "v"));
  }
  made.k_scales.resize(layers);
  made.v_scales.resize(layers);
  return made;
}

/// One layer's memory: packed, of the pool's size and type.
Array borrow_layer(nb::handle source, const std::string& name, size_t bytes, DType dtype) {
  Array array = borrow(source, name, Access::kWrite);
  const bool bits = array.element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
  if (array.dtype != dtype && !(array.dtype == DType::kUnset && bits)) {
    refuse(name + " is " + element_text(array.element) + "; the pool is " + std::string(to_string(dtype)));
  }
  int64_t packed = 1;
  for (int64_t i = array.rank() - 1; i >= 0; --i) {
    if (array.size(i) > 1 && array.stride(i) != packed) {
      refuse(name + " has a stride of " + std::to_string(array.stride(i)) + " in dimension " + std::to_string(i) +
             "; a layer is packed");
    }
    packed *= array.size(i);
  }
  const size_t given = array.memory.nbytes();
  if (given != bytes) {
    refuse(name + " has " + std::to_string(given) + " bytes; a layer of the pool has " + std::to_string(bytes));
  }
  array.dtype = dtype;
  return array;
}

std::vector<Array> borrow_layers(const nb::sequence& sources, const std::string& name, size_t bytes, DType dtype) {
  std::vector<Array> arrays;
  for (const nb::handle source : sources) {
    const std::string place = name + "[" + std::to_string(arrays.size()) + "]";
    arrays.push_back(borrow_layer(source, place, bytes, dtype));
  }
  return arrays;
}

bool same_place(const Place& a, const Place& b) {
  return a.host == b.host && a.cuda == b.cuda && a.cuda_index == b.cuda_index;
}

Pool borrow_pool(const KvPoolConfig& config, const nb::sequence& k, const nb::sequence& v) {
  Pool made;
  made.k = borrow_layers(k, "k", KvPool::k_bytes_per_layer(config), config.dtype);
  made.v = borrow_layers(v, "v", KvPool::v_bytes_per_layer(config), config.dtype);
  std::vector<void*> keys, values;
  for (const Array& array : made.k) keys.push_back(array.data);
  for (const Array& array : made.v) values.push_back(array.data);
  made.pool = std::make_shared<KvPool>(config, keys, values);
  for (const auto* arrays : {&made.k, &made.v}) {
    for (const Array& array : *arrays) {
      if (same_place(array.place, made.k.front().place)) continue;
      refuse(array.name + " lies on " + describe(array.place) + ", k[0] on " + describe(made.k.front().place) +
             "; a pool lies in one place");
    }
  }
  made.k_scales.resize(made.k.size());
  made.v_scales.resize(made.v.size());
  return made;
}

Cache view_of(const Pool& self, int32_t layer, std::optional<int32_t> page_size) {
  Cache cache;
  cache.view = page_size ? self.pool->view(layer, *page_size) : self.pool->view(layer);
  cache.arrays = {self.k[static_cast<size_t>(layer)], self.v[static_cast<size_t>(layer)]};
  return cache;
}

Tensor buffer_of(const TensorView& view, const Array& memory) {
  return {view, alias(view, memory)};
}

void set_scales(Pool& self, int32_t layer, nb::handle k, nb::handle v) {
  const Cache cache = view_of(self, layer, std::nullopt);  // refuses other layers
  ScaleArg keys = to_scale(k, "k");
  ScaleArg values = to_scale(v, "v");
  for (const ScaleArg* scale : {&keys, &values}) {
    require_extent(*scale, scale == &keys ? "k" : "v", cache.view.num_kv_heads, -1);
    if (scale->array && !same_place(scale->array->place, cache.arrays[0].place)) {
      refuse(scale->array->name + " lies on " + describe(scale->array->place) + ", the pool on " +
             describe(cache.arrays[0].place));
    }
  }
  self.pool->set_scales(layer, keys.scale, values.scale);
  self.k_scales[static_cast<size_t>(layer)] = std::move(keys);
  self.v_scales[static_cast<size_t>(layer)] = std::move(values);
}

WriteArgs write_args(const Pool& self, int32_t layer, nb::handle k, nb::handle v, nb::handle slots) {
  WriteArgs args;
  const Cache cache = view_of(self, layer, std::nullopt);
  args.arrays = cache.arrays;
  Tensor keys = to_tensor(k, "k", Access::kRead);
  Tensor values = to_tensor(v, "v", Access::kRead);
  Array mapping = borrow_int64(slots, "slots");
  const std::span<const int64_t> span(static_cast<const int64_t*>(mapping.data), static_cast<size_t>(mapping.size(0)));
  args.view = self.pool->write_args(layer, keys.view, values.view, span);
  args.k_scale = self.k_scales[static_cast<size_t>(layer)];
  args.v_scale = self.v_scales[static_cast<size_t>(layer)];
  for (const ScaleArg* scale : {&args.k_scale, &args.v_scale}) {
    if (scale->array) args.arrays.push_back(*scale->array);
  }
  args.arrays.push_back(std::move(keys.array));
  args.arrays.push_back(std::move(values.array));
  args.arrays.push_back(std::move(mapping));
  return args;
}

ScaleArg scale_of(const Pool& self, int32_t layer, const std::vector<ScaleArg>& scales) {
  view_of(self, layer, std::nullopt);
  return scales[static_cast<size_t>(layer)];
}

void bind_kv_pool(nb::module_& m) {
  bind_enum<KvPoolLayout>(m);
  using C = KvPoolConfig;
  fields_of<C>("KvPoolConfig", "The sizes of a KvPool. Its fields:",
               required("num_slots", &C::num_slots, "tokens that it is for, without the dummy page"),
               field("page_size", &C::page_size, "tokens a page; divides num_slots"),
               required("num_layers", &C::num_layers, "layers"),
               required("num_kv_heads", &C::num_kv_heads, "KV heads of a layer"),
               required("head_dim_qk", &C::head_dim_qk, "components of a key"),
               required("head_dim_v", &C::head_dim_v, "components of a value"),
               field("dtype", &C::dtype, "float32, float16, bfloat16 or fp8"),
               field("layout", &C::layout, "how a layer's slots lie in memory, a KvPoolLayout"))
      .bind(m);
  nb::class_<Pool>(m, "KvPool",
                   "The keys and values of every layer, as slots that a TokenAllocator of the same num_slots and "
                   "page_size hands out. Slots 0 to page_size - 1 are the dummy page, which takes the writes of "
                   "padding tokens. Without k and v the memory is the host's and the pool's own, zeroed; with them it "
                   "is borrowed: one packed, writable array a layer for each, on the host or on a GPU, of "
                   "k_bytes_per_layer and v_bytes_per_layer bytes.")
      .def(
          "__init__", [](Pool* self, const KvPoolConfig& config) { new (self) Pool(make_pool(config)); },
          nb::arg("config"))
      .def(
          "__init__",
          [](Pool* self, const KvPoolConfig& config, nb::sequence k, nb::sequence v) {
            new (self) Pool(borrow_pool(config, k, v));
          },
          nb::arg("config"), nb::arg("k"), nb::arg("v"))
      .def_static("k_bytes_per_layer", &KvPool::k_bytes_per_layer, nb::arg("config"))
      .def_static("v_bytes_per_layer", &KvPool::v_bytes_per_layer, nb::arg("config"))
      .def_prop_ro("config", [](const Pool& self) { return KvPoolConfig(self.pool->config()); })
      .def_prop_ro("num_slots", [](const Pool& self) { return self.pool->num_slots(); })
      .def_prop_ro(
          "buffer_len", [](const Pool& self) { return self.pool->buffer_len(); },
          "Slots of a layer with the dummy page: num_slots + page_size.")
      .def("view", &view_of, nb::arg("layer"), nb::arg("page_size") = nb::none(),
           "The layer as a KvCacheView with pages of the pool's page_size, or of another one that divides buffer_len "
           "(token-major pools; Unsupported for others). Raises InvalidArgument for a layer that the pool does not "
           "have, as every method does.")
      .def(
          "key_buffer",
          [](const Pool& self, int32_t layer) {
            return buffer_of(self.pool->key_buffer(layer), self.k[static_cast<size_t>(layer)]);
          },
          nb::arg("layer"),
          "The live keys as a TensorView [buffer_len, num_kv_heads, head_dim_qk]; no copy. Token-major pools only.")
      .def(
          "value_buffer",
          [](const Pool& self, int32_t layer) {
            return buffer_of(self.pool->value_buffer(layer), self.v[static_cast<size_t>(layer)]);
          },
          nb::arg("layer"), "Likewise, the values: [buffer_len, num_kv_heads, head_dim_v].")
      .def("set_scales", &set_scales, nb::arg("layer"), nb::arg("k"), nb::arg("v"),
           "Quantisation scales of an fp8 layer, stored = real / scale: numbers, or Scales per tensor or per head.")
      .def(
          "k_scale", [](const Pool& self, int32_t layer) { return scale_of(self, layer, self.k_scales); },
          nb::arg("layer"))
      .def(
          "v_scale", [](const Pool& self, int32_t layer) { return scale_of(self, layer, self.v_scales); },
          nb::arg("layer"))
      .def("write_args", &write_args, nb::arg("layer"), nb::arg("k"), nb::arg("v"), nb::arg("slots"),
           "What write_kv_cache takes to store token t in slots[t] of the layer, with its scales. k is "
           "[..., num_kv_heads, head_dim_qk] or [..., num_kv_heads * head_dim_qk], v likewise; the leading dimensions "
           "are the tokens. slots: int64, int32 or a list; negative ones are skipped.")
      .def("__repr__", [](const Pool& self) {
        const KvPoolConfig& config = self.pool->config();
        return "<folio.KvPool: " + std::to_string(config.num_layers) + " layers of " +
               std::to_string(config.num_slots) + " slots, pages of " + std::to_string(config.page_size) + ", " +
               std::string(to_string(config.dtype)) + ", on " + describe(self.k.front().place) + ">";
      });
}

using Rows = std::shared_ptr<ReqToTokenPool>;

/// The pool's table, which lives as long as an array over it does.
Array table_array(const Rows& rows) {
  const PageTableView view = rows->table();
  Array array;
  array.name = "table.entries";
  array.data = const_cast<int32_t*>(view.indices);
  array.element = nb::dtype<int32_t>();
  array.memory = nb::ndarray<nb::ro>(view.indices,
                                     {static_cast<size_t>(view.num_rows), static_cast<size_t>(rows->max_context_len())},
                                     keeper_of(rows), {}, array.element, nb::device::cpu::value);
  array.place.host = true;
  array.place.dlpack_type = nb::device::cpu::value;
  return array;
}

nb::ndarray<nb::numpy, const int32_t> row_of(const Rows& rows, int32_t row) {
  const std::span<const int32_t> entries = rows->row(row);
  return {entries.data(), {entries.size()}, keeper_of(rows)};
}

void bind_req_to_token_pool(nb::module_& m) {
  nb::class_<ReqToTokenPool>(m, "ReqToTokenPool",
                             "Which slot each token of each running request lies in: one row a request, one column a "
                             "position. Row 0 is the dummy row for padding requests; requests have rows 1 to size.")
      .def(nb::init<int32_t, int32_t>(), nb::arg("max_reqs"), nb::arg("max_context_len"))
      .def_prop_ro("size", &ReqToTokenPool::size, "Requests that can run at once.")
      .def_prop_ro("max_context_len", &ReqToTokenPool::max_context_len)
      .def_prop_ro("available", &ReqToTokenPool::available, "Rows that are free.")
      .def("is_held", &ReqToTokenPool::is_held, nb::arg("row"))
      .def(
          "alloc", [](ReqToTokenPool& self) { return self.alloc(); },
          "The row that has been free longest; None if all are taken.")
      .def(
          "alloc",
          [](ReqToTokenPool& self, int64_t count) -> std::optional<Int32s> {
            require_count(count);
            if (count > self.available()) return std::nullopt;
            std::vector<int32_t> rows(static_cast<size_t>(count));
            if (!self.alloc(rows)) return std::nullopt;
            return to_numpy(std::move(rows));
          },
          nb::arg("count"),
          "So many rows, int32 [count], all or nothing: None, and nothing changed, if fewer are free.")
      .def(
          "free", [](ReqToTokenPool& self, int32_t row) { self.free(row); }, nb::arg("row"),
          "Gives a row back. Raises InvalidArgument for a row that is not held.")
      .def(
          "write",
          [](ReqToTokenPool& self, int32_t row, int32_t first, nb::object slots) {
            self.write(row, first, to_int32s(slots, "slots"));
          },
          nb::arg("row"), nb::arg("first"), nb::arg("slots"),
          "Writes slots (a list, int32 or int64) at positions first, first + 1, ... of a held row. Raises "
          "InvalidArgument, and writes nothing, for rows that are not held and positions beyond max_context_len.")
      .def("row", &row_of, nb::arg("row"), "A row's max_context_len entries: int32, live, read-only.")
      .def_prop_ro(
          "entries",
          [](const Rows& self) {
            const PageTableView view = self->table();
            return nb::ndarray<nb::numpy, const int32_t>(
                view.indices, {static_cast<size_t>(view.num_rows), static_cast<size_t>(self->max_context_len())},
                keeper_of(self));
          },
          "The whole table: int32 [size + 1, max_context_len], live, read-only. What is copied to a GPU.",
          nb::rv_policy::automatic)
      .def(
          "table",
          [](const Rows& self) {
            Table table;
            table.view = self->table();
            table.columns = self->max_context_len();
            table.arrays = {table_array(self)};
            return table;
          },
          "The table as a PageTableView, borrowed: pages of one token.")
      .def("clear", &ReqToTokenPool::clear, "All rows free, and all entries 0.")
      .def("__repr__", [](const ReqToTokenPool& self) {
        return "<folio.ReqToTokenPool: " + std::to_string(self.available()) + " of " + std::to_string(self.size()) +
               " rows free, " + std::to_string(self.max_context_len()) + " positions each>";
      });
}

}  // namespace

void bind_pools(nb::module_& m) {
  bind_kv_pool(m);
  bind_req_to_token_pool(m);
}

}  // namespace folio::python
