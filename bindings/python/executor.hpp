#pragma once

#include "array.hpp"

namespace folio::python {

/// A folio.Executor as ContextOptions takes it. It is kept for as long as the process lives. Throws nb::type_error.
Executor executor_for_life(nb::handle source);

/// Executor; before Context, which takes one. Then what Context and its calls offer beside it.
void bind_executor(nb::module_& m);
void bind_context_calls(nb::module_& m);

}  // namespace folio::python
