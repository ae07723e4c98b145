#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool::gpu {

namespace {

[[noreturn]] void fail_unavailable(int32_t device) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", device,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace

void build_lists(int32_t device, const ListsJob& /*job*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void create_kv_indices(int32_t device, const KvIndicesJob& /*job*/, int32_t /*num_requests*/, ListReport* /*report*/,
                       Stream /*stream*/) {
  fail_unavailable(device);
}

void generate_draft_kv_indices(int32_t device, const DraftIndicesJob& /*job*/, ListReport* /*report*/,
                               Stream /*stream*/) {
  fail_unavailable(device);
}

void select_draft_tokens(int32_t device, const DraftSelectionJob& /*job*/, ListReport* /*report*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void write_parents(int32_t device, const DraftParentsJob& /*job*/, ListReport* /*report*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void write_nodes(int32_t device, const DraftNodesJob& /*job*/, ListReport* /*report*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void fill_tree_mask(int32_t device, const TreeMaskJob& /*job*/, ListReport* /*report*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void write_request_table(int32_t device, const TableWriteJob& /*job*/, ListReport* /*report*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void fill_graph_inputs(int32_t device, const GraphInputsJob& /*job*/, Stream /*stream*/) {
  fail_unavailable(device);
}

std::unique_ptr<HostStages> make_stages(int32_t device) {
  fail_unavailable(device);
}

std::shared_ptr<ListReport> make_report(int32_t device) {
  fail_unavailable(device);
}

}  // namespace folio::inline v0::backends::token_pool::gpu
