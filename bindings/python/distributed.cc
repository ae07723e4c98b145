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

template <>
struct folio::python::Names<folio::distributed::DcpCombine> {
  static constexpr const char* kName = "DcpCombine";
  static constexpr const char* kDoc = "How ranks combine their partial results of all heads.";
  static constexpr Enumerator<distributed::DcpCombine> kAll[] = {
      {"ALL_GATHER_REDUCE_SCATTER", distributed::DcpCombine::kAllGatherReduceScatter,
       "LSEs are gathered, outputs reduce-scattered in float32: vLLM's ag_rs."},
      {"ALL_TO_ALL", distributed::DcpCombine::kAllToAll, "Every rank is sent its heads with their LSE: vLLM's a2a."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::DcpCombine);

template <>
struct folio::python::Names<folio::distributed::DcpTransport> {
  static constexpr const char* kName = "DcpTransport";
  static constexpr const char* kDoc = "By what ranks bring each other queries and partial results.";
  static constexpr Enumerator<distributed::DcpTransport> kAll[] = {
      {"AUTO", distributed::DcpTransport::kAuto,
       "Peer memory where it can be had, each rank has a GPU of its own and a layer's bytes are few; else GROUP."},
      {"GROUP", distributed::DcpTransport::kGroup, "The process group's operations."},
      {"PEER", distributed::DcpTransport::kPeer, "Peer memory: GPUs of one host store to each other's memory."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::DcpTransport);

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

/// DcpBatch, with its lengths.
struct DcpLengths {
  std::vector<int32_t> cu_q, seq_lens;
  int32_t num_cached = 0;
  bool all_visible = false;
  bool cross_attention = false;
};

/// DcpAttention, for one thread at a time, with its group.
struct Dcp {
  Dcp(const Context& made_for, std::shared_ptr<Group> shared, ProcessGroup& used, const DcpConfig& config)
      : context(made_for), group(std::move(shared)), attention(made_for, used, config) {}
  Context context;
  std::shared_ptr<Group> group;
  distributed::DcpAttention attention;
  std::mutex mutex;
};

/// DcpPlan. `cached_len`: tokens of each request that this rank's cache has and the plan reads.
struct DcpStep {
  distributed::DcpPlan plan;
  std::shared_ptr<Dcp> dcp;
  std::vector<int32_t> cached_len;
};

/// DcpArgs, as they were given, checked for what the C++ API takes by address alone.
struct DcpArguments {
  Tensor q, out;
  std::optional<Tensor> k, v;
  Cache cache;
  Table table;
  ScaleArg k_scale, v_scale, q_scale, out_scale;
  Lse lse;
  float sm_scale = 0.0f;
  float logits_soft_cap = 0.0f;
  std::optional<Array> alibi_slopes, sinks;
};

DcpStep plan(const std::shared_ptr<Dcp>& self, const DcpLengths& lengths, nb::handle stream) {
  distributed::DcpBatch batch;
  batch.num_requests = static_cast<int32_t>(lengths.seq_lens.size());
  batch.cu_q = lengths.cu_q.data();
  batch.seq_lens = lengths.seq_lens.data();
  batch.num_cached = lengths.num_cached;
  batch.all_visible = lengths.all_visible;
  batch.cross_attention = lengths.cross_attention;
  const std::vector<Array> none;
  const Stream queue = to_stream(stream, self->context.device(), {&none});
  const GroupUse use(*self->group);
  DcpStep step{{}, self, {}};
  const ReleasedGil released;
  const std::lock_guard lock(self->mutex);
  step.plan = self->attention.plan(batch, queue);
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const auto i = static_cast<size_t>(r);
    const int32_t q_len = lengths.cu_q[i + 1] - lengths.cu_q[i];
    const int32_t whole = r < batch.num_cached ? lengths.seq_lens[i] : lengths.seq_lens[i] - q_len;
    const bool read = step.plan.cached.has_value() && q_len > 0;
    step.cached_len.push_back(
        read ? shard_len(whole, self->group->size, self->group->rank, self->attention.config().interleave) : 0);
  }
  return step;
}

void require_entries(const std::optional<Array>& vector, int64_t wanted) {
  if (!vector || vector->size(0) == wanted) return;
  refuse(vector->name + " has " + std::to_string(vector->size(0)) + " entries; there are " + std::to_string(wanted) +
         " q heads");
}

Scale keep_scale(DeviceCall& call, const ScaleArg& scale, const std::string& name, int64_t heads, int64_t requests) {
  require_extent(scale, name, heads, requests);
  if (scale.array) call.keep({*scale.array});
  return scale.scale;
}

void run(const std::shared_ptr<Dcp>& self, const DcpStep& step, const DcpArguments& given, const Scratch& workspace,
         nb::handle stream) {
  if (step.dcp != self) refuse("plan is of another DcpAttention");
  const DcpConfig& config = self->attention.config();
  const int64_t own_heads = config.attention.num_q_heads;
  const int64_t out_heads = config.all_heads_out ? own_heads * self->group->size : own_heads;
  const int64_t kv_heads = config.attention.num_kv_heads;
  const int64_t requests = step.plan.num_requests;
  DeviceCall call(self->context);
  distributed::DcpArgs args;
  for (const Tensor* tensor : {&given.q, &given.out}) call.keep({tensor->array});
  args.q = given.q.view;
  args.out = given.out.view;
  if (given.k) {
    call.keep({given.k->array});
    args.k = given.k->view;
  }
  if (given.v) {
    call.keep({given.v->array});
    args.v = given.v->view;
  }
  args.cache = call.cache(given.cache, "cache", Access::kRead);
  const OwnTable table(call, given.table, step.cached_len, config.attention.page_size);
  if (call.on_cpu()) validate(table.view, step.cached_len, config.attention.page_size, args.cache.num_pages);
  args.table = table.view;
  args.k_scale = keep_scale(call, given.k_scale, "k_scale", kv_heads, requests);
  args.v_scale = keep_scale(call, given.v_scale, "v_scale", kv_heads, requests);
  args.q_scale = keep_scale(call, given.q_scale, "q_scale", kv_heads, requests);
  args.out_scale = keep_scale(call, given.out_scale, "out_scale", kv_heads, requests);
  if (given.lse.array) {
    call.keep({*given.lse.array});
    if (given.lse.array->size(0) < step.plan.num_tokens || given.lse.array->size(1) != out_heads) {
      refuse("lse is " + shape_text(*given.lse.array) + "; it must have " + std::to_string(step.plan.num_tokens) +
             " rows or more of " + std::to_string(out_heads) + " heads");
    }
  }
  args.lse = given.lse.view;
  args.sm_scale = given.sm_scale;
  args.logits_soft_cap = given.logits_soft_cap;
  require_entries(given.alibi_slopes, config.replicated_queries ? own_heads * self->group->size : own_heads);
  require_entries(given.sinks, out_heads);
  for (const auto* vector : {&given.alibi_slopes, &given.sinks}) {
    if (*vector) call.keep({**vector});
  }
  if (given.alibi_slopes) args.alibi_slopes = static_cast<const float*>(given.alibi_slopes->data);
  if (given.sinks) args.sinks = static_cast<const float*>(given.sinks->data);
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
      "over all ranks, the new ones included; lists or int arrays of the host, copied. The new tokens "
      "of the first num_cached requests are read from the cache, the others' from DcpArgs' k and v. "
      "all_visible: this batch has neither mask nor window. cross_attention: seq_lens are an encoder's, "
      "whose keys all lie in the cache; num_cached must count every request.")
      .def(
          "__init__",
          [](DcpLengths* self, nb::object cu_q, nb::object seq_lens, int32_t num_cached, bool all_visible,
             bool cross_attention) {
            DcpLengths made{to_int32s(cu_q, "cu_q"), to_int32s(seq_lens, "seq_lens"), num_cached, all_visible,
                            cross_attention};
            if (made.cu_q.size() != made.seq_lens.size() + 1) {
              refuse("cu_q has " + std::to_string(made.cu_q.size()) + " entries, seq_lens " +
                     std::to_string(made.seq_lens.size()) + "; the first has one more");
            }
            new (self) DcpLengths(std::move(made));
          },
          nb::arg("cu_q"), nb::arg("seq_lens"), nb::kw_only(), nb::arg("num_cached") = 0,
          nb::arg("all_visible") = false, nb::arg("cross_attention") = false)
      .def_prop_ro("num_requests", [](const DcpLengths& self) { return self.seq_lens.size(); })
      .def_ro("num_cached", &DcpLengths::num_cached)
      .def_ro("all_visible", &DcpLengths::all_visible)
      .def_ro("cross_attention", &DcpLengths::cross_attention)
      .def("__repr__", [](const DcpLengths& self) {
        return "<folio.DcpBatch: " + std::to_string(self.seq_lens.size()) + " requests, " +
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
  nb::class_<DcpArguments>(m, "DcpArgs",
                           "One layer's arguments on this rank. q [tokens.., num_q_heads, head_dim_qk], replicated: "
                           "all ranks' heads; out and "
                           "lse [tokens.., num_q_heads, ...], all_heads_out: all ranks' heads, and so sinks; cache and "
                           "table of this rank's shard; k and v [tokens.., "
                           "num_kv_heads, ...], the "
                           "new tokens, where DcpPlan.reads_new_tokens; the rest as AttentionArgs.")
      .def(
          "__init__",
          [](DcpArguments* self, nb::object q, nb::object out, const Cache& cache, const Table& table, nb::object k,
             nb::object v, nb::object lse, float sm_scale, float logits_soft_cap, nb::object alibi_slopes,
             nb::object sinks, nb::object k_scale, nb::object v_scale, nb::object q_scale, nb::object out_scale) {
            DcpArguments args;
            args.q = to_tensor(q, "q", Access::kRead);
            args.out = to_tensor(out, "out", Access::kWrite);
            args.cache = cache;
            args.table = table;
            if (!k.is_none()) args.k = to_tensor(k, "k", Access::kRead);
            if (!v.is_none()) args.v = to_tensor(v, "v", Access::kRead);
            args.lse = to_lse(lse, "lse");
            args.sm_scale = sm_scale;
            args.logits_soft_cap = logits_soft_cap;
            if (!alibi_slopes.is_none()) args.alibi_slopes = borrow_float32(alibi_slopes, "alibi_slopes");
            if (!sinks.is_none()) args.sinks = borrow_float32(sinks, "sinks");
            args.k_scale = to_scale(k_scale, "k_scale");
            args.v_scale = to_scale(v_scale, "v_scale");
            args.q_scale = to_scale(q_scale, "q_scale");
            args.out_scale = to_scale(out_scale, "out_scale");
            new (self) DcpArguments(std::move(args));
          },
          nb::arg("q"), nb::arg("out"), nb::arg("cache"), nb::arg("table"), nb::kw_only(), nb::arg("k") = nb::none(),
          nb::arg("v") = nb::none(), nb::arg("lse") = nb::none(), nb::arg("sm_scale") = 0.0f,
          nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(),
          nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f, nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f)
      .def("__repr__", [](const DcpArguments& self) {
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
          [](const std::shared_ptr<Dcp>& self, const DcpStep& step) {
            if (step.dcp != self) refuse("plan is of another DcpAttention");
            const ReleasedGil released;
            const std::lock_guard lock(self->mutex);
            return self->attention.workspace_size(step.plan);
          },
          nb::arg("plan"), "Bytes of workspace that a run of this plan needs.")
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
}

}  // namespace folio::python
