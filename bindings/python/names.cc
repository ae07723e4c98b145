#include "names.hpp"

#include <cctype>
#include <string>
#include <string_view>

#include "views.hpp"

namespace folio::python {
namespace {

/// The text of a Python string; empty for anything else.
std::string_view string_of(nb::handle source) noexcept {
  if (!PyUnicode_Check(source.ptr())) return {};
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(source.ptr(), &size);
  if (text == nullptr) {  // lone surrogates
    PyErr_Clear();
    return {};
  }
  return {text, static_cast<size_t>(size)};
}

bool find_name(std::string_view name, DType& dtype) noexcept {
  for (const Enumerator<DType>& one : Names<DType>::kAll) {
    if (name != one.name && name != to_string(one.value)) continue;
    dtype = one.value;
    return true;
  }
  return false;
}

/// What an array library calls the type: "float32" for numpy.dtype("float32"), numpy.float32 and torch.float32. Empty
/// for what is none, and for types of the other byte order.
std::string library_name(nb::handle source) {
  const nb::object home = nb::getattr(source.type(), "__module__", nb::none());
  if (PyType_Check(source.ptr())) {  // numpy.float32, ml_dtypes.bfloat16
    const nb::object module = nb::getattr(source, "__module__", nb::none());
    const std::string_view package = string_of(module);
    return package == "numpy" || package == "ml_dtypes" ? nb::cast<std::string>(source.attr("__name__")) : "";
  }
  if (string_of(home) == "torch") {
    const std::string name = nb::cast<std::string>(nb::str(source));
    constexpr std::string_view kPackage = "torch.";
    return name.starts_with(kPackage) ? name.substr(kPackage.size()) : "";
  }
  if (nb::hasattr(source, "itemsize") && nb::hasattr(source, "isnative") && nb::hasattr(source, "name")) {
    return nb::cast<bool>(source.attr("isnative")) ? nb::cast<std::string>(nb::str(source.attr("name"))) : "";
  }
  return nb::hasattr(source, "dtype") && !nb::hasattr(source, "shape") ? library_name(source.attr("dtype")) : "";
}

bool add_feature(nb::handle source, Features& features) noexcept {
  Feature feature{};
  if (!nb::try_cast(source, feature, false)) return false;
  features = features | feature;
  return true;
}

}  // namespace

std::string to_lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

bool names(nb::handle source, const char* enumerator) noexcept {
  const std::string_view text = string_of(source);
  const std::string_view name = enumerator;
  if (text.size() != name.size()) return false;
  for (size_t i = 0; i < name.size(); ++i) {
    if (text[i] != std::tolower(static_cast<unsigned char>(name[i]))) return false;
  }
  return true;
}

bool find_dtype(nb::handle source, DType& dtype) noexcept {
  if (PyUnicode_Check(source.ptr())) return find_name(string_of(source), dtype);
  try {
    return find_name(library_name(source), dtype);
  } catch (...) {  // of attributes that raise
    PyErr_Clear();
    return false;
  }
}

bool to_features(nb::handle source, Features& features) noexcept {
  features = {};
  if (source.is_none() || add_feature(source, features)) return true;
  if (PyUnicode_Check(source.ptr())) return false;
  try {
    for (const nb::handle one : nb::iter(source)) {
      if (!add_feature(one, features)) return false;
    }
    return true;
  } catch (...) {  // of an iterator, and where there is none
    PyErr_Clear();
    return false;
  }
}

void bind_enums(nb::module_& m) {
  bind_enum<ErrorCode>(m);
  bind_enum<DeviceType>(m);
  bind_enum<Where>(m);
  bind_enum<ThreadPinning>(m);
  bind_enum<DType>(m);
  bind_enum<KvFormat>(m);
  bind_enum<KvSource>(m);
  bind_enum<MaskKind>(m);
  bind_enum<SegmentMask>(m);
  bind_enum<CustomMaskScope>(m);
  bind_enum<Determinism>(m);
  bind_enum<Feature>(m, nb::is_flag());
  bind_enum<LseBase>(m);
  bind_enum<ScaleGranularity>(m);
  for (const Enumerator<DType>& one : Names<DType>::kAll) m.attr(one.name) = one.value;
}

}  // namespace folio::python
