#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "names.hpp"

/// Plain structs in Python. One table of fields gives everything that a class of them has: keyword-only construction,
/// properties, repr, ==, copy, pickle, and the documentation; the stub's signatures follow from the members' types.
///
///     const auto fields = fields_of<GraphBounds>("GraphBounds", "Upper bounds of every batch of an op.",
///         required("max_requests", &GraphBounds::max_requests, "requests of a batch"),
///         field("max_shared_levels", &GraphBounds::max_shared_levels, "shared segments of a batch"));
///     fields.bind(m);
namespace folio::python {

/// One field: `Given` is the type of the argument that it is set by. Defaults are those of a default-constructed
/// struct.
template <typename Struct, typename Value, typename GivenType = Value, bool kIsRequired = false>
struct Field {
  using Given = GivenType;
  static constexpr bool kRequired = kIsRequired;
  static constexpr bool kUnsetIsNone = std::is_same_v<Value, DType> && std::is_same_v<Given, std::optional<DType>>;
  const char* name;
  Value Struct::*member;
  const char* doc;

  static Value from_given(const Given& given) {
    if constexpr (kUnsetIsNone) {
      return given.value_or(DType::kUnset);
    } else {
      return given;
    }
  }
};

/// A field that may be left out.
template <typename Struct, typename Value>
constexpr auto field(const char* name, Value Struct::*member, const char* doc) {
  return Field<Struct, Value>{name, member, doc};
}

/// A field that must be given.
template <typename Struct, typename Value>
constexpr auto required(const char* name, Value Struct::*member, const char* doc) {
  return Field<Struct, Value, Value, true>{name, member, doc};
}

/// A dtype that may be None: kUnset.
template <typename Struct>
constexpr auto optional_dtype(const char* name, DType Struct::*member, const char* doc) {
  return Field<Struct, DType, std::optional<DType>>{name, member, doc};
}

template <typename Struct, typename... F>
class Fields {
 public:
  Fields(const char* name, const char* doc, F... fields) : name_(name), doc_(doc), fields_(fields...) {
    doc_ += "\n";
    each([this](const auto& field) { doc_ += std::string("\n    ") + field.name + ": " + field.doc; });
  }

  /// A class that Python makes and changes.
  nb::class_<Struct> bind(nb::module_& m) const {
    nb::class_<Struct> cls(m, name_, doc_.c_str());
    bind_init(cls);
    each([&cls](const auto& field) { bind_property(cls, field); });
    bind_repr_and_equality(cls);
    cls.attr("__hash__") = nb::none();  // it may change
    bind_state(cls);
    return cls;
  }

  /// A class that only Folio makes: read only, and hashable.
  nb::class_<Struct> bind_answer(nb::module_& m) const {
    nb::class_<Struct> cls(m, name_, doc_.c_str());
    each([&cls](const auto& field) { cls.def_ro(field.name, field.member, field.doc); });
    bind_repr_and_equality(cls);
    cls.def("__hash__", [fields = fields_](const Struct& self) { return nb::hash(values(fields, self)); });
    return cls;
  }

  /// A static function whose keyword-only parameters are the fields: function(leading..., struct).
  template <typename... Leading, typename Class, typename Function, typename... Extra>
  void def_static(Class& cls, const char* name, const std::string& doc, Function function,
                  const Extra&... extra) const {
    const std::string whole = doc + doc_;
    std::apply(
        [&](const F&... field) {
          cls.def_static(
              name,
              [fields = fields_, function](Leading... leading, typename F::Given... given) {
                return function(leading..., make(fields, given...));
              },
              whole.c_str(), extra..., nb::kw_only(), argument(field)...);
        },
        fields_);
  }

 private:
  using Table = std::tuple<F...>;

  template <typename Function>
  void each(Function function) const {
    std::apply([&function](const F&... field) { (function(field), ...); }, fields_);
  }

  template <typename One>
  static nb::object value_of(const One& field, const Struct& self) {
    if constexpr (One::kUnsetIsNone) {
      const DType dtype = self.*field.member;
      return dtype == DType::kUnset ? nb::object(nb::none()) : nb::cast(dtype);
    } else {
      return nb::cast(self.*field.member, nb::rv_policy::copy);
    }
  }

  static nb::tuple values(const Table& fields, const Struct& self) {
    return std::apply([&self](const F&... field) { return nb::make_tuple(value_of(field, self)...); }, fields);
  }

  static Struct make(const Table& fields, const typename F::Given&... given) {
    Struct made;
    std::apply([&](const F&... field) { ((made.*field.member = F::from_given(given)), ...); }, fields);
    return made;
  }

  template <typename One>
  static auto argument(const One& field) {
    constexpr bool takes_none = std::is_same_v<typename One::Given, Features>;
    if constexpr (One::kRequired) {
      return nb::arg(field.name);
    } else if constexpr (takes_none) {
      return nb::arg(field.name) = nb::none();
    } else {
      return nb::arg(field.name) = value_of(field, Struct{});
    }
  }

  void bind_init(nb::class_<Struct>& cls) const {
    std::apply(
        [&](const F&... field) {
          cls.def(
              "__init__",
              [fields = fields_](Struct* self, typename F::Given... given) {
                new (self) Struct(make(fields, given...));
              },
              nb::kw_only(), argument(field)...);
        },
        fields_);
  }

  template <typename One>
  static void bind_property(nb::class_<Struct>& cls, const One& field) {
    using Given = typename One::Given;
    const auto set = [member = field.member](Struct& self, Given given) { self.*member = One::from_given(given); };
    constexpr bool takes_none = std::is_same_v<Given, Features>;
    const auto argument = [&field] {
      if constexpr (takes_none) {
        return nb::arg(field.name).none();
      } else {
        return nb::arg(field.name);
      }
    }();
    if constexpr (One::kUnsetIsNone) {
      const auto get = [member = field.member](const Struct& self) -> Given {
        return self.*member == DType::kUnset ? Given() : Given(self.*member);
      };
      cls.def_prop_rw(field.name, get, set, nb::for_setter(argument), field.doc);
    } else {  // a reference, so that a struct inside can be changed in place
      const auto get = [member = field.member](Struct & self) -> auto& {
        return self.*member;
      };
      cls.def_prop_rw(field.name, get, set, nb::for_setter(argument), field.doc);
    }
  }

  void bind_repr_and_equality(nb::class_<Struct>& cls) const {
    cls.def("__repr__", [fields = fields_, name = name_](const Struct& self) {
      std::string text = std::string("folio.") + name + "(";
      const char* separator = "";
      std::apply(
          [&](const F&... field) {
            ((text += separator + std::string(field.name) + "=" + nb::repr(value_of(field, self)).c_str(),
              separator = ", "),
             ...);
          },
          fields);
      return text + ")";
    });
    cls.def(
        "__eq__",
        [fields = fields_](const Struct& self, nb::handle other) -> nb::object {
          const Struct* same = nullptr;
          if (!nb::try_cast(other, same, false) || same == nullptr) {
            return nb::borrow(nb::handle(Py_NotImplemented));
          }
          return nb::bool_(values(fields, self).equal(values(fields, *same)));
        },
        nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"));
  }

  /// The state is a dict of the fields. One that an older Folio wrote has fewer: the others get their defaults.
  void bind_state(nb::class_<Struct>& cls) const {
    cls.def("__getstate__", [fields = fields_](const Struct& self) {
      nb::dict state;
      std::apply([&](const F&... field) { ((state[field.name] = value_of(field, self)), ...); }, fields);
      return state;
    });
    cls.def(
        "__setstate__",
        [](Struct* self, const nb::dict& state) { new (self) Struct(nb::cast<Struct>(nb::type<Struct>()(**state))); },
        nb::arg("state"));
  }

  const char* name_;
  std::string doc_;
  Table fields_;
};

template <typename Struct, typename... F>
Fields<Struct, F...> fields_of(const char* name, const char* doc, F... fields) {
  return Fields<Struct, F...>(name, doc, fields...);
}

}  // namespace folio::python
