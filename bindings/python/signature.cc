#include "signature.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "names.hpp"

namespace folio::python {
namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

/// The parts between separators that stand in no bracket.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : separator;
    if (c == '[' || c == '(') ++depth;
    if (c == ']' || c == ')') --depth;
    if (i < text.size() && (depth != 0 || c != separator)) continue;
    parts.push_back(trim(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  return parts;
}

/// Where the bracket at `open` closes.
size_t closing(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '[' || text[i] == '(') ++depth;
    if (text[i] == ']' || text[i] == ')') --depth;
    if (depth == 0) return i;
  }
  return text.size();
}

bool is_dict_type(std::string_view type) {
  return type == "dict" || type.starts_with("dict[") || type.starts_with("collections.abc.Mapping[");
}

bool is_callable_type(std::string_view type) {
  return type.starts_with("collections.abc.Callable") || type.starts_with("typing.Callable");
}

std::string_view element_type(std::string_view type) {
  const size_t open = type.find('[');
  return type.substr(open + 1, closing(type, open) - open - 1);
}

}  // namespace

std::string describe_value(nb::handle value) {
  const bool plain = value.is_none() || PyBool_Check(value.ptr()) || PyLong_Check(value.ptr()) ||
                     PyFloat_Check(value.ptr()) || PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr());
  if (plain) {
    constexpr size_t kLongest = 60;
    const std::string text = nb::repr(value).c_str();
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
  }
  const nb::handle type = value.type();
  const std::string module = nb::cast<std::string>(nb::str(nb::getattr(type, "__module__", nb::str(""))));
  const std::string name = nb::cast<std::string>(nb::str(type.attr("__qualname__")));
  const std::string whole = module == "builtins" ? name : (module.ends_with("_folio") ? "folio" : module) + "." + name;
  return (std::string_view("aeiou").find(whole.front()) == std::string_view::npos ? "a " : "an ") + whole;
}

namespace {

/// The class of a name such as "_folio.Context" or "Feature"; none where the module has no such class.
nb::object find_class(std::string_view type) {
  const size_t dot = type.rfind('.');
  const std::string name(dot == std::string_view::npos ? type : type.substr(dot + 1));
  for (const char* module_name : {"folio._folio", "_folio"}) {
    const nb::object module = nb::steal(PyImport_GetModule(nb::str(module_name).ptr()));
    if (!module.is_valid()) continue;
    const nb::object found = nb::getattr(module, name.c_str(), nb::none());
    return PyType_Check(found.ptr()) ? found : nb::none();
  }
  return nb::none();
}

/// The lower-case names of an enum class, 'none', 'causal' or 'custom'; empty for other classes.
std::vector<std::string> enumerator_names(nb::handle cls) {
  std::vector<std::string> found;
  if (cls.is_none() || !nb::hasattr(cls, "__members__")) return found;
  for (const nb::handle name : nb::iter(cls.attr("__members__"))) {
    found.push_back(to_lower(nb::cast<std::string>(nb::str(name))));
  }
  return found;
}

std::string choices(const std::vector<std::string>& all) {
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) {
    text += (i == 0 ? "'" : i + 1 == all.size() ? " or '" : ", '") + all[i] + "'";
  }
  return text;
}

bool is_sequence_type(std::string_view type) {
  return type.starts_with("collections.abc.Sequence[") || type.starts_with("collections.abc.Iterable[") ||
         type.starts_with("Iterable[") || type.starts_with("list[");
}

/// What one type of a union is called, for "expected ...".
std::string expected_of(std::string_view type) {
  if (type == "int") return "an integer";
  if (type == "float") return "a number";
  if (type == "bool") return "True or False";
  if (type == "str") return "a string";
  if (type == "bytes") return "bytes";
  if (type == "None") return "None";
  if (is_dict_type(type)) return "a dict";
  if (is_callable_type(type)) return "a function";
  if (type == "object" || type == "typing.Any") return "a value";
  if (is_sequence_type(type)) return "a sequence of them";
  const size_t dot = type.rfind('.');
  return "a folio." + std::string(dot == std::string_view::npos ? type : type.substr(dot + 1));
}

enum class Match { kNo, kYes, kUnknown };

/// Whether a value is of one type of a union, sequences apart.
Match match(std::string_view type, nb::handle value) {
  const auto is = [](bool yes) { return yes ? Match::kYes : Match::kNo; };
  if (type == "int") return is(PyIndex_Check(value.ptr()) != 0 && !nb::hasattr(value, "shape"));
  if (type == "float") return is(PyFloat_Check(value.ptr()) || PyIndex_Check(value.ptr()) != 0);
  if (type == "bool") return is(PyBool_Check(value.ptr()));
  if (type == "str") return is(PyUnicode_Check(value.ptr()));
  if (type == "bytes") return is(PyBytes_Check(value.ptr()));
  if (is_dict_type(type)) return is(PyDict_Check(value.ptr()));
  if (is_callable_type(type)) return is(PyCallable_Check(value.ptr()) != 0);
  if (type == "None") return is(value.is_none());
  if (type == "object" && value.is_none()) return Match::kNo;  // taken where the type says so too
  const nb::object cls = find_class(type);
  if (cls.is_none()) return Match::kUnknown;
  const int found = PyObject_IsInstance(value.ptr(), cls.ptr());
  if (found < 0) PyErr_Clear();
  return is(found == 1);
}

/// A value where an enum is wanted, by the enumerator or its name.
Fault check_enum(nb::handle cls, nb::handle value) {
  const std::vector<std::string> all = enumerator_names(cls);
  const std::string name = nb::cast<std::string>(nb::str(cls.attr("__name__")));
  Fault fault;
  fault.given = describe_value(value);
  const bool text = PyUnicode_Check(value.ptr());
  const bool dtype = name == Names<DType>::kName;
  DType found = DType::kUnset;
  if (dtype && find_dtype(value, found)) return {};
  if (!dtype && text && std::find(all.begin(), all.end(), nb::cast<std::string>(value)) != all.end()) return {};
  fault.fits = false;
  fault.wrong_value = text;
  const std::string kind = dtype ? "a dtype of folio, torch, numpy or ml_dtypes: " : "a folio." + name + ": ";
  fault.expected = (text ? "" : kind) + choices(all);
  const bool named =
      PyType_Check(value.ptr()) ||
      to_lower(nb::cast<std::string>(nb::str(value.type().attr("__name__")))).find("dtype") != std::string::npos;
  if (dtype && named) fault.given = nb::repr(value).c_str();
  return fault;
}

Fault check_elements(std::string_view type, nb::handle value) {
  const nb::object list = nb::steal(PySequence_List(value.ptr()));
  if (!list.is_valid()) {
    PyErr_Clear();
    return {};
  }
  size_t index = 0;
  for (const nb::handle element : nb::borrow<nb::list>(list)) {
    Fault fault = find_fault(element_type(type), element);
    if (!fault.fits) {
      fault.element = "[" + std::to_string(index) + "]" + fault.element;
      return fault;
    }
    ++index;
  }
  return {};
}

}  // namespace

Signature parse_signature(std::string_view text) {
  Signature signature;
  const size_t open = text.find('(');
  if (open == std::string_view::npos) return signature;
  bool keyword_only = false;
  for (const std::string_view part : split(text.substr(open + 1, closing(text, open) - open - 1), ',')) {
    if (part.empty() || part == "/") continue;
    if (part == "*") {
      keyword_only = true;
      continue;
    }
    Parameter parameter;
    const std::vector<std::string_view> value = split(part, '=');
    const std::vector<std::string_view> typed = split(value[0], ':');
    parameter.name = typed[0];
    if (typed.size() > 1) parameter.type = typed[1];
    parameter.has_default = value.size() > 1;
    parameter.keyword_only = keyword_only;
    signature.parameters.push_back(std::move(parameter));
  }
  return signature;
}

Fault find_fault(std::string_view type, nb::handle value) {
  const std::vector<std::string_view> types = split(type, '|');
  if (type.empty()) return {};
  std::string expected;
  std::string_view sequence;
  for (const std::string_view one : types) {
    if (is_sequence_type(one)) {
      sequence = one;
      continue;
    }
    const Match found = match(one, value);
    const nb::object cls = find_class(one);
    if (found != Match::kYes && !enumerator_names(cls).empty()) {
      const bool may_be_none = std::find(types.begin(), types.end(), "None") != types.end() && value.is_none();
      const bool of_many = types.back() != one && PySequence_Check(value.ptr()) && !PyUnicode_Check(value.ptr());
      if (may_be_none) return {};
      if (of_many && type.find("Iterable") != std::string_view::npos) continue;
      return check_enum(cls, value);
    }
    if (found != Match::kNo) return {};
    expected += (expected.empty() ? "" : " or ") + expected_of(one);
  }
  if (!sequence.empty()) {
    const bool many = PySequence_Check(value.ptr()) || PyAnySet_Check(value.ptr());
    if (many && !PyUnicode_Check(value.ptr()) && !PyBytes_Check(value.ptr())) return check_elements(sequence, value);
    const std::string of = expected_of(element_type(sequence));
    expected = "a sequence, each " + of + (expected.empty() ? "" : ", or " + expected);
  }
  return {false, false, expected, describe_value(value), ""};
}

bool is_far_integer(std::string_view type, nb::handle value, int64_t least) {
  const std::vector<std::string_view> types = split(type, '|');
  if (std::find(types.begin(), types.end(), "int") == types.end() || PyIndex_Check(value.ptr()) == 0) return false;
  int overflow = 0;
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    return false;
  }
  const int64_t small = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  return overflow != 0 || small < least || small > std::numeric_limits<int32_t>::max();
}

}  // namespace folio::python
