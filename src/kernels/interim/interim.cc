#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "folio/types/float_convert.hpp"
#include "kernels/attention_kernel.hpp"
#include "planner/partition_rule.hpp"

// A scalar stand-in, so that everything above the kernels can be built and tested; replaced by the generic kernel.
namespace folio::inline v0::kernels {
namespace {

using planner::PlanView;
using planner::SegmentLengths;
using planner::WorkItem;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

float scale_at(const Scale& s, int32_t request, int32_t head) {
  if (s.data == nullptr) return s.value;
  switch (s.granularity) {
    case ScaleGranularity::kPerTensor: return s.data[0];
    case ScaleGranularity::kPerHead: return s.data[head];
    case ScaleGranularity::kPerRequest: return s.data[request];
    case ScaleGranularity::kPerRequestAndHead: return s.data[request * s.request_stride + head];
  }
  return 1;
}

struct State {
  float* acc;
  float* m;
  float* l;
};

void fold(float* acc, float* m, float* l, const float* acc2, float m2, float l2, int32_t dim) {
  if (m2 == kEmpty) return;
  const float mx = std::max(*m, m2);
  const float a = *m == kEmpty ? 0.0f : std::exp(*m - mx);
  const float b = std::exp(m2 - mx);
  for (int32_t d = 0; d < dim; ++d) acc[d] = acc[d] * a + acc2[d] * b;
  *l = *l * a + l2 * b;
  *m = mx;
}

void finish(const AttentionParams& p, int32_t row, int32_t kv_head, const float* acc, float m, float l) {
  const AttentionArgs& args = *p.args;
  const int32_t token = row / p.group_size;
  const int32_t head = kv_head * p.group_size + row % p.group_size;
  float scale = 1;
  if (args.sinks != nullptr) {
    const float sink = args.sinks[head];
    const float mx = std::max(m, sink);
    scale = m == kEmpty ? 0.0f : std::exp(m - mx);
    l = l * scale + std::exp(sink - mx);
    m = mx;
  }
  const float out_scale = is_fp8(p.config->out) ? scale_at(args.out_scale, 0, 0) : 1.0f;
  const int64_t base = token * args.out.strides[0] + head * args.out.strides[1];
  for (int32_t d = 0; d < p.config->head_dim_v; ++d) {
    const float v = l == 0.0f ? 0.0f : acc[d] * scale / l;
    store_from_float(args.out.data, args.out.dtype, base + d, v / out_scale);
  }
  if (args.lse.data != nullptr) {
    float lse = l == 0.0f ? kEmpty : m + std::log(l);
    if (args.lse.base == LseBase::k2) lse *= 1.44269504f;
    args.lse.data[token * args.lse.token_stride + head * args.lse.head_stride] = lse;
  }
}

struct Row {
  int64_t k, v;
  int32_t v_step;
};

void accumulate(const AttentionParams& p, const WorkItem& item, int32_t row, int32_t request, float* acc, float* m, float* l) {
  const AttentionConfig& c = *p.config;
  const PlanView& plan = p.plan;
  const SegmentLengths& seg = plan.segments[item.segment];
  const SegmentArgs& args = p.args->segments[static_cast<size_t>(item.segment)];
  const int32_t token = row / p.group_size;
  const int32_t head = item.kv_head * p.group_size + row % p.group_size;
  const int64_t pos = int64_t{plan.q_first_pos[request]} + (token - plan.cu_q[request]);
  const auto sight = planner::key_sight(c.mask, seg.mask, c.window_left, c.window_right);
  const auto range = planner::visible_range({seg.first_pos[item.kv_row], seg.kv_len[item.kv_row], seg.shard}, sight, pos);
  const bool paged = seg.source == KvSource::kPaged;
  const float ks = scale_at(args.k_scale, request, item.kv_head);
  const float vs = scale_at(args.v_scale, request, item.kv_head);
  const float qs = scale_at(p.args->q_scale, request, item.kv_head);
  const int64_t qbase = token * p.args->q.strides[0] + head * p.args->q.strides[1];
  for (int64_t j = std::max<int64_t>(item.kv_begin, range.begin); j < std::min<int64_t>(item.kv_end, range.end); ++j) {
    if (c.mask == MaskKind::kCustom && seg.mask == SegmentMask::kAsConfig) {
      const int64_t key = (seg.key_offset != nullptr ? seg.key_offset[request] : 0) + j - plan.mask_first_column[request];
      if (key >= 0 && key < plan.mask_columns[request]) {
        const int64_t bit = int64_t{token - plan.cu_q[request]} * plan.mask_columns[request] + key;
        if (((p.args->custom_mask[plan.mask_byte_indptr[request] + bit / 8] >> (bit % 8)) & 1) == 0) continue;
      }
    }
    int64_t k0, v0, vstep = 1;
    const void *kp, *vp;
    DType dt;
    if (paged) {
      const KvCacheView& cache = args.cache;
      const int64_t pg = j / c.page_size, t = j % c.page_size;
      const PageTableView& tb = args.table;
      const int64_t page = tb.kind == PageTableKind::kCsr ? tb.indices[tb.indptr[item.kv_row] + pg]
                                                          : tb.indices[item.kv_row * tb.row_stride + tb.first_column + pg];
      k0 = page * cache.k_strides.page + t * cache.k_strides.token + item.kv_head * cache.k_strides.head;
      v0 = page * cache.v_strides.page + item.kv_head * cache.v_strides.head;
      if (cache.format == KvFormat::kCpuPacked) {
        v0 += t / 2 * cache.v_strides.token + t % 2;
        vstep = 2;
      } else {
        v0 += t * cache.v_strides.token;
      }
      kp = cache.k;
      vp = cache.v;
      dt = cache.dtype;
    } else {
      const int64_t t = args.ragged.indptr[item.kv_row] + j;
      k0 = t * args.ragged.k.strides[0] + item.kv_head * args.ragged.k.strides[1];
      v0 = t * args.ragged.v.strides[0] + item.kv_head * args.ragged.v.strides[1];
      kp = args.ragged.k.data;
      vp = args.ragged.v.data;
      dt = args.ragged.k.dtype;
    }
    float s = 0;
    for (int32_t d = 0; d < c.head_dim_qk; ++d) s += load_as_float(p.args->q.data, c.q, qbase + d) * load_as_float(kp, dt, k0 + d);
    s *= qs * ks * p.args->sm_scale;
    if (p.args->logits_soft_cap > 0) s = p.args->logits_soft_cap * std::tanh(s / p.args->logits_soft_cap);
    if (p.args->alibi_slopes != nullptr) {
      const int64_t kpos = seg.first_pos[item.kv_row] + planner::shard_offset(seg.shard, j);
      s -= p.args->alibi_slopes[head] * static_cast<float>(std::abs(pos - kpos));
    }
    const float mx = std::max(*m, s);
    const float a = *m == kEmpty ? 0.0f : std::exp(*m - mx);
    const float e = std::exp(s - mx);
    for (int32_t d = 0; d < c.head_dim_v; ++d) acc[d] = acc[d] * a + e * vs * load_as_float(vp, dt, v0 + d * vstep);
    *l = *l * a + e;
    *m = mx;
  }
}

void run_worker(const AttentionParams& p, int32_t worker) noexcept {
  const int32_t dv = p.config->head_dim_v;
  auto* scratch = reinterpret_cast<float*>(p.scratch + static_cast<size_t>(worker) * p.scratch_stride);
  float* acc = scratch;
  float* m = acc + p.tile.rows * dv;
  float* l = m + p.tile.rows;
  float* acc2 = l + p.tile.rows;
  for (int32_t i = p.plan.worker_indptr[worker]; i < p.plan.worker_indptr[worker + 1]; ++i) {
    const WorkItem& item = p.plan.items[i];
    int32_t request = item.request;
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      const int32_t token = row / p.group_size;
      while (token >= p.plan.cu_q[request + 1]) ++request;
      const int32_t n = row - item.row_begin;
      if (item.flags & planner::kStart) {
        std::fill_n(acc + n * dv, dv, 0.0f);
        m[n] = kEmpty;
        l[n] = 0;
      }
      if (item.flags & planner::kFold) {
        std::fill_n(acc2, dv, 0.0f);
        float m2 = kEmpty, l2 = 0;
        accumulate(p, item, row, request, acc2, &m2, &l2);
        fold(acc + n * dv, m + n, l + n, acc2, m2, l2, dv);
      } else {
        accumulate(p, item, row, request, acc + n * dv, m + n, l + n);
      }
      if (item.flags & planner::kFinish) {
        if (item.partial < 0) {
          finish(p, row, item.kv_head, acc + n * dv, m[n], l[n]);
        } else {
          const int64_t to = int64_t{item.partial} + n;
          std::memcpy(p.partial_acc + to * dv, acc + n * dv, sizeof(float) * static_cast<size_t>(dv));
          p.partial_max[to] = m[n];
          p.partial_sum[to] = l[n];
        }
      }
    }
  }
}

void run_merge(const AttentionParams& p, int32_t index) noexcept {
  const planner::MergeItem& merge = p.plan.merges[index];
  const int32_t dv = p.config->head_dim_v;
  for (int32_t row = merge.row_begin; row < merge.row_end; ++row) {
    float acc[1024] = {};
    float m = kEmpty, l = 0;
    for (int32_t s = merge.source_begin; s < merge.source_end; ++s) {
      const int64_t from = int64_t{p.plan.merge_sources[s]} + (row - merge.row_begin);
      fold(acc, &m, &l, p.partial_acc + from * dv, p.partial_max[from], p.partial_sum[from], dv);
    }
    finish(p, row, merge.kv_head, acc, m, l);
  }
}

constexpr AttentionKernel kInterim = {
    "generic",
    [](const platform::CpuFeatures&) { return std::string(); },
    [](const AttentionConfig& c) {
      if (c.head_dim_qk % 8 != 0 || c.head_dim_qk > 576)
        return "head_dim_qk is " + std::to_string(c.head_dim_qk) + "; it takes multiples of 8 up to 576";
      if (c.head_dim_v % 8 != 0 || c.head_dim_v > 512)
        return "head_dim_v is " + std::to_string(c.head_dim_v) + "; it takes multiples of 8 up to 512";
      if (c.features.has(Feature::kRopeLlama)) return std::string("no in-kernel rotary embedding");
      return std::string();
    },
    [](const AttentionConfig&) { return planner::TileShape{64, 64}; },
    [](const AttentionConfig& c, const planner::TileShape& t) {
      return sizeof(float) * static_cast<size_t>(t.rows * (c.head_dim_v + 2) + c.head_dim_v);
    },
    run_worker,
    run_merge,
    16,
    4,
};
constexpr const AttentionKernel* kAll[] = {&kInterim};

}  // namespace

std::span<const AttentionKernel* const> cpu_attention_kernels() { return kAll; }

}  // namespace folio::inline v0::kernels
