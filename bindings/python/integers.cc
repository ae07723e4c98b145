#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array.hpp"
#include "folio/types/error.hpp"
#include "signature.hpp"

/// Lengths, offsets and ids. An array of the type that Folio reads is borrowed. One of the other width, a list or a
/// tuple is copied once, when the object that holds it is made: what is written into it later is not seen.
namespace folio::python {
namespace {

constexpr int64_t kVector = -1;  ///< columns of what has none

/// An element's name: "kv_len[3]", "table.entries[1, 0]".
std::string element_name(const std::string& name, int64_t index, int64_t columns) {
  const std::string place = columns == kVector
                                ? std::to_string(index)
                                : std::to_string(index / columns) + ", " + std::to_string(index % columns);
  return name + "[" + place + "]";
}

template <typename Int>
void require_in_range(int64_t value, const std::string& name, int64_t index, int64_t columns) {
  if (value >= std::numeric_limits<Int>::min() && value <= std::numeric_limits<Int>::max()) return;
  refuse(element_name(name, index, columns) + " is " + std::to_string(value) + ", which 32 bits do not hold");
}

/// An array of Folio's own on the host: a vector where columns is kVector.
template <typename Int>
Array own(std::vector<Int>&& values, int64_t rows, int64_t columns, const std::string& name) {
  auto kept = std::make_unique<std::vector<Int>>(std::move(values));
  kept->reserve(1);  // an address also where there is nothing
  const size_t shape[] = {static_cast<size_t>(rows), static_cast<size_t>(std::max<int64_t>(columns, 0))};
  Int* const data = kept->data();
  const nb::capsule owner(kept.get(), [](void* memory) noexcept { delete static_cast<std::vector<Int>*>(memory); });
  kept.release();
  Array array;
  array.name = name;
  array.memory = nb::ndarray<nb::ro>(data, columns == kVector ? 1 : 2, shape, owner, nullptr, nb::dtype<Int>(),
                                     nb::device::cpu::value);
  array.data = data;
  array.element = nb::dtype<Int>();
  array.place.host = true;
  array.place.dlpack_type = nb::device::cpu::value;
  return array;
}

/// Appends the integers of a list or tuple.
template <typename Int>
void append(nb::handle list, const std::string& name, int64_t columns, std::vector<Int>& values) {
  for (const nb::handle item : nb::iter(list)) {
    const auto index = static_cast<int64_t>(values.size());
    const bool integer = PyIndex_Check(item.ptr()) != 0 && !PyBool_Check(item.ptr()) && !nb::hasattr(item, "__len__");
    const nb::object number = integer ? nb::steal(PyNumber_Index(item.ptr())) : nb::object();
    if (!number.is_valid()) {
      PyErr_Clear();
      refuse(element_name(name, index, columns) + ": expected an integer, got " + describe_value(item));
    }
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0) {
      refuse(element_name(name, index, columns) + " is " + nb::repr(number).c_str() + ", which 64 bits do not hold");
    }
    require_in_range<Int>(value, name, index, columns);
    values.push_back(static_cast<Int>(value));
  }
}

bool is_list(nb::handle source) {
  return PyList_Check(source.ptr()) || PyTuple_Check(source.ptr()) || PyRange_Check(source.ptr());
}

template <typename Int>
Array from_list(nb::handle source, const std::string& name, int32_t rank) {
  std::vector<Int> values;
  if (rank == 1) {
    append<Int>(source, name, kVector, values);
    const auto size = static_cast<int64_t>(values.size());
    return own<Int>(std::move(values), size, kVector, name);
  }
  int64_t rows = 0;
  int64_t columns = -1;
  for (const nb::handle row : nb::iter(source)) {
    if (!is_list(row)) {
      refuse(name + "[" + std::to_string(rows) + "]: expected a list of integers, got " + describe_value(row));
    }
    const auto size = static_cast<int64_t>(nb::len(row));
    if (columns >= 0 && size != columns) {
      refuse(name + "[" + std::to_string(rows) + "] has " + std::to_string(size) + " entries, the row before " +
             std::to_string(columns));
    }
    columns = size;
    append<Int>(row, name, columns, values);
    ++rows;
  }
  return own<Int>(std::move(values), rows, std::max<int64_t>(columns, 0), name);
}

/// A host array of the other width, element by element.
template <typename Int, typename Other>
Array convert_host(const Array& array) {
  const bool matrix = array.rank() == 2;
  const int64_t rows = array.size(0);
  const int64_t columns = matrix ? array.size(1) : 1;
  std::vector<Int> values;
  values.reserve(static_cast<size_t>(rows * columns));
  const auto* const from = static_cast<const Other*>(array.data);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t offset = i / columns * array.stride(0) + (matrix ? i % columns * array.stride(1) : 0);
    require_in_range<Int>(from[offset], array.name, i, matrix ? columns : kVector);
    values.push_back(static_cast<Int>(from[offset]));
  }
  return own<Int>(std::move(values), rows, matrix ? columns : kVector, array.name);
}

/// An array on a GPU, converted by the library that it comes from, on that library's current stream. Values are not
/// looked at: the host does not wait.
Array convert_device(nb::handle source, const Array& array, const char* wanted) {
  if (array.library == Library::kTorch) {
    const nb::object dtype = nb::module_::import_("torch").attr(wanted);
    return borrow(source.attr("to")(dtype).attr("contiguous")(), array.name);
  }
  if (!nb::hasattr(source, "astype")) {
    refuse(array.name + " is " + element_text(array.element) + " on " + describe(array.place) + "; it must be " +
           wanted + " there");
  }
  return borrow(source.attr("astype")(wanted), array.name);
}

template <typename Int, typename Other>
Array borrow_integers(nb::handle source, const std::string& name, int32_t rank) {
  if (is_list(source)) return from_list<Int>(source, name, rank);
  Array array = borrow(source, name);
  if (array.rank() != rank) {
    refuse(name + " has shape " + shape_text(array) + "; it must have " +
           (rank == 1 ? std::string("one dimension") : std::to_string(rank) + " dimensions"));
  }
  if (array.element == nb::dtype<Other>()) {
    array = array.place.host ? convert_host<Int, Other>(array)
                             : convert_device(source, array, sizeof(Int) == sizeof(int32_t) ? "int32" : "int64");
  }
  if (array.element != nb::dtype<Int>()) {
    refuse(name + " is " + element_text(array.element) + "; int32 and int64 are taken");
  }
  if (rank == 1 && array.size(0) > 1 && array.stride(0) != 1) {
    refuse(name + " has a stride of " + std::to_string(array.stride(0)) + " elements; it must be contiguous");
  }
  return array;
}

}  // namespace

Array borrow_int32(nb::handle source, const std::string& name, int32_t rank) {
  return borrow_integers<int32_t, int64_t>(source, name, rank);
}

Array borrow_int64(nb::handle source, const std::string& name) {
  return borrow_integers<int64_t, int32_t>(source, name, 1);
}

}  // namespace folio::python
