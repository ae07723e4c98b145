#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "folio/types/ds_mla.hpp"
#include "folio/types/float_convert.hpp"
#include "testing/factors.hpp"
#include "testing/problem.hpp"

namespace folio::inline v0::verify {
namespace {

float round_to(DType dtype, float value) {
  std::array<unsigned char, 4> bytes{};
  store_from_float(bytes.data(), dtype, 0, value);
  return load_as_float(bytes.data(), dtype, 0);
}

std::vector<float> normals(Random& random, DType dtype, int64_t count, float deviation) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = round_to(dtype, deviation * random.normal());
  return values;
}

/// Far enough from 1, and from each other, that leaving one out or swapping two shows.
float pick_scale(Random& random) {
  return (random.one_in(2) ? 0.4f : 1.5f) * (1.0f + 0.5f * random.unit());
}

ScaleModel make_scale(ScalesLevel kind, Random& random, int32_t requests, int32_t kv_heads) {
  ScaleModel scale;
  scale.num_kv_heads = kv_heads;
  scale.in_memory = kind >= ScalesLevel::kTensor;
  int32_t count = 1;
  switch (kind) {
    case ScalesLevel::kNone: return scale;
    case ScalesLevel::kHost:
    case ScalesLevel::kTensor: break;
    case ScalesLevel::kHead:
      scale.granularity = ScaleGranularity::kPerHead;
      count = kv_heads;
      break;
    case ScalesLevel::kRequest:
      scale.granularity = ScaleGranularity::kPerRequest;
      count = requests;
      break;
    case ScalesLevel::kRequestAndHead:
      scale.granularity = ScaleGranularity::kPerRequestAndHead;
      scale.same_for_all_requests = random.one_in(3);
      count = scale.same_for_all_requests ? kv_heads : requests * kv_heads;
      break;
  }
  scale.values.clear();
  for (int32_t i = 0; i < count; ++i) scale.values.push_back(pick_scale(random));
  return scale;
}

void make_scales(const ConformanceCase& c, Random& random, Problem& problem) {
  const auto kind = level<ScalesLevel>(c, kScales);
  const auto requests = static_cast<int32_t>(problem.requests.size());
  const int32_t heads = problem.config.num_kv_heads;
  for (SegmentModel& segment : problem.segments) {
    segment.k_scale = make_scale(kind, random, requests, heads);
    segment.v_scale = make_scale(kind, random, requests, heads);
  }
  if (is_fp8(problem.config.q)) {  // per tensor or KV head
    const bool per_request = kind == ScalesLevel::kRequest || kind == ScalesLevel::kRequestAndHead;
    problem.q_scale = make_scale(per_request ? ScalesLevel::kHead : kind, random, requests, heads);
  }
  if (is_fp8(problem.config.out)) {  // small, so that outputs use the codes' range and a few saturate
    problem.out_scale = make_scale(std::min(kind, ScalesLevel::kTensor), random, requests, heads);
    if (kind != ScalesLevel::kNone) problem.out_scale.values[0] *= random.one_in(4) ? 0.004f : 0.05f;
  }
  if (problem.config.out == DType::kFloat4E2M1x2) {  // large, so that block scales use e4m3's range and a few saturate
    problem.out_scale = make_scale(std::min(kind, ScalesLevel::kTensor), random, requests, heads);
    if (kind != ScalesLevel::kNone) problem.out_scale.values[0] *= random.one_in(4) ? 3000.0f : 200.0f;
  }
}

/// Distinct random pages for every row; a row may begin with the full pages of the row before it, contents and all.
void make_pages(Random& random, const AttentionConfig& config, Problem& problem) {
  const int32_t page = config.page_size;
  int32_t next = 0;
  for (SegmentModel& segment : problem.segments) {
    if (segment.source != KvSource::kPaged) continue;
    for (size_t r = 0; r < segment.rows.size(); ++r) {
      KvRowModel& row = segment.rows[r];
      const int32_t needed = (row.kv_len + page - 1) / page;
      if (r > 0 && random.one_in(3)) {
        const KvRowModel& before = segment.rows[r - 1];
        const int32_t full = std::min(before.kv_len, row.kv_len) / page;
        const int32_t shared = full == 0 ? 0 : random.between(1, full);
        row.pages.assign(before.pages.begin(), before.pages.begin() + shared);
        const auto copy = [&](const std::vector<float>& from, std::vector<float>& to, int32_t dim) {
          std::copy_n(from.begin(), int64_t{shared} * page * config.num_kv_heads * dim, to.begin());
        };
        copy(before.k, row.k, config.head_dim_qk);
        copy(before.v, row.v, config.head_dim_v);
        copy(before.k_token_scales, row.k_token_scales, before.k_token_scales.empty() ? 0 : 1);
        copy(before.v_token_scales, row.v_token_scales, before.v_token_scales.empty() ? 0 : 1);
        if (!row.block_scales.empty()) {
          std::copy_n(before.block_scales.begin(), int64_t{shared} * page * kDsMlaBlocks, row.block_scales.begin());
        }
      }
      while (static_cast<int32_t>(row.pages.size()) < needed) row.pages.push_back(next++);
    }
  }
  problem.num_pages = next + random.between(0, 3) + (next == 0 ? 1 : 0);  // the rest belongs to nobody
  std::vector<int32_t> place(static_cast<size_t>(problem.num_pages));
  std::iota(place.begin(), place.end(), 0);
  for (size_t i = place.size(); i > 1; --i)
    std::swap(place[i - 1], place[static_cast<size_t>(random.below(static_cast<int32_t>(i)))]);
  for (SegmentModel& segment : problem.segments) {
    for (KvRowModel& row : segment.rows) {
      for (int32_t& id : row.pages) id = place[static_cast<size_t>(id)];
    }
  }
}

/// V as the first components of K's heads, from `offset` on.
void alias_v(const AttentionConfig& config, int32_t offset, KvRowModel& row) {
  for (int64_t h = 0; h < int64_t{row.kv_len} * config.num_kv_heads; ++h) {
    std::copy_n(row.k.begin() + h * config.head_dim_qk + offset, config.head_dim_v,
                row.v.begin() + h * config.head_dim_v);
  }
}

/// Rows of fp8_ds_mla. Scales have so few bits that a float has the product with an e4m3 value. They grow from token to
/// token, or the other way round, far beyond float16's range, and what is stored shrinks as much. Some rows are tiny.
void make_ds_mla(Random& random, KvRowModel& row) {
  constexpr float kDeviation = 100.0f;  // e4m3 goes to 448
  constexpr int32_t kMostBits = 16;
  constexpr int32_t kTokensOfBit = 12;
  const float size = random.one_in(4) ? 0x1p-24f : 1.0f;
  const bool grows = random.one_in(2);
  row.k.clear();
  for (int32_t token = 0; token < row.kv_len; ++token) {
    const int32_t from_end = grows ? token : row.kv_len - 1 - token;
    const auto factor = static_cast<float>(1 << std::min(from_end / kTokensOfBit, kMostBits));
    for (int32_t block = 0; block < kDsMlaBlocks; ++block) {
      const auto mantissa = static_cast<float>(random.between(1 << 11, 1 << 12));
      row.block_scales.push_back(mantissa * factor * size * (random.one_in(4) ? 0x1p-18f : 0x1p-19f));
      for (const float value : normals(random, DType::kFloat8E4M3, kDsMlaBlockDim, kDeviation / factor)) {
        row.k.push_back(value * row.block_scales.back());
      }
    }
    const std::vector<float> rope = normals(random, DType::kBFloat16, kDsMlaRopeDim, 1.0f);
    row.k.insert(row.k.end(), rope.begin(), rope.end());
  }
}

/// Keys or values of int8 tokens, [heads, dim], and their scales. Scales have so few bits that a float has the product
/// with a stored value; some are far from the others, and some are 0.
void make_int8(Random& random, int64_t heads, int64_t dim, std::vector<float>& values, std::vector<float>& scales) {
  constexpr float kDeviation = 40.0f;  // int8 goes to 127
  values.clear();
  for (int64_t head = 0; head < heads; ++head) {
    const auto mantissa = static_cast<float>(random.between(1 << 11, 1 << 12));
    const float size = random.one_in(16) ? 0.0f : random.one_in(6) ? 0x1p-24f : random.one_in(6) ? 0x1p-15f : 0x1p-17f;
    scales.push_back(mantissa * size);
    for (const float value : normals(random, DType::kInt8, dim, kDeviation)) values.push_back(value * scales.back());
  }
}

void make_kv(const ConformanceCase& c, Random& random, Problem& problem) {
  const AttentionConfig& config = problem.config;
  const bool alias = level<FormatLevel>(c, kFormat) == FormatLevel::kAlias;
  problem.alias_offset = alias && random.one_in(2) ? config.head_dim_qk - config.head_dim_v : 0;
  for (SegmentModel& segment : problem.segments) {
    const bool paged = segment.source == KvSource::kPaged;
    const DType dtype = paged ? config.kv : config.ragged_kv;
    for (KvRowModel& row : segment.rows) {
      const int64_t heads = int64_t{row.kv_len} * config.num_kv_heads;
      row.k = normals(random, dtype, heads * config.head_dim_qk, 1.0f);
      row.v = normals(random, dtype, heads * config.head_dim_v, 1.0f);
      const bool ds_mla = paged && config.kv_format == KvFormat::kFp8DsMla;
      if (ds_mla) make_ds_mla(random, row);
      if (dtype == DType::kInt8) {
        make_int8(random, heads, config.head_dim_qk, row.k, row.k_token_scales);
        make_int8(random, heads, config.head_dim_v, row.v, row.v_token_scales);
        if (alias) row.v_token_scales = row.k_token_scales;
      }
      if (ds_mla || (alias && paged)) alias_v(config, problem.alias_offset, row);
    }
  }
  make_pages(random, config, problem);
}

/// Whether query `i` of a request sees column `j` of its custom mask. Masks are random bits, or those of a tree of
/// drafted tokens behind tokens that all see, causal, or a band: kernels have paths for what all or no rows see.
bool sees_column(size_t request, const RequestModel& model, int32_t i, int32_t j, bool bit) {
  const int32_t before = model.mask_columns - model.q_len;
  switch ((request + static_cast<size_t>(model.mask_columns)) % 4) {
    case 0: return bit;
    case 1: return bit || j < before;
    case 2: return j <= before + i;
    default: return std::abs(j - before - i) < std::max(model.mask_columns / 2, 2);
  }
}

void make_masks(Random& random, Problem& problem) {
  for (size_t r = 0; r < problem.requests.size(); ++r) {
    RequestModel& request = problem.requests[r];
    const int32_t keys = problem.num_keys(r);
    request.mask_columns = keys;
    if (problem.mask_scope == CustomMaskScope::kTail) {
      request.mask_columns = random.one_in(2) ? std::min(keys, request.q_len) : random.between(0, keys);
    }
    request.mask.resize(static_cast<size_t>(request.q_len) * static_cast<size_t>(request.mask_columns));
    for (int32_t i = 0; i < request.q_len; ++i) {
      const bool nothing = random.one_in(9);
      for (int32_t j = 0; j < request.mask_columns; ++j) {
        const bool bit = !nothing && random.below(10) < 6;
        request.mask[static_cast<size_t>(int64_t{i} * request.mask_columns + j)] = sees_column(r, request, i, j, bit);
      }
    }
  }
}

}  // namespace

float ScaleModel::at(int32_t request, int32_t kv_head) const {
  switch (granularity) {
    case ScaleGranularity::kPerTensor: return values[0];
    case ScaleGranularity::kPerHead: return values[static_cast<size_t>(kv_head)];
    case ScaleGranularity::kPerRequest: return values[static_cast<size_t>(request)];
    case ScaleGranularity::kPerRequestAndHead: break;
  }
  const int64_t row = same_for_all_requests ? 0 : request;
  return values[static_cast<size_t>(row * num_kv_heads + kv_head)];
}

void make_values(const ConformanceCase& c, Random random, Problem& problem) {
  const AttentionConfig& config = problem.config;
  // Logits of a deviation near 2: some keys matter far more than others, none decides alone.
  for (RequestModel& request : problem.requests) {
    request.q = normals(random, config.q, int64_t{request.q_len} * config.num_q_heads * config.head_dim_qk, 2.0f);
  }
  make_kv(c, random, problem);
  make_scales(c, random, problem);
  // 0 stands for 1 / sqrt(head_dim_qk).
  problem.sm_scale =
      random.one_in(2) ? 0.0f : (0.5f + random.unit()) / std::sqrt(static_cast<float>(config.head_dim_qk));
  if (is_on(c, kSoftCap)) problem.logits_soft_cap = random.one_in(2) ? 30.0f : 1.5f + 2.0f * random.unit();
  if (is_on(c, kAlibi)) {
    for (int32_t h = 0; h < config.num_q_heads; ++h) {
      // Most heads see a few tokens far; the last may be pushed the other way.
      const float slope =
          std::exp2(-static_cast<float>(h + 1) * 4.0f / static_cast<float>(config.num_q_heads)) * random.unit();
      problem.alibi_slopes.push_back(h == 2 ? -0.01f : slope);
    }
  }
  if (is_on(c, kSinks)) {
    for (int32_t h = 0; h < config.num_q_heads; ++h) problem.sinks.push_back(2.0f * random.normal());
    if (random.one_in(4)) problem.sinks[0] = -std::numeric_limits<float>::infinity();  // a sink that weighs nothing
  }
  if (is_on(c, kRope)) {
    problem.rope = {random.one_in(2) ? 1e4f : 100.0f, 0.5f + 2.0f * random.unit()};
  }
  const auto mask = level<MaskLevel>(c, kMask);
  if (mask == MaskLevel::kCustomAll || mask == MaskLevel::kCustomTail) {
    problem.mask_scope = mask == MaskLevel::kCustomTail ? CustomMaskScope::kTail : CustomMaskScope::kAll;
    make_masks(random, problem);
  }
}

Problem make_problem(const ConformanceCase& c) {
  Problem problem;
  Random random(c.seed);
  make_shape(c, random.fork(1), problem);
  make_values(c, random.fork(2), problem);
  make_rules(c, random.fork(3), problem);
  return problem;
}

}  // namespace folio::inline v0::verify
