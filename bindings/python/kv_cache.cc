#include "folio/kv_cache.hpp"

#include <limits>
#include <string>

#include "device_call.hpp"
#include "fields.hpp"
#include "folio/page_table.hpp"
#include "gil.hpp"

/// Pages of caches that are copied, converted, gathered and dequantized.
namespace folio::python {
namespace {

/// CacheConvertScales, with their arrays.
struct ConvertScales {
  ScaleArg from_k, from_v, to_k, to_v;
};

Scale keep_scale(DeviceCall& call, const ScaleArg& scale, const std::string& name, int32_t heads) {
  require_extent(scale, name, heads, -1);
  if (scale.array) {
    Array array = *scale.array;
    array.name = name + ".data";
    call.keep({array});
  }
  return scale.scale;
}

void copy(const Context& context, const Cache& from, const Cache& to, nb::handle source, nb::handle destination,
          nb::handle stream, nb::handle status) {
  DeviceCall call(context);
  const KvCacheView read = call.cache(from, "from_cache", Access::kRead);
  const KvCacheView written = call.cache(to, "to_cache", Access::kWrite);
  const auto sources = call.int32s(source, "source");
  const auto destinations = call.int32s(destination, "destination");
  int32_t* const flag = call.status(status);
  const Stream queue = call.stream(stream);
  const ReleasedGil released;
  copy_pages(context, read, written, sources, destinations, queue, flag);
}

void convert(const Context& context, const Cache& from, const Cache& to, nb::handle source, nb::handle destination,
             const ConvertScales& scales, nb::handle stream, nb::handle status) {
  DeviceCall call(context);
  const KvCacheView read = call.cache(from, "from_cache", Access::kRead);
  const KvCacheView written = call.cache(to, "to_cache", Access::kWrite);
  const auto sources = call.int32s(source, "source");
  const auto destinations = call.int32s(destination, "destination");
  const int32_t heads = read.num_kv_heads;
  const CacheConvertScales factors{
      keep_scale(call, scales.from_k, "from_k", heads), keep_scale(call, scales.from_v, "from_v", heads),
      keep_scale(call, scales.to_k, "to_k", heads), keep_scale(call, scales.to_v, "to_v", heads)};
  int32_t* const flag = call.status(status);
  const Stream queue = call.stream(stream);
  const ReleasedGil released;
  convert_pages(context, read, written, sources, destinations, factors, queue, flag);
}

void gather(const Context& context, const Cache& cache, const Table& table, nb::handle kv_len, nb::handle k_out,
            nb::handle v_out, nb::handle k_scale, nb::handle v_scale, nb::handle stream, nb::handle status) {
  DeviceCall call(context);
  const KvCacheView view = call.cache(cache, "cache", Access::kRead);
  const auto lens = call.int32s(kv_len, "kv_len");
  const OwnTable rows(call, table, lens, view.page_size);
  const TensorView keys = call.tensor(k_out, "k_out", Access::kWrite);
  const TensorView values = call.tensor(v_out, "v_out", Access::kWrite);
  const auto requests = static_cast<int64_t>(lens.size());
  const Scale k = call.scale(k_scale, "k_scale", view.num_kv_heads, requests);
  const Scale v = call.scale(v_scale, "v_scale", view.num_kv_heads, requests);
  int32_t* const flag = call.status(status);
  const Stream queue = call.stream(stream);
  const ReleasedGil released;
  gather_kv(context, view, rows.view, lens, keys, values, k, v, queue, flag);
}

void dequantize(const Context& context, const Cache& from, const Table& table, nb::handle seq_lens, float k_scale,
                float v_scale, const Cache& to, nb::handle new_table, nb::handle stream, nb::handle status) {
  DeviceCall call(context);
  const KvCacheView read = call.cache(from, "from_cache", Access::kRead);
  const KvCacheView written = call.cache(to, "to_cache", Access::kWrite);
  const auto lens = call.int32s(seq_lens, "seq_lens");
  PageTableView view = call.table(table);
  const auto out = call.int32s_out(new_table, "new_table", 2);
  const int64_t columns = call.arrays().back().size(1);
  if (columns > std::numeric_limits<int32_t>::max()) refuse("new_table has too many columns");
  if (call.arrays().back().size(0) != static_cast<int64_t>(lens.size())) {
    refuse("new_table has shape " + shape_text(call.arrays().back()) + "; there are " + std::to_string(lens.size()) +
           " requests");
  }
  std::vector<int32_t> dense;  // of its own, as OwnTable
  if (call.on_cpu()) {
    dense = to_dense(view, lens, read.page_size, static_cast<int32_t>(columns));
    view = dense_table(dense, static_cast<int32_t>(lens.size()), columns);
  }
  int32_t* const flag = call.status(status);
  const Stream queue = call.stream(stream);
  const ReleasedGil released;
  dequantize_pages(context, read, view, static_cast<int32_t>(columns), lens, k_scale, v_scale, written, out, queue,
                   flag);
}

void bind_shape(nb::module_& m) {
  using S = KvCacheShape;
  fields_of<S>(
      "KvCacheShape",
      "The sizes of one layer's paged KV cache. Its fields:", required("num_pages", &S::num_pages, "pages"),
      required("page_size", &S::page_size, "tokens a page"), required("num_kv_heads", &S::num_kv_heads, "KV heads"),
      required("head_dim_qk", &S::head_dim_qk, "components of a key"),
      required("head_dim_v", &S::head_dim_v, "components of a value"), field("dtype", &S::dtype, "element type"))
      .bind(m);
  m.def("k_elements", &k_elements, nb::arg("shape"), "Elements of the K half of such a cache, packed.");
  m.def("v_elements", &v_elements, nb::arg("shape"), "Elements of the V half of such a cache, packed.");
  m.def("token_scale_elements", &token_scale_elements, nb::arg("shape"),
        "Scales of the K or the V half of such a cache of int8, packed.");
  nb::class_<ConvertScales>(m, "CacheConvertScales",
                            "What convert_pages multiplies fp8 values by on reading (from_k, from_v) and divides them "
                            "by on writing (to_k, to_v): numbers, or Scales per tensor or per head.")
      .def(
          "__init__",
          [](ConvertScales* self, nb::object from_k, nb::object from_v, nb::object to_k, nb::object to_v) {
            new (self) ConvertScales{to_scale(from_k, "from_k"), to_scale(from_v, "from_v"), to_scale(to_k, "to_k"),
                                     to_scale(to_v, "to_v")};
          },
          nb::kw_only(), nb::arg("from_k") = 1.0f, nb::arg("from_v") = 1.0f, nb::arg("to_k") = 1.0f,
          nb::arg("to_v") = 1.0f)
      .def_ro("from_k", &ConvertScales::from_k)
      .def_ro("from_v", &ConvertScales::from_v)
      .def_ro("to_k", &ConvertScales::to_k)
      .def_ro("to_v", &ConvertScales::to_v);
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  bind_shape(m);
  m.def(
      "copy_pages", &copy, nb::arg("context"), nb::arg("from_cache"), nb::arg("to_cache"), nb::arg("source"),
      nb::arg("destination"), nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(),
      "Copies page source[i] of a cache to page destination[i] of another, or of the same, of equal sizes, format and "
      "dtype. Destinations are distinct, and no sources of the same cache. Raises InvalidArgument before anything is "
      "written. A GPU leaves out pairs with a page out of range, and makes `status`, an int32 [1] there, 1.");
  m.def("convert_pages", &convert, nb::arg("context"), nb::arg("from_cache"), nb::arg("to_cache"), nb::arg("source"),
        nb::arg("destination"), nb::arg("scales") = ConvertScales{}, nb::arg("stream") = nb::none(),
        nb::arg("status") = nb::none(),
        "copy_pages between caches of different formats or dtypes. Equal dtypes with equal scales keep every bit.");
  m.def(
      "gather_kv", &gather, nb::arg("context"), nb::arg("cache"), nb::arg("table"), nb::arg("kv_len"), nb::arg("k_out"),
      nb::arg("v_out"), nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f, nb::arg("stream") = nb::none(),
      nb::arg("status") = nb::none(),
      "Row r's first kv_len[r] tokens, one row after the other, into k_out [tokens, num_kv_heads, head_dim_qk] and "
      "v_out [tokens, num_kv_heads, head_dim_v]: float32, float16 or bfloat16, fp8 values times the scales; or the "
      "cache's fp8 type, copied as it is. Raises InvalidArgument before anything is written; a GPU leaves out what is "
      "out of range, and makes `status`, an int32 [1] there, 1.");
  m.def(
      "num_dequantized_pages",
      [](nb::object seq_lens, int32_t page_size) {
        return num_dequantized_pages(to_int32s(seq_lens, "seq_lens"), page_size);
      },
      nb::arg("seq_lens"), nb::arg("page_size"), "Pages of a cache that dequantize_pages fills, page 0 included.");
  m.def("dequantize_pages", &dequantize, nb::arg("context"), nb::arg("from_cache"), nb::arg("table"),
        nb::arg("seq_lens"), nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("to_cache"), nb::arg("new_table"),
        nb::arg("stream") = nb::none(), nb::arg("status") = nb::none(),
        "Copies the pages of an fp8 cache that some requests use into a float16 or bfloat16 cache of "
        "num_dequantized_pages or more, every value times its scale. new_table, int32 [requests, columns], gets their "
        "ids there, from 1 on, 0 beyond a row's pages. On a GPU the table is a dense one.");
  m.def(
      "concat_mla_k",
      [](const Context& context, nb::object k, nb::object k_nope, nb::object k_pe, nb::object stream) {
        DeviceCall call(context);
        const TensorView keys = call.tensor(k, "k", Access::kWrite);
        const TensorView nope = call.tensor(k_nope, "k_nope", Access::kRead);
        const TensorView pe = call.tensor(k_pe, "k_pe", Access::kRead);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        concat_mla_k(context, keys, nope, pe, queue);
      },
      nb::arg("context"), nb::arg("k"), nb::arg("k_nope"), nb::arg("k_pe"), nb::arg("stream") = nb::none(),
      "Keys of multi-head latent attention: k[t, h] = k_nope[t, h] followed by k_pe[t, 0]. k [tokens, heads, nope + "
      "rope], k_nope [tokens, heads, nope], k_pe [tokens, 1, rope], of one dtype. k_nope may be the part of k where it "
      "is copied to.");
}

}  // namespace folio::python
