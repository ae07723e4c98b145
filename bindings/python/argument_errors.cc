#include "argument_errors.hpp"

#include <nb_internals.h>  // nanobind's, of the version that is compiled in: where a function keeps its entry point

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "signature.hpp"
#include "views.hpp"

namespace folio::python {
namespace {

using Entry = PyObject* (*)(PyObject*, PyObject* const*, size_t, PyObject*);

/// nanobind has a handful of entry points, by how much a signature asks of them.
constexpr size_t kMostEntries = 12;
std::array<Entry, kMostEntries> entries{};

/// A call as it was made, bound to a signature.
struct Call {
  std::vector<nb::handle> positional;
  std::vector<std::pair<std::string, nb::handle>> keywords;
};

Call read_call(PyObject* const* args, size_t nargs, PyObject* keywords) {
  Call call;
  for (size_t i = 0; i < nargs; ++i) call.positional.emplace_back(args[i]);
  if (keywords == nullptr) return call;
  for (const nb::handle key : nb::borrow<nb::tuple>(keywords)) {
    call.keywords.emplace_back(nb::cast<std::string>(nb::str(key)), nb::handle(args[nargs + call.keywords.size()]));
  }
  return call;
}

/// Why a signature does not take a call, and how many of its parameters were good.
struct Refusal {
  size_t good = 0;
  std::string argument;  ///< its name; empty where numbers or names of arguments are wrong
  std::string message;
  bool wrong_value = false;  ///< of the right kind
};

std::string list_parameters(const Signature& signature) {
  std::string text;
  for (const Parameter& parameter : signature.parameters) {
    text += (text.empty() ? "" : ", ") + parameter.name + (parameter.has_default ? "=..." : "");
  }
  return text.empty() ? "no arguments" : text;
}

/// Of a method: self is no argument that a caller counts or names.
void leave_self_out(Call& call, Signature& signature) {
  if (signature.parameters.empty() || signature.parameters.front().name != "self") return;
  signature.parameters.erase(signature.parameters.begin());
  if (!call.positional.empty()) call.positional.erase(call.positional.begin());
}

/// Puts the call's values beside the parameters; null where a default is taken. A refusal where that cannot be done.
std::optional<Refusal> bind_call(const Call& call, const Signature& signature, const std::string& function,
                                 std::vector<nb::handle>& values) {
  Refusal refusal;
  values.assign(signature.parameters.size(), nb::handle());
  size_t positional = 0;
  for (const Parameter& parameter : signature.parameters) positional += parameter.keyword_only ? 0 : 1;
  if (call.positional.size() > positional) {
    refusal.message = function + " takes " + std::to_string(positional) + " positional argument" +
                      (positional == 1 ? "" : "s") + ", not " + std::to_string(call.positional.size()) + "; it takes " +
                      list_parameters(signature);
    return refusal;
  }
  std::copy(call.positional.begin(), call.positional.end(), values.begin());
  for (const auto& [name, value] : call.keywords) {
    const auto found = std::find_if(signature.parameters.begin(), signature.parameters.end(),
                                    [&name = name](const Parameter& one) { return one.name == name; });
    if (found == signature.parameters.end()) {
      refusal.message = function + " has no argument '" + name + "'; it takes " + list_parameters(signature);
      return refusal;
    }
    nb::handle& place = values[static_cast<size_t>(found - signature.parameters.begin())];
    if (place.is_valid()) {
      refusal.message = function + " is given '" + name + "' twice, by position and by name";
      return refusal;
    }
    place = value;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const Parameter& parameter = signature.parameters[i];
    if (values[i].is_valid() || parameter.has_default) continue;
    refusal.message =
        function + " misses the argument '" + parameter.name + "'; it takes " + list_parameters(signature);
    return refusal;
  }
  return std::nullopt;
}

/// The first value that its parameter does not take.
std::optional<Refusal> check_values(const Signature& signature, const std::vector<nb::handle>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].is_valid()) continue;
    const Fault fault = find_fault(signature.parameters[i].type, values[i]);
    if (fault.fits) continue;
    const std::string name = signature.parameters[i].name + fault.element;
    return Refusal{i, name, name + ": expected " + fault.expected + ", got " + fault.given, fault.wrong_value};
  }
  // All are of the right kind: an integer must be beyond the C++ type's range. Signatures do not tell signed types from
  // unsigned ones, so negative numbers are suspected last.
  for (const int64_t least : {int64_t{std::numeric_limits<int32_t>::min()}, int64_t{0}}) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (!values[i].is_valid() || !is_far_integer(signature.parameters[i].type, values[i], least)) continue;
      const std::string& name = signature.parameters[i].name;
      return Refusal{i, name, name + ": " + nb::repr(values[i]).c_str() + " is out of range", true};
    }
  }
  return std::nullopt;
}

/// "prepare()", "AttentionConfig()", "Context.cpu()".
std::string function_name(nb::handle function) {
  std::string name = nb::cast<std::string>(nb::str(nb::getattr(function, "__qualname__", nb::str(""))));
  constexpr std::string_view kInit = ".__init__";
  if (name.ends_with(kInit)) name.resize(name.size() - kInit.size());
  return name + "()";
}

/// Of several overloads the one that took most; those that stopped at one argument are told together.
std::optional<Refusal> explain_refusal(nb::handle function, const Call& call) {
  std::vector<Refusal> refusals;
  for (const nb::handle overload : nb::borrow<nb::tuple>(function.attr("__nb_signature__"))) {
    Signature signature = parse_signature(nb::cast<std::string>(overload[0]));
    Call own = call;
    leave_self_out(own, signature);
    std::vector<nb::handle> values;
    std::optional<Refusal> refusal = bind_call(own, signature, function_name(function), values);
    if (!refusal) refusal = check_values(signature, values);
    if (!refusal) return std::nullopt;  // nothing is seen to be wrong
    refusals.push_back(std::move(*refusal));
  }
  if (refusals.empty()) return std::nullopt;
  Refusal best = *std::max_element(refusals.begin(), refusals.end(), [](const Refusal& a, const Refusal& b) {
    return std::pair(!a.argument.empty(), a.good) < std::pair(!b.argument.empty(), b.good);
  });
  for (const Refusal& other : refusals) {
    if (other.message == best.message || other.argument.empty() || other.good != best.good) continue;
    best.message += "; or " + other.message;
  }
  return best;
}

/// Replaces nanobind's error where a better one can be said.
void improve_error(PyObject* function, PyObject* const* args, size_t nargs, PyObject* keywords) noexcept {
  nb::python_error error;  // takes what was raised
  try {
    const std::string message = nb::cast<std::string>(nb::str(error.value()));
    std::optional<Refusal> refusal;
    if (message.find("(): incompatible function arguments") != std::string::npos) {
      refusal = explain_refusal(function, read_call(args, nargs, keywords));
    }
    if (!refusal) {
      error.restore();
    } else if (refusal->wrong_value) {
      set_python_error(Error(ErrorCode::kInvalidArgument, refusal->message));
    } else {
      PyErr_SetString(PyExc_TypeError, refusal->message.c_str());
    }
  } catch (...) {  // of a repr that raises, say: nanobind's message stays
    error.restore();
  }
}

template <size_t kIndex>
PyObject* call_entry(PyObject* function, PyObject* const* args, size_t nargs, PyObject* keywords) {
  PyObject* const result = entries[kIndex](function, args, nargs, keywords);
  if (result == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    improve_error(function, args, static_cast<size_t>(NB_VECTORCALL_NARGS_EXT(nargs)), keywords);
  }
  return result;
}

template <size_t... kIndices>
constexpr std::array<Entry, kMostEntries> make_hooks(std::index_sequence<kIndices...>) {
  return {&call_entry<kIndices>...};
}
constexpr std::array<Entry, kMostEntries> kHooks = make_hooks(std::make_index_sequence<kMostEntries>());

void hook(nb::handle function) {
  auto* inside = reinterpret_cast<nb::detail::nb_func*>(function.ptr());
  if (std::find(kHooks.begin(), kHooks.end(), inside->vectorcall) != kHooks.end()) return;
  auto* place = std::find(entries.begin(), entries.end(), inside->vectorcall);
  if (place == entries.end()) place = std::find(entries.begin(), entries.end(), nullptr);
  if (place == entries.end()) return;  // more entry points than nanobind has today: its messages stay
  *place = inside->vectorcall;
  inside->vectorcall = kHooks[static_cast<size_t>(place - entries.begin())];
}

bool is_nanobind_function(nb::handle value) {
  const std::string name = nb::cast<std::string>(nb::str(value.type().attr("__name__")));
  return (name == "nb_func" || name == "nb_method") && nb::hasattr(value, "__nb_signature__");
}

/// Of a module, or of a class.
void hook_all(nb::handle names) {
  for (const nb::handle value : nb::iter(names.attr("values")())) {
    if (is_nanobind_function(value)) {
      hook(value);
    } else if (nb::hasattr(value, "fset")) {
      if (is_nanobind_function(value.attr("fset"))) hook(value.attr("fset"));
    }
  }
}

}  // namespace

void name_arguments_in_errors(nb::module_& m) {
  const nb::object names = m.attr("__dict__");
  hook_all(names);
  for (const nb::handle value : nb::iter(names.attr("values")())) {
    if (PyType_Check(value.ptr())) hook_all(value.attr("__dict__"));
  }
}

}  // namespace folio::python
