#include "folio/distributed.hpp"

#include <limits>
#include <string>
#include <utility>

#include "device_call.hpp"
#include "gil.hpp"
#include "plan.hpp"
#include "process_group.hpp"

/// A KV cache that is divided over the ranks of a group: whose tokens lie where, and how partial results are combined.
namespace folio::python {
namespace {

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

}  // namespace

void bind_distributed(nb::module_& m) {
  bind_context_parallel(m);
  bind_combines(m);
  bind_dcp(m);
  bind_pcp(m);
}

}  // namespace folio::python
