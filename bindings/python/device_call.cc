#include "device_call.hpp"

namespace folio::python {
namespace {

void require_packed(const Array& array) {
  int64_t packed = 1;
  for (int64_t i = array.rank() - 1; i >= 0; --i) {
    if (array.size(i) > 1 && array.stride(i) != packed) {
      refuse(array.name + " has a stride of " + std::to_string(array.stride(i)) + " elements in dimension " +
             std::to_string(i) + "; it must be contiguous");
    }
    packed *= array.size(i);
  }
}

/// A dense table's rows one after the other, without what lies between them: that is not the table's.
std::vector<int32_t> packed_rows(const Table& table) {
  std::vector<int32_t> rows;
  rows.reserve(static_cast<size_t>(table.view.num_rows * table.columns));
  for (int64_t r = 0; r < table.view.num_rows; ++r) {
    const int32_t* const row = table.view.indices + r * table.view.row_stride;
    rows.insert(rows.end(), row, row + table.columns);
  }
  return rows;
}

}  // namespace

const Array& DeviceCall::kept(Array array) {
  require_on(device_, array);
  arrays_.push_back(std::move(array));
  return arrays_.back();
}

void DeviceCall::keep(const std::vector<Array>& arrays) {
  for (const Array& array : arrays) kept(array);
}

void DeviceCall::keep_apart(const Array& array, bool written) {
  const auto begin = reinterpret_cast<uintptr_t>(array.data);
  uintptr_t end = begin;
  for (int64_t i = 0; i < array.rank() && array.memory.size() > 0; ++i) {
    end += static_cast<uintptr_t>((array.size(i) - 1) * array.stride(i)) * array.element.bits / 8;
  }
  if (array.memory.size() > 0) end += array.element.bits / 8;
  for (const Memory& other : lists_) {
    if ((written || other.written) && begin < other.end && other.begin < end) {
      refuse(array.name + " overlaps " + other.name);
    }
  }
  lists_.push_back({array.name, begin, end, written});
}

std::span<const int32_t> DeviceCall::int32s(nb::handle source, const std::string& name) {
  if (on_cpu()) return copies_.emplace_back(to_int32s(source, name));
  const Array& array = kept(borrow_int32(source, name));
  return {static_cast<const int32_t*>(array.data), static_cast<size_t>(array.size(0))};
}

const Array& DeviceCall::packed_array(nb::handle source, const std::string& name, nb::dlpack::dtype element,
                                      Access access) {
  const Array& array = kept(borrow(source, name, access));
  if (array.element != element) {
    refuse(name + " is " + element_text(array.element) + "; it must be " + element_text(element));
  }
  require_packed(array);
  return array;
}

template <typename T>
std::span<T> DeviceCall::out(nb::handle source, const std::string& name, int64_t rank) {
  const Array& array = kept(borrow(source, name, Access::kWrite));
  if (array.element != nb::dtype<T>()) {
    refuse(name + " is " + element_text(array.element) + "; it must be " + element_text(nb::dtype<T>()));
  }
  if (array.rank() != rank) {
    refuse(name + " has shape " + shape_text(array) + "; it must have " + std::to_string(rank) +
           (rank == 1 ? " dimension" : " dimensions"));
  }
  require_packed(array);
  keep_apart(array, true);
  return {static_cast<T*>(array.data), array.memory.size()};
}

std::span<int32_t> DeviceCall::int32s_out(nb::handle source, const std::string& name, int64_t rank) {
  return out<int32_t>(source, name, rank);
}

std::span<int64_t> DeviceCall::int64s_out(nb::handle source, const std::string& name) {
  return out<int64_t>(source, name, 1);
}

std::span<float> DeviceCall::floats_out(nb::handle source, const std::string& name) {
  return out<float>(source, name, 1);
}

std::span<const float> DeviceCall::floats(nb::handle source, const std::string& name) {
  const Array& array = kept(borrow_float32(source, name));
  return {static_cast<const float*>(array.data), static_cast<size_t>(array.size(0))};
}

std::span<const uint8_t> DeviceCall::bytes(nb::handle source, const std::string& name) {
  const Array& array = kept(borrow_bytes(source, name));
  return {static_cast<const uint8_t*>(array.data), static_cast<size_t>(array.size(0))};
}

TensorView DeviceCall::tensor(nb::handle source, const std::string& name, Access access) {
  Tensor tensor = to_tensor(source, name, access);
  kept(std::move(tensor.array));
  return tensor.view;
}

LseView DeviceCall::lse(nb::handle source, const std::string& name) {
  const Lse lse = to_lse(source, name);
  if (lse.array) kept(*lse.array);
  return lse.view;
}

Scale DeviceCall::scale(nb::handle source, const std::string& name, int64_t heads, int64_t requests) {
  const ScaleArg scale = to_scale(source, name);
  require_extent(scale, name, heads, requests);
  if (scale.array) kept(*scale.array);
  return scale.scale;
}

KvCacheView DeviceCall::cache(const Cache& cache, const std::string& name, Access access) {
  for (Array array : cache.arrays) {
    array.name = name + "." + array.name;
    if (access == Access::kWrite && !array.writable) {
      refuse(array.name + " is read-only, and Folio would write to it");
    }
    kept(std::move(array));
  }
  return cache.view;
}

PageTableView DeviceCall::table(const Table& table) {
  keep(table.arrays);
  for (const Array& array : table.arrays) keep_apart(array, false);
  PageTableView view = table.view;
  if (!on_cpu()) return view;
  if (view.kind == PageTableKind::kCsr) {
    view.indptr = copies_.emplace_back(view.indptr, view.indptr + view.num_rows + 1).data();
  } else if (view.row_stride > table.columns && view.num_rows > 1) {
    view.indices = copies_.emplace_back(packed_rows(table)).data();
    view.row_stride = table.columns;
    view.num_indices = int64_t{view.num_rows} * table.columns;
  }
  return view;
}

int32_t* DeviceCall::status(nb::handle source) {
  if (source.is_none()) return nullptr;
  const std::span<int32_t> flag = int32s_out(source, "status");
  if (flag.size() != 1) refuse("status has " + std::to_string(flag.size()) + " entries; it is one int32");
  return flag.data();
}

}  // namespace folio::python
