// What the ranks of a group must have in common of divided queries, and how they find that they have not.
#include <bit>
#include <cmath>

#include "core/error.hpp"
#include "distributed/pcp_run.hpp"

namespace folio::inline v0::distributed {

uint64_t digest_of(const PcpConfig& config) {
  const AttentionConfig& attention = config.attention;
  const GraphBounds bounds = config.bounds.value_or(GraphBounds{});
  return Digest()
      .add(config.bounds.has_value())
      .add(attention.num_q_heads)
      .add(attention.num_kv_heads)
      .add(attention.head_dim_qk)
      .add(attention.head_dim_v)
      .add(attention.q)
      .add(attention.kv)
      .add(attention.ragged_kv)
      .add(attention.kv_format)
      .add(attention.page_size)
      .add(attention.mask)
      .add(attention.window_left)
      .add(attention.window_right)
      .add(attention.attention_chunk)
      .add(attention.features.bits)
      .add(attention.determinism)
      .add(config.interleave)
      .add(config.exchange)
      .add(bounds.max_requests)
      .add(bounds.max_tokens)
      .add(bounds.max_q_len)
      .add(bounds.max_kv_len)
      .value();
}

bool is_per_request(const Scale& scale) {
  return scale.granularity == ScaleGranularity::kPerRequest ||
         scale.granularity == ScaleGranularity::kPerRequestAndHead;
}

float scale_of(const Scale& scale, int64_t request, int32_t head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerHead: return scale.data[head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + head];
    default: return scale.data[0];
  }
}

namespace {

/// Of its values, one for every KV head, of every request where they differ.
uint64_t digest_of(const PcpState& state, const PcpPlan& plan, const Scale& scale) {
  Digest digest;
  const int32_t requests = is_per_request(scale) ? plan.num_requests : 1;
  for (int32_t i = 0; i < requests; ++i) {
    if (is_per_request(scale) && state.q_len[static_cast<size_t>(i)] == 0) continue;  // it has no scale
    for (int32_t h = 0; h < state.attention().num_kv_heads; ++h) {
      digest.add(std::bit_cast<uint32_t>(scale_of(scale, i, h)));
    }
  }
  return digest.value();
}

uint64_t digest_of(const float* values, int64_t count) {
  Digest digest;
  for (int64_t i = 0; i < count; ++i) digest.add(std::bit_cast<uint32_t>(values[i]));
  return digest.value();
}

}  // namespace

PcpHeader header_of(const PcpState& state, const PcpPlan& plan, const PcpArgs& args) {
  const AttentionConfig& config = state.attention();
  PcpHeader header;
  header.digest = plan.digest;
  const float by_default = 1.0f / std::sqrt(static_cast<float>(config.head_dim_qk));
  header.sm_scale = args.sm_scale == 0.0f ? by_default : args.sm_scale;
  header.logits_soft_cap = args.logits_soft_cap;
  if (args.alibi_slopes != nullptr) header.slopes = digest_of(args.alibi_slopes, config.num_q_heads);
  header.q_scale = digest_of(state, plan, args.q_scale);
  if (plan.exchange != PcpExchange::kPassKv) return header;
  header.k_scale = digest_of(state, plan, args.k_scale);
  header.v_scale = digest_of(state, plan, args.v_scale);
  return header;
}

void check_header(const PcpHeader& mine, const PcpHeader& theirs, int32_t r, int32_t own) {
  core::require(theirs.digest == mine.digest, "rank ", r,
                " of the group runs another batch or configuration than rank ", own);
  const auto require_same = [&](const char* name, bool same) {
    core::require(same, name, " of rank ", r, " of the group is not that of rank ", own, "; all ranks give the same");
  };
  require_same("sm_scale", theirs.sm_scale == mine.sm_scale);
  require_same("logits_soft_cap", theirs.logits_soft_cap == mine.logits_soft_cap);
  require_same("alibi_slopes", theirs.slopes == mine.slopes);
  require_same("q_scale", theirs.q_scale == mine.q_scale);
  require_same("k_scale", theirs.k_scale == mine.k_scale);
  require_same("v_scale", theirs.v_scale == mine.v_scale);
}

}  // namespace folio::inline v0::distributed
