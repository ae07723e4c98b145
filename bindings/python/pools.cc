#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "folio/pools.hpp"
#include "gil.hpp"
#include "int_lists.hpp"
#include "pools.hpp"
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

void require_count(int64_t count) {
  if (count < 0) refuse("count is " + std::to_string(count) + "; it is not negative");
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

/// The lists of an allocation; read once.
struct Growth {
  std::vector<int32_t> prefix_lens, seq_lens, last_slots;
};

Growth read_growth(nb::handle prefix_lens, nb::handle seq_lens, nb::handle last_slots) {
  Growth growth;
  if (!prefix_lens.is_none()) growth.prefix_lens = to_int32s(prefix_lens, "prefix_lens");
  growth.seq_lens = to_int32s(seq_lens, "seq_lens");
  growth.last_slots = to_int32s(last_slots, "last_slots");
  if (!prefix_lens.is_none() && growth.prefix_lens.size() != growth.seq_lens.size()) {
    refuse("prefix_lens has " + std::to_string(growth.prefix_lens.size()) + " entries, seq_lens " +
           std::to_string(growth.seq_lens.size()));
  }
  return growth;
}

/// Tokens that an extension adds; shrinking ones are named by the allocator.
int64_t added_by(const Growth& growth) {
  int64_t added = 0;
  for (size_t i = 0; i < growth.seq_lens.size(); ++i) {
    added += std::max<int64_t>(0, int64_t{growth.seq_lens[i]} - growth.prefix_lens[i]);
  }
  return added;
}

template <typename Allocator>
std::optional<Int32s> alloc(Allocator& self, int64_t count) {
  require_count(count);
  if (count > self.available()) return std::nullopt;
  std::vector<int32_t> slots(static_cast<size_t>(count));
  if (!self.alloc(std::span<int32_t>(slots))) return std::nullopt;
  return to_numpy(std::move(slots));
}

template <typename Allocator>
std::optional<Int32s> alloc_extend(Allocator& self, nb::handle prefix_lens, nb::handle seq_lens,
                                   nb::handle last_slots) {
  const Growth growth = read_growth(prefix_lens, seq_lens, last_slots);
  const int64_t added = added_by(growth);
  // More than there can ever be needs no memory to be refused, unless the lengths themselves are wrong.
  const bool fits = added <= self.size();
  std::vector<int32_t> slots(static_cast<size_t>(fits ? added : 0));
  if (!fits) {
    for (size_t i = 0; i < growth.seq_lens.size(); ++i) {
      if (growth.prefix_lens[i] < 0 || growth.seq_lens[i] < growth.prefix_lens[i]) {
        refuse("request " + std::to_string(i) + " grows from " + std::to_string(growth.prefix_lens[i]) + " to " +
               std::to_string(growth.seq_lens[i]) + " tokens");
      }
    }
    return std::nullopt;
  }
  if (!self.alloc_extend(growth.prefix_lens, growth.seq_lens, growth.last_slots, slots)) return std::nullopt;
  return to_numpy(std::move(slots));
}

template <typename Allocator>
std::optional<Int32s> alloc_decode(Allocator& self, nb::handle seq_lens, nb::handle last_slots) {
  const Growth growth = read_growth(nb::none(), seq_lens, last_slots);
  std::vector<int32_t> slots(growth.seq_lens.size());
  if (!self.alloc_decode(growth.seq_lens, growth.last_slots, slots)) return std::nullopt;
  return to_numpy(std::move(slots));
}

/// What the allocators have in common.
template <typename Allocator>
void bind_allocation(nb::class_<Allocator>& type) {
  type.def_prop_ro("size", &Allocator::size, "Slots that it has to hand out.")
      .def_prop_ro("page_size", &Allocator::page_size)
      .def_prop_ro("available", &Allocator::available, "Slots of free pages.")
      .def("is_held", &Allocator::is_held, nb::arg("slot"))
      .def("alloc", &alloc<Allocator>, nb::arg("count"),
           "int32 [count] slots of fresh pages, page by page. All or nothing: None, and nothing changed, if there are "
           "too few.")
      .def("alloc_extend", &alloc_extend<Allocator>, nb::arg("prefix_lens"), nb::arg("seq_lens"), nb::arg("last_slots"),
           "Slots for requests that grow from prefix_lens[r] to seq_lens[r] tokens: int32 [sum(seq_lens - "
           "prefix_lens)], request after request, or None. last_slots[r] is the slot of token prefix_lens[r] - 1, not "
           "read where that is -1. Raises InvalidArgument naming the request.")
      .def("alloc_decode", &alloc_decode<Allocator>, nb::arg("seq_lens"), nb::arg("last_slots"),
           "alloc_extend by one token a request, which seq_lens count: int32 [requests], or None.")
      .def(
          "free", [](Allocator& self, nb::object slots) { self.free(to_int32s(slots, "slots")); }, nb::arg("slots"),
          "Gives back the slots' pages. Raises InvalidArgument naming a slot that is not held; nothing is then "
          "changed.")
      .def("clear", &Allocator::clear, "Everything free.")
      .def("check_invariants", &Allocator::check_invariants, "For tests: raises Error if a count is wrong.");
}

/// TokenAllocator::FreeGroup, with the allocator that must outlive it.
struct FreeGroup {
  std::shared_ptr<TokenAllocator> allocator;
  std::optional<TokenAllocator::FreeGroup> group;
};

void bind_token_allocator(nb::module_& m) {
  nb::class_<TokenAllocator> type(m, "TokenAllocator",
                                  "Hands out the slots of a KvPool: page_size to size + page_size - 1, the lowest free "
                                  "pages first. num_slots is a multiple of page_size.");
  type.def(nb::init<int32_t, int32_t>(), nb::arg("num_slots"), nb::arg("page_size") = 1);
  bind_allocation(type);
  type.def(
          "fresh_pages",
          [](TokenAllocator& self, nb::object prefix_lens, nb::object seq_lens, nb::object last_slots) {
            const Growth growth = read_growth(prefix_lens, seq_lens, last_slots);
            const int64_t added =
                prefix_lens.is_none() ? static_cast<int64_t>(growth.seq_lens.size()) : added_by(growth);
            return self.fresh_pages(growth.prefix_lens, growth.seq_lens, growth.last_slots, static_cast<size_t>(added));
          },
          nb::arg("prefix_lens").none(), nb::arg("seq_lens"), nb::arg("last_slots"),
          "Fresh pages that alloc_extend would take, or, with prefix_lens None, alloc_decode. Changes nothing.")
      .def(
          "free_group",
          [](const std::shared_ptr<TokenAllocator>& self) {
            return FreeGroup{self, self->free_group()};
          },
          "Opens a FreeGroup. Raises InvalidArgument if one is open.")
      .def("__repr__", [](const TokenAllocator& self) {
        return "<folio.TokenAllocator: " + std::to_string(self.available()) + " of " + std::to_string(self.size()) +
               " slots free, pages of " + std::to_string(self.page_size()) + ">";
      });
  nb::class_<FreeGroup>(m, "FreeGroup",
                        "While it is open, pages that are freed are held back; when it closes they can be handed out. "
                        "Made by TokenAllocator.free_group; a context manager.")
      .def(
          "close", [](FreeGroup& self) { self.group.reset(); }, "Ends the group; once more does nothing.")
      .def_prop_ro("is_open", [](const FreeGroup& self) { return self.group.has_value(); })
      .def("__enter__", [](nb::object self) { return self; })
      .def(
          "__exit__", [](FreeGroup& self, nb::args) { self.group.reset(); }, nb::arg("exception"))
      .def("__repr__", [](const FreeGroup& self) {
        return std::string("<folio.FreeGroup: ") + (self.group ? "open" : "closed") + ">";
      });
}

void bind_window_allocator(nb::module_& m) {
  nb::class_<WindowTokenAllocator> type(
      m, "WindowTokenAllocator",
      "Slots of two pools at once, for models that have layers with a sliding window beside others: a slot is one of "
      "the full pool, its window copy the slot where the windowed layers keep that token.");
  type.def(nb::init<int32_t, int32_t, int32_t>(), nb::arg("num_slots"), nb::arg("num_window_slots"),
           nb::arg("page_size") = 1);
  bind_allocation(type);
  type.def_prop_ro("window_size", &WindowTokenAllocator::window_size)
      .def_prop_ro("window_available", &WindowTokenAllocator::window_available)
      .def("has_window_copy", &WindowTokenAllocator::has_window_copy, nb::arg("slot"))
      .def(
          "free_window",
          [](WindowTokenAllocator& self, nb::object slots) { self.free_window(to_int32s(slots, "slots")); },
          nb::arg("slots"), "Gives back the window copies of held slots, which stay held.")
      .def("apply", &WindowTokenAllocator::apply, nb::arg("changes"),
           "Moves and frees what a call of PrefixCache asked for.")
      .def(
          "to_window",
          [](const WindowTokenAllocator& self, nb::object slots) {
            const std::vector<int32_t> full = to_int32s(slots, "slots");
            std::vector<int32_t> window(full.size());
            self.to_window(full, window);
            return to_numpy(std::move(window));
          },
          nb::arg("slots"),
          "int32 [n]: the window copy of each slot; the window pool's dummy page where there is none, -1 for negative "
          "slots.")
      .def("__repr__", [](const WindowTokenAllocator& self) {
        return "<folio.WindowTokenAllocator: " + std::to_string(self.available()) + " of " +
               std::to_string(self.size()) + " slots free, " + std::to_string(self.window_available()) + " of " +
               std::to_string(self.window_size()) + " window copies, pages of " + std::to_string(self.page_size()) +
               ">";
      });
}

/// Pairs [n, 2].
Int32s moves_of(const SlotChanges& changes) {
  std::vector<int32_t> pairs;
  for (const SlotChanges::Move& move : changes.moved) pairs.insert(pairs.end(), {move.from, move.to});
  const size_t count = changes.moved.size();
  return to_numpy(std::move(pairs), {count, 2});
}

void bind_slot_changes(nb::module_& m) {
  nb::class_<SlotChanges>(m, "SlotChanges",
                          "What calls of PrefixCache want done with slots; calls append. Arrays are copies.")
      .def(
          "__init__",
          [](SlotChanges* self, nb::object freed, nb::object window_freed) {
            new (self) SlotChanges{{}, to_int32s(window_freed, "window_freed"), to_int32s(freed, "freed")};
          },
          nb::arg("freed") = nb::tuple(), nb::arg("window_freed") = nb::tuple())
      .def_prop_ro("moved", &moves_of,
                   "int32 [n, 2], windowed caches only: the window copy of the first slot becomes that of the second.",
                   nb::rv_policy::automatic)
      .def_prop_ro(
          "window_freed", [](const SlotChanges& self) { return to_numpy(self.window_freed); },
          "int32 [n]: slots that lose their window copies and stay held.", nb::rv_policy::automatic)
      .def_prop_ro(
          "freed", [](const SlotChanges& self) { return to_numpy(self.freed); },
          "int32 [n]: slots that are nobody's any more: for the allocator's free.", nb::rv_policy::automatic)
      .def_prop_ro("empty", &SlotChanges::empty)
      .def("clear", &SlotChanges::clear)
      .def("__repr__", [](const SlotChanges& self) {
        return "<folio.SlotChanges: " + std::to_string(self.freed.size()) + " freed, " +
               std::to_string(self.window_freed.size()) + " window copies freed, " + std::to_string(self.moved.size()) +
               " moved>";
      });
}

}  // namespace

void bind_pools(nb::module_& m) {
  bind_kv_pool(m);
  bind_req_to_token_pool(m);
  bind_slot_changes(m);
  bind_token_allocator(m);
  bind_window_allocator(m);
}

}  // namespace folio::python
