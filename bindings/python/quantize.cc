#include "folio/quantize.hpp"

#include <limits>
#include <string>

#include "device_call.hpp"
#include "folio/types/nvfp4.hpp"
#include "gil.hpp"

/// Quantisation of whole tensors.
namespace folio::python {
namespace {

/// BlockScaleArgs, with its array.
struct BlockScale {
  Array array;
  int64_t first_row = 0;
};

BlockScale make_block_scale(nb::handle data, int64_t first_row) {
  if (first_row < 0) refuse("first_row is " + std::to_string(first_row) + "; it is not negative");
  return {borrow_bytes(data, "data"), first_row};
}

/// An array of bytes with two 4-bit values each, or a TensorView that says so.
TensorView nvfp4_tensor(DeviceCall& call, nb::handle source, const std::string& name, Access access) {
  if (nb::isinstance<Tensor>(source)) return call.tensor(source, name, access);
  Tensor tensor = make_tensor(source, DType::kFloat4E2M1x2, name, access);
  call.keep({tensor.array});
  return tensor.view;
}

/// `values` says how many there are: [tokens, heads, head_dim], or half as many bytes.
BlockScaleArgs block_scale(DeviceCall& call, const BlockScale& given, const TensorView& values, int64_t per_element,
                           Access access) {
  Array array = given.array;
  array.name = "block_scale.data";
  if (access == Access::kWrite) array = borrow_again(array);
  const int64_t blocks = values.rank == 3 ? values.shape[1] * (values.shape[2] * per_element / kNvfp4BlockSize) : 0;
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (given.first_row > kMostRows) refuse("block_scale.first_row is " + std::to_string(given.first_row));
  const int64_t needed = nvfp4_scale_bytes(given.first_row + values.shape[0], blocks);
  if (array.size(0) < needed) {
    refuse("block_scale.data has " + std::to_string(array.size(0)) + " bytes; " +
           std::to_string(given.first_row + values.shape[0]) + " rows of " + std::to_string(blocks) + " blocks take " +
           std::to_string(needed));
  }
  BlockScaleArgs args{array.data, given.first_row};
  call.keep({array});
  return args;
}

}  // namespace
}  // namespace folio::python
