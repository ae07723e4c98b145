#include "kernels/cpu/common/random_case_test_util.hpp"

namespace folio::inline v0::kernels::testing {
namespace {

/// A custom mask's columns follow the lengths.
void pick_tails(scheduler::testing::OwnedBatch& batch, std::mt19937& random) {
  for (size_t r = 0; r < batch.tail_len.size(); ++r) {
    int32_t keys = 0;
    for (const auto& segment : batch.segments) {
      if (segment.group_indptr.empty()) {
        keys += segment.kv_len[r];
        continue;
      }
      for (size_t g = 0; g + 1 < segment.group_indptr.size(); ++g) {
        const auto request = static_cast<int32_t>(r);
        if (segment.group_indptr[g] <= request && request < segment.group_indptr[g + 1]) keys += segment.kv_len[g];
      }
    }
    batch.tail_len[r] = std::uniform_int_distribution<int32_t>(0, keys)(random);
  }
}

}  // namespace

RandomCase random_case(std::mt19937& random) {
  const auto pick = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  const auto chance = [&](int32_t percent) { return pick(1, 100) <= percent; };
  scheduler::testing::Case planned = scheduler::testing::random_case(random);
  RandomCase out;
  AttentionConfig& config = out.config;
  config.num_q_heads = planned.config.num_q_heads;
  config.num_kv_heads = planned.config.num_kv_heads;
  config.mask = planned.config.mask;
  config.window_left = planned.config.window_left;
  config.window_right = planned.config.window_right;
  config.attention_chunk = planned.config.attention_chunk;
  config.span_window_left = planned.config.span_window_left;
  config.features = planned.config.features;
  config.determinism = planned.config.determinism;
  out.num_workers = planned.config.num_workers;
  out.batch = std::move(planned.batch);
  const int32_t stretch = pick(1, 12);  // over several tiles
  for (auto& segment : out.batch.segments) {
    for (int32_t& length : segment.kv_len) length = length * stretch - (length > 0 ? pick(0, stretch - 1) : 0);
  }
  if (config.window_left > 0) config.window_left *= stretch;
  if (config.window_right > 0) config.window_right *= stretch;
  if (config.span_window_left > 0) config.span_window_left *= stretch;
  config.attention_chunk *= stretch;
  for (int32_t& start : out.batch.kv_start) start *= stretch;
  for (int32_t& bound : out.batch.spans) bound *= stretch;
  const DType wide[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const DType all[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2};
  config.q = all[pick(0, 4)];
  config.kv = all[pick(0, 4)];
  config.ragged_kv = all[pick(0, 4)];
  config.out = chance(50) ? wide[pick(0, 2)] : all[pick(0, 4)];
  const int32_t dims[] = {8, 16, 24, 40, 64, 72, 128};
  config.head_dim_qk = dims[pick(0, 6)];
  config.head_dim_v = chance(60) ? config.head_dim_qk : dims[pick(0, 6)];
  config.page_size = chance(25) ? 1 : pick(2, 33);
  if (config.kv != DType::kFloat32 && chance(40)) {
    config.kv_format = KvFormat::kCpuPacked;
    config.page_size = 16 + 2 * pick(0, 8);
  }
  CaseOptions& options = out.options;
  options.dense_table = chance(50);
  options.hnd = chance(50);
  options.v_aliases_k = config.kv_format == KvFormat::kStrided && config.head_dim_v <= config.head_dim_qk && chance(20);
  options.soft_cap = chance(30);
  options.alibi = chance(30);
  options.sinks = chance(30);
  options.scales_per_head = chance(30);
  options.scales_per_request = chance(30);
  options.lse_base = chance(50) ? LseBase::kE : LseBase::k2;
  if (chance(30)) out.tile_rows = pick(1, 20);
  pick_tails(out.batch, random);
  return out;
}

}  // namespace folio::inline v0::kernels::testing
