#include <limits>
#include <string>

#include "folio/types/ds_mla.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "repr.hpp"

namespace folio::python {
namespace {

int32_t to_int32(int64_t value, const std::string& name) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) refuse(name + " is " + std::to_string(value));
  return static_cast<int32_t>(value);
}

/// One half of a cache. Attention only reads it, so read-only memory is taken; write_kv_cache asks for more.
Tensor cache_half(nb::handle source, DType dtype, const std::string& name, int32_t rank, const char* shape) {
  Tensor half = dtype == DType::kUnset ? to_tensor(source, name, Access::kWriteIfPossible)
                                       : make_tensor(source, dtype, name, Access::kWriteIfPossible);
  if (half.view.rank != rank) refuse(name + " has shape " + shape_text(half.array) + "; it must be " + shape);
  return half;
}

void require_contiguous(const Tensor& half, const std::string& name, size_t dimension, int64_t stride) {
  if (half.view.shape[dimension] > 1 && half.view.strides[dimension] != stride) {
    refuse(name + " has a stride of " + std::to_string(half.view.strides[dimension]) + " elements in dimension " +
           std::to_string(dimension) + "; it must be " + std::to_string(stride));
  }
}

void require_equal(const char* what, int64_t k, int64_t v) {
  if (k != v) refuse("k has " + std::to_string(k) + " " + what + ", v " + std::to_string(v));
}

/// The scales of an int8 cache's tokens, where they are given.
struct ScaleSources {
  nb::object k;
  nb::object v;
};

/// One of them: dimensions as those of the keys, but without components.
void set_token_scales(Cache& cache, TokenScales& scales, nb::handle source, const std::string& name, size_t token,
                      size_t head) {
  if (source.is_none()) return;
  Array array = borrow(source, name, Access::kWriteIfPossible);
  if (array.dtype != DType::kFloat32) refuse(name + " is " + element_text(array.element) + "; it must be float32");
  const KvCacheView& view = cache.view;
  const bool fits = array.rank() == 3 && array.size(0) == view.num_pages &&
                    array.size(static_cast<int64_t>(token)) == view.page_size &&
                    array.size(static_cast<int64_t>(head)) == view.num_kv_heads;
  if (!fits) {
    refuse(name + " has shape " + shape_text(array) + "; it must be that of k without the head dimension");
  }
  scales.data = static_cast<float*>(array.data);
  scales.strides = {array.stride(0), array.stride(static_cast<int64_t>(token)),
                    array.stride(static_cast<int64_t>(head))};
  cache.arrays.push_back(std::move(array));
}

/// `token` and `head` say which dimensions of the arrays are which; `pair` is how many tokens V keeps side by side.
Cache make_cache(Tensor k, Tensor v, const ScaleSources& scales, KvFormat format, size_t token, size_t head,
                 int64_t pair) {
  require_equal("pages", k.view.shape[0], v.view.shape[0]);
  require_equal("tokens a page", k.view.shape[token], v.view.shape[token] * pair);
  require_equal("heads", k.view.shape[head], v.view.shape[head]);
  if (k.view.dtype != v.view.dtype) {
    refuse("k is " + std::string(to_string(k.view.dtype)) + ", v " + std::string(to_string(v.view.dtype)));
  }
  Cache cache;
  KvCacheView& view = cache.view;
  view.format = format;
  view.dtype = k.view.dtype;
  view.k = k.view.data;
  view.v = v.view.data;
  view.num_pages = k.view.shape[0];
  view.page_size = to_int32(k.view.shape[token], "k's page size");
  view.num_kv_heads = to_int32(k.view.shape[head], "k's number of heads");
  view.head_dim_qk = to_int32(k.view.shape[3], "k's head dimension");
  view.head_dim_v = to_int32(v.view.shape[3], "v's head dimension");
  view.k_strides = {k.view.strides[0], k.view.strides[token], k.view.strides[head]};
  view.v_strides = {v.view.strides[0], v.view.strides[token], v.view.strides[head]};
  cache.arrays = {std::move(k.array), std::move(v.array)};
  set_token_scales(cache, view.k_token_scales, scales.k, "k_token_scales", token, head);
  set_token_scales(cache, view.v_token_scales, scales.v, "v_token_scales", token, head);
  validate(view);
  return cache;
}

Cache make_strided(nb::handle k, nb::handle v, DType dtype, const ScaleSources& scales, const char* shape, size_t token,
                   size_t head) {
  Tensor keys = cache_half(k, dtype, "k", 4, shape);
  Tensor values = cache_half(v, dtype, "v", 4, shape);
  require_contiguous(keys, "k", 3, 1);
  require_contiguous(values, "v", 3, 1);
  return make_cache(std::move(keys), std::move(values), scales, KvFormat::kStrided, token, head, 1);
}

constexpr const char* kNhdShape = "[pages, page_size, heads, head_dim]";

Cache make_packed(nb::handle k, nb::handle v, DType dtype, const ScaleSources& scales) {
  Tensor keys = cache_half(k, dtype, "k", 4, "[pages, heads, page_size, head_dim_qk]");
  Tensor values = cache_half(v, dtype, "v", 5, "[pages, heads, page_size / 2, head_dim_v, 2]");
  if (values.view.shape[4] != 2) refuse("v has shape " + shape_text(values.array) + "; its last dimension must be 2");
  require_contiguous(keys, "k", 3, 1);
  require_contiguous(values, "v", 4, 1);
  require_contiguous(values, "v", 3, 2);
  return make_cache(std::move(keys), std::move(values), scales, KvFormat::kCpuPacked, 2, 1, 2);
}

Cache make_ds_mla(nb::handle source) {
  constexpr const char* kShape = "[pages, page_size, 656] or [pages, page_size, 1, 656]";
  Tensor rows = make_tensor(source, DType::kFloat8E4M3, "rows", Access::kWriteIfPossible);
  const int32_t rank = rows.view.rank;
  const bool fits = (rank == 3 || (rank == 4 && rows.view.shape[2] == 1)) &&
                    rows.view.shape[static_cast<size_t>(rank - 1)] == kDsMlaRowBytes;
  if (!fits) refuse("rows has shape " + shape_text(rows.array) + "; it must be " + kShape);
  require_contiguous(rows, "rows", static_cast<size_t>(rank - 1), 1);
  Cache cache;
  cache.view = make_fp8_ds_mla_view(0, to_int32(rows.view.shape[1], "rows' page size"), nullptr);
  cache.view.k = cache.view.v = rows.view.data;
  cache.view.num_pages = rows.view.shape[0];
  cache.view.k_strides.page = cache.view.v_strides.page = rows.view.strides[0];
  cache.view.k_strides.token = cache.view.v_strides.token = rows.view.strides[1];
  validate(cache.view);
  cache.arrays = {std::move(rows.array)};
  return cache;
}

Table make_csr(nb::handle indices, nb::handle indptr) {
  Table table;
  Array entries = borrow_int32(indices, "table.indices");
  Array offsets = borrow_int32(indptr, "table.indptr");
  if (offsets.size(0) < 1) refuse("table.indptr is empty; it has one entry more than rows");
  table.view.kind = PageTableKind::kCsr;
  table.view.indices = static_cast<const int32_t*>(entries.data);
  table.view.num_indices = entries.size(0);
  table.view.indptr = static_cast<const int32_t*>(offsets.data);
  table.view.num_rows = to_int32(offsets.size(0) - 1, "the table's number of rows");
  table.arrays = {std::move(entries), std::move(offsets)};
  return table;
}

Table make_dense(nb::handle source, int32_t first_column, const std::string& name = "table.entries") {
  Table table;
  Array entries = borrow_int32(source, name, 2);
  if (entries.size(1) > 1 && entries.stride(1) != 1) refuse(name + "' columns must be contiguous");
  if (entries.size(0) > 1 && entries.stride(0) < 0) refuse(name + "' row stride is negative");
  table.view.kind = PageTableKind::kDense;
  table.view.indices = static_cast<const int32_t*>(entries.data);
  table.view.num_rows = to_int32(entries.size(0), "the table's number of rows");
  table.columns = entries.size(1);
  table.view.row_stride = entries.size(0) > 1 ? entries.stride(0) : entries.size(1);
  const bool empty = entries.size(0) == 0 || entries.size(1) == 0;
  table.view.num_indices = empty ? 0 : (entries.size(0) - 1) * table.view.row_stride + entries.size(1);
  table.view.first_column = first_column;
  table.arrays = {std::move(entries)};
  return table;
}

Ragged make_ragged(nb::handle k, nb::handle v, nb::handle indptr) {
  Ragged ragged;
  Tensor keys = to_tensor(k, "ragged.k", Access::kRead);
  Tensor values = to_tensor(v, "ragged.v", Access::kRead);
  Array offsets = borrow_int32(indptr, "ragged.indptr");
  if (offsets.size(0) < 1) refuse("ragged.indptr is empty; it has one entry more than rows");
  ragged.view = {keys.view, values.view, static_cast<const int32_t*>(offsets.data)};
  ragged.arrays = {std::move(keys.array), std::move(values.array), std::move(offsets)};
  return ragged;
}

WriteArgs make_write_args(nb::handle k, nb::handle v, nb::handle slot_mapping, const Cache& cache,
                          std::optional<int64_t> num_slots, nb::handle k_scale, nb::handle v_scale, nb::handle status) {
  WriteArgs args;
  if (!status.is_none()) {
    Array flag = borrow(status, "status", Access::kWrite);
    if (flag.element != nb::dtype<int32_t>() || flag.memory.size() != 1) {
      refuse("status is " + element_text(flag.element) + " " + shape_text(flag) + "; it is one int32");
    }
    args.view.status = static_cast<int32_t*>(flag.data);
    args.arrays.push_back(std::move(flag));
  }
  require_writable(cache);
  args.arrays.insert(args.arrays.end(), cache.arrays.begin(), cache.arrays.end());
  Tensor keys = to_tensor(k, "k", Access::kRead);
  args.view.k = keys.view;
  args.arrays.push_back(std::move(keys.array));
  if (!v.is_none()) {  // None where V is a part of K
    Tensor values = to_tensor(v, "v", Access::kRead);
    args.view.v = values.view;
    args.arrays.push_back(std::move(values.array));
  }
  Array slots = borrow_int64(slot_mapping, "slot_mapping");
  args.view.slot_mapping = static_cast<const int64_t*>(slots.data);
  args.view.num_slots = num_slots.value_or(slots.size(0));
  if (args.view.num_slots > slots.size(0)) {
    refuse("num_slots is " + std::to_string(args.view.num_slots) + "; slot_mapping has " +
           std::to_string(slots.size(0)));
  }
  args.arrays.push_back(std::move(slots));
  args.view.cache = cache.view;
  args.k_scale = to_scale(k_scale, "k_scale");
  args.v_scale = to_scale(v_scale, "v_scale");
  for (const ScaleArg* scale : {&args.k_scale, &args.v_scale}) {
    require_extent(*scale, scale == &args.k_scale ? "k_scale" : "v_scale", cache.view.num_kv_heads, -1);
    if (scale->array) args.arrays.push_back(*scale->array);
  }
  args.view.k_scale = args.k_scale.scale;
  args.view.v_scale = args.v_scale.scale;
  return args;
}

}  // namespace

Cache make_nhd_cache(nb::handle k, nb::handle v) {
  return make_strided(k, v, DType::kUnset, {nb::none(), nb::none()}, kNhdShape, 1, 2);
}

void require_writable(const Cache& cache) {
  for (const Array& array : cache.arrays) {
    if (!array.writable) refuse("the cache's " + array.name + " is read-only, and Folio would write to it");
  }
}

Table to_table(nb::handle source, const std::string& name) {
  const Table* given = nullptr;
  if (nb::try_cast(source, given, false) && given != nullptr) {
    Table table = *given;
    for (Array& array : table.arrays) array.name = name + "." + array.name;
    return table;
  }
  return make_dense(source, 0, name);
}

void bind_cache(nb::module_& m) {
  nb::class_<Cache> cache(
      m, "KvCacheView",
      "A borrowed paged KV cache of one layer; made by make_nhd_view, make_hnd_view, make_cpu_packed_view "
      "and make_fp8_ds_mla_view.");
  cache
      .def_prop_ro(
          "format", [](const Cache& self) { return self.view.format; }, "A KvFormat.")
      .def_prop_ro(
          "dtype", [](const Cache& self) { return self.view.dtype; }, "The dtype of keys and values.")
      .def_prop_ro(
          "num_pages", [](const Cache& self) { return self.view.num_pages; }, "Pages.")
      .def_prop_ro(
          "page_size", [](const Cache& self) { return self.view.page_size; }, "Tokens a page.")
      .def_prop_ro(
          "num_kv_heads", [](const Cache& self) { return self.view.num_kv_heads; }, "KV heads.")
      .def_prop_ro(
          "head_dim_qk", [](const Cache& self) { return self.view.head_dim_qk; }, "Components of a key.")
      .def_prop_ro(
          "head_dim_v", [](const Cache& self) { return self.view.head_dim_v; }, "Components of a value.");
  bind_repr(cache);
  m.def(
      "make_nhd_view",
      [](nb::object k, nb::object v, DType dtype, nb::object k_token_scales, nb::object v_token_scales) {
        return make_strided(k, v, dtype, {k_token_scales, v_token_scales}, kNhdShape, 1, 2);
      },
      nb::arg("k"), nb::arg("v"), nb::arg("dtype").none() = DType::kUnset, nb::kw_only(),
      nb::arg("k_token_scales") = nb::none(), nb::arg("v_token_scales") = nb::none(),
      "A KvCacheView of arrays [pages, page_size, heads, head_dim], of any strides but the innermost; v's head_dim may "
      "differ. `dtype` names the type of arrays of uint16 and uint8. Arrays of int8 need the scales of their tokens, "
      "float32 [pages, page_size, heads]: a stored component k8 is k8 * k_token_scales[page, slot, head]. Raises "
      "InvalidArgument for other shapes.");
  m.def(
      "make_hnd_view",
      [](nb::object k, nb::object v, DType dtype, nb::object k_token_scales, nb::object v_token_scales) {
        return make_strided(k, v, dtype, {k_token_scales, v_token_scales}, "[pages, heads, page_size, head_dim]", 2, 1);
      },
      nb::arg("k"), nb::arg("v"), nb::arg("dtype").none() = DType::kUnset, nb::kw_only(),
      nb::arg("k_token_scales") = nb::none(), nb::arg("v_token_scales") = nb::none(),
      "A KvCacheView of arrays [pages, heads, page_size, head_dim], and scales [pages, heads, page_size]; otherwise as "
      "make_nhd_view.");
  m.def(
      "make_cpu_packed_view",
      [](nb::object k, nb::object v, DType dtype, nb::object k_token_scales, nb::object v_token_scales) {
        return make_packed(k, v, dtype, {k_token_scales, v_token_scales});
      },
      nb::arg("k"), nb::arg("v"), nb::arg("dtype").none() = DType::kUnset, nb::kw_only(),
      nb::arg("k_token_scales") = nb::none(), nb::arg("v_token_scales") = nb::none(),
      "A KvCacheView of format CPU_PACKED: k is [pages, heads, page_size, head_dim_qk], v [pages, heads, page_size / "
      "2, head_dim_v, 2], two tokens side by side. Page sizes are even, 16 or more; element types have 8 or 16 bits. "
      "int8: "
      "scales are [pages, heads, page_size], as in make_hnd_view.");
  m.def(
      "make_fp8_ds_mla_view", [](nb::object rows) { return make_ds_mla(rows); }, nb::arg("rows"),
      "A KvCacheView of format FP8_DS_MLA: `rows` is uint8 [pages, page_size, 656] or [pages, page_size, 1, 656], of "
      "strides that are multiples of 16. Of a token's bytes, 0 to 511 are e4m3, 512 to 527 four float32 scales for 128 "
      "of these each, 528 to 655 the RoPE part in bfloat16. The attention's kv dtype is float8_e4m3fn, its head "
      "dimensions are 576 and 512.");
  nb::class_<Table> table(m, "PageTableView",
                          "Which pages each row's tokens lie in, in order; made by csr_table and dense_table.");
  table.def_prop_ro(
      "num_rows", [](const Table& self) { return self.view.num_rows; }, "Rows: requests, or groups.");
  bind_repr(table);
  m.def(
      "csr_table", [](nb::object indices, nb::object indptr) { return make_csr(indices, indptr); }, nb::arg("indices"),
      nb::arg("indptr"),
      "A PageTableView of page ids one row after the other: row r has indices[indptr[r]:indptr[r + 1]]. `indptr` is "
      "[rows + 1]. Integers are int32, or int64 or lists, which are copied once.");
  m.def(
      "dense_table", [](nb::object entries, int32_t first_column) { return make_dense(entries, first_column); },
      nb::arg("entries"), nb::arg("first_column") = 0,
      "A PageTableView of page ids [rows, columns] of any row stride: page j of row r is entries[r, first_column + j]. "
      "Integers are int32, or int64 or lists of lists, which are copied once.");
  nb::class_<Ragged> ragged_class(
      m, "RaggedKvView",
      "Keys and values that do not lie in pages: k and v [tokens, heads, head_dim], row r's tokens being [indptr[r], "
      "indptr[r + 1]); indptr is [rows + 1], int32, or int64 or a list, which are copied once.");
  bind_repr(ragged_class);
  ragged_class.def(
      "__init__",
      [](Ragged* self, nb::object k, nb::object v, nb::object indptr) { new (self) Ragged(make_ragged(k, v, indptr)); },
      nb::arg("k"), nb::arg("v"), nb::arg("indptr"));
  nb::class_<WriteArgs> write(
      m, "CacheWriteArgs",
      "New tokens for a paged cache: k and v [tokens, heads, head_dim], slot_mapping [tokens]. Token i goes to page "
      "slot // page_size, offset slot % page_size. Slots are int64, or int32 or a list, which are copied once. "
      "`num_slots` tokens are written, or all; v is None where the cache's V is a part of its K. Scales are numbers or "
      "folio.Scale, for fp8 caches: stored = value / scale; int8 caches get the scales of their tokens written. "
      "status, an int32 [1] on a GPU, becomes 1 if a slot lies "
      "beyond the cache.");
  bind_repr(write);
  write.def(
      "__init__",
      [](WriteArgs* self, nb::object k, nb::object v, nb::object slot_mapping, const Cache& cache,
         std::optional<int64_t> num_slots, nb::object k_scale, nb::object v_scale, nb::object status) {
        new (self) WriteArgs(make_write_args(k, v, slot_mapping, cache, num_slots, k_scale, v_scale, status));
      },
      nb::arg("k"), nb::arg("v").none(), nb::arg("slot_mapping"), nb::arg("cache"), nb::kw_only(),
      nb::arg("num_slots") = nb::none(), nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f,
      nb::arg("status") = nb::none());
  m.def(
      "write_kv_cache",
      [](const Context& context, const WriteArgs& args, nb::object stream) {
        require_on(context.device(), args.arrays);
        const Stream queue = to_stream(stream, context.device(), {&args.arrays});
        const ReleasedGil released;
        if (context.device().type != DeviceType::kCpu) {
          write_kv_cache(context, args.view, queue);
          return;
        }
        // Other threads may rewrite the slots: those that are checked are those that are written.
        thread_local std::vector<int64_t> slots;
        slots.assign(args.view.slot_mapping, args.view.slot_mapping + std::max<int64_t>(args.view.num_slots, 0));
        folio::CacheWriteArgs view = args.view;
        view.slot_mapping = slots.data();
        write_kv_cache(context, view, queue);
      },
      nb::arg("context"), nb::arg("args"), nb::arg("stream") = nb::none(),
      "Writes the tokens of CacheWriteArgs into their slots; a negative slot is left out. On a CPU a slot beyond the "
      "cache raises InvalidArgument, and nothing is written. On a GPU it is left out, and a stream left out is "
      "current_stream's.");
}

}  // namespace folio::python
