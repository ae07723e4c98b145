#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "folio/distributed.hpp"
#include "rank_attention.hpp"
#include "rank_names.hpp"

/// Attention over a KV cache that is divided over the ranks of a group (decode context parallelism).
namespace folio::python {
namespace {

using distributed::DcpCombine;
using distributed::DcpConfig;

void bind_dcp_choices(nb::module_& m) {
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
  distributed::DcpBatch batch() const {
    distributed::DcpBatch batch;
    batch.where = where();
    batch.num_requests = num_requests;
    batch.num_tokens = num_tokens;
    batch.cu_q = cu_q.view().data();
    batch.seq_lens = seq_lens.view().data();
    batch.num_cached = num_cached;
    batch.all_visible = all_visible;
    batch.cross_attention = cross_attention;
    return batch;
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

/// For rank_attention.hpp.
struct DcpKind {
  using Attention = distributed::DcpAttention;
  using Config = DcpConfig;
  using Batch = distributed::DcpBatch;
  using Plan = distributed::DcpPlan;
  using Args = distributed::DcpArgs;
  using Lengths = DcpLengths;
  using Arguments = RankArguments;
  static constexpr const char* kName = "DcpAttention";
  static constexpr const char* kPlanName = "DcpPlan";

  static const AttentionOp& kernel_op(const Attention& attention) { return attention.cached_op(); }
  static int32_t known_requests(const Batch& batch) { return batch.where == Where::kHost ? batch.num_requests : 0; }
  static int32_t cached_tokens(const Batch& batch, const Plan& plan, int32_t r) {
    const int32_t q_len = batch.cu_q[r + 1] - batch.cu_q[r];
    if (!plan.cached.has_value() || q_len == 0) return 0;
    return r < batch.num_cached ? batch.seq_lens[r] : batch.seq_lens[r] - q_len;
  }
  static RankExtents extents(const Config& config, const Plan& plan, int32_t world) {
    const int64_t own_heads = config.attention.num_q_heads, all_heads = own_heads * world;
    return {plan.num_requests, plan.num_tokens, config.all_heads_out ? all_heads : own_heads,
            config.replicated_queries ? all_heads : own_heads};
  }
};

using Dcp = RankAttention<DcpKind>;
using DcpStep = RankPlan<DcpKind>;

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
               optional_dtype("partial_dtype", &C::partial_dtype,
                              "what partial results travel in: None, float32, or the output's dtype where that is "
                              "float16 or bfloat16, half the bytes"),
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
  bind_rank_plan<DcpKind>(m, "A step's plan on this rank, valid until its DcpAttention plans again.",
                          "Rows of the step.")
      .def_prop_ro(
          "reads_new_tokens", [](const DcpStep& self) { return self.plan.reads_new_tokens; },
          "Some request's new tokens are read from k and v.")
      .def_prop_ro(
          "over_peer_memory", [](const DcpStep& self) { return self.plan.over_peer_memory; },
          "Queries and partial results go over peer memory.");
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
            new (self) RankArguments(make_rank_arguments({q, out, k, v, lse, alibi_slopes, sinks, k_scale, v_scale,
                                                          q_scale, out_scale, sm_scale, logits_soft_cap},
                                                         cache, table));
          },
          nb::arg("q"), nb::arg("out"), nb::arg("cache"), nb::arg("table"), nb::kw_only(), nb::arg("k") = nb::none(),
          nb::arg("v") = nb::none(), nb::arg("lse") = nb::none(), nb::arg("sm_scale") = 0.0f,
          nb::arg("logits_soft_cap") = 0.0f, nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(),
          nb::arg("k_scale") = 1.0f, nb::arg("v_scale") = 1.0f, nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f)
      .def("__repr__", [](const RankArguments& self) { return text_of("DcpArgs", self); });
}

void bind_dcp_attention(nb::module_& m) {
  bind_rank_attention<DcpKind>(
      m,
      {"Attention of this rank's heads over the KV of all ranks of a group (decode context parallelism); one "
       "for each group of layers with one window. For one thread at a time: another is refused.",
       "Bytes of workspace that a run of this plan needs; None: of any plan within DcpConfig.bounds.",
       "One layer. Collective where the group has more than one rank and any request has keys in the cache. On a CPU "
       "page ids are checked too. Raises InvalidArgument before anything is sent or written, and on a CPU where the "
       "ranks run different batches; Error with STALE_PLAN, WORKSPACE_TOO_SMALL, and UNAVAILABLE where the group "
       "fails."})
      .def(
          "start", &run_layer<DcpKind, &distributed::DcpAttention::start>, nb::arg("plan"), nb::arg("args"),
          nb::arg("workspace"), nb::arg("stream") = nb::none(),
          "run in two steps: on a GPU what is enqueued on the stream between start and finish runs beside the exchange "
          "of partial results. One layer at a time; workspace and arrays stay as they are until finish.")
      .def(
          "finish",
          [](const std::shared_ptr<Dcp>& self, nb::handle stream) {
            const Stream queue = DeviceCall(self->context).stream(stream);
            const ReleasedGil released;
            const std::lock_guard lock(self->mutex);
            self->attention.finish(queue);
          },
          nb::arg("stream") = nb::none(),
          "The stream waits for the started layer's results. Raises InvalidArgument if none was started.")
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
      .def_prop_ro(
          "cached_op", [](const Dcp& self) { return AttentionOp(self.attention.cached_op()); }, nb::rv_policy::move,
          "Over the shard: the heads of all ranks, once.")
      .def_prop_ro(
          "fresh_op", [](const Dcp& self) { return AttentionOp(self.attention.fresh_op()); }, nb::rv_policy::move,
          "Over the new tokens: this rank's heads.");
}

}  // namespace

void bind_dcp(nb::module_& m) {
  bind_enum<DcpCombine>(m);
  bind_enum<distributed::DcpTransport>(m);
  bind_dcp_choices(m);
  bind_dcp_values(m);
  bind_dcp_args(m);
  bind_dcp_attention(m);
}

}  // namespace folio::python
