#include "exchange.hpp"

#include <cstddef>
#include <string>
#include <vector>

namespace folio::python {
namespace nb = nanobind;

// The layouts of dlpack.h, under its names without the prefix. They are a stable ABI: see DLPackExchangeAPIHeader.
struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned* self);
  uint64_t flags;
  nb::dlpack::dltensor dl_tensor;
};

struct ExchangeApi {
  Version version;
  const ExchangeApi* prev_api;  ///< an older version; its header is the same
  void* managed_tensor_allocator;
  int (*managed_tensor_from_py_object_no_sync)(void* py_object, ManagedTensorVersioned** out);
  void* managed_tensor_to_py_object_no_sync;
  void* dltensor_from_py_object_no_sync;
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

namespace {

constexpr uint32_t kMajorVersion = 1;
constexpr uint64_t kReadOnly = 1;  // DLPACK_FLAG_BITMASK_READ_ONLY
constexpr int32_t kDlCuda = 2;     // kDLCUDA
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr const char* kTensorName = "dltensor_versioned";

const ExchangeApi* find_exchange(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kCapsuleName) == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  while (api != nullptr && api->version.major != kMajorVersion) api = api->prev_api;
  const bool whole =
      api != nullptr && api->managed_tensor_from_py_object_no_sync != nullptr && api->current_work_stream != nullptr;
  return whole ? api : nullptr;
}

std::string text_of(nb::handle type, const char* attribute) {
  const nb::object text = nb::getattr(type, attribute, nb::none());
  return nb::isinstance<nb::str>(text) ? nb::cast<std::string>(text) : std::string();
}

/// What the classes say that the type is derived from, and the type itself.
void read_bases(nb::handle type, ArrayType& found) {
  const nb::object bases = nb::getattr(type, "__mro__", nb::none());
  if (!nb::isinstance<nb::tuple>(bases)) return;
  for (const nb::handle base : nb::borrow<nb::tuple>(bases)) {
    const std::string module = text_of(base, "__module__");
    const std::string package = module.substr(0, module.find('.'));
    if (found.library == Library::kNone && package == "torch") found.library = Library::kTorch;
    if (found.library == Library::kNone && package == "cupy") found.library = Library::kCupy;
    const std::string name = text_of(base, "__name__");
    found.numpy_time |= package == "numpy" && (name == "datetime64" || name == "timedelta64");
  }
}

ArrayType describe(nb::handle type) {
  ArrayType found{type.ptr(), find_exchange(type)};
  read_bases(type, found);
  found.plain_numpy = text_of(type, "__module__") == "numpy" && text_of(type, "__name__") == "ndarray";
  return found;
}

void release_unclaimed(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kTensorName) == 0) return;  // its importer has renamed it, and owns the tensor
  auto* tensor = static_cast<ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, kTensorName));
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

}  // namespace

ArrayType array_type_of(nb::handle source) {
  // A type that is in here stays alive, so that its address means nothing else. A program has a few types of arrays;
  // one that makes more of them than these finds the others slowly.
  constexpr size_t kMostTypes = 32;
  static std::vector<ArrayType> known;
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(source.ptr()));
  for (const ArrayType& one : known) {
    if (one.type == type) return one;
  }
  const ArrayType found = describe(type);
  if (known.size() < kMostTypes) {
    Py_INCREF(type);
    known.push_back(found);
  }
  return found;
}

bool export_array(const ExchangeApi& api, nb::handle source, Exchanged* result) {
  ManagedTensorVersioned* tensor = nullptr;
  if (api.managed_tensor_from_py_object_no_sync(source.ptr(), &tensor) != 0 || tensor == nullptr) {
    PyErr_Clear();
    return false;
  }
  result->writable = (tensor->flags & kReadOnly) == 0;
  const nb::object capsule = nb::steal(PyCapsule_New(tensor, kTensorName, &release_unclaimed));
  if (!capsule.is_valid()) {
    PyErr_Clear();
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
    return false;
  }
  return nb::try_cast(capsule, result->memory, false);
}

uintptr_t current_work_stream(const ExchangeApi& api, int32_t index) {
  void* stream = nullptr;
  if (api.current_work_stream(kDlCuda, index, &stream) != 0) nb::raise_python_error();
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace folio::python
