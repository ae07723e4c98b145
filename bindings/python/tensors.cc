#include <array>
#include <string>

#include "folio/types/error.hpp"
#include "repr.hpp"

namespace folio::python {
namespace {

bool has_no_float_type(nb::dlpack::dtype element) {
  return element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) ||
         element.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
}

/// The type that the caller says against the one that the array has: bits without a float type may be called anything
/// of their size.
DType agreed_type(const Array& array, DType said) {
  const std::string element = element_text(array.element);
  if (array.dtype != DType::kUnset) {
    if (said == DType::kUnset || said == array.dtype) return array.dtype;
    refuse(array.name + " is " + std::string(to_string(array.dtype)) + "; it cannot be taken as " +
           std::string(to_string(said)));
  }
  if (!has_no_float_type(array.element)) {
    refuse(array.name + " is " + element + "; float32, float16, bfloat16 and fp8 are taken");
  }
  if (said == DType::kUnset && array.element == nb::dtype<int8_t>()) return DType::kInt8;
  if (said == DType::kUnset) {
    refuse(array.name + " is " + element +
           ", which says no float type; name it: folio.TensorView(array, folio.bfloat16)");
  }
  if (size_of(said) * 8 != array.element.bits) {
    refuse(array.name + " is " + element + "; " + std::string(to_string(said)) + " takes elements of " +
           std::to_string(size_of(said)) + " bytes");
  }
  return said;
}

int64_t pick(bool wanted, int64_t value) {
  return wanted ? value : 1;
}

ScaleArg scale_of_array(nb::handle data, ScaleGranularity granularity) {
  ScaleArg scale;
  const bool per_head =
      granularity == ScaleGranularity::kPerHead || granularity == ScaleGranularity::kPerRequestAndHead;
  const bool per_request =
      granularity == ScaleGranularity::kPerRequest || granularity == ScaleGranularity::kPerRequestAndHead;
  Array array = borrow_float32(data, "data", per_head && per_request ? 2 : 1);
  if (per_head && per_request) {
    if (array.size(1) > 1 && array.stride(1) != 1) refuse("data's heads must be contiguous");
    scale.scale.request_stride = array.stride(0);
  }
  scale.requests = pick(per_request, array.size(0));
  scale.heads = pick(per_head, array.size(array.rank() - 1));
  if (!per_head && !per_request && array.size(0) < 1) refuse("data is empty; a scale per tensor is one number");
  scale.scale.data = static_cast<const float*>(array.data);
  scale.scale.granularity = granularity;
  scale.array = std::move(array);
  return scale;
}

Lse make_lse(nb::handle source, LseBase base, const std::string& name) {
  Lse lse;
  Array array = borrow(source, name, Access::kWrite);
  if (array.dtype != DType::kFloat32) refuse(name + " is " + element_text(array.element) + "; it must be float32");
  if (array.rank() != 2) refuse(name + " has shape " + shape_text(array) + "; it must be [tokens, heads]");
  lse.view = {static_cast<float*>(array.data), array.stride(0), array.stride(1), base};
  lse.array = std::move(array);
  return lse;
}

}  // namespace

Tensor make_tensor(nb::handle source, DType dtype, const std::string& name, Access access) {
  Tensor tensor;
  tensor.array = borrow(source, name, access);
  const Array& array = tensor.array;
  if (array.rank() > kMaxRank) refuse(name + " has shape " + shape_text(array) + "; at most 5 dimensions are taken");
  tensor.view.data = array.data;
  tensor.view.dtype = agreed_type(array, dtype);
  tensor.view.rank = static_cast<int32_t>(array.rank());
  for (int64_t i = 0; i < array.rank(); ++i) {
    tensor.view.shape[static_cast<size_t>(i)] = array.size(i);
    tensor.view.strides[static_cast<size_t>(i)] = array.stride(i);
  }
  return tensor;
}

Tensor to_tensor(nb::handle source, const std::string& name, Access access) {
  const Tensor* given = nullptr;
  if (!nb::try_cast(source, given, false) || given == nullptr) {
    return make_tensor(source, DType::kUnset, name, access);
  }
  Tensor tensor = *given;
  tensor.array.name = name;
  if (access == Access::kWrite && !tensor.array.writable) refuse(name + " is read-only, and Folio would write to it");
  return tensor;
}

Lse to_lse(nb::handle source, const std::string& name) {
  if (source.is_none()) return {};
  const Lse* given = nullptr;
  if (!nb::try_cast(source, given, false) || given == nullptr) return make_lse(source, LseBase::kE, name);
  Lse lse = *given;
  if (lse.array) lse.array->name = name;
  return lse;
}

void require_lse(const std::optional<Array>& lse, int64_t num_tokens, int64_t heads) {
  if (lse && (lse->size(0) != num_tokens || lse->size(1) != heads)) {
    refuse("lse is " + shape_text(*lse) + "; it must be [" + std::to_string(num_tokens) + ", " + std::to_string(heads) +
           "]");
  }
}

void require_heads(const std::optional<Array>& vector, int64_t heads) {
  if (vector && vector->size(0) != heads) {
    refuse(vector->name + " has " + std::to_string(vector->size(0)) + " entries; there are " + std::to_string(heads) +
           " q heads");
  }
}

ScaleArg to_scale(nb::handle source, const std::string& name) {
  ScaleArg scale;
  const ScaleArg* given = nullptr;
  if (nb::try_cast(source, given, false) && given != nullptr) {
    scale = *given;
    if (scale.array) scale.array->name = name + ".data";
  } else if (!nb::try_cast(source, scale.scale.value, true)) {
    refuse(name + " must be a number or a folio.Scale");
  }
  return scale;
}

void require_extent(const ScaleArg& scale, const std::string& name, int64_t heads, int64_t requests) {
  const ScaleGranularity granularity = scale.scale.granularity;
  const bool per_head =
      granularity == ScaleGranularity::kPerHead || granularity == ScaleGranularity::kPerRequestAndHead;
  const bool per_request =
      granularity == ScaleGranularity::kPerRequest || granularity == ScaleGranularity::kPerRequestAndHead;
  if (!scale.array) return;
  if (per_head && scale.heads < heads) {
    refuse(name + ".data has " + std::to_string(scale.heads) + " heads; there are " + std::to_string(heads));
  }
  if (per_request && requests >= 0 && scale.requests < requests) {
    refuse(name + ".data has " + std::to_string(scale.requests) + " requests; there are " + std::to_string(requests));
  }
}

namespace {

/// The view's memory as another library's array: what nanobind makes of it has DLPack's methods.
template <typename Framework>
nb::object export_memory(const Tensor& tensor, nb::dlpack::dtype element) {
  std::array<size_t, kMaxRank> shape{};
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = static_cast<size_t>(tensor.view.shape[i]);
  const Place& place = tensor.array.place;
  auto* const held = new Array(tensor.array);
  const nb::capsule owner(held, [](void* array) noexcept { delete static_cast<Array*>(array); });
  const auto rank = static_cast<size_t>(tensor.view.rank);
  const int64_t* const strides = tensor.view.strides.data();
  if (tensor.array.writable) {
    return nb::cast(nb::ndarray<Framework>(tensor.view.data, rank, shape.data(), owner, strides, element,
                                           place.dlpack_type, place.cuda_index));
  }
  return nb::cast(nb::ndarray<Framework, nb::ro>(tensor.view.data, rank, shape.data(), owner, strides, element,
                                                 place.dlpack_type, place.cuda_index));
}

/// numpy knows float32 and float16; ml_dtypes the others, by a view of integers of their size.
nb::object to_numpy_array(const Tensor& tensor) {
  if (!tensor.array.place.host) {
    refuse(tensor.array.name + " lies on " + describe(tensor.array.place) + "; numpy's arrays lie on the host");
  }
  const DType dtype = tensor.view.dtype;
  if (dtype == DType::kFloat32 || dtype == DType::kFloat16) {
    return export_memory<nb::numpy>(tensor, element_of(dtype));
  }
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  const nb::object integers =
      export_memory<nb::numpy>(tensor, {static_cast<uint8_t>(nb::dlpack::dtype_code::UInt), bits, 1});
  if (dtype == DType::kFloat4E2M1x2) return integers;
  nb::object package;
  try {
    package = nb::module_::import_("ml_dtypes");
  } catch (nb::python_error&) {
    throw Error(ErrorCode::kUnavailable, "numpy has no " + std::string(to_string(dtype)) + "; ml_dtypes has");
  }
  const char* const name = dtype == DType::kBFloat16     ? "bfloat16"
                           : dtype == DType::kFloat8E4M3 ? "float8_e4m3fn"
                                                         : "float8_e5m2";
  return integers.attr("view")(package.attr(name));
}

}  // namespace

void bind_tensors(nb::module_& m) {
  nb::class_<Tensor> tensor(
      m, "TensorView",
      "A borrowed array with its float type, of at most 5 dimensions. Arrays of uint16 and uint8 say none, so `dtype` "
      "names it; others know theirs, and every tensor argument takes them as they are.");
  bind_repr(tensor);
  tensor
      .def(
          "__init__",
          [](Tensor* self, nb::object array, DType dtype) {
            new (self) Tensor(make_tensor(array, dtype, "array", Access::kWriteIfPossible));
          },
          nb::arg("array"), nb::arg("dtype").none() = DType::kUnset)
      .def_prop_ro(
          "dtype", [](const Tensor& self) { return self.view.dtype; }, "Its float type.")
      .def_prop_ro(
          "writable", [](const Tensor& self) { return self.array.writable; }, "Whether Folio may write to it.")
      .def("numpy", &to_numpy_array,
           "The same memory as a numpy array; of ml_dtypes' type for bfloat16 and fp8, bytes for 4-bit pairs.")
      .def(
          "__dlpack__",
          [](const Tensor& self, nb::kwargs how) {
            return export_memory<nb::array_api>(self, element_of(self.view.dtype)).attr("__dlpack__")(**how);
          },
          nb::arg("how"), "For torch.from_dlpack(view) and its like; no copy.")
      .def("__dlpack_device__",
           [](const Tensor& self) { return nb::make_tuple(self.array.place.dlpack_type, self.array.place.cuda_index); })
      .def_prop_ro(
          "data", [](const Tensor& self) { return reinterpret_cast<uintptr_t>(self.view.data); },
          "The address of the first element: that of the array itself.")
      .def_prop_ro(
          "shape",
          [](const Tensor& self) {
            nb::list shape;
            for (int32_t i = 0; i < self.view.rank; ++i) shape.append(self.view.shape[static_cast<size_t>(i)]);
            return nb::tuple(shape);
          },
          "Elements of each dimension.")
      .def_prop_ro(
          "strides",
          [](const Tensor& self) {
            nb::list strides;
            for (int32_t i = 0; i < self.view.rank; ++i) {
              strides.append(self.view.strides[static_cast<size_t>(i)]);
            }
            return nb::tuple(strides);
          },
          "Elements from one entry of each dimension to the next.");
  nb::class_<Lse> lse(
      m, "LseView",
      "Log-sum-exp of every row: a writable float32 array [tokens, heads] of any strides. An array where one is taken "
      "has base e.");
  bind_repr(lse);
  lse.def(
         "__init__", [](Lse* self, nb::object data, LseBase base) { new (self) Lse(make_lse(data, base, "data")); },
         nb::arg("data"), nb::arg("base") = LseBase::kE)
      .def_prop_ro(
          "base", [](const Lse& self) { return self.view.base; }, "The logarithm's base, an LseBase.");
  nb::class_<ScaleArg> scale_class(
      m, "Scale",
      "A quantisation scale: stored values times the scale are the real ones. `value` for everything, or float32 "
      "`data` of a ScaleGranularity: [1], [heads], [requests] or [requests, heads]. A plain number wherever a Scale is "
      "taken is one per tensor.");
  bind_repr(scale_class);
  scale_class
      .def(
          "__init__",
          [](ScaleArg* self, float value, nb::object data, ScaleGranularity granularity) {
            if (!data.is_none() && value != 1.0f) refuse("a Scale takes a value or data, not both");
            ScaleArg scale = data.is_none() ? ScaleArg{} : scale_of_array(data, granularity);
            if (data.is_none() && granularity != ScaleGranularity::kPerTensor) {
              refuse("a Scale per head or request needs data");
            }
            scale.scale.value = value;
            new (self) ScaleArg(std::move(scale));
          },
          nb::arg("value") = 1.0f, nb::kw_only(), nb::arg("data") = nb::none(),
          nb::arg("granularity") = ScaleGranularity::kPerTensor)
      .def_prop_ro(
          "value", [](const ScaleArg& self) { return self.scale.value; }, "1 where there is data.")
      .def_prop_ro(
          "granularity", [](const ScaleArg& self) { return self.scale.granularity; }, "How data is indexed.");
}

}  // namespace folio::python
