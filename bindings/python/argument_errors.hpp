#pragma once

#include <nanobind/nanobind.h>

/// What a caller reads who gives a wrong argument: its name, what was expected, what was given. nanobind's own message
/// is the list of all signatures.
namespace folio::python {

namespace nb = nanobind;

/// To be called last: every function, constructor, method and setter that the module has by then raises such errors.
/// TypeError for a wrong kind and for wrong names and numbers of arguments, InvalidArgument for a string that is no
/// enumerator and for an integer that is out of range. Costs one indirect call where nothing is wrong.
void name_arguments_in_errors(nb::module_& m);

}  // namespace folio::python
