#include <new>
#include <string>

#include "argument_errors.hpp"
#include "backends.hpp"
#include "executor.hpp"
#include "folio/types/error.hpp"
#include "folio/version.hpp"
#include "token_allocators.hpp"
#include "views.hpp"

namespace folio::python {
namespace {

/// The exception types, alive as long as the process.
PyObject* error_type = nullptr;
PyObject* invalid_argument_type = nullptr;

PyObject* make_exception(nb::module_& m, const char* name, const char* doc, nb::handle bases) {
  const std::string full_name = std::string(PyModule_GetName(m.ptr())) + "." + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) nb::raise_python_error();
  m.attr(name) = nb::handle(type);
  return type;
}

}  // namespace

void set_python_error(const Error& error) {
  PyObject* type = error.code() == ErrorCode::kInvalidArgument ? invalid_argument_type : error_type;
  nb::object instance = nb::handle(type)(error.what());
  instance.attr("code") = error.code();
  PyErr_SetObject(type, instance.ptr());
}

void bind_errors(nb::module_& m) {
  error_type = make_exception(m, "Error",
                              "What every function of Folio raises; `code` is an ErrorCode, and the message says what "
                              "was given and what is offered.",
                              PyExc_RuntimeError);
  invalid_argument_type =
      make_exception(m, "InvalidArgument", "An Error whose code is INVALID_ARGUMENT; a ValueError too.",
                     nb::make_tuple(nb::handle(error_type), nb::handle(PyExc_ValueError)));
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      set_python_error(error);
    } catch (const std::bad_alloc&) {
      set_python_error(Error(ErrorCode::kOutOfMemory, "out of host memory"));
    }
  });
}

/// What `import *` takes: the names so far, which are folio's own. Those that follow are folio.backends'.
void end_public_names(nb::module_& m) {
  nb::list names;
  for (const nb::handle name : m.attr("__dict__").attr("keys")()) {
    if (!nb::cast<std::string>(name).starts_with('_')) names.append(name);
  }
  m.attr("__all__") = names;
}

}  // namespace folio::python

NB_MODULE(_folio, m) {
  nanobind::set_leak_warnings(false);  // a library does not print
  m.doc() = "Folio: paged attention for LLM serving.";
  folio::python::bind_enums(m);
  folio::python::bind_errors(m);
  folio::python::bind_config(m);
  folio::python::bind_executor(m);
  folio::python::bind_context(m);
  folio::python::bind_tensors(m);
  folio::python::bind_cache(m);
  folio::python::bind_batch(m);
  folio::python::bind_attention(m);
  folio::python::bind_step(m);
  folio::python::bind_layer(m);
  folio::python::bind_paged_attention(m);
  folio::python::bind_masks(m);
  folio::python::bind_merge(m);
  folio::python::bind_stream(m);
  folio::python::bind_kv_cache(m);
  folio::python::bind_tables(m);
  folio::python::bind_pools(m);
  folio::python::bind_token_allocators(m);
  folio::python::bind_prefix_cache(m);
  folio::python::bind_quantize(m);
  folio::python::bind_cascade(m);
  folio::python::bind_sealed_plan(m);
  folio::python::bind_context_calls(m);
  folio::python::bind_process_groups(m);
  folio::python::bind_nccl_groups(m);
  folio::python::bind_distributed(m);
  folio::python::bind_verify(m);
  m.def("version", &folio::version, "Folio's version, as \"0.1.0\".");
  folio::python::end_public_names(m);
  folio::python::bind_backends_config(m);
  folio::python::bind_backends_capability(m);
  folio::python::bind_backends_batch(m);
  folio::python::bind_virtual_batches(m);
  folio::python::bind_merge_attn_states(m);
  folio::python::bind_backends_dispatch(m);
  folio::python::bind_flash_attn(m);
  folio::python::bind_flashinfer(m);
  folio::python::bind_flashinfer_wrappers(m);
  folio::python::bind_token_pool(m);
  folio::python::bind_draft_trees(m);
  folio::python::name_arguments_in_errors(m);
}
