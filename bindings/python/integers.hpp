#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "array.hpp"

/// Integers that cross the border: lengths, offsets, ids, slots and tokens. They come as int32 or int64 arrays, or as
/// lists, tuples and ranges. A wrong kind of element in a list is a TypeError. What its type does not hold, and arrays
/// of other shapes, types and places are Error(kInvalidArgument). Messages name the element: "kv_len[3]".
namespace folio::python {

/// Copies of vectors on the host, of any stride: what a call checks is what it uses, whatever other threads write.
std::vector<int32_t> to_int32s(nb::handle source, const std::string& name);
std::vector<int64_t> to_int64s(nb::handle source, const std::string& name);

/// A packed vector of this type, or a matrix of it with any strides, is borrowed. What comes as the other type or as a
/// list is copied once: what is written into it later is not seen. On a GPU the array's own library converts, and no
/// value is looked at.
Array borrow_int32(nb::handle source, const std::string& name, int32_t rank = 1);
Array borrow_int64(nb::handle source, const std::string& name);

/// A vector of integers that a step is described by. One on the host is copied, so that nothing changes between its
/// check and its use; one on a GPU is borrowed.
template <typename Element>
class Numbers {
 public:
  std::span<const Element> view() const {
    if (array_) return {static_cast<const Element*>(array_->data), static_cast<size_t>(array_->size(0))};
    return copy_;
  }
  bool on_device() const { return array_.has_value(); }
  const std::optional<Array>& array() const { return array_; }

  void copy(std::vector<Element> values) { copy_ = std::move(values); }
  void borrow(Array array) { array_ = std::move(array); }

 private:
  std::vector<Element> copy_;
  std::optional<Array> array_;
};

/// None is empty. On the host as to_int32s, on a GPU as borrow_int32.
Numbers<int32_t> int32_numbers(nb::handle source, const std::string& name);
Numbers<int64_t> int64_numbers(nb::handle source, const std::string& name);

/// An array [n] of int32 or int64, of any stride on the host, whose numbers a call replaces.
class IntsInOut {
 public:
  /// Reads it. Throws as to_int32s, and Error(kInvalidArgument) where it is read-only or no array.
  IntsInOut(nb::handle source, const std::string& name);
  std::span<int32_t> values() { return values_; }
  void write_back();

 private:
  Array array_;
  std::vector<int32_t> values_;
};

/// Integers that Folio owns, as an argument that is borrowed. On the host.
Array own_ints(std::vector<int32_t>&& values, const std::string& name);
Array own_ints(std::vector<int64_t>&& values, const std::string& name);

/// An array over `view`'s memory, which `keeper` keeps alive.
Array alias(const TensorView& view, const Array& keeper);

/// What keeps `owner` alive as long as Python has it. To be destroyed with the GIL.
template <typename Owner>
nb::capsule keeper_of(Owner owner) {
  return nb::capsule(new Owner(std::move(owner)), [](void* held) noexcept { delete static_cast<Owner*>(held); });
}

/// A new numpy array of these values. Rank and shape default to [n].
template <typename T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* memory) noexcept { delete static_cast<std::vector<T>*>(memory); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}
template <typename T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T> values) {
  const size_t size = values.size();
  return to_numpy(std::move(values), {size});
}

using Int32s = nb::ndarray<nb::numpy, int32_t>;
using Int64s = nb::ndarray<nb::numpy, int64_t>;

}  // namespace folio::python
