#include "folio/distributed.hpp"

#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device_call.hpp"
#include "fields.hpp"
#include "folio/types/error.hpp"
#include "gil.hpp"
#include "plan.hpp"
#include "process_group.hpp"
#include "rank_arguments.hpp"
#include "rank_names.hpp"

/// Attention over a KV cache that is divided over the ranks of a group, and its parts.
namespace folio::python {
namespace {

using distributed::DcpCombine;
using distributed::DcpConfig;
using distributed::ProcessGroup;

void bind_context_parallel(nb::module_& m) {
  m.def(
      "get_dcp_local_seq_lens",
      [](nb::object seq_lens, int32_t world, std::optional<int32_t> rank, int32_t interleave) {
        const std::vector<int32_t> lens = to_int32s(seq_lens, "seq_lens");
        if (rank) {
          std::vector<int32_t> local(lens.size());
          distributed::get_dcp_local_seq_lens(lens, world, *rank, interleave, local);
          return nb::cast(to_numpy(std::move(local)));
        }
        constexpr int32_t kMostRanks = 1 << 16;
        if (world < 1 || world > kMostRanks) refuse("world is " + std::to_string(world) + "; it must be in [1, 65536]");
        std::vector<int32_t> local(lens.size() * static_cast<size_t>(world));
        distributed::get_dcp_local_seq_lens(lens, world, interleave, local);
        return nb::cast(to_numpy(std::move(local), {lens.size(), static_cast<size_t>(world)}));
      },
      nb::arg("seq_lens"), nb::arg("world"), nb::arg("rank") = nb::none(), nb::arg("interleave") = 1,
      "Each length's tokens on one rank, int32 [requests]; without a rank on all of them, int32 [requests, world].");
  m.def("max_dcp_context_len", &distributed::max_dcp_context_len, nb::arg("max_len"), nb::arg("world"),
        nb::arg("interleave"), "No rank holds more tokens of a request of at most max_len.");
  m.def(
      "dcp_combine_from_name",
      [](const std::string& name, int32_t world) { return distributed::dcp_combine_from_name(name, world); },
      nb::arg("name"), nb::arg("world"), "'ag_rs' and 'a2a', the values of vLLM's dcp_comm_backend.");
  m.def(
      "dcp_transport_from_name", [](const std::string& name) { return distributed::dcp_transport_from_name(name); },
      nb::arg("name"), "'auto', 'group' and 'peer'.");
  m.def("use_replicated_queries", &distributed::use_replicated_queries, nb::arg("wish").none(), nb::arg("combine"),
        nb::arg("world"), nb::arg("prefill_world"),
        "Whether an engine should let every rank compute the queries of all ranks' heads.");
  m.def("lse_lanes", &distributed::lse_lanes, nb::arg("dtype"),
        "Elements of a row's dtype that its float32 LSE takes behind the row's values.");
  m.def("combine_workspace_size", &distributed::combine_workspace_size, nb::arg("world"), nb::arg("num_tokens"),
        nb::arg("num_heads"), nb::arg("head_dim"), "Bytes of workspace that any combine of such partials needs.");
}

/// EmptyRows, as they were given: read anew by every call.
struct Empty {
  nb::object local_seq_lens, query_start_loc;
};

distributed::EmptyRows read_empty(DeviceCall& call, const Empty* empty) {
  if (empty == nullptr) return {};
  return {call.int32s(empty->local_seq_lens, "local_seq_lens"), call.int32s(empty->query_start_loc, "query_start_loc")};
}

using Combine = void (*)(const Context&, ProcessGroup&, const AttentionStateView&, TensorView, LseView, Workspace,
                         const distributed::EmptyRows&, Stream);

void def_combine(nb::module_& m, const char* name, Combine combine, const char* doc) {
  m.def(
      name,
      [combine](const Context& context, Group& group, const State& partial, nb::object out, nb::object lse,
                const Scratch& workspace, const Empty* empty, nb::object stream) {
        DeviceCall call(context);
        call.keep(partial.arrays);
        const TensorView target = call.tensor(out, "out", Access::kWrite);
        const Lse sums = to_lse(lse, "lse");
        if (sums.array) {
          call.keep({*sums.array});
          if (target.rank != 3 || sums.array->size(0) != target.shape[0] || sums.array->size(1) != target.shape[1]) {
            refuse("lse is " + shape_text(*sums.array) + "; it must have out's tokens and heads");
          }
        }
        require_on(context.device(), workspace);
        const distributed::EmptyRows rows = read_empty(call, empty);
        const Stream queue = call.stream(stream);
        const GroupUse use(group);
        const ReleasedGil released;
        combine(context, *use, partial.view, target, sums.view, workspace.view, rows, queue);
      },
      nb::arg("context"), nb::arg("group"), nb::arg("partial"), nb::arg("out"), nb::arg("lse").none(),
      nb::arg("workspace"), nb::arg("empty") = nb::none(), nb::arg("stream") = nb::none(), doc);
}

void bind_combines(nb::module_& m) {
  nb::class_<Empty>(m, "EmptyRows",
                    "Rows of a partial result that take part as empty ones: those of requests whose local_seq_lens, "
                    "int32 [requests], is 0, and those from query_start_loc[-1], int32 [requests + 1], on.")
      .def(
          "__init__",
          [](Empty* self, nb::object local_seq_lens, nb::object query_start_loc) {
            new (self) Empty{std::move(local_seq_lens), std::move(query_start_loc)};
          },
          nb::arg("local_seq_lens"), nb::arg("query_start_loc"))
      .def("__repr__", [](const Empty&) { return "<folio.EmptyRows>"; });
  m.def(
      "mask_empty_rows",
      [](const Context& context, const Empty& rows, nb::object lse, nb::object stream) {
        DeviceCall call(context);
        const Lse sums = to_lse(lse, "lse");
        if (!sums.array) refuse("lse is None; an array is needed");
        call.keep({*sums.array});
        const distributed::EmptyRows empty = read_empty(call, &rows);
        constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
        if (sums.array->size(0) > kMost || sums.array->size(1) > kMost) refuse("lse has too many rows");
        const Stream queue = call.stream(stream);
        const ReleasedGil released;
        distributed::mask_empty_rows(context, empty, static_cast<int32_t>(sums.array->size(0)),
                                     static_cast<int32_t>(sums.array->size(1)), sums.view, queue);
      },
      nb::arg("context"), nb::arg("rows"), nb::arg("lse"), nb::arg("stream") = nb::none(),
      "Sets the LSE [tokens, heads] of those rows to -infinity, in place.");
  def_combine(m, "cp_lse_ag_out_rs", &distributed::cp_lse_ag_out_rs,
              "Combines the partial results that the ranks have of the same queries over disjoint keys, by the rule of "
              "merge_state: LSEs are gathered, weighted outputs reduce-scattered. partial [tokens, H, head_dim], H the "
              "heads of all ranks; out [tokens, H / size, head_dim], lse likewise or None. A partial whose LSE is "
              "infinite or NaN is empty. Collective.");
  def_combine(m, "cp_lse_ag_out_ar", &distributed::cp_lse_ag_out_ar,
              "As cp_lse_ag_out_rs with an all-reduce: every rank gets all heads, out [tokens, H, head_dim].");
  def_combine(m, "dcp_a2a_lse_reduce", &distributed::dcp_a2a_lse_reduce, "As cp_lse_ag_out_rs with one all-to-all.");
}

/// DcpBatch, with its lengths: copied where they are the host's.
struct DcpLengths {
  Numbers<int32_t> cu_q, seq_lens;
  int32_t num_requests = 0;
  int32_t num_tokens = 0;  ///< on a GPU: what was given
  int32_t num_cached = 0;
  bool all_visible = false;
  bool cross_attention = false;

  Where where() const { return cu_q.on_device() ? Where::kDevice : Where::kHost; }
  std::vector<Array> arrays() const {
    if (!cu_q.on_device()) return {};
    return {*cu_q.array(), *seq_lens.array()};
  }
};

DcpLengths make_lengths(nb::handle cu_q, nb::handle seq_lens, std::optional<int32_t> num_tokens) {
  DcpLengths made;
  made.cu_q = int32_numbers(cu_q, "cu_q");
  made.seq_lens = int32_numbers(seq_lens, "seq_lens");
  const size_t entries = made.cu_q.view().size(), requests = made.seq_lens.view().size();
  if (entries != requests + 1) {
    refuse("cu_q has " + std::to_string(entries) + " entries, seq_lens " + std::to_string(requests) +
           "; the first has one more");
  }
  made.num_requests = static_cast<int32_t>(requests);
  if (made.cu_q.on_device() != made.seq_lens.on_device()) {
    refuse(std::string("cu_q lies on ") + (made.cu_q.on_device() ? "a GPU" : "the host") +
           ", seq_lens does not; a batch's lengths lie in one place");
  }
  if (made.where() == Where::kDevice && !num_tokens) refuse("num_tokens must be given where cu_q lies on a GPU");
  made.num_tokens = num_tokens.value_or(0);
  return made;
}

/// DcpAttention, for one thread at a time, with its group.
struct Dcp {
  Dcp(const Context& made_for, std::shared_ptr<Group> shared, ProcessGroup& used, const DcpConfig& config)
      : context(made_for), group(std::move(shared)), attention(made_for, used, config) {}
  Context context;
  std::shared_ptr<Group> group;
  distributed::DcpAttention attention;
  std::mutex mutex;
};

/// DcpPlan. `cached_len`: tokens of each request that this rank's cache has and the plan reads; of lengths on a GPU
/// nothing is known. `lengths`: arrays that the stream may still have to read.
struct DcpStep {
  distributed::DcpPlan plan;
  std::shared_ptr<Dcp> dcp;
  std::vector<int32_t> cached_len;
  std::vector<Array> lengths;
};

DcpStep plan(const std::shared_ptr<Dcp>& self, const DcpLengths& lengths, nb::handle stream) {
  distributed::DcpBatch batch;
  batch.where = lengths.where();
  batch.num_requests = lengths.num_requests;
  batch.num_tokens = lengths.num_tokens;
  batch.cu_q = lengths.cu_q.view().data();
  batch.seq_lens = lengths.seq_lens.view().data();
  batch.num_cached = lengths.num_cached;
  batch.all_visible = lengths.all_visible;
  batch.cross_attention = lengths.cross_attention;
  DcpStep step{{}, self, {}, lengths.arrays()};
  require_on(self->context.device(), step.lengths);
  const Stream queue = to_stream(stream, self->context.device(), {&step.lengths});
  const GroupUse use(*self->group);
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  step.plan = self->attention.plan(batch, queue);
  for (int32_t r = 0; r < batch.num_requests && batch.where == Where::kHost; ++r) {
    const int32_t q_len = batch.cu_q[r + 1] - batch.cu_q[r];
    const int32_t whole = r < batch.num_cached ? batch.seq_lens[r] : batch.seq_lens[r] - q_len;
    const bool read = step.plan.cached.has_value() && q_len > 0;
    step.cached_len.push_back(
        read ? shard_len(whole, self->group->size, self->group->rank, self->attention.config().interleave) : 0);
  }
  return step;
}

void run(const std::shared_ptr<Dcp>& self, const DcpStep& step, const RankArguments& given, const Scratch& workspace,
         nb::handle stream) {
  if (step.dcp != self) refuse("plan is of another DcpAttention");
  const DcpConfig& config = self->attention.config();
  const int64_t own_heads = config.attention.num_q_heads;
  const int64_t all_heads = own_heads * self->group->size;
  const int64_t out_heads = config.all_heads_out ? all_heads : own_heads;
  const int64_t requests = step.plan.num_requests;
  DeviceCall call(self->context);
  distributed::DcpArgs args;
  read_rank_arguments(call, given, config.attention,
                      {requests, step.plan.num_tokens, out_heads, config.replicated_queries ? all_heads : own_heads},
                      args);
  args.cache = call.cache(given.cache, "cache", Access::kRead);
  const OwnTable table(call, given.table, step.cached_len, config.attention.page_size);
  if (call.on_cpu()) validate(table.view, step.cached_len, config.attention.page_size, args.cache.num_pages);
  args.table = table.view;
  require_on(self->context.device(), workspace);
  const Stream queue = call.stream(stream);
  const GroupUse use(*self->group);
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  self->attention.run(step.plan, args, workspace.view, queue);
}

void bind_dcp_values(nb::module_& m) {
  using C = DcpConfig;
  fields_of<C>("DcpConfig", "What attention over a divided KV cache is prepared for; equal on all ranks. Its fields:",
               required("attention", &C::attention,
                        "an AttentionConfig: this rank's own q heads, and the KV heads that all ranks share"),
               field("interleave", &C::interleave, "neighbouring tokens that lie on one rank; divides the page size"),
               field("combine", &C::combine, "how partial results are combined, a DcpCombine"),
               field("replicated_queries", &C::replicated_queries, "every rank has the queries of all ranks' heads"),
               field("all_heads_out", &C::all_heads_out,
                     "every rank gets the results of all ranks' heads; needs replicated_queries"),
               field("transport", &C::transport, "by what ranks exchange, a DcpTransport"),
               field("force_kernel", &C::force_kernel, "as PrepareOptions.force_kernel"),
               field("num_workers", &C::num_workers, "as PrepareOptions.num_workers"),
               field("max_kv_splits", &C::max_kv_splits, "as PrepareOptions.max_kv_splits"),
               field("bounds", &C::bounds,
                     "GraphBounds or None; given: plan refuses larger batches, making the object is collective, and on "
                     "a GPU runs may be captured"))
      .bind(m);
  nb::class_<DcpLengths>(
      m, "DcpBatch",
      "One step's batch, the same on all ranks: cu_q [requests + 1], and seq_lens [requests], tokens "
      "over all ranks, the new ones included; lists or int arrays of the host, copied. On a GPU both may be int32 "
      "arrays there, with DcpConfig.bounds and num_tokens, the step's rows: they are read when the device comes to it, "
      "in a graph's replay again. The new tokens of the first num_cached requests are read from the cache, the others' "
      "from DcpArgs' k and v. "
      "all_visible: this batch has neither mask nor window. cross_attention: seq_lens are an encoder's, "
      "whose keys all lie in the cache; num_cached must count every request.")
      .def(
          "__init__",
          [](DcpLengths* self, nb::object cu_q, nb::object seq_lens, int32_t num_cached, bool all_visible,
             bool cross_attention, std::optional<int32_t> num_tokens) {
            DcpLengths made = make_lengths(cu_q, seq_lens, num_tokens);
            made.num_cached = num_cached;
            made.all_visible = all_visible;
            made.cross_attention = cross_attention;
            new (self) DcpLengths(std::move(made));
          },
          nb::arg("cu_q"), nb::arg("seq_lens"), nb::kw_only(), nb::arg("num_cached") = 0,
          nb::arg("all_visible") = false, nb::arg("cross_attention") = false, nb::arg("num_tokens") = nb::none())
      .def_ro("num_requests", &DcpLengths::num_requests)
      .def_prop_ro(
          "num_tokens",
          [](const DcpLengths& self) {
            return self.where() == Where::kHost ? self.cu_q.view().back() : self.num_tokens;
          },
          "Rows of the step.")
      .def_prop_ro("where", &DcpLengths::where, "Where the lengths lie, a Where.")
      .def_ro("num_cached", &DcpLengths::num_cached)
      .def_ro("all_visible", &DcpLengths::all_visible)
      .def_ro("cross_attention", &DcpLengths::cross_attention)
      .def("__repr__", [](const DcpLengths& self) {
        return "<folio.DcpBatch: " + std::to_string(self.num_requests) + " requests, " +
               std::to_string(self.num_cached) + " of them read from the cache>";
      });
  nb::class_<DcpStep>(m, "DcpPlan", "A step's plan on this rank, valid until its DcpAttention plans again.")
      .def_prop_ro("num_requests", [](const DcpStep& self) { return self.plan.num_requests; })
      .def_prop_ro("num_tokens", [](const DcpStep& self) { return self.plan.num_tokens; })
      .def_prop_ro(
          "reads_new_tokens", [](const DcpStep& self) { return self.plan.reads_new_tokens; },
          "Some request's new tokens are read from k and v.")
      .def_prop_ro(
          "over_peer_memory", [](const DcpStep& self) { return self.plan.over_peer_memory; },
          "Queries and partial results go over peer memory.")
      .def_prop_ro(
          "digest", [](const DcpStep& self) { return self.plan.digest; },
          "Of batch and configuration; run compares it.")
      .def("__repr__", [](const DcpStep& self) {
        return "<folio.DcpPlan: " + std::to_string(self.plan.num_requests) + " requests, " +
               std::to_string(self.plan.num_tokens) + " tokens>";
      });
}

void bind_dcp_args(nb::module_& m) {
  nb::class_<RankArguments>(
      m, "DcpArgs",
      "One layer's arguments on this rank. q [tokens.., num_q_heads, head_dim_qk], replicated: "
      "all ranks' heads; out and "
      "lse [tokens.., num_q_heads, ...], all_heads_out: all ranks' heads, and so sinks; cache and "
      "table of this rank's shard; k and v [tokens.., "
      "num_kv_heads, ...], the "
      "new tokens, where DcpPlan.reads_new_tokens; the rest as AttentionArgs.")
      .def(
          "__init__",
          [](RankArguments* self, nb::object q, nb::object out, const Cache& cache, const Table& table, nb::object k,
             nb::object v, nb::object lse, float sm_scale, float logits_soft_cap, nb::object alibi_slopes,
             nb::object sinks, nb::object k_scale, nb::object v_scale, nb::object q_scale, nb::object out_scale) {
            RankArguments args = make_rank_arguments(
                {q, out, k, v, lse, alibi_slopes, sinks, k_scale, v_scale, q_scale, out_scale}, cache, table);
            args.sm_scale = sm_scale;
            args.logits_soft_cap = logits_soft_cap;
            new (self) RankArguments(std::move(args));
          },
          nb::arg("q"), nb::arg("out"), nb::arg("cache"), nb::arg("table"), nb::kw_only(), nb::arg("k") = nb::none(),
          nb::arg("v") = nb::none(), nb::arg("lse") = nb::none(), nb::arg("sm_scale") = 0.0f,
          nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(),
          nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f, nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f)
      .def("__repr__", [](const RankArguments& self) {
        return "<folio.DcpArgs: q " + shape_text(self.q.array) + ", out " + shape_text(self.out.array) + ">";
      });
}

void bind_dcp(nb::module_& m) {
  nb::class_<Dcp>(
      m, "DcpAttention",
      "Attention of this rank's heads over the KV of all ranks of a group (decode context parallelism); one "
      "for each group of layers with one window. For one thread at a time: another is refused.")
      .def(
          "__init__",
          [](Dcp* self, const Context& context, const std::shared_ptr<Group>& group, const DcpConfig& config) {
            const GroupUse use(*group);
            const ReleasedGil released;  // with bounds ranks wait for one another
            new (self) Dcp(context, group, *use, config);
          },
          nb::arg("context"), nb::arg("group"), nb::arg("config"))
      .def("plan", &plan, nb::arg("batch"), nb::arg("stream") = nb::none(),
           "Plans one step. Raises InvalidArgument with the request's number. On a GPU collective: ranks compare their "
           "batches, and all raise where one differs or raises.")
      .def(
          "check",
          [](const std::shared_ptr<Dcp>& self) {
            const GroupUse use(*self->group);
            const ReleasedGil released;
            const std::lock_guard lock(self->mutex);
            self->attention.check();
          },
          "On a GPU, raises InvalidArgument where the device has found that ranks ran other scales; Error with "
          "UNAVAILABLE if the group has failed. Waits for nothing. plan begins with it.")
      .def(
          "workspace_size",
          [](const std::shared_ptr<Dcp>& self, const DcpStep* step) {
            if (step != nullptr && step->dcp != self) refuse("plan is of another DcpAttention");
            const ReleasedGil released;
            const std::lock_guard lock(self->mutex);
            return step != nullptr ? self->attention.workspace_size(step->plan) : self->attention.workspace_size();
          },
          nb::arg("plan") = nb::none(),
          "Bytes of workspace that a run of this plan needs; None: of any plan within DcpConfig.bounds.")
      .def(
          "run", &run, nb::arg("plan"), nb::arg("args"), nb::arg("workspace"), nb::arg("stream") = nb::none(),
          "One layer. Collective where the group has more than one rank and any request has keys in the cache. On a "
          "CPU "
          "page ids are checked too. Raises InvalidArgument before anything is sent or written, and on a CPU where the "
          "ranks "
          "run different batches; Error with STALE_PLAN, WORKSPACE_TOO_SMALL, and UNAVAILABLE where the group fails.")
      .def_prop_ro(
          "config", [](const Dcp& self) { return DcpConfig(self.attention.config()); }, nb::rv_policy::move)
      .def_prop_ro(
          "cached_op", [](const Dcp& self) { return AttentionOp(self.attention.cached_op()); }, nb::rv_policy::move,
          "Over the shard: the heads of all ranks, once.")
      .def_prop_ro(
          "fresh_op", [](const Dcp& self) { return AttentionOp(self.attention.fresh_op()); }, nb::rv_policy::move,
          "Over the new tokens: this rank's heads.")
      .def_prop_ro("group", [](const Dcp& self) { return self.group; })
      .def("__repr__", [](const Dcp& self) {
        return "<folio.DcpAttention: rank " + std::to_string(self.group->rank) + " of " +
               std::to_string(self.group->size) + ", " + self.attention.cached_op().kernel_name() + ">";
      });
}

}  // namespace

void bind_distributed(nb::module_& m) {
  bind_enum<DcpCombine>(m);
  bind_enum<distributed::DcpTransport>(m);
  bind_context_parallel(m);
  bind_combines(m);
  bind_dcp_values(m);
  bind_dcp_args(m);
  bind_dcp(m);
  bind_pcp(m);
}

}  // namespace folio::python
