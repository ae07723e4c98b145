#include "int_lists.hpp"

#include <array>
#include <cstring>

namespace folio::python {
namespace {

std::string repr_of(nb::handle value) {
  return nb::cast<std::string>(nb::repr(value));
}

template <typename T>
T checked(int64_t value, const std::string& name, int64_t index) {
  if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
    refuse(name + "[" + std::to_string(index) + "] is " + std::to_string(value) + "; it must fit into " +
           std::to_string(8 * sizeof(T)) + " bits");
  }
  return static_cast<T>(value);
}

int64_t to_integer(nb::handle item, const std::string& name, int64_t index) {
  const std::string place = name + "[" + std::to_string(index) + "]";
  if (PyBool_Check(item.ptr()) || !PyIndex_Check(item.ptr())) {
    throw nb::type_error((place + ": expected an integer, got " + repr_of(item)).c_str());
  }
  const nb::object number = nb::steal(PyNumber_Index(item.ptr()));
  if (!number.is_valid()) nb::raise_python_error();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) refuse(place + " is " + repr_of(number) + "; it must fit into 64 bits");
  if (value == -1 && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return value;
}

/// An array of ints on the host, [n].
Array host_ints(nb::handle source, const std::string& name, Access access) {
  Array array = borrow(source, name, access);
  if (array.element != nb::dtype<int32_t>() && array.element != nb::dtype<int64_t>()) {
    refuse(name + " is " + element_text(array.element) + "; it must be int32 or int64");
  }
  if (array.rank() != 1) refuse(name + " has shape " + shape_text(array) + "; it must have one dimension");
  if (!array.place.host) refuse(name + " lies on " + describe(array.place) + "; it is read on the host");
  return array;
}

template <typename Element, typename T>
void read_elements(const Array& array, std::vector<T>& values) {
  const auto* data = static_cast<const Element*>(array.data);
  for (int64_t i = 0; i < array.size(0); ++i) values.push_back(checked<T>(data[i * array.stride(0)], array.name, i));
}

template <typename T>
std::vector<T> values_of(const Array& array) {
  std::vector<T> values;
  values.reserve(static_cast<size_t>(array.size(0)));
  if (array.element.bits == 64) {
    read_elements<int64_t>(array, values);
  } else {
    read_elements<int32_t>(array, values);
  }
  return values;
}

template <typename T>
std::vector<T> to_ints(nb::handle source, const std::string& name) {
  if (!nb::isinstance<nb::list>(source) && !nb::isinstance<nb::tuple>(source)) {
    return values_of<T>(host_ints(source, name, Access::kRead));
  }
  std::vector<T> values;
  const nb::tuple items(nb::borrow(source));  // a list's own items may change while theirs are asked for
  for (const nb::handle item : items) {
    const auto index = static_cast<int64_t>(values.size());
    values.push_back(checked<T>(to_integer(item, name, index), name, index));
  }
  return values;
}

template <typename T>
Array own(std::vector<T>&& values, const std::string& name) {
  const nb::ndarray<nb::numpy, T> memory = to_numpy(std::move(values));
  Array array;
  array.name = name;
  array.memory = nb::ndarray<nb::ro>(memory);
  array.data = memory.data();
  array.element = nb::dtype<T>();
  array.place.host = true;
  array.place.dlpack_type = nb::device::cpu::value;
  array.writable = true;
  return array;
}

}  // namespace

std::vector<int32_t> to_int32s(nb::handle source, const std::string& name) {
  return to_ints<int32_t>(source, name);
}

std::vector<int64_t> to_int64s(nb::handle source, const std::string& name) {
  return to_ints<int64_t>(source, name);
}

IntsInOut::IntsInOut(nb::handle source, const std::string& name)
    : array_(host_ints(source, name, Access::kWrite)), values_(values_of<int32_t>(array_)) {}

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
