#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "array.hpp"

/// Lists of integers that cross the border by value: small ones of the host, which are copied, so that what a call
/// checks is what it uses, whatever other threads write meanwhile; and results.
namespace folio::python {

/// A list, a tuple, or an int32 or int64 array [n] of any stride on the host. Throws nb::type_error for what holds no
/// integers, Error(kInvalidArgument) for arrays of other shapes, types and places and for what leaves the type.
std::vector<int32_t> to_int32s(nb::handle source, const std::string& name);
std::vector<int64_t> to_int64s(nb::handle source, const std::string& name);

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
