#include "folio/distributed/nccl_group.hpp"

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fields.hpp"
#include "gil.hpp"
#include "process_group.hpp"
#include "views.hpp"

template <>
struct folio::python::Names<folio::distributed::NcclSums> {
  static constexpr const char* kName = "NcclSums";
  static constexpr const char* kDoc = "Who adds sums over a group of GPUs.";
  static constexpr Enumerator<distributed::NcclSums> kAll[] = {
      {"RANK_ORDER", distributed::NcclSums::kRankOrder,
       "NCCL moves the parts, a kernel adds them in the order of the ranks."},
      {"NCCL", distributed::NcclSums::kNccl, "NCCL's own reductions, in whatever order the size suggests."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::NcclSums);

/// The group over NCCL, where the build has it. folio.nccl is what its users see.
namespace folio::python {
namespace {

using distributed::NcclGroupOptions;
using distributed::NcclUniqueId;

#if defined(FOLIO_HAS_NCCL)
constexpr bool kBuilt = true;
NcclUniqueId new_id(const std::string& library) {
  return distributed::nccl_unique_id(library);
}
std::unique_ptr<distributed::NcclGroup> new_group(const Context& context, const NcclGroupOptions& options) {
  return distributed::make_nccl_group(context, options);
}
#else
constexpr bool kBuilt = false;
[[noreturn]] void refuse_to_make() {
  throw Error(ErrorCode::kUnavailable,
              "this build of Folio has no NCCL group: it was made without CUDA or without nccl.h");
}
NcclUniqueId new_id(const std::string&) {
  refuse_to_make();
}
std::unique_ptr<distributed::NcclGroup> new_group(const Context&, const NcclGroupOptions&) {
  refuse_to_make();
}
#endif

/// A rank's handle, with what it uses.
struct NcclRank : Group {
  NcclRank(std::unique_ptr<distributed::NcclGroup> made, std::shared_ptr<Group> with, nb::object keep)
      : Group(*made), nccl(std::move(made)), control(std::move(with)), owner(std::move(keep)) {}
  ~NcclRank() {
    group = nullptr;
    const ReleasedGil released;  // it waits for the device
    nccl = nullptr;
  }
  std::unique_ptr<distributed::NcclGroup> nccl;
  std::shared_ptr<Group> control;
  nb::object owner;  ///< of an engine's communicator
};

std::chrono::milliseconds to_milliseconds(double seconds) {
  constexpr double kLongest = 1e9;
  if (!(seconds > 0) || seconds > kLongest) {
    refuse("timeout is " + std::to_string(seconds) + " seconds; it must be above 0 and at most 1e9");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
}

std::shared_ptr<NcclRank> make_group(const Context& context, const std::optional<nb::bytes>& id, int32_t rank,
                                     int32_t size, std::optional<uint64_t> communicator, std::shared_ptr<Group> control,
                                     double timeout, size_t scratch_bytes, distributed::NcclSums sums,
                                     const std::string& library, nb::object owner) {
  NcclGroupOptions options;
  if (communicator) options.communicator = reinterpret_cast<void*>(static_cast<uintptr_t>(*communicator));
  if (communicator && *communicator == 0) refuse("communicator is a null pointer");
  if (id) {
    options.id.emplace();
    if (id->size() != options.id->size()) {
      refuse("id has " + std::to_string(id->size()) + " bytes; unique_id() returns " +
             std::to_string(options.id->size()));
    }
    std::memcpy(options.id->data(), id->c_str(), id->size());
  }
  options.rank = rank;
  options.size = size;
  options.timeout = to_milliseconds(timeout);
  options.scratch_bytes = scratch_bytes;
  options.sums = sums;
  options.library = library;
  std::optional<GroupUse> use;
  if (control != nullptr) options.control = &*use.emplace(*control);
  std::unique_ptr<distributed::NcclGroup> made;
  {
    const ReleasedGil released;
    made = new_group(context, options);
  }
  return std::make_shared<NcclRank>(std::move(made), std::move(control), std::move(owner));
}

}  // namespace

void bind_nccl_groups(nb::module_& m) {
  bind_enum<distributed::NcclSums>(m);
  nb::class_<NcclRank, Group>(
      m, "NcclGroup",
      "A rank of a group of GPUs over NCCL, from folio.nccl. Operations are enqueued on their "
      "stream, wait for nothing on the host, and may be captured by a CUDA graph. Such graphs are "
      "destroyed before the group.")
      .def(
          "watch",
          [](NcclRank& self, nb::object stream) {
            const std::vector<Array> none;
            const Stream queue = to_stream(stream, self.device, {&none});
            const GroupUse use(self);
            const ReleasedGil released;
            self.nccl->watch(queue);
          },
          nb::arg("stream") = nb::none(),
          "After a graph was launched: what the stream has is watched, as operations outside graphs are. What the "
          "device "
          "has not finished when the timeout is over makes the group fail, and ends the operations.")
      .def(
          "check",
          [](NcclRank& self) {
            const GroupUse use(self);
            self.nccl->check();
          },
          "Raises Error with UNAVAILABLE if the group has failed. Waits for nothing: to be called once a step.");
  m.attr("_has_nccl") = kBuilt;
  m.def(
      "_nccl_unique_id",
      [](const std::string& library) {
        const NcclUniqueId id = new_id(library);
        return nb::bytes(id.data(), id.size());
      },
      nb::arg("library"));
  m.def("_make_nccl_group", &make_group, nb::arg("context"), nb::kw_only(), nb::arg("id").none(), nb::arg("rank"),
        nb::arg("size"), nb::arg("communicator").none(), nb::arg("control").none(), nb::arg("timeout"),
        nb::arg("scratch_bytes"), nb::arg("sums"), nb::arg("library"), nb::arg("owner").none());
}

}  // namespace folio::python
