#pragma once

#include <cstdint>
#include <vector>

#include "folio/attention.hpp"
#include "folio/verify.hpp"
#include "testing/random.hpp"

namespace folio::inline v0::verify {

/// A quantisation scale: one value, or one a head, a request, or both.
struct ScaleModel {
  ScaleGranularity granularity = ScaleGranularity::kPerTensor;
  bool in_memory = false;              ///< given as an array
  bool same_for_all_requests = false;  ///< kPerRequestAndHead with a request stride of 0
  int32_t num_kv_heads = 1;
  std::vector<float> values{1.0f};  ///< [1], [heads], [requests] or [requests, heads]

  float at(int32_t request, int32_t kv_head) const;
};

/// The tokens that a row of a segment holds, as numbers.
struct KvRowModel {
  int32_t kv_len = 0;
  int32_t first_pos = 0;
  std::vector<int32_t> pages;         ///< paged: the pages of its tokens, in order
  std::vector<float> k;               ///< [kv_len, num_kv_heads, head_dim_qk], exactly as stored: scales not applied
  std::vector<float> v;               ///< [kv_len, num_kv_heads, head_dim_v]
  std::vector<float> block_scales;    ///< fp8_ds_mla: [kv_len, kDsMlaBlocks], which k and v have been multiplied by
  std::vector<float> k_token_scales;  ///< int8: [kv_len, num_kv_heads], which k has been multiplied by
  std::vector<float> v_token_scales;  ///< likewise; where V aliases K, those of K
};

struct SegmentModel {
  KvSource source = KvSource::kPaged;
  SegmentMask mask = SegmentMask::kAsConfig;
  KvShard shard;
  bool shared = false;  ///< rows are groups of neighbouring requests
  std::vector<KvRowModel> rows;
  std::vector<int32_t> row_of_request;  ///< [requests], -1 = none
  ScaleModel k_scale, v_scale;

  /// Global position of a row's local token.
  int32_t position(const KvRowModel& row, int32_t token) const;
};

/// Key positions that a query sees besides its mask's: [begin, end), none where begin >= end.
struct SpanModel {
  int32_t begin = 0;
  int32_t end = 0;
};

struct RequestModel {
  int32_t q_len = 0;
  int32_t q_first_pos = 0;
  int32_t kv_start = 0;          ///< Feature::kKvStart
  bool causal = true;            ///< Feature::kRequestCausal
  std::vector<SpanModel> spans;  ///< [q_len], Feature::kSpans
  std::vector<float> q;          ///< [q_len, num_q_heads, head_dim_qk], as stored
  int32_t mask_columns = 0;      ///< custom masks
  std::vector<uint8_t> mask;     ///< [q_len, mask_columns], 0 or 1
};

/// A case as numbers: what attention is of, before anything lies in memory.
struct Problem {
  AttentionConfig config;  ///< dtypes resolved
  PrepareOptions options;
  int64_t num_pages = 0;
  bool default_q_first_pos = false;  ///< q_first_pos is what a null array means
  CustomMaskScope mask_scope = CustomMaskScope::kAll;
  std::vector<RequestModel> requests;
  std::vector<SegmentModel> segments;
  float sm_scale = 0.0f;
  float logits_soft_cap = 0.0f;
  std::vector<float> alibi_slopes, sinks;  ///< empty = off
  RopeArgs rope;
  ScaleModel q_scale, out_scale;
  int32_t alias_offset = 0;  ///< V aliasing K: V's first component within K's head

  int32_t num_keys(size_t request) const;  ///< over all segments
};

/// The problem that a case describes; equal cases give equal problems. The case must be valid.
Problem make_problem(const ConformanceCase& conformance_case);

/// The parts of make_problem: lengths and positions (problem_shape.cc), masks as rules (problem_rules.cc), then values
/// (problem_values.cc).
void make_shape(const ConformanceCase& conformance_case, Random random, Problem& problem);
void make_rules(const ConformanceCase& conformance_case, Random random, Problem& problem);
void make_values(const ConformanceCase& conformance_case, Random random, Problem& problem);

}  // namespace folio::inline v0::verify
