#pragma once

#include <cstdint>
#include <memory>

#include "backends/token_pool/device/draft_indices_rule.hpp"
#include "backends/token_pool/device/draft_tree_rule.hpp"
#include "backends/token_pool/device/graph_inputs_rule.hpp"
#include "backends/token_pool/device/kv_lists_rule.hpp"
#include "backends/token_pool/device/request_table_rule.hpp"
#include "backends/token_pool/device/tree_mask_rule.hpp"
#include "backends/token_pool/host_stages.hpp"
#include "folio/types/device.hpp"

/// What the backend asks of a GPU besides attention and memory. Implemented in cuda/; in builds without a toolkit every
/// call throws kUnavailable.
namespace folio::inline v0::backends::token_pool::gpu {

/// The lists of a wrapper; what it cannot list is in the job's report.
void build_lists(int32_t device, const ListsJob& job, Stream stream);

/// create_kv_indices of `num_requests`, from arrays on the device.
void create_kv_indices(int32_t device, const KvIndicesJob& job, int32_t num_requests, ListReport* report,
                       Stream stream);

/// Draft branches, and trees of drafts: what a job cannot have is in the report.
void generate_draft_kv_indices(int32_t device, const DraftIndicesJob& job, ListReport* report, Stream stream);
void select_draft_tokens(int32_t device, const DraftSelectionJob& job, ListReport* report, Stream stream);
void write_parents(int32_t device, const DraftParentsJob& job, ListReport* report, Stream stream);
void write_nodes(int32_t device, const DraftNodesJob& job, ListReport* report, Stream stream);
void fill_tree_mask(int32_t device, const TreeMaskJob& job, ListReport* report, Stream stream);

/// New tokens' slots into the request table.
void write_request_table(int32_t device, const TableWriteJob& job, ListReport* report, Stream stream);

/// A captured batch's inputs, padding included.
void fill_graph_inputs(int32_t device, const GraphInputsJob& job, Stream stream);

std::unique_ptr<HostStages> make_stages(int32_t device);

/// A report that the host reads and kernels write.
std::shared_ptr<ListReport> make_report(int32_t device);

}  // namespace folio::inline v0::backends::token_pool::gpu
