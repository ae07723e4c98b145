#include "rank_arguments.hpp"

namespace folio::python {
namespace {

void require_entries(const std::optional<Array>& vector, int64_t wanted) {
  if (!vector || vector->size(0) == wanted) return;
  refuse(vector->name + " has " + std::to_string(vector->size(0)) + " entries; there are " + std::to_string(wanted) +
         " q heads");
}

void keep_scale(DeviceCall& call, const ScaleArg& scale, const std::string& name, int64_t heads, int64_t requests) {
  require_extent(scale, name, heads, requests);
  if (scale.array) call.keep({*scale.array});
}

}  // namespace

RankArguments make_rank_arguments(const GivenRankArguments& given, const Cache& cache, const Table& table) {
  RankArguments args;
  args.q = to_tensor(given.q, "q", Access::kRead);
  args.out = to_tensor(given.out, "out", Access::kWrite);
  args.cache = cache;
  args.table = table;
  if (!given.k.is_none()) args.k = to_tensor(given.k, "k", Access::kRead);
  if (!given.v.is_none()) args.v = to_tensor(given.v, "v", Access::kRead);
  args.lse = to_lse(given.lse, "lse");
  if (!given.alibi_slopes.is_none()) args.alibi_slopes = borrow_float32(given.alibi_slopes, "alibi_slopes");
  if (!given.sinks.is_none()) args.sinks = borrow_float32(given.sinks, "sinks");
  args.k_scale = to_scale(given.k_scale, "k_scale");
  args.v_scale = to_scale(given.v_scale, "v_scale");
  args.q_scale = to_scale(given.q_scale, "q_scale");
  args.out_scale = to_scale(given.out_scale, "out_scale");
  args.sm_scale = given.sm_scale;
  args.logits_soft_cap = given.logits_soft_cap;
  return args;
}

std::string text_of(const char* name, const RankArguments& args) {
  return std::string("<folio.") + name + ": q " + shape_text(args.q.array) + ", out " + shape_text(args.out.array) +
         ">";
}

void check_rank_arguments(DeviceCall& call, const RankArguments& given, const AttentionConfig& config,
                          const RankExtents& extents) {
  call.keep({given.q.array, given.out.array});
  for (const std::optional<Tensor>* tensor : {&given.k, &given.v}) {
    if (*tensor) call.keep({(*tensor)->array});
  }
  const int64_t kv_heads = config.num_kv_heads;
  keep_scale(call, given.k_scale, "k_scale", kv_heads, extents.requests);
  keep_scale(call, given.v_scale, "v_scale", kv_heads, extents.requests);
  keep_scale(call, given.q_scale, "q_scale", kv_heads, extents.requests);
  keep_scale(call, given.out_scale, "out_scale", kv_heads, extents.requests);
  if (given.lse.array) {
    call.keep({*given.lse.array});
    if (given.lse.array->size(0) < extents.rows || given.lse.array->size(1) != extents.out_heads) {
      refuse("lse is " + shape_text(*given.lse.array) + "; it must have " + std::to_string(extents.rows) +
             " rows or more of " + std::to_string(extents.out_heads) + " heads");
    }
  }
  require_entries(given.alibi_slopes, extents.query_heads);
  require_entries(given.sinks, extents.out_heads);
  for (const auto* vector : {&given.alibi_slopes, &given.sinks}) {
    if (*vector) call.keep({**vector});
  }
}

}  // namespace folio::python
