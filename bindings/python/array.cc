#include "array.hpp"

#include <utility>

#include "folio/types/error.hpp"
#include "signature.hpp"

namespace folio::python {
namespace {

// DLPack's device types (dlpack.h, DLDeviceType).
constexpr int32_t kDlCpu = 1;
constexpr int32_t kDlCuda = 2;
constexpr int32_t kDlCudaHost = 3;
constexpr int32_t kDlCudaManaged = 13;

// DLPack's type codes (dlpack.h, DLDataTypeCode).
constexpr uint8_t kDlInt = 0;
constexpr uint8_t kDlUInt = 1;
constexpr uint8_t kDlFloat = 2;
constexpr uint8_t kDlBfloat = 4;
constexpr uint8_t kDlBool = 6;
constexpr uint8_t kDlFloat8E4M3Fn = 10;
constexpr uint8_t kDlFloat8E5M2 = 12;

Place place_of(const nb::ndarray<nb::ro>& memory) {
  Place place;
  place.dlpack_type = memory.device_type();
  place.host = place.dlpack_type == kDlCpu || place.dlpack_type == kDlCudaHost || place.dlpack_type == kDlCudaManaged;
  place.cuda = place.dlpack_type == kDlCuda || place.dlpack_type == kDlCudaManaged;
  place.cuda_index = place.cuda ? memory.device_id() : 0;
  return place;
}

/// numpy has no bfloat16 and no fp8; ml_dtypes adds them, but such arrays export neither DLPack nor a buffer. A view of
/// the same memory as integers does.
DType ml_dtype(nb::handle source, const char** integers) {
  if (!nb::hasattr(source, "dtype") || !nb::hasattr(source, "view")) return DType::kUnset;
  const nb::object dtype = source.attr("dtype");
  if (!nb::hasattr(dtype, "name")) return DType::kUnset;
  const auto name = nb::cast<std::string>(nb::str(dtype.attr("name")));
  if (name == "bfloat16") {
    *integers = "uint16";
    return DType::kBFloat16;
  }
  *integers = "uint8";
  if (name == "float8_e4m3fn") return DType::kFloat8E4M3;
  if (name == "float8_e5m2") return DType::kFloat8E5M2;
  return DType::kUnset;
}

/// numpy's array type; null where the process has not imported numpy.
PyTypeObject* numpy_array_type() {
  static PyObject* type = nullptr;  // kept for good, as numpy itself is
  if (type == nullptr) {
    const nb::object numpy = nb::steal(PyImport_GetModule(nb::str("numpy").ptr()));
    if (numpy.is_valid() && nb::hasattr(numpy, "ndarray")) type = nb::object(numpy.attr("ndarray")).release().ptr();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

/// Whether a subclass of numpy's array hides elements, as numpy.ma's does: the memory says nothing of that.
bool is_masked(nb::handle source) {
  PyTypeObject* const type = Py_TYPE(source.ptr());
  PyTypeObject* const numpy = numpy_array_type();
  if (numpy == nullptr || type == numpy || PyType_IsSubtype(type, numpy) == 0) return false;
  return nb::hasattr(source, "mask");
}

/// Why the array's own `__dlpack__` failed ("Can't export tensors that require gradient"), for the message.
std::string export_failure(nb::handle source) {
  if (!nb::hasattr(source, "__dlpack__")) return "it has neither __dlpack__ nor a buffer";
  try {
    source.attr("__dlpack__")();
  } catch (nb::python_error& error) {
    return nb::cast<std::string>(nb::str(error.value()));
  }
  return "its __dlpack__ gives no tensor that can be read";
}

/// Whether the object says that it requires a gradient. Said here, because some ways of exporting a torch tensor do not
/// mind.
bool requires_grad(nb::handle source) {
  static PyObject* const kName = PyUnicode_InternFromString("requires_grad");
  const nb::object answer = nb::steal(PyObject_GetAttr(source.ptr(), kName));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.is_valid() && nb::cast<bool>(answer);
}

/// torch's lazy negation, as of `x.conj().imag`: the memory holds the other sign.
bool is_negated(nb::handle source) {
  static PyObject* const kName = PyUnicode_InternFromString("is_neg");
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(source.ptr(), kName, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.is_valid() && nb::cast<bool>(answer);
}

bool take_exchanged(nb::handle source, const ArrayType& type, Array& array) {
  Exchanged exchanged;
  if (type.exchange == nullptr || !export_array(*type.exchange, source, &exchanged)) return false;
  array.memory = std::move(exchanged.memory);
  array.data = const_cast<void*>(array.memory.data());  // writes are refused by `writable`
  array.writable = exchanged.writable;
  return true;
}

bool take(nb::handle source, const ArrayType& type, Access access, Array& array) {
  if (take_exchanged(source, type, array)) return true;
  if (access != Access::kRead) {
    nb::ndarray<> writable;
    if (nb::try_cast(source, writable, false)) {
      array.memory = nb::ndarray<nb::ro>(writable);
      array.data = writable.data();
      array.writable = true;
      return true;
    }
  }
  if (!nb::try_cast(source, array.memory, false)) return false;
  array.data = const_cast<void*>(array.memory.data());  // writes are refused by `writable`
  return true;
}

Array borrow_vector(nb::handle source, const std::string& name, nb::dlpack::dtype wanted) {
  Array array = borrow(source, name);
  if (array.element != wanted) {
    refuse(name + " is " + element_text(array.element) + "; it must be " + element_text(wanted));
  }
  if (array.rank() != 1) refuse(name + " has shape " + shape_text(array) + "; it must have one dimension");
  if (array.size(0) > 1 && array.stride(0) != 1) {
    refuse(name + " has a stride of " + std::to_string(array.stride(0)) + " elements; it must be contiguous");
  }
  return array;
}

}  // namespace

Library library_of(nb::handle source) {
  return array_type_of(source).library;
}

void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void refuse_kind(const std::string& name, const std::string& expected, nb::handle given) {
  throw nb::type_error((name + ": expected " + expected + ", got " + describe_value(given)).c_str());
}

Array borrow(nb::handle source, const std::string& name, Access access) {
  Array array;
  array.name = name;
  if (source.is_none()) refuse(name + " is None; an array is needed");
  const ArrayType type = array_type_of(source);
  if (type.numpy_time) refuse(name + ": expected an array, got " + describe_value(source));
  if (!type.plain_numpy) {
    if (requires_grad(source)) refuse(name + " requires a gradient, which Folio does not compute; detach it");
    if (is_masked(source)) refuse(name + " is a masked array, and Folio would not see its mask; give its data");
    if (type.library == Library::kTorch && is_negated(source)) {
      refuse(name + " is negated lazily, and Folio would not see its sign; give resolve_neg()");
    }
  }
  if (!take(source, type, access, array)) {
    const char* integers = nullptr;
    array.dtype = ml_dtype(source, &integers);
    if (array.dtype == DType::kUnset || !take(source.attr("view")(integers), type, access, array)) {
      refuse(name + ": expected an array, got " + describe_value(source) + ": " + export_failure(source));
    }
  }
  array.element = array.memory.dtype();
  if (array.dtype == DType::kUnset) array.dtype = float_type(array.element);
  array.place = place_of(array.memory);
  if (array.data == nullptr && array.memory.size() != 0) refuse(name + " has a shape but no memory");
  if (array.place.cuda) {
    array.library = type.library;
    array.exchange = type.exchange;
  }
  if (access == Access::kWrite && !array.writable) refuse(name + " is read-only, and Folio would write to it");
  const auto bytes = static_cast<uintptr_t>(array.element.bits) / 8;
  if (bytes != 0 && reinterpret_cast<uintptr_t>(array.data) % bytes != 0) {
    refuse(name + " is not aligned to its elements of " + std::to_string(bytes) + " bytes");
  }
  return array;
}

Array borrow_bytes(nb::handle source, const std::string& name) {
  return borrow_vector(source, name, nb::dtype<uint8_t>());
}

Array borrow_float32(nb::handle source, const std::string& name, int32_t rank) {
  if (rank == 1) return borrow_vector(source, name, nb::dtype<float>());
  Array array = borrow(source, name);
  if (array.dtype != DType::kFloat32) refuse(name + " is " + element_text(array.element) + "; it must be float32");
  if (array.rank() != rank) {
    refuse(name + " has shape " + shape_text(array) + "; it must have " + std::to_string(rank) + " dimensions");
  }
  return array;
}

std::string describe(const Device& device) {
  return device.type == DeviceType::kCpu ? "the CPU" : "CUDA device " + std::to_string(device.index);
}

std::string describe(const Place& place) {
  if (place.cuda) return "CUDA device " + std::to_string(place.cuda_index);
  return place.host ? "the CPU" : "a device of DLPack's type " + std::to_string(place.dlpack_type);
}

void require_on(const Device& device, const Array& array) {
  const bool cpu = device.type == DeviceType::kCpu;
  const bool there = cpu ? array.place.host : array.place.cuda && array.place.cuda_index == device.index;
  if (!there) refuse(array.name + " lies on " + describe(array.place) + "; the context is " + describe(device));
}

void require_on(const Device& device, const std::vector<Array>& arrays) {
  for (const Array& array : arrays) require_on(device, array);
}

std::string shape_text(const Array& array) {
  std::string text = "[";
  for (int64_t i = 0; i < array.rank(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(array.size(i));
  return text + "]";
}

DType float_type(nb::dlpack::dtype element) {
  if (element.lanes != 1) return DType::kUnset;
  if (element.code == kDlFloat && element.bits == 32) return DType::kFloat32;
  if (element.code == kDlFloat && element.bits == 16) return DType::kFloat16;
  if (element.code == kDlBfloat && element.bits == 16) return DType::kBFloat16;
  if (element.code == kDlFloat8E4M3Fn && element.bits == 8) return DType::kFloat8E4M3;
  if (element.code == kDlFloat8E5M2 && element.bits == 8) return DType::kFloat8E5M2;
  return DType::kUnset;
}

nb::dlpack::dtype element_of(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16: return {kDlFloat, bits, 1};
    case DType::kBFloat16: return {kDlBfloat, bits, 1};
    case DType::kFloat8E4M3: return {kDlFloat8E4M3Fn, bits, 1};
    case DType::kFloat8E5M2: return {kDlFloat8E5M2, bits, 1};
    case DType::kInt8: return {kDlInt, bits, 1};
    case DType::kFloat4E2M1x2:
    case DType::kUnset: break;
  }
  return {kDlUInt, 8, 1};
}

std::string element_text(nb::dlpack::dtype element) {
  const DType dtype = float_type(element);
  if (dtype != DType::kUnset) return std::string(to_string(dtype));
  const std::string bits = std::to_string(element.bits);
  switch (element.code) {
    case kDlInt: return "int" + bits;
    case kDlUInt: return "uint" + bits;
    case kDlFloat: return "float" + bits;
    case kDlBool: return "bool";
    default: return "of DLPack's type " + std::to_string(element.code) + " with " + bits + " bits";
  }
}

}  // namespace folio::python
