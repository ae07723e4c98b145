#include <array>
#include <string>

#include "views.hpp"

namespace folio::python {
namespace {

/// A library that the process has imported already; invalid where it has not.
nb::object loaded(const char* name) {
  return nb::steal(PyImport_GetModule(nb::str(name).ptr()));
}

nb::object cuda_part(const char* library) {
  const nb::object module = loaded(library);
  return module.is_valid() ? nb::getattr(module, "cuda", nb::none()) : nb::none();
}

uintptr_t torch_stream(nb::handle cuda, int32_t index) {
  return nb::cast<uintptr_t>(cuda.attr("current_stream")(index).attr("cuda_stream"));
}

uintptr_t cupy_stream(nb::handle cuda, int32_t index) {
  return nb::cast<uintptr_t>(cuda.attr("get_current_stream")(index).attr("ptr"));
}

/// Asking torch for its stream would start CUDA in it.
bool uses_cuda(nb::handle torch_cuda) {
  return nb::hasattr(torch_cuda, "is_initialized") && nb::cast<bool>(torch_cuda.attr("is_initialized")());
}

[[noreturn]] void refuse_two(uintptr_t torch, uintptr_t cupy) {
  refuse("stream is left out, and torch's current stream is " + std::to_string(torch) + ", CuPy's " +
         std::to_string(cupy) + "; give the one that is meant");
}

/// Of no array in particular. A library at its default stream has nothing to say.
uintptr_t stream_of_process(int32_t index) {
  const nb::object torch_cuda = cuda_part("torch");
  const nb::object cupy_cuda = cuda_part("cupy");
  const uintptr_t torch = uses_cuda(torch_cuda) ? torch_stream(torch_cuda, index) : 0;
  const uintptr_t cupy = nb::hasattr(cupy_cuda, "get_current_stream") ? cupy_stream(cupy_cuda, index) : 0;
  if (torch != 0 && cupy != 0 && torch != cupy) refuse_two(torch, cupy);
  return torch != 0 ? torch : cupy;
}

}  // namespace

Stream current_stream(int32_t index, ArrayLists lists) {
  bool has_torch = false;
  bool has_cupy = false;
  const ExchangeApi* torch_exchange = nullptr;
  for (const std::vector<Array>* arrays : lists) {
    for (const Array& array : *arrays) {
      has_torch |= array.library == Library::kTorch;
      has_cupy |= array.library == Library::kCupy;
      if (array.library == Library::kTorch && array.exchange != nullptr) torch_exchange = array.exchange;
    }
  }
  uintptr_t handle = 0;
  if (!has_torch && !has_cupy) {
    handle = stream_of_process(index);
  } else {
    const uintptr_t torch = torch_exchange != nullptr ? current_work_stream(*torch_exchange, index)
                            : has_torch               ? torch_stream(cuda_part("torch"), index)
                                                      : 0;
    const uintptr_t cupy = has_cupy ? cupy_stream(cuda_part("cupy"), index) : 0;
    if (has_torch && has_cupy && torch != cupy) refuse_two(torch, cupy);
    handle = has_torch ? torch : cupy;
  }
  return {reinterpret_cast<void*>(handle)};
}

Stream to_stream(nb::handle source, const Device& device, ArrayLists lists) {
  if (source.is_none()) return device.type == DeviceType::kCpu ? Stream{} : current_stream(device.index, lists);
  uintptr_t handle = 0;
  nb::object number = nb::hasattr(source, "cuda_stream") ? nb::object(source.attr("cuda_stream")) : nb::borrow(source);
  if (nb::isinstance<nb::bool_>(number) || !nb::try_cast(number, handle, false)) {
    refuse("stream must be None, a cudaStream_t as an integer, or an object with cuda_stream, such as a torch stream");
  }
  return {reinterpret_cast<void*>(handle)};
}

void bind_stream(nb::module_& m) {
  m.def(
      "current_stream",
      [](const std::vector<nb::object>& sources, int32_t index) {
        std::vector<Array> arrays;
        for (const nb::object& source : sources) {
          arrays.push_back(to_tensor(source, "arrays[" + std::to_string(arrays.size()) + "]", Access::kRead).array);
        }
        return reinterpret_cast<uintptr_t>(current_stream(index, {&arrays}).handle);
      },
      nb::arg("arrays") = std::vector<nb::object>{}, nb::arg("index") = 0,
      "The cudaStream_t, as an integer, that a call with these arrays on CUDA device `index` takes where its `stream` "
      "is left out. It is the current stream, in this thread and on this device, of the libraries that the arrays come "
      "from: torch and CuPy. Both at once must agree. Where no array comes from them, as in a plan of host lengths, "
      "it is that of whichever of them this process uses, and 0, the legacy default stream, at last. JAX has no "
      "current stream: its arrays are ready once they are borrowed, and results are the caller's to wait for.");
}

}  // namespace folio::python
