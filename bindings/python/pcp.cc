#include <string>
#include <utility>
#include <vector>

#include "fields.hpp"
#include "folio/distributed.hpp"
#include "rank_attention.hpp"

template <>
struct folio::python::Names<folio::distributed::PcpExchange> {
  static constexpr const char* kName = "PcpExchange";
  static constexpr const char* kDoc = "What travels so that queries on one rank meet older keys on another.";
  static constexpr Enumerator<distributed::PcpExchange> kAll[] = {
      {"AUTOMATIC", distributed::PcpExchange::kAutomatic,
       "By the bytes of each step; batch-invariant and within bounds PASS_Q."},
      {"PASS_Q", distributed::PcpExchange::kPassQ,
       "Queries go to all ranks, which attend over their shards; partial results come back."},
      {"PASS_KV", distributed::PcpExchange::kPassKv,
       "Older keys and values go to all ranks, which attend with their own queries."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::PcpExchange);

/// Attention whose queries are divided over the ranks of a group (prefill context parallelism).
namespace folio::python {
namespace {

using distributed::PcpConfig;
using distributed::PcpExchange;

void bind_pcp_tokens(nb::module_& m) {
  m.def(
      "pcp_local_cu_q",
      [](nb::object cu_q, int32_t world, int32_t rank) {
        const std::vector<int32_t> whole = to_int32s(cu_q, "cu_q");
        std::vector<int32_t> local(whole.size());
        distributed::pcp_local_cu_q(whole, world, rank, local);
        return to_numpy(std::move(local));
      },
      nb::arg("cu_q"), nb::arg("world"), nb::arg("rank"),
      "A rank's batch: its tokens of each request, int32 like cu_q.");
  m.def(
      "max_pcp_tokens",
      [](nb::object cu_q, int32_t world) { return distributed::max_pcp_tokens(to_int32s(cu_q, "cu_q"), world); },
      nb::arg("cu_q"), nb::arg("world"), "The most tokens that any rank has.");
  m.def(
      "pcp_tokens",
      [](nb::object cu_q, int32_t world, int32_t rank) {
        const std::vector<int32_t> whole = to_int32s(cu_q, "cu_q");
        std::vector<int32_t> local(whole.size());
        distributed::pcp_local_cu_q(whole, world, rank, local);
        std::vector<int32_t> tokens(static_cast<size_t>(local.back()));
        distributed::pcp_tokens(whole, world, rank, tokens);
        return to_numpy(std::move(tokens));
      },
      nb::arg("cu_q"), nb::arg("world"), nb::arg("rank"),
      "Which tokens of the batch a rank has, int32: of each request a chunk from the front and its mirror from the "
      "back.");
  m.def(
      "pcp_token_rows",
      [](nb::object cu_q, int32_t world, int32_t rows_per_rank) {
        const std::vector<int32_t> whole = to_int32s(cu_q, "cu_q");
        std::vector<int32_t> rows(whole.empty() ? 0 : static_cast<size_t>(std::max(whole.back(), 0)));
        distributed::pcp_token_rows(whole, world, rows_per_rank, rows);
        return to_numpy(std::move(rows));
      },
      nb::arg("cu_q"), nb::arg("world"), nb::arg("rows_per_rank"),
      "Where each token of the batch stands in an all-gather of the ranks' tensors of rows_per_rank rows, int32.");
}

/// PcpBatch, with its lengths.
struct PcpLengths {
  std::vector<int32_t> cu_q, seq_lens;
  bool all_visible = false;
  int32_t max_tokens = 0;

  static std::vector<Array> arrays() { return {}; }  // lengths are the host's
  distributed::PcpBatch batch() const {
    distributed::PcpBatch batch;
    batch.num_requests = static_cast<int32_t>(seq_lens.size());
    batch.cu_q = cu_q.data();
    batch.seq_lens = seq_lens.data();
    batch.all_visible = all_visible;
    batch.max_tokens = max_tokens;
    return batch;
  }
};

/// A class of its own in Python, since k and v are needed.
struct PcpArguments : RankArguments {};

/// For rank_attention.hpp.
struct PcpKind {
  using Attention = distributed::PcpAttention;
  using Config = PcpConfig;
  using Batch = distributed::PcpBatch;
  using Plan = distributed::PcpPlan;
  using Args = distributed::PcpArgs;
  using Lengths = PcpLengths;
  using Arguments = PcpArguments;
  static constexpr const char* kName = "PcpAttention";
  static constexpr const char* kPlanName = "PcpPlan";

  static const AttentionOp& kernel_op(const Attention& attention) { return attention.shard_op(); }
  static int32_t known_requests(const Batch& batch) { return batch.num_requests; }
  static int32_t cached_tokens(const Batch& batch, const Plan& plan, int32_t r) {
    const int32_t q_len = batch.cu_q[r + 1] - batch.cu_q[r];
    return plan.exchange == PcpExchange::kAutomatic || q_len == 0 ? 0 : batch.seq_lens[r] - q_len;
  }
  static RankExtents extents(const Config& config, const Plan& plan, int32_t /*world*/) {
    const int64_t heads = config.attention.num_q_heads;
    return {plan.num_requests, config.bounds ? plan.max_tokens : plan.num_tokens, heads, heads};
  }
};

using Pcp = RankAttention<PcpKind>;
using PcpStep = RankPlan<PcpKind>;

void bind_pcp_values(nb::module_& m) {
  using C = PcpConfig;
  fields_of<C>(
      "PcpConfig", "What attention over divided queries is prepared for; equal on all ranks. Its fields:",
      required("attention", &C::attention, "an AttentionConfig: every rank has all heads"),
      field("interleave", &C::interleave,
            "neighbouring tokens of the cache that lie on one rank; divides the page size"),
      field("exchange", &C::exchange, "how older tokens are reached, a PcpExchange"),
      field("force_kernel", &C::force_kernel, "as PrepareOptions.force_kernel"),
      field("num_workers", &C::num_workers, "as PrepareOptions.num_workers"),
      field("bounds", &C::bounds,
            "GraphBounds or None; given: plan refuses larger batches, older tokens are reached by PASS_Q, and on "
            "a GPU runs may be captured"))
      .bind(m);
  nb::class_<PcpLengths>(
      m, "PcpBatch",
      "One step's undivided batch, the same on all ranks: cu_q [requests + 1], new tokens over all ranks, and seq_lens "
      "[requests], tokens over all ranks, the new ones included; lists or int arrays of the host, copied. all_visible: "
      "this batch has neither mask nor window. max_tokens, with PcpConfig.bounds: rows of every rank's tensors, "
      "padding "
      "included; 0: max_pcp_tokens.")
      .def(
          "__init__",
          [](PcpLengths* self, nb::object cu_q, nb::object seq_lens, bool all_visible, int32_t max_tokens) {
            PcpLengths made{to_int32s(cu_q, "cu_q"), to_int32s(seq_lens, "seq_lens"), all_visible, max_tokens};
            if (made.cu_q.size() != made.seq_lens.size() + 1) {
              refuse("cu_q has " + std::to_string(made.cu_q.size()) + " entries, seq_lens " +
                     std::to_string(made.seq_lens.size()) + "; the first has one more");
            }
            new (self) PcpLengths(std::move(made));
          },
          nb::arg("cu_q"), nb::arg("seq_lens"), nb::kw_only(), nb::arg("all_visible") = false,
          nb::arg("max_tokens") = 0)
      .def_prop_ro("num_requests", [](const PcpLengths& self) { return self.seq_lens.size(); })
      .def_ro("all_visible", &PcpLengths::all_visible)
      .def_ro("max_tokens", &PcpLengths::max_tokens)
      .def("__repr__", [](const PcpLengths& self) {
        return "<folio.PcpBatch: " + std::to_string(self.seq_lens.size()) + " requests>";
      });
  bind_rank_plan<PcpKind>(m, "A step's plan on this rank, valid until its PcpAttention plans again.",
                          "Of this rank (pcp_tokens).")
      .def_prop_ro(
          "max_tokens", [](const PcpStep& self) { return self.plan.max_tokens; },
          "The most of any rank, or PcpBatch.max_tokens.")
      .def_prop_ro(
          "exchange", [](const PcpStep& self) { return self.plan.exchange; },
          "How older tokens are reached; AUTOMATIC where there are none.")
      .def_prop_ro(
          "pass_q_bytes", [](const PcpStep& self) { return self.plan.pass_q_bytes; },
          "What one rank would send to each other one for the older tokens, a layer, by PASS_Q.")
      .def_prop_ro(
          "pass_kv_bytes", [](const PcpStep& self) { return self.plan.pass_kv_bytes; }, "Likewise by PASS_KV.");
}

void bind_pcp_args(nb::module_& m) {
  nb::class_<PcpArguments>(
      m, "PcpArgs",
      "One layer's arguments on this rank, rows in the order of pcp_tokens: q [tokens.., "
      "num_q_heads, head_dim_qk], k and v [tokens.., num_kv_heads, ...] of the same tokens, out and "
      "lse; cache and table of this rank's shard of all tokens; the rest as AttentionArgs.")
      .def(
          "__init__",
          [](PcpArguments* self, nb::object q, nb::object k, nb::object v, nb::object out, const Cache& cache,
             const Table& table, nb::object lse, float sm_scale, float logits_soft_cap, nb::object alibi_slopes,
             nb::object sinks, nb::object k_scale, nb::object v_scale, nb::object q_scale, nb::object out_scale) {
            new (self) PcpArguments{make_rank_arguments({q, out, k, v, lse, alibi_slopes, sinks, k_scale, v_scale,
                                                         q_scale, out_scale, sm_scale, logits_soft_cap},
                                                        cache, table)};
          },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("cache"), nb::arg("table"), nb::kw_only(),
          nb::arg("lse") = nb::none(), nb::arg("sm_scale") = 0.0f, nb::arg("logits_soft_cap") = 0.0f,
          nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("k_scale") = 1.0f,
          nb::arg("v_scale") = 1.0f, nb::arg("q_scale") = 1.0f, nb::arg("out_scale") = 1.0f)
      .def("__repr__", [](const PcpArguments& self) { return text_of("PcpArgs", self); });
}

void bind_pcp_attention(nb::module_& m) {
  bind_rank_attention<PcpKind>(
      m, {"Attention whose queries are divided over the ranks of a group (prefill context parallelism), over a cache "
          "that is divided like DcpAttention's; one for each group of layers with one window. For one thread at a "
          "time: another is refused.",
          "Bytes of workspace that a run of this plan needs; None: of any plan within PcpConfig.bounds.",
          "One layer. Collective where the batch has any new token. On a CPU page ids are checked too. Raises "
          "InvalidArgument before anything is sent or written, and on a CPU where the ranks run different batches; "
          "Error with STALE_PLAN, WORKSPACE_TOO_SMALL, and UNAVAILABLE where the group fails."})
      .def_prop_ro(
          "fresh_op", [](const Pcp& self) { return AttentionOp(self.attention.fresh_op()); }, nb::rv_policy::move,
          "Over the new tokens.")
      .def_prop_ro(
          "shard_op", [](const Pcp& self) { return AttentionOp(self.attention.shard_op()); }, nb::rv_policy::move,
          "Over this rank's shard: PASS_Q.")
      .def_prop_ro(
          "gathered_op", [](const Pcp& self) { return AttentionOp(self.attention.gathered_op()); }, nb::rv_policy::move,
          "Over the gathered shards: PASS_KV.");
}

}  // namespace

void bind_pcp(nb::module_& m) {
  bind_enum<PcpExchange>(m);
  bind_pcp_tokens(m);
  bind_pcp_values(m);
  bind_pcp_args(m);
  bind_pcp_attention(m);
}

}  // namespace folio::python
