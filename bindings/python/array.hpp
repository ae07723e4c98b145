#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "exchange.hpp"
#include "folio/context.hpp"
#include "folio/types/tensor_view.hpp"
#include "names.hpp"

namespace folio::python {

namespace nb = nanobind;

/// Whether Folio writes through an array. A read-only array is refused where it would be written.
enum class Access { kRead, kWrite, kWriteIfPossible };

/// Where an array's memory lies, as DLPack says it. Pinned host memory is host memory; managed memory is both.
struct Place {
  bool host = false;
  bool cuda = false;
  int32_t cuda_index = 0;
  int32_t dlpack_type = 0;
};

/// An array of numpy, torch or whoever else speaks DLPack or the buffer protocol: borrowed, never copied. It keeps the
/// array's memory alive and where it is. The GIL must be held to copy or destroy one.
struct Array {
  std::string name;  ///< of the argument, for messages
  nb::ndarray<nb::ro> memory;
  void* data = nullptr;
  nb::dlpack::dtype element;  ///< as the array says it; uint16 and uint8 for ml_dtypes' types
  DType dtype = DType::kUnset;
  Place place;
  bool writable = false;
  Library library = Library::kNone;       ///< of arrays on a GPU; host arrays have no stream to follow
  const ExchangeApi* exchange = nullptr;  ///< likewise: its library's, where it has one

  int64_t rank() const { return static_cast<int64_t>(memory.ndim()); }
  int64_t size(int64_t dimension) const { return static_cast<int64_t>(memory.shape(static_cast<size_t>(dimension))); }
  /// In elements. An array without elements has those of a packed one: what numpy says there (0) means nothing.
  int64_t stride(int64_t dimension) const {
    if (memory.size() != 0) return memory.stride(static_cast<size_t>(dimension));
    int64_t packed = 1;
    for (int64_t i = dimension + 1; i < rank(); ++i) packed *= std::max<int64_t>(size(i), 1);
    return packed;
  }
};

/// Throws Error(kInvalidArgument) where `source` is no array, has a mask, or is read-only where it would be written.
Array borrow(nb::handle source, const std::string& name, Access access = Access::kRead);

/// Flags: a packed vector of bool or uint8 is borrowed, a list or tuple of bools is copied. A wrong kind
/// of element in a list is a TypeError, anything else Error(kInvalidArgument).
Array borrow_flags(nb::handle source, const std::string& name);

/// A vector of plain numbers, packed: [n] of exactly this type. Throws Error(kInvalidArgument).
Array borrow_bytes(nb::handle source, const std::string& name);
Array borrow_float32(nb::handle source, const std::string& name, int32_t rank = 1);

/// By the name of the package that the array's class, or one it is derived from, comes from.
Library library_of(nb::handle source);

/// "CPU" or "CUDA device 1".
std::string describe(const Device& device);
std::string describe(const Place& place);

/// Throws Error(kInvalidArgument) unless the array lies where a function on `device` can use it.
void require_on(const Device& device, const Array& array);
void require_on(const Device& device, const std::vector<Array>& arrays);

/// Throws Error(kInvalidArgument) with the parts put together as its message.
[[noreturn]] void refuse(const std::string& message);
/// Throws a TypeError: "workspace: expected a folio.Workspace or None, got 3".
[[noreturn]] void refuse_kind(const std::string& name, const std::string& expected, nb::handle given);

/// "[2, 8, 64]"
std::string shape_text(const Array& array);

/// The float type of an element as DLPack names it; kUnset for those that are none of Folio's.
DType float_type(nb::dlpack::dtype element);

/// The inverse; two 4-bit values are a byte.
nb::dlpack::dtype element_of(DType dtype);

/// "float32", "uint16" and so on.
std::string element_text(nb::dlpack::dtype element);

}  // namespace folio::python
