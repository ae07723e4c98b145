#include "process_group.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "folio/distributed/thread_group.hpp"
#include "gil.hpp"
#include "integers.hpp"
#include "views.hpp"

/// Process groups: those of threads, and those that Python implements.
namespace folio::python {
namespace {

/// A buffer of an operation: packed, of any type, where the group's buffers lie.
Array group_buffer(const Group& group, nb::handle source, const std::string& name, Access access) {
  Array array = borrow(source, name, access);
  int64_t packed = 1;
  for (int64_t i = array.rank() - 1; i >= 0; --i) {
    if (array.size(i) > 1 && array.stride(i) != packed) refuse(name + " is not contiguous");
    packed *= array.size(i);
  }
  require_on(group.device, array);
  return array;
}

Array group_floats(const Group& group, nb::handle source, const std::string& name, Access access) {
  Array array = group_buffer(group, source, name, access);
  if (array.dtype != DType::kFloat32) refuse(name + " is " + element_text(array.element) + "; it must be float32");
  return array;
}

void require_bytes(const Array& array, size_t wanted, const std::string& why) {
  if (array.memory.nbytes() == wanted) return;
  refuse(array.name + " has " + std::to_string(array.memory.nbytes()) + " bytes; " + why + " " +
         std::to_string(wanted));
}

void all_gather(Group& self, nb::handle send, nb::handle recv, nb::handle stream) {
  const std::vector<Array> arrays = {group_buffer(self, send, "send", Access::kRead),
                                     group_buffer(self, recv, "recv", Access::kWrite)};
  const size_t bytes = arrays[0].memory.nbytes();
  require_bytes(arrays[1], static_cast<size_t>(self.size) * bytes, "those that all ranks send are");
  const Stream queue = to_stream(stream, self.device, {&arrays});
  const GroupUse group(self);
  const ReleasedGil released;
  group->all_gather(arrays[0].data, arrays[1].data, bytes, queue);
}

void all_to_all(Group& self, nb::handle send, nb::handle recv, nb::handle stream) {
  const std::vector<Array> arrays = {group_buffer(self, send, "send", Access::kRead),
                                     group_buffer(self, recv, "recv", Access::kWrite)};
  const size_t bytes = arrays[0].memory.nbytes();
  const auto size = static_cast<size_t>(self.size);
  if (bytes % size != 0) {
    refuse("send has " + std::to_string(bytes) + " bytes; they cannot be divided among " + std::to_string(self.size) +
           " ranks");
  }
  require_bytes(arrays[1], bytes, "as send it must have");
  const Stream queue = to_stream(stream, self.device, {&arrays});
  const GroupUse group(self);
  const ReleasedGil released;
  group->all_to_all(arrays[0].data, arrays[1].data, bytes / size, queue);
}

void all_reduce_sum(Group& self, nb::handle data, nb::handle stream) {
  const std::vector<Array> arrays = {group_floats(self, data, "data", Access::kWrite)};
  const Stream queue = to_stream(stream, self.device, {&arrays});
  const GroupUse group(self);
  const ReleasedGil released;
  group->all_reduce_sum(static_cast<float*>(arrays[0].data), arrays[0].memory.size(), queue);
}

void reduce_scatter_sum(Group& self, nb::handle send, nb::handle recv, nb::handle stream) {
  const std::vector<Array> arrays = {group_floats(self, send, "send", Access::kRead),
                                     group_floats(self, recv, "recv", Access::kWrite)};
  const size_t count = arrays[1].memory.size();
  require_bytes(arrays[0], static_cast<size_t>(self.size) * count * sizeof(float), "a part for every rank is");
  const Stream queue = to_stream(stream, self.device, {&arrays});
  const GroupUse group(self);
  const ReleasedGil released;
  group->reduce_scatter_sum(static_cast<const float*>(arrays[0].data), static_cast<float*>(arrays[1].data), count,
                            queue);
}

distributed::ThreadGroupOptions thread_options(double timeout, const std::optional<Context>& context) {
  constexpr double kLongest = 1e9;  // seconds, which fit into milliseconds of 64 bits
  if (!(timeout > 0) || timeout > kLongest) {
    refuse("timeout is " + std::to_string(timeout) + " seconds; it must be above 0 and at most 1e9");
  }
  distributed::ThreadGroupOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(timeout * 1000)));
  options.context = context;
  return options;
}

/// Takes a lent group back from Python at the end of a body, when no thread uses it any more.
class Lending {
 public:
  explicit Lending(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Lending(const Lending&) = delete;
  Lending& operator=(const Lending&) = delete;
  ~Lending() {
    std::unique_lock<std::mutex> lock(group_->mutex, std::defer_lock);
    {
      const ReleasedGil released;
      lock.lock();
    }
    group_->group = nullptr;
  }

 private:
  std::shared_ptr<Group> group_;
};

/// Every rank is a thread.
void require_world(int32_t world) {
  constexpr int32_t kMostRanks = 1024;
  if (world < 1 || world > kMostRanks) {
    refuse("world is " + std::to_string(world) + "; it must be in [1, " + std::to_string(kMostRanks) + "]");
  }
}

nb::list run_ranks(int32_t world, nb::callable body, double timeout, const std::optional<Context>& context) {
  require_world(world);
  const distributed::ThreadGroupOptions options = thread_options(timeout, context);
  std::vector<nb::object> results(static_cast<size_t>(world));
  {
    const ReleasedGil released;
    distributed::run_ranks(
        world,
        [&](ProcessGroup& group) {
          const nb::gil_scoped_acquire gil;
          const auto lent = std::make_shared<Group>(group);
          const Lending lending(lent);
          results[static_cast<size_t>(group.rank())] = body(lent);
        },
        options);
  }
  nb::list all;
  for (const nb::object& result : results) all.append(result);
  return all;
}

/// A group whose operations are methods of a Python object. The GIL is taken for each; what a method raises ends the
/// group. On the host methods get copies of the buffers, which they may keep; on a GPU arrays over them.
class PythonGroup final : public ProcessGroup {
 public:
  PythonGroup(nb::object made_of, int32_t number, int32_t ranks, const Device& place)
      : implementation_(std::move(made_of)), rank_(number), size_(ranks), device_(place) {}
  ~PythonGroup() override {
    const nb::gil_scoped_acquire gil;
    implementation_.reset();
  }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  Device device() const noexcept override { return device_; }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    call<uint8_t>("all_gather", stream, {{send, nullptr, bytes}, {recv, recv, all(bytes)}});
  }
  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    call<uint8_t>("all_to_all", stream, {{send, nullptr, all(bytes)}, {recv, recv, all(bytes)}});
  }
  void all_reduce_sum(float* data, size_t count, Stream stream) override {
    call<float>("all_reduce_sum", stream, {{data, data, count}});
  }
  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    call<float>("reduce_scatter_sum", stream, {{send, nullptr, all(count)}, {recv, recv, count}});
  }
  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    if (device_.type == DeviceType::kCpu) return all_gather(send, recv, bytes, {});
    {
      const nb::gil_scoped_acquire gil;
      if (!nb::hasattr(implementation_, "all_gather_host")) {
        throw Error(ErrorCode::kUnsupported,
                    "the group's implementation has no method all_gather_host, which ranks on GPUs compare steps by");
      }
    }
    call<uint8_t>("all_gather_host", std::nullopt, {{send, nullptr, bytes}, {recv, recv, all(bytes)}});
  }
  void barrier(Stream stream) override { call<uint8_t>("barrier", stream, {}); }
  void fail(std::string_view reason) noexcept override {
    const nb::gil_scoped_acquire gil;
    if (failure_.empty()) failure_ = reason.empty() ? "a rank gave up" : std::string(reason);
  }

 private:
  struct Buffer {
    const void* data;
    void* result;  ///< null: it is only read
    size_t elements;
  };

  size_t all(size_t part) const { return part * static_cast<size_t>(size_); }

  template <typename T>
  nb::object array(const Buffer& buffer, bool on_host) const {
    if (on_host) {
      const T* const begin = static_cast<const T*>(buffer.data);
      return nb::cast(to_numpy(std::vector<T>(begin, begin + buffer.elements)));
    }
    return nb::cast(nb::ndarray<nb::array_api>(const_cast<void*>(buffer.data), {buffer.elements}, implementation_, {},
                                               nb::dtype<T>(), nb::device::cuda::value, device_.index));
  }

  /// No stream: buffers lie on the host, whatever the group's device is.
  template <typename T>
  void call(const char* operation, std::optional<Stream> stream, std::initializer_list<Buffer> buffers) {
    const nb::gil_scoped_acquire gil;
    const bool on_host = device_.type == DeviceType::kCpu || !stream;
    if (!failure_.empty()) throw Error(ErrorCode::kUnavailable, "the group has failed: " + failure_);
    nb::list arrays;
    for (const Buffer& buffer : buffers) arrays.append(array<T>(buffer, on_host));
    try {
      const nb::object method = implementation_.attr(operation);
      if (on_host) {
        method(*arrays);
      } else {
        method(*arrays, nb::arg("stream") = reinterpret_cast<uintptr_t>(stream->handle));
      }
    } catch (nb::python_error& error) {
      failure_ =
          std::string(operation) + " of rank " + std::to_string(rank_) + " raised " + nb::repr(error.value()).c_str();
      throw Error(ErrorCode::kUnavailable, "the group has failed: " + failure_);
    }
    if (!on_host) return;
    size_t index = 0;
    for (const Buffer& buffer : buffers) {
      const auto made = nb::cast<nb::ndarray<nb::numpy, T>>(arrays[index++]);
      if (buffer.result != nullptr) std::copy_n(made.data(), buffer.elements, static_cast<T*>(buffer.result));
    }
  }

  nb::object implementation_;
  int32_t rank_;
  int32_t size_;
  Device device_;
  std::string failure_;  ///< empty: none; with the GIL
};

std::shared_ptr<Group> make_process_group(nb::object implementation, int32_t rank, int32_t size,
                                          const std::optional<Context>& context) {
  if (size < 1 || rank < 0 || rank >= size) {
    refuse("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ranks are in [0, size)");
  }
  for (const char* name : {"all_gather", "all_to_all", "all_reduce_sum", "reduce_scatter_sum", "barrier"}) {
    if (PyCallable_Check(nb::getattr(implementation, name, nb::none()).ptr()) == 0) {
      throw nb::type_error(("implementation: it has no method " + std::string(name)).c_str());
    }
  }
  const Device device = context ? context->device() : Device{};
  return std::make_shared<Group>(std::make_unique<PythonGroup>(std::move(implementation), rank, size, device));
}

void bind_group_class(nb::module_& m) {
  nb::class_<Group>(m, "ProcessGroup",
                    "One rank's handle of a group. Every operation is collective: all ranks call the same ones, in the "
                    "same order, with the same sizes. Arrays are contiguous and lie in the group's memory. Sums are "
                    "float32 and run in the order of the ranks. Raises InvalidArgument before anything is sent; Error "
                    "with UNAVAILABLE where the group has failed.")
      .def_prop_ro("rank", [](const Group& self) { return self.rank; })
      .def_prop_ro("size", [](const Group& self) { return self.size; })
      .def_prop_ro(
          "device", [](const Group& self) { return self.device; }, nb::rv_policy::copy, "Where buffers lie.")
      .def("all_gather", &all_gather, nb::arg("send"), nb::arg("recv"), nb::arg("stream") = nb::none(),
           "recv: every rank's `send`, one after the other.")
      .def("all_to_all", &all_to_all, nb::arg("send"), nb::arg("recv"), nb::arg("stream") = nb::none(),
           "recv: from every rank the part of its `send` that is this rank's. Both have a part for every rank.")
      .def("all_reduce_sum", &all_reduce_sum, nb::arg("data"), nb::arg("stream") = nb::none(),
           "data, float32, becomes the sum over all ranks.")
      .def("reduce_scatter_sum", &reduce_scatter_sum, nb::arg("send"), nb::arg("recv"), nb::arg("stream") = nb::none(),
           "recv, float32: the sum over all ranks of their `send`'s part of this rank.")
      .def(
          "barrier",
          [](Group& self, nb::object stream) {
            const std::vector<Array> none;
            const Stream queue = to_stream(stream, self.device, {&none});
            const GroupUse group(self);
            const ReleasedGil released;
            group->barrier(queue);
          },
          nb::arg("stream") = nb::none(), "Returns when every rank has called it.")
      .def(
          "fail",
          [](Group& self, const std::string& reason) {
            if (self.group != nullptr) self.group->fail(reason);  // also while another thread waits in an operation
          },
          nb::arg("reason"), "Makes the group fail for every rank, also for those that wait in an operation.")
      .def("__repr__", [](const Group& self) {
        return "<folio.ProcessGroup: rank " + std::to_string(self.rank) + " of " + std::to_string(self.size) + ", on " +
               describe(self.device) + ">";
      });
}

}  // namespace

void bind_process_groups(nb::module_& m) {
  bind_group_class(m);
  m.def(
      "make_thread_groups",
      [](int32_t world, double timeout, const std::optional<Context>& context) {
        require_world(world);
        std::vector<std::shared_ptr<Group>> groups;
        for (auto& made : distributed::make_thread_groups(world, thread_options(timeout, context))) {
          groups.push_back(std::make_shared<Group>(std::move(made)));
        }
        return groups;
      },
      nb::arg("world"), nb::arg("timeout") = 300.0, nb::arg("context") = nb::none(),
      "A group inside this process: handle r is rank r's and is given to one thread. timeout: seconds that a rank "
      "waits for the others in one operation before the group fails. context: a GPU's, whose memory buffers lie in; "
      "None: the host's.");
  m.def("run_ranks", &run_ranks, nb::arg("world"), nb::arg("body"), nb::arg("timeout") = 300.0,
        nb::arg("context") = nb::none(),
        "Calls body(group) on `world` threads, one a rank, and returns their results in the order of the ranks. A body "
        "that ends has left the group. The first exception that was raised is raised then. The rest as "
        "make_thread_groups.");
  m.def(
      "make_process_group", &make_process_group, nb::arg("implementation"), nb::arg("rank"), nb::arg("size"),
      nb::arg("context") = nb::none(),
      "One rank's handle of a group that Python implements, over torch.distributed for example. implementation has the "
      "methods all_gather(send, recv), all_to_all(send, recv), all_reduce_sum(data), reduce_scatter_sum(send, recv) "
      "and barrier(), which return when the result is there: flat arrays, uint8 for the first two and float32 for "
      "sums, numpy's on the host. With a GPU's context they lie there, have __dlpack__, are good during the call, and "
      "every method gets stream=, a cudaStream_t as an integer; DcpAttention.plan then needs all_gather_host(send, "
      "recv) "
      "too, over numpy's arrays and without a stream. What a method raises ends the group: "
      "Error with UNAVAILABLE. Sums run in the order of the ranks where results must not depend on their neighbours.");
}

}  // namespace folio::python
