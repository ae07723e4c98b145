#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "folio/page_table.hpp"
#include "integers.hpp"
#include "views.hpp"

namespace folio::python {

/// The arguments of one call on a context's device. On a CPU, what a call checks and then follows (lengths, offsets) is
/// copied; lists and int64 arrays are taken. On a GPU everything lies there; int64 arrays are converted by their own
/// library, on its current stream. Throws Error(kInvalidArgument) naming the argument. To be made and destroyed with
/// the GIL, and to live until the call has returned.
class DeviceCall {
 public:
  explicit DeviceCall(const Context& context) : device_(context.device()) {}
  explicit DeviceCall(const Device& device) : device_(device) {}

  bool on_cpu() const { return device_.type == DeviceType::kCpu; }
  std::span<const int32_t> int32s(nb::handle source, const std::string& name);
  /// Contiguous, [n]. A matrix counts as its rows one after the other where `rank` is 2. Refused where it overlaps
  /// another output or a table.
  std::span<int32_t> int32s_out(nb::handle source, const std::string& name, int64_t rank = 1);
  std::span<int64_t> int64s_out(nb::handle source, const std::string& name);
  std::span<float> floats_out(nb::handle source, const std::string& name);
  std::span<const float> floats(nb::handle source, const std::string& name);
  std::span<const uint8_t> bytes(nb::handle source, const std::string& name);
  /// Contiguous, of any rank and of exactly this type, row-major. On a CPU a copy.
  template <typename T>
  std::span<const T> packed(nb::handle source, const std::string& name) {
    const Array& array = packed_array(source, name, nb::dtype<T>(), Access::kRead);
    const std::span<const T> values(static_cast<const T*>(array.data), array.memory.size());
    if (!on_cpu()) return values;
    std::vector<std::byte>& copy = packed_copies_.emplace_back(std::max(values.size_bytes(), sizeof(T)));
    if (!values.empty()) std::memcpy(copy.data(), values.data(), values.size_bytes());
    return {reinterpret_cast<const T*>(copy.data()), values.size()};
  }
  /// Likewise, written. Refused where it overlaps another output.
  template <typename T>
  std::span<T> packed_out(nb::handle source, const std::string& name) {
    const Array& array = packed_array(source, name, nb::dtype<T>(), Access::kWrite);
    keep_apart(array, true);
    return {static_cast<T*>(array.data), array.memory.size()};
  }
  TensorView tensor(nb::handle source, const std::string& name, Access access);
  LseView lse(nb::handle source, const std::string& name);
  /// `heads` and `requests`: what its data has at least. Negative requests are not counted.
  Scale scale(nb::handle source, const std::string& name, int64_t heads = 1, int64_t requests = -1);
  KvCacheView cache(const Cache& cache, const std::string& name, Access access);
  PageTableView table(const Table& table);
  /// Null for None.
  int32_t* status(nb::handle source);
  void keep(const std::vector<Array>& arrays);

  /// Last: what is left out follows the arrays so far.
  Stream stream(nb::handle source) const { return to_stream(source, device_, {&arrays_}); }
  const std::vector<Array>& arrays() const { return arrays_; }

 private:
  const Array& kept(Array array);
  const Array& packed_array(nb::handle source, const std::string& name, nb::dlpack::dtype element, Access access);
  void keep_apart(const Array& array, bool written);
  template <typename T>
  std::span<T> out(nb::handle source, const std::string& name, int64_t rank);

  struct Memory {  ///< of a list of integers
    std::string name;
    uintptr_t begin, end;
    bool written;
  };

  Device device_;
  std::vector<Array> arrays_;
  std::vector<Memory> lists_;
  std::deque<std::vector<int32_t>> copies_;
  std::deque<std::vector<std::byte>> packed_copies_;
};

/// The first rows of a table, one for each length, with page ids of their own on a CPU: those that are checked are
/// those that are read.
struct OwnTable {
  OwnTable(DeviceCall& call, const Table& table, std::span<const int32_t> lens, int32_t page_size)
      : view(call.table(table)) {
    if (!call.on_cpu()) return;
    csr = to_csr(view, lens, page_size);
    view = csr_table(csr.indices, csr.indptr);
  }
  OwnTable(const OwnTable&) = delete;
  OwnTable& operator=(const OwnTable&) = delete;

  PageTableView view;
  PagedMetadata csr;
};

}  // namespace folio::python
