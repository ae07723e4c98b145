#include "integers.hpp"

#include <array>
#include <memory>

#include "folio/types/error.hpp"

namespace folio::python {
namespace {

constexpr int64_t kVector = -1;  ///< columns of what has none

/// Integers of Folio's own: rows of `columns`, or a vector.
template <typename Int>
struct Integers {
  std::vector<Int> values;
  int64_t rows = 0;
  int64_t columns = kVector;
};

/// "kv_len[3]", "table.entries[1, 0]"
std::string element_name(const std::string& name, int64_t index, int64_t columns) {
  const std::string place = columns == kVector
                                ? std::to_string(index)
                                : std::to_string(index / columns) + ", " + std::to_string(index % columns);
  return name + "[" + place + "]";
}

template <typename Int>
Int checked(int64_t value, const std::string& name, int64_t index, int64_t columns) {
  if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max()) {
    refuse(element_name(name, index, columns) + " is " + std::to_string(value) + ", which 32 bits do not hold");
  }
  return static_cast<Int>(value);
}

bool is_list(nb::handle source) {
  return PyList_Check(source.ptr()) || PyTuple_Check(source.ptr()) || PyRange_Check(source.ptr());
}

/// An array with dimensions: of one element, some libraries take it as an integer.
bool has_dimensions(nb::handle item) {
  return nb::hasattr(item, "__len__") && !nb::getattr(item, "ndim", nb::int_(1)).equal(nb::int_(0));
}

int64_t to_integer(nb::handle item, const std::string& name, int64_t index, int64_t columns) {
  const bool integer = PyIndex_Check(item.ptr()) != 0 && !PyBool_Check(item.ptr()) && !has_dimensions(item);
  const nb::object number = integer ? nb::steal(PyNumber_Index(item.ptr())) : nb::object();
  if (!number.is_valid()) {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_TypeError) == 0) nb::raise_python_error();
    PyErr_Clear();
    refuse_kind(element_name(name, index, columns), "an integer", item);
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) {
    refuse(element_name(name, index, columns) + " is " + nb::repr(number).c_str() + ", which 64 bits do not hold");
  }
  return value;
}

/// Appends the integers of a copy of a list: the list itself may change while its elements are asked for their value.
template <typename Int>
void append(const nb::tuple& items, const std::string& name, int64_t columns, std::vector<Int>& values) {
  for (const nb::handle item : items) {
    const auto index = static_cast<int64_t>(values.size());
    values.push_back(checked<Int>(to_integer(item, name, index, columns), name, index, columns));
  }
}

template <typename Int>
Integers<Int> read_list(nb::handle source, const std::string& name, int32_t rank) {
  Integers<Int> read;
  if (rank == 1) {
    append(nb::tuple(nb::borrow(source)), name, kVector, read.values);
    read.rows = static_cast<int64_t>(read.values.size());
    return read;
  }
  const nb::tuple rows(nb::borrow(source));
  for (const nb::handle row : rows) {
    const std::string row_name = name + "[" + std::to_string(read.rows) + "]";
    if (!is_list(row)) refuse_kind(row_name, "a list of integers", row);
    const nb::tuple items(nb::borrow(row));  // counted after the copy: a subclass may say another length
    const auto size = static_cast<int64_t>(nb::len(items));
    if (read.columns != kVector && size != read.columns) {
      refuse(row_name + " has " + std::to_string(size) + " entries, the row before " + std::to_string(read.columns));
    }
    read.columns = size;
    append(items, name, size, read.values);
    ++read.rows;
  }
  read.columns = std::max<int64_t>(read.columns, 0);
  return read;
}

/// Element by element, of an int32 or int64 array on the host.
template <typename Element, typename Int>
Integers<Int> read_elements(const Array& array) {
  const bool matrix = array.rank() == 2;
  Integers<Int> read;
  read.rows = array.size(0);
  read.columns = matrix ? array.size(1) : kVector;
  const int64_t width = matrix ? read.columns : 1;
  read.values.reserve(static_cast<size_t>(read.rows * width));
  const auto* const from = static_cast<const Element*>(array.data);
  for (int64_t i = 0; i < read.rows * width; ++i) {
    const int64_t offset = i / width * array.stride(0) + (matrix ? i % width * array.stride(1) : 0);
    read.values.push_back(checked<Int>(from[offset], array.name, i, read.columns));
  }
  return read;
}

template <typename Int>
Integers<Int> read_array(const Array& array) {
  return array.element.bits == 64 ? read_elements<int64_t, Int>(array) : read_elements<int32_t, Int>(array);
}

/// An array of int32 or int64 of this rank, of any stride and wherever it lies.
Array int_array(nb::handle source, const std::string& name, int32_t rank, Access access) {
  Array array = borrow(source, name, access);
  if (array.rank() != rank) {
    refuse(name + " has shape " + shape_text(array) + "; it must have " +
           (rank == 1 ? std::string("one dimension") : std::to_string(rank) + " dimensions"));
  }
  if (array.element != nb::dtype<int32_t>() && array.element != nb::dtype<int64_t>()) {
    refuse(name + " is " + element_text(array.element) + "; int32 and int64 are taken");
  }
  return array;
}

Array host_ints(nb::handle source, const std::string& name, Access access) {
  Array array = int_array(source, name, 1, access);
  if (!array.place.host) refuse(name + " lies on " + describe(array.place) + "; it is read on the host");
  return array;
}

template <typename Int>
std::vector<Int> to_ints(nb::handle source, const std::string& name) {
  if (is_list(source)) return read_list<Int>(source, name, 1).values;
  return read_array<Int>(host_ints(source, name, Access::kRead)).values;
}

template <typename Int>
Array own(Integers<Int>&& read, const std::string& name) {
  auto kept = std::make_unique<std::vector<Int>>(std::move(read.values));
  kept->reserve(1);  // an address also where there is nothing
  const bool matrix = read.columns != kVector;
  const size_t shape[] = {static_cast<size_t>(read.rows), static_cast<size_t>(matrix ? read.columns : 0)};
  Int* const data = kept->data();
  const nb::capsule owner(kept.get(), [](void* memory) noexcept { delete static_cast<std::vector<Int>*>(memory); });
  kept.release();
  Array array;
  array.name = name;
  array.memory =
      nb::ndarray<nb::ro>(data, matrix ? 2 : 1, shape, owner, nullptr, nb::dtype<Int>(), nb::device::cpu::value);
  array.data = data;
  array.element = nb::dtype<Int>();
  array.place.host = true;
  array.place.dlpack_type = nb::device::cpu::value;
  array.writable = true;
  return array;
}

template <typename Int>
Array own(std::vector<Int>&& values, const std::string& name) {
  const auto size = static_cast<int64_t>(values.size());
  return own(Integers<Int>{std::move(values), size, kVector}, name);
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

/// Packed and of this type, where it lies.
template <typename Int>
Array packed(nb::handle source, Array array) {
  if (array.element != nb::dtype<Int>()) {
    if (array.place.host) return own(read_array<Int>(array), array.name);
    array = convert_device(source, array, sizeof(Int) == sizeof(int32_t) ? "int32" : "int64");
    if (array.element != nb::dtype<Int>()) {
      refuse(array.name + " is " + element_text(array.element) + " after its library converted it");
    }
  }
  if (array.rank() == 1 && array.size(0) > 1 && array.stride(0) != 1) {
    refuse(array.name + " has a stride of " + std::to_string(array.stride(0)) + " elements; it must be contiguous");
  }
  return array;
}

template <typename Int>
Array borrow_integers(nb::handle source, const std::string& name, int32_t rank) {
  if (is_list(source)) return own(read_list<Int>(source, name, rank), name);
  return packed<Int>(source, int_array(source, name, rank, Access::kRead));
}

template <typename Int>
Numbers<Int> to_numbers(nb::handle source, const std::string& name) {
  Numbers<Int> numbers;
  if (!source.is_valid() || source.is_none()) return numbers;
  if (is_list(source)) {
    numbers.copy(read_list<Int>(source, name, 1).values);
    return numbers;
  }
  Array array = int_array(source, name, 1, Access::kRead);
  if (array.place.host) {
    numbers.copy(read_array<Int>(array).values);
  } else {
    numbers.borrow(packed<Int>(source, std::move(array)));
  }
  return numbers;
}

}  // namespace

std::vector<int32_t> to_int32s(nb::handle source, const std::string& name) {
  return to_ints<int32_t>(source, name);
}

std::vector<int64_t> to_int64s(nb::handle source, const std::string& name) {
  return to_ints<int64_t>(source, name);
}

Array borrow_int32(nb::handle source, const std::string& name, int32_t rank) {
  return borrow_integers<int32_t>(source, name, rank);
}

Array borrow_flags(nb::handle source, const std::string& name) {
  if (is_list(source)) {
    std::vector<uint8_t> flags;
    for (const nb::handle item : nb::iter(source)) {
      if (!PyBool_Check(item.ptr())) {
        refuse_kind(element_name(name, static_cast<int64_t>(flags.size()), kVector), "a bool", item);
      }
      flags.push_back(nb::cast<bool>(item) ? 1 : 0);
    }
    return own(std::move(flags), name);
  }
  Array array = borrow(source, name);
  const bool is_bool = array.element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bool);
  if (array.element.bits != 8 || (!is_bool && array.element != nb::dtype<uint8_t>())) {
    refuse(name + " is " + element_text(array.element) + "; bool and uint8 are taken");
  }
  if (array.rank() != 1) refuse(name + " has shape " + shape_text(array) + "; it must have one dimension");
  if (array.size(0) > 1 && array.stride(0) != 1) {
    refuse(name + " has a stride of " + std::to_string(array.stride(0)) + " elements; it must be contiguous");
  }
  return array;
}

Array borrow_int64(nb::handle source, const std::string& name) {
  return borrow_integers<int64_t>(source, name, 1);
}

Numbers<int32_t> int32_numbers(nb::handle source, const std::string& name) {
  return to_numbers<int32_t>(source, name);
}

Numbers<int64_t> int64_numbers(nb::handle source, const std::string& name) {
  return to_numbers<int64_t>(source, name);
}

IntsInOut::IntsInOut(nb::handle source, const std::string& name)
    : array_(host_ints(source, name, Access::kWrite)), values_(read_array<int32_t>(array_).values) {}

void IntsInOut::write_back() {
  for (size_t i = 0; i < values_.size(); ++i) {
    const int64_t place = static_cast<int64_t>(i) * array_.stride(0);
    if (array_.element.bits == 64) {
      static_cast<int64_t*>(array_.data)[place] = values_[i];
    } else {
      static_cast<int32_t*>(array_.data)[place] = values_[i];
    }
  }
}

Array own_ints(std::vector<int32_t>&& values, const std::string& name) {
  return own(std::move(values), name);
}

Array own_ints(std::vector<int64_t>&& values, const std::string& name) {
  return own(std::move(values), name);
}

Array alias(const TensorView& view, const Array& keeper) {
  std::array<size_t, kMaxRank> shape{};
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = static_cast<size_t>(view.shape[i]);
  const auto rank = static_cast<size_t>(view.rank);
  Array array = keeper;
  array.dtype = view.dtype;
  array.element = element_of(view.dtype);
  array.data = view.data;
  array.memory = nb::ndarray<nb::ro>(view.data, rank, shape.data(), keeper_of(keeper), view.strides.data(),
                                     array.element, keeper.place.dlpack_type, keeper.place.cuda_index);
  return array;
}

}  // namespace folio::python
