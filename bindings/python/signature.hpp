#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Signatures as nanobind writes them, read back: which parameters a function has, and whether a value is of the type
/// that one asks for. For messages alone: nothing is accepted or refused here.
namespace folio::python {

namespace nb = nanobind;

struct Parameter {
  std::string name;
  std::string type;  ///< "int", "_folio.MaskKind | str"; empty where none is written
  bool has_default = false;
  bool keyword_only = false;
};

/// "def prepare(context: _folio.Context, config: ..., options: ... = \0) -> _folio.AttentionOp"
struct Signature {
  std::vector<Parameter> parameters;
};

Signature parse_signature(std::string_view text);

/// What is wrong with a value.
struct Fault {
  bool fits = true;
  bool wrong_value = false;  ///< of the right kind: a string that is no enumerator
  std::string expected;      ///< "an integer", "'none', 'causal' or 'custom'"
  std::string given;         ///< "'x'", "a numpy.ndarray"
  std::string element;       ///< "[2]" for an element of a sequence
};

/// Holds a value against a type as a signature has it. A type that is not known here takes everything.
Fault find_fault(std::string_view type, nb::handle value);

/// A number or a string by itself, "'x'"; anything else by its type, "a numpy.ndarray".
std::string describe_value(nb::handle value);

/// Whether an integer where `type` asks for one is below `least` or beyond 31 bits: nanobind refuses those that the C++
/// type does not hold.
bool is_far_integer(std::string_view type, nb::handle value, int64_t least);

}  // namespace folio::python
