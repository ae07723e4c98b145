// What the ranks of a group must have in common, and how they find that they have not.
#include <atomic>
#include <bit>
#include <cmath>

#include "attention/cache_args.hpp"
#include "core/error.hpp"
#include "distributed/dcp_state.hpp"

namespace folio::inline v0::distributed {

using kernels::cuda::GatherHeader;
using kernels::cuda::HeaderFault;
using kernels::cuda::QScales;

uint64_t digest_of(const DcpConfig& config) {
  const AttentionConfig& attention = config.attention;
  Digest digest;
  digest.add(attention.num_q_heads)
      .add(attention.num_kv_heads)
      .add(attention.head_dim_qk)
      .add(attention.head_dim_v)
      .add(attention.q)
      .add(attention.mask)
      .add(attention.window_left)
      .add(attention.window_right)
      .add(attention.attention_chunk)
      .add(attention.features.bits)
      .add(config.interleave)
      .add(config.combine)
      .add(config.replicated_queries)
      .add(config.all_heads_out)
      .add(config.transport)
      .add(config.partial_dtype)
      .add(config.bounds.has_value());
  if (!config.bounds) return digest.value();
  const GraphBounds& bounds = *config.bounds;
  return digest.add(bounds.max_requests).add(bounds.max_tokens).add(bounds.max_q_len).add(bounds.max_kv_len).value();
}

QScales q_scales_of(const DcpState& state, const DcpPlan& plan, const DcpArgs& args) {
  const Scale& scale = args.q_scale;
  QScales scales;
  if (scale.data == nullptr) return scales;
  const bool of_requests =
      scale.granularity == ScaleGranularity::kPerRequest || scale.granularity == ScaleGranularity::kPerRequestAndHead;
  const bool of_heads =
      scale.granularity == ScaleGranularity::kPerHead || scale.granularity == ScaleGranularity::kPerRequestAndHead;
  scales.data = scale.data;
  scales.rows = of_requests ? plan.num_requests : 1;
  scales.columns = of_heads ? state.config.attention.num_kv_heads : 1;
  scales.row_stride = of_requests ? (of_heads ? scale.request_stride : 1) : 0;
  scales.granularity = scale.granularity;
  if (of_requests) scales.cu_q = state.gpu() != nullptr ? state.device.indptr : state.indptr.data();
  return scales;
}

GatherHeader header_of(const DcpState& state, const DcpPlan& plan, const DcpArgs& args) {
  GatherHeader header;
  header.digest = plan.digest;
  const float by_default = 1.0f / std::sqrt(static_cast<float>(state.config.attention.head_dim_qk));
  header.sm_scale = args.sm_scale == 0.0f ? by_default : args.sm_scale;
  header.logits_soft_cap = args.logits_soft_cap;
  const QScales scales = q_scales_of(state, plan, args);
  if (scales.data == nullptr) {
    header.q_scale = args.q_scale.value;
    header.q_scales = QScales::term_of(header.q_scale, 0);
  } else if (state.gpu() == nullptr) {
    header.q_scale = scales.data[0];
    header.q_scales = scales.begin();
    for (int64_t i = 0; i < scales.count(); ++i) header.q_scales += scales.term(i);
  }
  return header;
}

void check_header(const GatherHeader& mine, const GatherHeader& theirs, int32_t r, int32_t own, const char* when) {
  core::require(theirs.digest == mine.digest, when, "rank ", r,
                " of the group runs another batch or configuration than rank ", own);
  const auto require_same = [&](const char* name, bool same, float other, float value) {
    core::require(same, when, name, " is ", other, " on rank ", r, " of the group and ", value, " on rank ", own,
                  "; all ranks give the same");
  };
  require_same("sm_scale", theirs.sm_scale == mine.sm_scale, theirs.sm_scale, mine.sm_scale);
  require_same("logits_soft_cap", theirs.logits_soft_cap == mine.logits_soft_cap, theirs.logits_soft_cap,
               mine.logits_soft_cap);
  if (theirs.q_scales == mine.q_scales) return;
  require_same("q_scale", theirs.q_scale == mine.q_scale, theirs.q_scale, mine.q_scale);
  core::fail(ErrorCode::kInvalidArgument, when, "q_scale has other values on rank ", r, " of the group than on rank ",
             own, " behind the first, which is ", mine.q_scale,
             " on both, or another granularity; all ranks give the same");
}

namespace {

void report(HeaderFault& fault, int32_t own, const char* when) {
  const std::atomic_ref rank(fault.rank);
  const int32_t found = rank.load(std::memory_order_acquire);
  if (found < 0) return;
  const GatherHeader mine = fault.mine, theirs = fault.theirs;  // the device writes them again only once forgotten
  rank.store(-1, std::memory_order_release);
  check_header(mine, theirs, found, own, when);
}

}  // namespace

void report(DcpState& state) {
  if (state.status == nullptr) return;
  if (state.peers.memory != nullptr) state.peers.memory->report(*state.group);
  report(state.status->plan, state.group->rank(), "an earlier plan from device lengths: ");
  report(state.status->run, state.group->rank(), "an earlier run: ");
  check_plans(state.cached_buffer);
  check_plans(state.fresh_buffer);
}

void check_finished(const DcpState& state) {
  core::require(!state.started, "a layer was started and is not finished: call DcpAttention::finish first");
}

void check_capture(const DcpState& state, bool capturing) {
  core::require(!capturing || state.group->size() == 1 || state.group->enqueues(),
                "the stream is captured, and the group's operations wait on the host: graphs need a group whose "
                "ProcessGroup::enqueues is true");
}

void check_rows(const char* name, const ConstTensorView& tensor, DType dtype, int64_t rows, int64_t heads,
                int64_t dim) {
  attention::check_tensor(name, tensor, heads, dim);
  core::require(tensor.dtype == dtype, name, " is ", tensor.dtype, "; it must be ", dtype);
  core::require(tensor.shape[0] >= rows, name, " has ", tensor.shape[0], " tokens; the plan has ", rows);
  core::require(tensor.data != nullptr || rows == 0, name, " has no memory");
}

void agree(ProcessGroup& group, std::vector<RankRecord>& records, uint64_t digest, const std::exception_ptr& failure,
           const Agreement& what) {
  const int32_t own = group.rank();
  const RankRecord mine{digest, failure != nullptr ? uint64_t{1} : uint64_t{0}};
  try {
    group.all_gather_host(&mine, records.data(), sizeof(mine));
  } catch (const Error&) {
    if (failure == nullptr) throw;
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  for (int32_t r = 0; r < group.size(); ++r) {
    const RankRecord& theirs = records[static_cast<size_t>(r)];
    core::require(theirs.failed == 0, "rank ", r, " of the group ", what.undone);
    core::require(theirs.digest == digest, "rank ", r, " of the group ", what.differs, " than rank ", own);
  }
}

}  // namespace folio::inline v0::distributed
