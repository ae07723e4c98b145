#include "folio/quantize.hpp"

#include <limits>
#include <string>

#include "block_scale.hpp"
#include "device_call.hpp"
#include "fields.hpp"
#include "folio/types/nvfp4.hpp"
#include "gil.hpp"

/// Quantisation of whole tensors.
namespace folio::python {
namespace {

BlockScale make_block_scale(nb::handle data, int64_t first_row) {
  Array array = borrow(data, "data", Access::kWriteIfPossible);
  if (array.element != nb::dtype<uint8_t>() && array.dtype != DType::kFloat8E4M3) {
    refuse("data is " + element_text(array.element) + "; it must be uint8 or fp8_e4m3");
  }
  if (array.rank() != 1 || (array.size(0) > 1 && array.stride(0) != 1)) {
    refuse("data has shape " + shape_text(array) + "; it must be one contiguous dimension");
  }
  if (first_row < 0 || first_row > std::numeric_limits<int32_t>::max()) {
    refuse("first_row is " + std::to_string(first_row) + "; it must be in [0, 2^31)");
  }
  return {std::move(array), first_row};
}

/// An array of bytes with two 4-bit values each, or a TensorView that says so.
TensorView nvfp4_tensor(DeviceCall& call, nb::handle source, const std::string& name, Access access) {
  if (nb::isinstance<Tensor>(source)) return call.tensor(source, name, access);
  const Tensor tensor = make_tensor(source, DType::kFloat4E2M1x2, name, access);
  call.keep({tensor.array});
  return tensor.view;
}

/// The factors of `packed`, [tokens, heads, head_dim / 2] bytes.
BlockScaleArgs keep_block_scale(DeviceCall& call, const BlockScale& given, const TensorView& packed, Access access) {
  const BlockScale scale = block_scale_of(given, packed, "block_scale", access);
  call.keep({scale.array});
  return {scale.array.data, scale.first_row};
}

void bind_nvfp4(nb::module_& m) {
  nb::class_<BlockScale>(m, "BlockScaleArgs",
                         "Scale factors of NVFP4 values: `data`, nvfp4_scale_bytes of the whole matrix, uint8 or "
                         "fp8_e4m3; the values' token 0 is row `first_row` of that matrix.")
      .def(
          "__init__",
          [](BlockScale* self, nb::object data, int64_t first_row) {
            new (self) BlockScale(make_block_scale(data, first_row));
          },
          nb::arg("data"), nb::arg("first_row") = 0)
      .def_ro("first_row", &BlockScale::first_row)
      .def("__repr__", [](const BlockScale& self) {
        return "<folio.BlockScaleArgs: " + std::to_string(self.array.size(0)) + " bytes, first row " +
               std::to_string(self.first_row) + ">";
      });
  m.attr("NVFP4_BLOCK_SIZE") = kNvfp4BlockSize;
  m.def(
      "nvfp4_scale_index",
      [](int32_t row, int32_t block, int32_t blocks_per_row) {
        if (row < 0 || block < 0 || block >= blocks_per_row) {
          refuse("block " + std::to_string(block) + " of row " + std::to_string(row) + " is not among " +
                 std::to_string(blocks_per_row) + " blocks a row");
        }
        return nvfp4_scale_index(row, block, blocks_per_row);
      },
      nb::arg("row"), nb::arg("block"), nb::arg("blocks_per_row"),
      "The byte of a block's scale factor: tiles of 128 rows by 4 blocks, as Blackwell's matrix units read them.");
  m.def(
      "nvfp4_scale_bytes",
      [](int32_t rows, int32_t blocks_per_row) {
        if (rows < 0 || blocks_per_row < 0) refuse("rows and blocks_per_row are not negative");
        return nvfp4_scale_bytes(rows, blocks_per_row);
      },
      nb::arg("rows"), nb::arg("blocks_per_row"),
      "Bytes of the scale factors of a whole matrix; a row has heads * head_dim / 16 blocks.");
  m.def(
      "quantize_nvfp4",
      [](const Context& context, nb::object input, nb::object out, const BlockScale& block_scale, float global_scale,
         nb::object stream) {
        DeviceCall call(context);
        const TensorView values = call.tensor(input, "input", Access::kRead);
        const TensorView packed = nvfp4_tensor(call, out, "out", Access::kWrite);
        const BlockScaleArgs factors = keep_block_scale(call, block_scale, packed, Access::kWrite);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        quantize_nvfp4(context, values, packed, factors, global_scale, queue);
      },
      nb::arg("context"), nb::arg("input"), nb::arg("out"), nb::arg("block_scale"), nb::arg("global_scale"),
      nb::arg("stream") = nb::none(),
      "NVFP4: per 16 neighbouring values of a head, sf = e4m3(global_scale * max|x| / 6) and e2m1(x * global_scale / "
      "sf). input [tokens, heads, head_dim]: float32, float16 or bfloat16, head_dim a multiple of 16; out uint8 "
      "[tokens, heads, head_dim / 2], value 2i in the low half of byte i. Real value = stored * sf / global_scale.");
  m.def(
      "dequantize_nvfp4",
      [](const Context& context, nb::object input, const BlockScale& block_scale, float global_scale, nb::object out,
         nb::object stream) {
        DeviceCall call(context);
        const TensorView packed = nvfp4_tensor(call, input, "input", Access::kRead);
        const BlockScaleArgs factors = keep_block_scale(call, block_scale, packed, Access::kRead);
        const TensorView values = call.tensor(out, "out", Access::kWrite);
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        dequantize_nvfp4(context, packed, factors, global_scale, values, queue);
      },
      nb::arg("context"), nb::arg("input"), nb::arg("block_scale"), nb::arg("global_scale"), nb::arg("out"),
      nb::arg("stream") = nb::none(), "The inverse, into float32 [tokens, heads, head_dim].");
}

}  // namespace

BlockScale block_scale_of(const BlockScale& given, const TensorView& packed, const std::string& name, Access access) {
  BlockScale scale = given;
  scale.array.name = name + ".data";
  if (access == Access::kWrite && !scale.array.writable) {
    refuse(scale.array.name + " is read-only, and Folio would write to it");
  }
  if (packed.rank != 3) refuse("4-bit values have three dimensions: [tokens, heads, head_dim / 2]");
  const int64_t limit = std::numeric_limits<int32_t>::max();
  const auto [tokens, heads, bytes] = std::tuple(packed.shape[0], packed.shape[1], packed.shape[2]);
  if (tokens > limit || heads > limit || bytes > limit || heads * bytes > limit) {
    refuse("4-bit values have shape [" + std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
           std::to_string(bytes) + "]; a row has less than 2^31 bytes, and there are less than 2^31 rows");
  }
  const int64_t blocks = heads * (2 * bytes / kNvfp4BlockSize);
  const int64_t needed = nvfp4_scale_bytes(scale.first_row + tokens, blocks);
  if (scale.array.size(0) < needed) {
    refuse(scale.array.name + " has " + std::to_string(scale.array.size(0)) + " bytes; " +
           std::to_string(scale.first_row + tokens) + " rows of " + std::to_string(blocks) + " blocks take " +
           std::to_string(needed));
  }
  return scale;
}

void bind_quantize(nb::module_& m) {
  bind_nvfp4(m);
  m.def(
      "quantize_fp8",
      [](const Context& context, nb::object input, nb::object out, nb::object scale, nb::object stream) {
        DeviceCall call(context);
        const TensorView values = call.tensor(input, "input", Access::kRead);
        const TensorView codes = call.tensor(out, "out", Access::kWrite);
        const Scale factor = call.scale(scale, "scale");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        quantize_fp8(context, values, codes, factor, queue);
      },
      nb::arg("context"), nb::arg("input"), nb::arg("out"), nb::arg("scale"), nb::arg("stream") = nb::none(),
      "out = fp8(input / scale), rounded to nearest even, saturated. input [tokens, heads, head_dim]: float32, float16 "
      "or bfloat16; out fp8_e4m3 or fp8_e5m2 of the same shape; scale positive, per tensor. Raises InvalidArgument "
      "before anything is written.");
  using K = KvScaleConstants;
  fields_of<K>("KvScaleConstants",
               "What the largest magnitudes are divided by: vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT and "
               "V_SCALE_CONSTANT. Its fields:",
               field("q", &K::q, "of queries"), field("k", &K::k, "of keys"), field("v", &K::v, "of values"))
      .bind(m);
  m.def(
      "calculate_kv_scales",
      [](const Context& context, nb::object q, nb::object k, nb::object v, nb::object scales,
         const KvScaleConstants& constants, nb::object stream) {
        DeviceCall call(context);
        const TensorView queries = call.tensor(q, "q", Access::kRead);
        const TensorView keys = call.tensor(k, "k", Access::kRead);
        const TensorView values = call.tensor(v, "v", Access::kRead);
        const auto out = call.floats_out(scales, "scales");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        calculate_kv_scales(context, queries, keys, values, out, constants, queue);
      },
      nb::arg("context"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scales"),
      nb::arg("constants") = KvScaleConstants{}, nb::arg("stream") = nb::none(),
      "A layer's fp8 scales from its first batch, max |x| / constant, into scales, float32 [3]: those of q, k and v. 1 "
      "for a tensor without values or of zeros. Tensors of any shape and strides.");
}

}  // namespace folio::python
