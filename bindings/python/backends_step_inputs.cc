#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "backends.hpp"
#include "backends_forward_batch.hpp"
#include "folio/backends/token_pool.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "pools.hpp"

/// What a step puts into memory that stays: the request table of a device, and a captured batch's inputs.
namespace folio::python {
namespace token_pool {
namespace {

using RequestTable = bk::DeviceReqToTokenPool;
using Tables = std::shared_ptr<RequestTable>;

/// Memory of `owner` on a device, as an argument.
template <typename T>
Array array_over(std::span<const T> values, std::initializer_list<size_t> shape, const nb::capsule& owner,
                 const Device& device, const char* name) {
  Array array;
  array.name = name;
  array.data = const_cast<T*>(values.data());
  array.element = nb::dtype<T>();
  array.place.host = device.type == DeviceType::kCpu;
  array.place.cuda = !array.place.host;
  array.place.cuda_index = device.index;
  array.place.dlpack_type = array.place.host ? nb::device::cpu::value : nb::device::cuda::value;
  array.memory = nb::ndarray<nb::ro>(values.data(), shape.size(), shape.begin(), owner, nullptr, array.element,
                                     array.place.dlpack_type, device.index);
  return array;
}

std::span<const int32_t> entries_of(const RequestTable& table) {
  const PageTableView view = table.table();
  return {view.indices, static_cast<size_t>(view.num_indices)};
}

std::pair<size_t, size_t> shape_of(const RequestTable& table) {
  return {static_cast<size_t>(table.size()) + 1, static_cast<size_t>(table.max_context_len())};
}

nb::object entries(const Tables& self) {
  const auto [rows, columns] = shape_of(*self);
  const int32_t* const first = entries_of(*self).data();
  const size_t shape[] = {rows, columns};
  const Device device = self->device();
  if (device.type == DeviceType::kCpu) {
    return nb::cast(nb::ndarray<nb::numpy, const int32_t>(first, 2, shape, keeper_of(self)));
  }
  return nb::cast(nb::ndarray<int32_t>(const_cast<int32_t*>(first), 2, shape, keeper_of(self), nullptr,
                                       nb::dtype<int32_t>(), nb::device::cuda::value, device.index));
}

Table table(const Tables& self) {
  const auto [rows, columns] = shape_of(*self);
  Table table;
  table.view = self->table();
  table.columns = self->max_context_len();
  table.arrays = {array_over(entries_of(*self), {rows, columns}, keeper_of(self), self->device(), "table.entries")};
  return table;
}

/// A batch's slots: int32 or int64 as they are on a device, int64 on the host.
struct Slots {
  explicit Slots(nb::handle source) {
    if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr()) || PyRange_Check(source.ptr())) {
      wide = int64_numbers(source, "slots");
      return;
    }
    const Array array = borrow(source, "slots");
    if (!array.place.host && array.element == nb::dtype<int32_t>()) {
      narrow = int32_numbers(source, "slots");
    } else {
      wide = int64_numbers(source, "slots");
    }
  }
  bool on_device() const { return wide.on_device() || narrow.on_device(); }
  Numbers<int64_t> wide;
  Numbers<int32_t> narrow;
};

void write_batch(RequestTable& self, nb::handle req_pool_indices, nb::handle slots, nb::handle first, nb::handle ends,
                 nb::handle lens, int32_t tokens_per_request, bk::DeviceFaults* faults, nb::handle stream) {
  const Numbers<int32_t> rows = int32_numbers(req_pool_indices, "req_pool_indices");
  const Numbers<int32_t> firsts = int32_numbers(first, "first"), past = int32_numbers(ends, "ends");
  const Numbers<int32_t> lengths = int32_numbers(lens, "lens");
  const Slots given(slots);
  const bool on_device = rows.on_device();
  for (const auto& [name, there, empty] : {std::tuple("first", firsts.on_device(), firsts.view().empty()),
                                           {"ends", past.on_device(), past.view().empty()},
                                           {"lens", lengths.on_device(), lengths.view().empty()},
                                           {"slots", given.on_device(), false}}) {
    if (!empty && there != on_device) refuse(std::string(name) + " and req_pool_indices lie in different places");
  }
  if (on_device && faults == nullptr) refuse("faults is None; it is needed where the arrays lie on a GPU");
  std::vector<Array> arrays;
  for (const auto* numbers : {&rows, &firsts, &past, &lengths, &given.narrow}) {
    if (numbers->on_device()) arrays.push_back(*numbers->array());
  }
  if (given.wide.on_device()) arrays.push_back(*given.wide.array());
  python::require_on(self.device(), arrays);
  bk::ReqToTokenWrites writes;
  writes.req_pool_indices = rows.view();
  writes.first = firsts.view();
  writes.ends = past.view();
  writes.lens = lengths.view();
  writes.tokens_per_request = tokens_per_request;
  writes.slots = given.narrow.view();
  writes.out_cache_loc = given.wide.view();
  const Stream queue = to_stream(stream, self.device(), {&arrays});
  if (on_device) {
    self.write(writes, *faults, queue);
  } else {
    self.write(writes, queue);
  }
}

void bind_request_table(nb::module_& m) {
  nb::class_<RequestTable>(
      m, "DeviceReqToTokenPool",
      "ReqToTokenPool with its table in the memory of a context's device, where TokenPoolBackend reads it. Writes are "
      "enqueued on a stream; nothing waits for the GPU. Row 0 is the dummy row. Made of a ReqToTokenPool it is a copy: "
      "rows are the host pool's, and each write goes to both.")
      .def(
          "__init__",
          [](RequestTable* self, int32_t max_reqs, int32_t max_context_len, const std::optional<Context>& context) {
            new (self) RequestTable(context_or_default(context), max_reqs, max_context_len);
          },
          nb::arg("max_reqs"), nb::arg("max_context_len"), nb::arg("context") = nb::none())
      .def(
          "__init__",
          [](RequestTable* self, ReqToTokenPool& host, const std::optional<Context>& context) {
            new (self) RequestTable(context_or_default(context), host);
          },
          nb::arg("host"), nb::arg("context") = nb::none(), nb::keep_alive<1, 2>())
      .def_prop_ro("size", &RequestTable::size, "Requests that can run at once.")
      .def_prop_ro("max_context_len", &RequestTable::max_context_len)
      .def_prop_ro("available", &RequestTable::available, "Rows that are free.")
      .def("is_held", &RequestTable::is_held, nb::arg("row"))
      .def(
          "alloc", [](RequestTable& self) { return self.alloc(); },
          "The row that has been free longest; None if all are taken.")
      .def(
          "alloc",
          [](RequestTable& self, int64_t count) -> std::optional<Int32s> {
            if (count < 0) refuse("count is " + std::to_string(count) + "; it must not be negative");
            if (count > self.available()) return std::nullopt;
            std::vector<int32_t> rows(static_cast<size_t>(count));
            if (!self.alloc(rows)) return std::nullopt;
            return to_numpy(std::move(rows));
          },
          nb::arg("count"), "So many rows, int32 [count], all or nothing: None, if fewer are free.")
      .def("free", &RequestTable::free, nb::arg("row"), "Gives a row back.")
      .def(
          "write",
          [](RequestTable& self, int32_t row, int32_t first, nb::object slots, nb::object stream) {
            const std::vector<int32_t> values = to_int32s(slots, "slots");
            self.write(row, first, values, to_stream(stream, self.device(), {}));
          },
          nb::arg("row"), nb::arg("first"), nb::arg("slots"), nb::arg("stream") = nb::none(),
          "Writes slots of the host (a list, int32 or int64) at positions first, first + 1, ... of a held row. They "
          "may be changed afterwards.")
      .def("write_batch", &write_batch, nb::arg("req_pool_indices"), nb::arg("slots"), nb::kw_only(),
           nb::arg("first") = nb::none(), nb::arg("ends") = nb::none(), nb::arg("lens") = nb::none(),
           nb::arg("tokens_per_request") = 1, nb::arg("faults").none() = nb::none(), nb::arg("stream") = nb::none(),
           "A batch's slots, one request's after the other's, in one kernel. Positions begin at first[i] or end before "
           "ends[i]; a request has lens[i] slots, or tokens_per_request. Row 0 is padding, and writes nothing. "
           "out_cache_loc with extend_prefix_lens as `first` and extend_seq_lens as `lens` is an extend, with seq_lens "
           "as `ends` a decode. Arrays lie all on the host, or all on the GPU; `faults` is then told what cannot be "
           "written, and captured graphs may hold the call.")
      .def("table", &table, "The table as a PageTableView, borrowed: pages of one token.")
      .def_prop_ro(
          "entries", [](const Tables& self) { return entries(self); },
          "The whole table, live: int32 [size + 1, max_context_len]. On a CPU a read-only numpy array, on a GPU "
          "for torch.from_dlpack and its like; what they write there counts.")
      .def(
          "clear", [](RequestTable& self, nb::object stream) { self.clear(to_stream(stream, self.device(), {})); },
          nb::arg("stream") = nb::none(), "All rows free, and all entries 0.")
      .def("__repr__", [](const RequestTable& self) {
        return "<folio.backends.token_pool.DeviceReqToTokenPool: " + std::to_string(self.available()) + " of " +
               std::to_string(self.size()) + " rows free, " + std::to_string(self.max_context_len()) +
               " positions each, on " + describe(self.device()) + ">";
      });
}

/// GraphInputs with its device.
struct Inputs {
  Device device;
  std::shared_ptr<bk::GraphInputs> inputs;
};

/// An input of the padded batch: borrowed on a GPU, copied on the host.
template <typename T>
Numbers<T> padded_numbers(std::span<const T> values, const Inputs& self, bool host, const char* name) {
  Numbers<T> numbers;
  if (host || self.device.type == DeviceType::kCpu) {
    numbers.copy({values.begin(), values.end()});
  } else if (!values.empty()) {
    numbers.borrow(array_over(values, {values.size()}, keeper_of(self.inputs), self.device, name));
  }
  return numbers;
}

Batch pad(Inputs& self, const Batch& batch, int32_t padded_bs, nb::handle stream) {
  const bool on_device = batch.req_pool_indices.on_device();
  require_batch_places(on_device ? self.device : Device{}, batch);
  std::vector<Array> arrays;
  if (on_device) arrays.push_back(*batch.req_pool_indices.array());
  const Stream queue = to_stream(stream, self.device, {&arrays});
  const bk::ForwardBatch padded = on_device ? self.inputs->pad(batch.view(), padded_bs, queue)
                                            : self.inputs->pad_from_host(batch.view(), padded_bs, queue);
  Batch result = batch;
  result.batch_size = padded.batch_size;
  result.seq_lens_sum = padded.seq_lens_sum;
  result.req_pool_indices = padded_numbers(padded.req_pool_indices, self, false, "req_pool_indices");
  result.seq_lens = padded_numbers(padded.seq_lens, self, false, "seq_lens");
  result.seq_lens_cpu = padded_numbers(padded.seq_lens_cpu, self, true, "seq_lens_cpu");
  result.encoder_lens = padded_numbers(padded.encoder_lens, self, false, "encoder_lens");
  result.encoder_lens_cpu = padded_numbers(padded.encoder_lens_cpu, self, true, "encoder_lens_cpu");
  result.out_cache_loc = padded_numbers(padded.out_cache_loc, self, false, "out_cache_loc");
  result.window_out_cache_loc = padded_numbers(padded.window_out_cache_loc, self, false, "window_out_cache_loc");
  result.spec_info.tree_mask = padded_numbers(padded.spec_info.tree_mask, self, false, "spec_info.tree_mask");
  result.spec_info.tree_mask_cpu =
      padded_numbers(padded.spec_info.tree_mask_cpu, self, true, "spec_info.tree_mask_cpu");
  return result;
}

void bind_graph_inputs(nb::module_& m) {
  nb::class_<Inputs>(
      m, "GraphInputs",
      "A captured batch's inputs in memory of the context's device that stays where it is, and the "
      "padding that fills it up: length 1, row 0, slot 0. max_bs requests of tokens_per_request queries.")
      .def(
          "__init__",
          [](Inputs* self, int32_t max_bs, int32_t tokens_per_request, const std::optional<Context>& given) {
            const Context context = context_or_default(given);
            new (self) Inputs{context.device(), std::make_shared<bk::GraphInputs>(context, max_bs, tokens_per_request)};
          },
          nb::arg("max_bs"), nb::arg("tokens_per_request") = 1, nb::arg("context") = nb::none())
      .def("pad", &pad, nb::arg("forward_batch"), nb::arg("padded_bs"), nb::arg("stream") = nb::none(),
           "The batch with padding up to padded_bs requests, whose arrays are this object's memory: valid until the "
           "next call. On a GPU one kernel fills it; the batch's arrays lie there or, all of them, on the host. "
           "seq_lens_sum counts padding, -1 where the host does not know it.");
}

}  // namespace

void bind_step_inputs(nb::module_& m) {
  bind_request_table(m);
  bind_graph_inputs(m);
}

}  // namespace token_pool
}  // namespace folio::python
