#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

/// DLPack's C exchange API (dlpack.h 1.3, DLPackExchangeAPI): the functions that an array's type offers beside
/// `__dlpack__`. They cost nanoseconds where that method costs microseconds. torch has them from 2.10 on.
namespace folio::python {

struct ExchangeApi;

/// The array libraries that have a current stream.
enum class Library : uint8_t { kNone, kTorch, kCupy };

/// What an array's type says about all of its arrays; looked up once a type.
struct ArrayType {
  PyObject* type = nullptr;
  const ExchangeApi* exchange = nullptr;  ///< null where the type has none, or one of another major version
  Library library = Library::kNone;       ///< by the package of the class, or of one that it is derived from
  bool plain_numpy = false;               ///< numpy.ndarray itself: it has neither a gradient nor a mask
  bool numpy_time = false;  ///< numpy's scalar of a time: its buffer has no strides, which crashes readers
};

/// The GIL must be held.
ArrayType array_type_of(nanobind::handle source);

/// An array's memory as its exchange API exports it.
struct Exchanged {
  nanobind::ndarray<nanobind::ro> memory;
  bool writable = false;
};

/// False, with no Python error set, where this array cannot be exported that way.
bool export_array(const ExchangeApi& api, nanobind::handle source, Exchanged* result);

/// The current stream of the library on CUDA device `index`, in this thread. Throws nanobind::python_error.
uintptr_t current_work_stream(const ExchangeApi& api, int32_t index);

}  // namespace folio::python
