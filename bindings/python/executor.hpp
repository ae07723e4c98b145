#pragma once

#include "array.hpp"

namespace folio::python {

/// A folio.Executor as ContextOptions takes it; none for None. It is kept for as long as the process lives. False for
/// anything else.
bool executor_for_life(nb::handle source, Executor& executor) noexcept;

/// Executor; before Context, which takes one. Then what Context and its calls offer beside it.
void bind_executor(nb::module_& m);
void bind_context_calls(nb::module_& m);

}  // namespace folio::python

template <>
struct nanobind::detail::type_caster<folio::Executor> {
  NB_TYPE_CASTER(folio::Executor, const_name("_folio.Executor"))

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    return folio::python::executor_for_life(source, value);
  }

  static handle from_cpp(const folio::Executor&, rv_policy, cleanup_list*) noexcept { return none().release(); }
};
