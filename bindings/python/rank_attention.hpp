#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device_call.hpp"
#include "gil.hpp"
#include "plan.hpp"
#include "process_group.hpp"
#include "rank_arguments.hpp"

/// What DcpAttention and PcpAttention have alike. A `Kind` says what differs:
///   Attention, Config, Batch, Plan, Args   the C++ types
///   Lengths                 the Python batch: `batch()`, and `arrays()` that the stream may still have to read
///   Arguments               the Python arguments: RankArguments, or a class derived from it
///   kName, kPlanName        the classes' names in Python
///   kernel_op(attention)    whose kernel the representation names
///   known_requests(batch)   requests whose lengths the host can read
///   cached_tokens(batch, plan, r)       tokens of request r that the plan reads from the caches of all ranks
///   extents(config, plan, world)        what arguments must have
namespace folio::python {

/// For one thread at a time, with its group.
template <typename Kind>
struct RankAttention {
  RankAttention(const Context& made_for, std::shared_ptr<Group> shared, ProcessGroup& used,
                const typename Kind::Config& config)
      : context(made_for), group(std::move(shared)), attention(made_for, used, config) {}
  Context context;
  std::shared_ptr<Group> group;
  typename Kind::Attention attention;
  std::mutex mutex;
};

/// `cached_len`: tokens of each request that this rank's cache has and the plan reads; of lengths on a GPU nothing is
/// known. `lengths`: arrays that the stream may still have to read.
template <typename Kind>
struct RankPlan {
  typename Kind::Plan plan;
  std::shared_ptr<RankAttention<Kind>> attention;
  std::vector<int32_t> cached_len;
  std::vector<Array> lengths;
};

template <typename Kind>
RankPlan<Kind> plan_ranks(const std::shared_ptr<RankAttention<Kind>>& self, const typename Kind::Lengths& lengths,
                          nb::handle stream) {
  const typename Kind::Batch batch = lengths.batch();
  RankPlan<Kind> made{{}, self, {}, lengths.arrays()};
  require_on(self->context.device(), made.lengths);
  const Stream queue = to_stream(stream, self->context.device(), {&made.lengths});
  const GroupUse use(*self->group);
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  made.plan = self->attention.plan(batch, queue);
  const int32_t interleave = self->attention.config().interleave;
  for (int32_t r = 0; r < Kind::known_requests(batch); ++r) {
    const int32_t tokens = Kind::cached_tokens(batch, made.plan, r);
    made.cached_len.push_back(tokens > 0 ? shard_len(tokens, self->group->size, self->group->rank, interleave) : 0);
  }
  return made;
}

/// `kLayer`: Attention's run, or another function that takes the same.
template <typename Kind, auto kLayer = &Kind::Attention::run>
void run_layer(const std::shared_ptr<RankAttention<Kind>>& self, const RankPlan<Kind>& made,
               const typename Kind::Arguments& given, const Scratch& workspace, nb::handle stream) {
  if (made.attention != self) refuse(std::string("plan is of another ") + Kind::kName);
  const typename Kind::Config& config = self->attention.config();
  DeviceCall call(self->context);
  typename Kind::Args args;
  read_rank_arguments(call, given, config.attention, Kind::extents(config, made.plan, self->group->size), args);
  args.cache = call.cache(given.cache, "cache", Access::kRead);
  const OwnTable table(call, given.table, made.cached_len, config.attention.page_size);
  if (call.on_cpu()) validate(table.view, made.cached_len, config.attention.page_size, args.cache.num_pages);
  args.table = table.view;
  require_on(self->context.device(), workspace);
  const Stream queue = call.stream(stream);
  const GroupUse use(*self->group);
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  (self->attention.*kLayer)(made.plan, args, workspace.view, queue);
}

template <typename Kind>
size_t workspace_size(const std::shared_ptr<RankAttention<Kind>>& self, const RankPlan<Kind>* made) {
  if (made != nullptr && made->attention != self) refuse(std::string("plan is of another ") + Kind::kName);
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  return made != nullptr ? self->attention.workspace_size(made->plan) : self->attention.workspace_size();
}

template <typename Kind>
nb::class_<RankPlan<Kind>> bind_rank_plan(nb::module_& m, const char* doc, const char* tokens_doc) {
  using Made = RankPlan<Kind>;
  return nb::class_<Made>(m, Kind::kPlanName, doc)
      .def_prop_ro("num_requests", [](const Made& self) { return self.plan.num_requests; })
      .def_prop_ro(
          "num_tokens", [](const Made& self) { return self.plan.num_tokens; }, tokens_doc)
      .def_prop_ro(
          "digest", [](const Made& self) { return self.plan.digest; }, "Of batch and configuration; run compares it.")
      .def("__repr__", [](const Made& self) {
        return std::string("<folio.") + Kind::kPlanName + ": " + std::to_string(self.plan.num_requests) +
               " requests, " + std::to_string(self.plan.num_tokens) + " tokens>";
      });
}

/// What the class, `workspace_size` and `run` say of themselves.
struct RankAttentionDocs {
  const char* attention;
  const char* workspace_size;
  const char* run;
};

template <typename Kind>
nb::class_<RankAttention<Kind>> bind_rank_attention(nb::module_& m, const RankAttentionDocs& docs) {
  using Ranks = RankAttention<Kind>;
  return nb::class_<Ranks>(m, Kind::kName, docs.attention)
      .def(
          "__init__",
          [](Ranks* self, const Context& context, const std::shared_ptr<Group>& group,
             const typename Kind::Config& config) {
            const GroupUse use(*group);
            const ReleasedGil released;  // ranks may wait for one another
            new (self) Ranks(context, group, *use, config);
          },
          nb::arg("context"), nb::arg("group"), nb::arg("config"))
      .def("plan", &plan_ranks<Kind>, nb::arg("batch"), nb::arg("stream") = nb::none(),
           "Plans one step. Raises InvalidArgument with the request's number. On a GPU collective: ranks compare their "
           "batches, and all raise where one differs or raises.")
      .def("workspace_size", &workspace_size<Kind>, nb::arg("plan") = nb::none(), docs.workspace_size)
      .def("run", &run_layer<Kind>, nb::arg("plan"), nb::arg("args"), nb::arg("workspace"),
           nb::arg("stream") = nb::none(), docs.run)
      .def_prop_ro(
          "config", [](const Ranks& self) { return typename Kind::Config(self.attention.config()); },
          nb::rv_policy::move)
      .def_prop_ro("group", [](const Ranks& self) { return self.group; })
      .def("__repr__", [](const Ranks& self) {
        return std::string("<folio.") + Kind::kName + ": rank " + std::to_string(self.group->rank) + " of " +
               std::to_string(self.group->size) + ", " + Kind::kernel_op(self.attention).kernel_name() + ">";
      });
}

}  // namespace folio::python
