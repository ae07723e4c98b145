#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "array.hpp"

/// Plain structs from one table of fields: keyword-only init, properties, repr, ==, copy, pickle and the stub's
/// signature.
namespace folio::python {

template <typename Struct, typename Member>
struct Field {
  const char* name;
  Member Struct::*member;
  const char* doc;
};

template <typename Struct, typename Member>
Field<Struct, Member> field(const char* name, Member Struct::*member, const char* doc = "") {
  return {name, member, doc};
}

namespace fields {

template <typename Type>
struct IsOptional : std::false_type {};
template <typename Type>
struct IsOptional<std::optional<Type>> : std::true_type {};

/// What a stub says of a type that is taken.
template <typename Type>
std::string type_text() {
  if constexpr (std::is_same_v<Type, bool>) {
    return "bool";
  } else if constexpr (std::is_integral_v<Type>) {
    return "int";
  } else if constexpr (std::is_floating_point_v<Type>) {
    return "float";
  } else if constexpr (std::is_same_v<Type, std::string>) {
    return "str";
  } else if constexpr (std::is_same_v<Type, std::vector<int32_t>>) {
    return "list[int]";
  } else if constexpr (std::is_same_v<Type, DType>) {
    return "DType | str | None";
  } else if constexpr (std::is_enum_v<Type>) {
    return std::string(Names<Type>::kName) + " | str";
  } else if constexpr (IsOptional<Type>::value) {
    const std::string inner = type_text<typename Type::value_type>();
    return inner.ends_with("None") ? inner : inner + " | None";
  } else {
    return nb::cast<std::string>(nb::type<Type>().attr("__name__"));
  }
}

[[noreturn]] inline void refuse_type(const std::string& text) {
  throw nb::type_error(text.c_str());
}

template <typename Type>
void set(Type& target, nb::handle value, const std::string& name) {
  if constexpr (IsOptional<Type>::value) {
    if (value.is_none()) {
      target.reset();
    } else {
      set(target.emplace(), value, name);
    }
  } else if (!nb::try_cast(value, target, true)) {
    refuse_type(name + ": expected " + type_text<Type>() + ", got " + nb::cast<std::string>(nb::repr(value)));
  }
}

template <typename Type>
nb::object get(const Type& value) {
  if constexpr (IsOptional<Type>::value) {
    return value ? get(*value) : nb::none();
  } else {
    return nb::cast(value);
  }
}

template <typename Struct, typename... Members>
void assign(Struct& target, nb::handle given, const std::string& type, const Field<Struct, Members>&... all) {
  for (const auto& [key, value] : nb::borrow<nb::dict>(given)) {
    const auto name = nb::cast<std::string>(key);
    bool known = false;
    const auto try_field = [&](const auto& one) {
      if (known || name != one.name) return;
      known = true;
      set(target.*one.member, value, name);
    };
    (try_field(all), ...);
    if (known) continue;
    std::string names;
    ((names += (names.empty() ? "" : ", ") + std::string(all.name)), ...);
    refuse_type(type + " has no field '" + name + "'; it has " + names);
  }
}

}  // namespace fields

template <typename Struct, typename... Members>
nb::class_<Struct> bind_struct(nb::module_& m, const char* name, const char* doc, const Field<Struct, Members>&... all) {
  const std::string type = name;
  std::string signature = "def __init__(self, *";
  ((signature += std::string(", ") + all.name + ": " + fields::type_text<Members>() + " = ..."), ...);
  signature += ") -> None";
  nb::class_<Struct> bound(m, name, doc);
  bound.def(
      "__init__",
      [type, all...](Struct* self, const nb::kwargs& given) {
        Struct value{};
        fields::assign(value, given, type, all...);
        new (self) Struct(std::move(value));
      },
      nb::sig(signature.c_str()));
  const auto bind_property = [&bound](const auto& one) {
    using Member = std::remove_cvref_t<decltype(std::declval<Struct&>().*one.member)>;
    const std::string field_name = one.name;
    const auto setter = [one, field_name](Struct& self, nb::object value) {
      fields::set(self.*one.member, value, field_name);
    };
    if constexpr (std::is_class_v<Member> && !fields::IsOptional<Member>::value &&
                  !std::is_same_v<Member, std::string> && !std::is_same_v<Member, std::vector<int32_t>>) {
      bound.def_prop_rw(
          one.name, [one](Struct& self) -> Member& { return self.*one.member; }, setter,
          nb::for_getter(nb::rv_policy::reference_internal), nb::for_setter(nb::arg("value").none()), one.doc);
    } else {
      bound.def_prop_rw(
          one.name, [one](const Struct& self) { return self.*one.member; }, setter,
          nb::for_setter(nb::arg("value").none()), one.doc);
    }
  };
  (bind_property(all), ...);
  const auto state = [all...](const Struct& self) {
    nb::dict values;
    ((values[all.name] = fields::get(self.*all.member)), ...);
    return values;
  };
  bound.def("__getstate__", state)
      .def("__setstate__",
           [type, all...](Struct* self, const nb::dict& values) {
             Struct value{};
             fields::assign(value, values, type, all...);
             new (self) Struct(std::move(value));
           })
      .def("__eq__",
           [state](const Struct& self, nb::handle other) -> nb::object {
             const Struct* right = nullptr;
             if (!nb::try_cast(other, right, false) || right == nullptr) return nb::borrow(Py_NotImplemented);
             return nb::bool_(state(self).equal(state(*right)));
           }, nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [type, state](const Struct& self) {
        std::string text;
        for (const auto& [key, value] : state(self)) {
          text += (text.empty() ? "" : ", ") + nb::cast<std::string>(key) + "=" + nb::cast<std::string>(nb::repr(value));
        }
        return type + "(" + text + ")";
      });
  bound.attr("__hash__") = nb::none();
  return bound;
}

}  // namespace folio::python
