#include "masks.hpp"

#include <memory>
#include <utility>

#include "host_copies.hpp"

namespace folio::python {
namespace {

using namespace nb::literals;

constexpr int64_t kByte = 8;

std::string text(const MaskShape& shape) {
  return "[" + std::to_string(shape.queries) + ", " + std::to_string(shape.columns) + "]";
}

bool is_list_or_tuple(nb::handle source) {
  return PyList_Check(source.ptr()) || PyTuple_Check(source.ptr());
}

bool is_bool(const Array& array) {
  return array.element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bool) && array.element.bits == 8;
}

Array borrow_block(nb::handle source, const std::string& name) {
  Array block = borrow(source, name);
  if (!is_bool(block)) refuse(name + " is " + element_text(block.element) + "; a mask must be bool");
  if (block.rank() != 2) refuse(name + " has shape " + shape_text(block) + "; a mask must be [queries, columns]");
  return block;
}

/// Appends one block's bits.
void pack_block(const Array& block, std::vector<uint8_t>& bytes) {
  const auto* const visible = static_cast<const uint8_t*>(block.data);
  const size_t begin = bytes.size();
  const int64_t columns = block.size(1);
  bytes.resize(begin + static_cast<size_t>((block.size(0) * columns + kByte - 1) / kByte));
  for (int64_t row = 0; row < block.size(0); ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      if (visible[row * block.stride(0) + column * block.stride(1)] == 0) continue;
      const int64_t bit = row * columns + column;
      bytes[begin + static_cast<size_t>(bit / kByte)] |= static_cast<uint8_t>(1u << (bit % kByte));
    }
  }
}

nb::object pack_on_host(const std::vector<Array>& blocks) {
  auto bytes = std::make_unique<std::vector<uint8_t>>();
  bytes->reserve(1);  // an address also where there is nothing
  for (const Array& block : blocks) pack_block(block, *bytes);
  uint8_t* const data = bytes->data();
  const size_t size = bytes->size();
  const nb::capsule owner(bytes.get(),
                          [](void* memory) noexcept { delete static_cast<std::vector<uint8_t>*>(memory); });
  bytes.release();
  return nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, {size}, owner));
}

/// By torch's own functions, wherever the masks lie: on a GPU on torch's current stream, without a wait.
nb::object pack_with_torch(const std::vector<nb::object>& blocks) {
  const nb::module_ torch = nb::module_::import_("torch");
  const nb::object uint8 = torch.attr("uint8");
  nb::list parts;
  for (const nb::object& block : blocks) {
    const nb::object flat = block.attr("reshape")(-1);
    const auto entries = static_cast<int64_t>(nb::len(flat));
    const int64_t bytes = (entries + kByte - 1) / kByte;
    const nb::object padded =
        torch.attr("nn").attr("functional").attr("pad")(flat, nb::make_tuple(0, bytes * kByte - entries));
    const nb::object bits = padded.attr("view")(bytes, kByte).attr("to")(uint8);
    const nb::object places = torch.attr("arange")(kByte, "dtype"_a = uint8, "device"_a = block.attr("device"));
    parts.append(torch.attr("bitwise_left_shift")(bits, places).attr("sum")(-1, "dtype"_a = uint8));
  }
  return torch.attr("cat")(parts);
}

/// A vector of all entries, cut into the requests' blocks.
std::vector<nb::object> cut(nb::handle source, const Array& all, const std::vector<MaskShape>& shapes) {
  int64_t entries = 0;
  for (const MaskShape& shape : shapes) entries += shape.queries * shape.columns;
  if (all.size(0) != entries) {
    refuse(all.name + " has " + std::to_string(all.size(0)) + " entries; the batch's masks have " +
           std::to_string(entries));
  }
  std::vector<nb::object> blocks;
  int64_t begin = 0;
  for (const MaskShape& shape : shapes) {
    const int64_t end = begin + shape.queries * shape.columns;
    const nb::object part = source[nb::slice(nb::int_(begin), nb::int_(end), nb::none())];
    blocks.push_back(part.attr("reshape")(shape.queries, shape.columns));
    begin = end;
  }
  return blocks;
}

/// One [queries, columns] array a request.
std::vector<nb::object> blocks_of(nb::handle source, const std::string& name, const std::vector<MaskShape>* wanted) {
  std::vector<nb::object> blocks;
  if (!is_list_or_tuple(source)) {
    const Array all = borrow(source, name);
    if (!is_bool(all)) refuse(name + " is " + element_text(all.element) + "; a mask must be bool");
    if (all.rank() == 2) return {nb::borrow(source)};
    if (all.rank() == 1 && wanted == nullptr) {
      refuse(name +
             " has one dimension, and only the batch says where a request's entries begin: give "
             "folio.pack_custom_mask(mask, batch), or a list of one [queries, columns] mask a request");
    }
    if (all.rank() == 1) return cut(source, all, *wanted);
    if (all.rank() != 3) {
      refuse(name + " has shape " + shape_text(all) + "; masks are [requests, queries, columns], or a list of them");
    }
  }
  for (const nb::handle block : nb::iter(source)) blocks.push_back(nb::borrow(block));
  return blocks;
}

/// The row of a segment that holds a request's keys; -1: none.
int32_t row_of(const KvSegment& segment, int32_t request) {
  if (segment.group_indptr == nullptr) return request;
  for (int32_t row = 0; row < segment.num_groups; ++row) {
    if (segment.group_indptr[row] <= request && request < segment.group_indptr[row + 1]) return row;
  }
  return -1;
}

}  // namespace

bool is_unpacked_mask(nb::handle source) {
  if (is_list_or_tuple(source)) return true;
  return is_bool(borrow(source, "custom_mask"));
}

PackedMask pack_mask(nb::handle source, const std::string& name, const std::vector<MaskShape>* wanted) {
  PackedMask packed;
  std::vector<Array> arrays;
  const std::vector<nb::object> blocks = blocks_of(source, name, wanted);
  bool torch = !blocks.empty();
  for (const nb::object& block : blocks) {
    Array array = borrow_block(block, name + "[" + std::to_string(arrays.size()) + "]");
    packed.shapes.push_back({array.size(0), array.size(1)});
    torch &= library_of(block) == Library::kTorch;
    arrays.push_back(std::move(array));
  }
  for (const Array& array : arrays) {
    if (!torch && !array.place.host) {
      refuse(array.name + " lies on " + describe(array.place) + "; there only torch's masks are packed");
    }
  }
  if (wanted != nullptr) require_equal_shapes(*wanted, packed.shapes, name);
  packed.bits = torch ? pack_with_torch(blocks) : pack_on_host(arrays);
  return packed;
}

std::vector<MaskShape> mask_shapes(const BatchView& batch) {
  std::vector<MaskShape> shapes;
  for (int32_t request = 0; request < batch.num_requests; ++request) {
    MaskShape shape{batch.cu_q[request + 1] - batch.cu_q[request], 0};
    if (batch.custom_mask.scope == CustomMaskScope::kTail) {
      if (batch.custom_mask.tail_len != nullptr) shape.columns = batch.custom_mask.tail_len[request];
    } else {
      for (const KvSegment& segment : batch.segments) {
        const int32_t row = row_of(segment, request);
        if (row >= 0) shape.columns += segment.kv_len[row];
      }
    }
    shapes.push_back(shape);
  }
  return shapes;
}

void require_equal_shapes(const std::vector<MaskShape>& wanted, const std::vector<MaskShape>& shapes,
                          const std::string& name) {
  if (shapes.size() != wanted.size()) {
    refuse(name + " has " + std::to_string(shapes.size()) + " masks; there are " + std::to_string(wanted.size()) +
           " requests");
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i] != wanted[i]) {
      refuse(name + "[" + std::to_string(i) + "] is " + text(shapes[i]) + "; request " + std::to_string(i) + " has " +
             text(wanted[i]) + " queries and columns");
    }
  }
}

void bind_masks(nb::module_& m) {
  m.def(
      "pack_custom_mask",
      [](nb::object mask, const Batch* batch) {
        if (batch == nullptr) return pack_mask(mask, "mask").bits;
        if (batch->view.where != Where::kHost) {
          refuse("batch: its lengths lie on a GPU, so the shapes of its masks are not known; leave it out");
        }
        const std::vector<MaskShape> shapes = mask_shapes(BatchCopy(*batch).view());
        return pack_mask(mask, "mask", &shapes).bits;
      },
      nb::arg("mask"), nb::arg("batch").none() = nb::none(),
      "Packs bools (True: visible) into the bits that AttentionArgs.custom_mask takes: a uint8 vector, of torch on the "
      "masks' device where they are torch's, of numpy otherwise.\n\n`mask` is a list of one bool array [queries, "
      "columns] a request, or one array [requests, queries, columns], or, with `batch`, a vector of all entries, "
      "request after request. Columns are the request's keys, or its last tail_len ones (CustomMask). With a `batch` "
      "of host lengths shapes are checked. Every request's bits begin on a byte, lowest bit first. Raises "
      "InvalidArgument for other shapes and types.");
}

}  // namespace folio::python
