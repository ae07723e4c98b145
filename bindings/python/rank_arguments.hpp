#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "device_call.hpp"

/// What one layer of attention over ranks is given: DcpArgs and PcpArgs.
namespace folio::python {

/// As it was given, checked for what the C++ API takes by address alone.
struct RankArguments {
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

/// Python's arguments; k, v, lse, alibi_slopes and sinks may be None.
struct GivenRankArguments {
  nb::handle q, out, k, v, lse, alibi_slopes, sinks, k_scale, v_scale, q_scale, out_scale;
  float sm_scale = 0.0f;
  float logits_soft_cap = 0.0f;
};
RankArguments make_rank_arguments(const GivenRankArguments& given, const Cache& cache, const Table& table);

/// As repr.hpp's, of the class `name`.
std::string text_of(const char* name, const RankArguments& args);

/// What arrays must have at least, or, of heads, exactly.
struct RankExtents {
  int64_t requests = 0;
  int64_t rows = 0;
  int64_t out_heads = 0;
  int64_t query_heads = 0;  ///< that have slopes
};
void check_rank_arguments(DeviceCall& call, const RankArguments& given, const AttentionConfig& config,
                          const RankExtents& extents);

/// All of `args` but the cache and its table.
template <typename Args>
void read_rank_arguments(DeviceCall& call, const RankArguments& given, const AttentionConfig& config,
                         const RankExtents& extents, Args& args) {
  check_rank_arguments(call, given, config, extents);
  args.q = given.q.view;
  args.out = given.out.view;
  if (given.k) args.k = given.k->view;
  if (given.v) args.v = given.v->view;
  args.k_scale = given.k_scale.scale;
  args.v_scale = given.v_scale.scale;
  args.q_scale = given.q_scale.scale;
  args.out_scale = given.out_scale.scale;
  args.lse = given.lse.view;
  args.sm_scale = given.sm_scale;
  args.logits_soft_cap = given.logits_soft_cap;
  if (given.alibi_slopes) args.alibi_slopes = static_cast<const float*>(given.alibi_slopes->data);
  if (given.sinks) args.sinks = static_cast<const float*>(given.sinks->data);
}

}  // namespace folio::python
