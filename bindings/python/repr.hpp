#pragma once

#include <string>

#include "views.hpp"

/// What objects say of themselves in one line: shapes, element types, places.
namespace folio::python {

/// "float32 [2, 8, 64]"
std::string text_of(const Array& array);
std::string text_of(const Tensor& tensor);
std::string text_of(const Lse& lse);
std::string text_of(const ScaleArg& scale);
std::string text_of(const Cache& cache);
std::string text_of(const Table& table);
std::string text_of(const Ragged& ragged);
std::string text_of(const Segment& segment);
std::string text_of(const Batch& batch);
std::string text_of(const SegmentArg& segment);
std::string text_of(const Args& args);
std::string text_of(const WriteArgs& args);
std::string text_of(const State& state);
std::string text_of(const States& states);
std::string text_of(const Context& context);
std::string text_of(const AttentionOp& op);

/// "1 request", "2 requests"
std::string count_of(int64_t count, const char* what);

/// "<folio.KvCacheView: 5 pages of 16 tokens, ...>" for a class that has a text.
template <typename Class>
void bind_repr(Class& cls) {
  cls.def("__repr__", [](nb::handle self) {
    const auto name = nb::cast<std::string>(nb::str(self.type().attr("__name__")));
    return "<folio." + name + ": " + text_of(nb::cast<const typename Class::Type&>(self)) + ">";
  });
}

}  // namespace folio::python
