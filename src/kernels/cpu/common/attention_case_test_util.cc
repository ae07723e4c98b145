#include "kernels/cpu/common/attention_case_test_util.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "core/aligned_buffer.hpp"
#include "folio/types/float_convert.hpp"
#include "testing/reference_attention.hpp"

namespace folio::inline v0::kernels::testing {
namespace {

constexpr unsigned char kPoison = 0xff;  // every float type reads NaN from bytes of all ones
constexpr float kInt8Deviation = 40.0f;  // of an int8 cache's numbers, which go to 127

int64_t rows_of(const scheduler::testing::OwnedBatch& batch, size_t s) {
  const auto& indptr = batch.segments[s].group_indptr;
  return indptr.empty() ? static_cast<int64_t>(batch.q_len.size()) : static_cast<int64_t>(indptr.size()) - 1;
}

/// Half the distance between neighbouring values of the type around `value`, and at least half its smallest subnormal.
double rounding(DType dtype, double value) {
  const double magnitude = std::abs(value);
  switch (dtype) {
    case DType::kFloat16: return std::max(magnitude * 0x1p-11, 0x1p-25);
    case DType::kBFloat16: return magnitude * 0x1p-8;
    case DType::kFloat8E4M3: return std::max(magnitude * 0x1p-4, 0x1p-10);
    case DType::kFloat8E5M2: return std::max(magnitude * 0x1p-3, 0x1p-17);
    default: return magnitude * 0x1p-24;
  }
}

}  // namespace

AttentionCase::AttentionCase(const AttentionConfig& config, scheduler::testing::OwnedBatch batch,
                             const CaseOptions& options, uint32_t seed)
    : config_(config), batch_(std::move(batch)), options_(options), random_(seed), values_(seed) {
  num_tokens_ = batch_.view().num_tokens;
  memory_.resize(batch_.segments.size());
  segment_args_.resize(batch_.segments.size());
  fill_queries();
  for (size_t s = 0; s < memory_.size(); ++s) fill_segment(s);
  args_.segments = segment_args_;
  if (config_.mask == MaskKind::kCustom) fill_mask();
  std::uniform_real_distribution<float> unit(0.1f, 1.0f);
  if (options_.soft_cap) args_.logits_soft_cap = 3.0f;
  for (int32_t h = 0; h < config_.num_q_heads; ++h) {
    slopes_.push_back(unit(random_) * 0.1f);
    sinks_.push_back(unit(random_) * 4.0f - 2.0f);
  }
  if (options_.alibi) args_.alibi_slopes = slopes_.data();
  if (options_.sinks) args_.sinks = sinks_.data();
  if (is_fp8(config_.out)) args_.out_scale.value = 0.01f;
  args_.sm_scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim_qk));
}

float AttentionCase::random_value(DType dtype) {
  return values_.normal() * (dtype == DType::kInt8 ? kInt8Deviation : options_.magnitude);
}

void AttentionCase::store_values(unsigned char* data, DType dtype, int64_t first, int64_t step, int32_t count) {
  for (int32_t d = 0; d < count; ++d) store_from_float(data, dtype, first + d * step, random_value(dtype));
}

void AttentionCase::lay_out_token_scales(KvCacheView& cache, OwnedArgs& memory) const {
  const int64_t heads = cache.num_kv_heads;
  const int64_t gap = 3;
  const auto lay_out = [&](std::vector<float>& scales) {
    scales.assign(static_cast<size_t>(cache.num_pages * (cache.page_size * heads + gap)),
                  std::numeric_limits<float>::quiet_NaN());
    return TokenScales{scales.data(), options_.hnd ? KvStrides{cache.page_size * heads + gap, 1, cache.page_size}
                                                   : KvStrides{cache.page_size * heads + gap, heads, 1}};
  };
  cache.k_token_scales = lay_out(memory.k_token_scales);
  cache.v_token_scales = options_.v_aliases_k ? cache.k_token_scales : lay_out(memory.v_token_scales);
}

void AttentionCase::fill_token_scales(const KvCacheView& cache, int64_t page, int64_t slot) {
  std::uniform_real_distribution<float> unit(0.5f, 1.5f);
  for (const TokenScales* const scales : {&cache.k_token_scales, &cache.v_token_scales}) {
    for (int64_t h = 0; h < cache.num_kv_heads; ++h) {
      scales->data[page * scales->strides.page + slot * scales->strides.token + h * scales->strides.head] =
          unit(random_) * options_.magnitude / kInt8Deviation;
    }
  }
}

Scale AttentionCase::make_scale(std::vector<float>& values, int32_t rows) {
  Scale scale;
  std::uniform_real_distribution<float> unit(0.5f, 1.5f);
  if (!options_.scales_per_head && !options_.scales_per_request) {
    scale.value = unit(random_);
    return scale;
  }
  const int32_t heads = config_.num_kv_heads;
  values.resize(static_cast<size_t>(std::max(rows, 1) * heads));
  for (float& value : values) value = unit(random_);
  scale.data = values.data();
  scale.granularity = options_.scales_per_head ? (options_.scales_per_request ? ScaleGranularity::kPerRequestAndHead
                                                                              : ScaleGranularity::kPerHead)
                                               : ScaleGranularity::kPerRequest;
  scale.request_stride = heads;
  return scale;
}

void AttentionCase::fill_queries() {
  const int32_t gap = 3;  // elements between heads: strides that are not packed
  const int64_t stride = config_.head_dim_qk + gap;
  const int64_t rows = int64_t{num_tokens_} * config_.num_q_heads;
  q_.assign(static_cast<size_t>(rows * stride * size_of(config_.q)), kPoison);
  const int64_t live = batch_.view().cu_q[batch_.q_len.size()] * int64_t{config_.num_q_heads};
  for (int64_t row = 0; row < live; ++row) store_values(q_.data(), config_.q, row * stride, 1, config_.head_dim_qk);
  args_.q = ConstTensorView(q_.data(), config_.q, {num_tokens_, config_.num_q_heads, config_.head_dim_qk});
  args_.q.strides = {stride * config_.num_q_heads, stride, 1};
  if (is_fp8(config_.q)) args_.q_scale = make_scale(q_scale_, static_cast<int32_t>(batch_.q_len.size()));
}

void AttentionCase::fill_segment(size_t s) {
  const scheduler::testing::OwnedSegment& lengths = batch_.segments[s];
  OwnedArgs& memory = memory_[s];
  SegmentArgs& args = segment_args_[s];
  const int64_t rows = rows_of(batch_, s);
  const int32_t heads = config_.num_kv_heads;
  const int32_t qk = config_.head_dim_qk;
  const int32_t dv = config_.head_dim_v;
  args.k_scale = make_scale(memory.k_scale, static_cast<int32_t>(batch_.q_len.size()));
  args.v_scale = make_scale(memory.v_scale, static_cast<int32_t>(batch_.q_len.size()));
  memory.indptr.assign(1, 0);
  if (lengths.source == KvSource::kRagged) {
    const DType dtype = config_.ragged_kv;
    memory.indptr[0] = 2;  // tokens of nobody before, between and after the rows
    for (int64_t r = 0; r < rows; ++r)
      memory.indptr.push_back(memory.indptr.back() + lengths.kv_len[static_cast<size_t>(r)] + 1);
    const int64_t tokens = memory.indptr.back() + 2;
    memory.k.assign(static_cast<size_t>(tokens * heads * qk * size_of(dtype)), kPoison);
    memory.v.assign(static_cast<size_t>(tokens * heads * dv * size_of(dtype)), kPoison);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = int64_t{memory.indptr[static_cast<size_t>(r)]} * heads;
      const int32_t count = lengths.kv_len[static_cast<size_t>(r)] * heads;
      for (int32_t i = 0; i < count; ++i) {
        store_values(memory.k.data(), dtype, (first + i) * qk, 1, qk);
        store_values(memory.v.data(), dtype, (first + i) * dv, 1, dv);
      }
    }
    args.ragged.k = ConstTensorView(memory.k.data(), dtype, {tokens, heads, qk});
    args.ragged.v = ConstTensorView(memory.v.data(), dtype, {tokens, heads, dv});
    args.ragged.indptr = memory.indptr.data();
    return;
  }

  const int32_t page_size = config_.page_size;
  int64_t used = 0;
  int64_t widest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t pages = (lengths.kv_len[static_cast<size_t>(r)] + page_size - 1) / page_size;
    used += pages;
    widest = std::max(widest, pages);
  }
  KvCacheView& cache = args.cache;
  cache.format = config_.kv_format;
  cache.dtype = config_.kv;
  cache.num_pages = used + 3;
  cache.page_size = page_size;
  cache.num_kv_heads = heads;
  cache.head_dim_qk = qk;
  cache.head_dim_v = dv;
  const bool packed = config_.kv_format == KvFormat::kCpuPacked;
  const int64_t gap = packed ? 0 : 5;  // elements between pages: strides that are not packed
  const auto strides = [&](int64_t dim) {
    if (packed || options_.hnd) return KvStrides{page_size * heads * dim + gap, dim, page_size * dim};
    return KvStrides{page_size * heads * dim + gap, heads * dim, dim};
  };
  cache.k_strides = strides(qk);
  cache.v_strides = options_.v_aliases_k ? cache.k_strides : strides(dv);
  if (packed) cache.v_strides.token = 2 * dv;
  memory.k.assign(static_cast<size_t>(cache.num_pages * cache.k_strides.page * size_of(config_.kv)), kPoison);
  cache.k = memory.k.data();
  if (options_.v_aliases_k) {
    cache.v = cache.k;
  } else {
    memory.v.assign(static_cast<size_t>(cache.num_pages * cache.v_strides.page * size_of(config_.kv)), kPoison);
    cache.v = memory.v.data();
  }
  if (config_.kv == DType::kInt8) lay_out_token_scales(cache, memory);
  std::vector<int32_t> pages(static_cast<size_t>(cache.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  if (options_.pages_nearly_in_order) {
    for (size_t i = 5; i + 1 < pages.size(); i += 16) std::swap(pages[i], pages[i + 1]);
  } else {
    std::shuffle(pages.begin(), pages.end(), random_);
  }
  PageTableView& table = args.table;
  table.num_rows = static_cast<int32_t>(rows);
  table.row_stride = widest + 2;
  table.first_column = 1;
  size_t next = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t length = lengths.kv_len[static_cast<size_t>(r)];
    const int64_t count = (length + page_size - 1) / page_size;
    if (options_.dense_table) memory.indices.resize(static_cast<size_t>(r * table.row_stride + 1), -7);
    for (int64_t i = 0; i < count; ++i) memory.indices.push_back(pages[next++]);
    memory.indptr.push_back(static_cast<int32_t>(memory.indices.size()));
    for (int32_t t = 0; t < length; ++t) {
      const int64_t page =
          memory.indices[memory.indices.size() - static_cast<size_t>(count) + static_cast<size_t>(t / page_size)];
      const int64_t slot = t % page_size;
      if (config_.kv == DType::kInt8) fill_token_scales(cache, page, slot);
      for (int32_t h = 0; h < heads; ++h) {
        store_values(memory.k.data(), config_.kv,
                     page * cache.k_strides.page + slot * cache.k_strides.token + h * cache.k_strides.head, 1, qk);
        const int64_t v = page * cache.v_strides.page + h * cache.v_strides.head;
        if (packed) {
          store_values(memory.v.data(), config_.kv, v + slot / 2 * cache.v_strides.token + slot % 2, 2, dv);
        } else if (!options_.v_aliases_k) {
          store_values(memory.v.data(), config_.kv, v + slot * cache.v_strides.token, 1, dv);
        }
      }
    }
  }
  if (options_.dense_table) memory.indices.resize(static_cast<size_t>(rows * table.row_stride + 1), -7);
  table.kind = options_.dense_table ? PageTableKind::kDense : PageTableKind::kCsr;
  table.indices = memory.indices.data();
  table.num_indices = static_cast<int64_t>(memory.indices.size());
  table.indptr = options_.dense_table ? nullptr : memory.indptr.data();
}

void AttentionCase::fill_mask() {
  int64_t bytes = 0;
  for (size_t r = 0; r < batch_.q_len.size(); ++r) {
    int64_t columns = 0;
    if (batch_.scope == CustomMaskScope::kTail) {
      columns = batch_.tail_len[r];
    } else {
      for (const auto& segment : batch_.segments) {
        if (segment.group_indptr.empty()) {
          columns += segment.kv_len[r];
          continue;
        }
        for (size_t g = 0; g + 1 < segment.group_indptr.size(); ++g) {
          const auto request = static_cast<int32_t>(r);
          if (segment.group_indptr[g] <= request && request < segment.group_indptr[g + 1]) columns += segment.kv_len[g];
        }
      }
    }
    bytes += (batch_.q_len[r] * columns + 7) / 8;
  }
  mask_.resize(static_cast<size_t>(bytes));
  for (uint8_t& byte : mask_) byte = static_cast<uint8_t>(random_());
  mask_.shrink_to_fit();
  args_.custom_mask = mask_.data();
  args_.custom_mask_bytes = bytes;
}

AttentionCase::Result AttentionCase::run(const AttentionKernel& kernel, int32_t num_workers, int32_t tile_rows,
                                         int32_t fixed_split_tokens) {
  scheduler::SchedulerConfig planning;
  planning.num_q_heads = config_.num_q_heads;
  planning.num_kv_heads = config_.num_kv_heads;
  planning.page_size = config_.page_size;
  planning.mask = config_.mask;
  planning.window_left = config_.window_left;
  planning.window_right = config_.window_right;
  planning.attention_chunk = config_.attention_chunk;
  planning.span_window_left = config_.span_window_left;
  planning.features = config_.features;
  planning.determinism = config_.determinism;
  planning.tile = kernel.tile(config_);
  if (tile_rows > 0) planning.tile.rows = std::min(tile_rows, planning.tile.rows);
  planning.num_workers = num_workers;
  planning.fixed_split_tokens = fixed_split_tokens;
  planning.tile_cost = kernel.tile_cost;
  planning.row_cost = kernel.row_cost;
  planning.min_split_tokens = 32;
  if (kernel.heads_together != nullptr) planning.heads_together = kernel.heads_together(config_);
  planning.uneven_workers = true;  // as prepare says of CPUs
  scheduler::PlanStorage storage;
  const BatchView batch = batch_.view();

  Result result;
  const int64_t rows = int64_t{num_tokens_} * config_.num_q_heads;
  const int64_t stride = config_.head_dim_v + 2;
  std::vector<unsigned char> out(static_cast<size_t>(rows * stride * size_of(config_.out)), kPoison);
  result.lse.assign(static_cast<size_t>(rows), std::numeric_limits<float>::quiet_NaN());
  AttentionArgs args = args_;
  args.out = TensorView(out.data(), config_.out, {num_tokens_, config_.num_q_heads, config_.head_dim_v});
  args.out.strides = {stride * config_.num_q_heads, stride, 1};
  args.lse = {result.lse.data(), config_.num_q_heads, 1, options_.lse_base};

  AttentionParams params;
  params.config = &config_;
  params.args = &args;
  params.plan = scheduler::make_plan(planning, batch, storage);
  params.tile = planning.tile;
  params.group_size = config_.num_q_heads / config_.num_kv_heads;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto partial_rows = static_cast<size_t>(params.plan.num_partial_rows);
  std::vector<float> acc(partial_rows * static_cast<size_t>(config_.head_dim_v), nan);
  std::vector<float> row_max(partial_rows, nan);
  std::vector<float> row_sum(partial_rows, nan);
  params.partial_acc = acc.data();
  params.partial_row_max = row_max.data();
  params.partial_row_sum = row_sum.data();
  params.scratch_stride = (kernel.scratch_bytes(config_, planning.tile) + 63) / 64 * 64;
  core::AlignedBuffer scratch(params.scratch_stride * static_cast<size_t>(num_workers) + 1);
  std::memset(scratch.data(), kPoison, scratch.bytes());
  params.scratch = scratch.data();
  run_workers(kernel, params);
  for (int32_t m = params.plan.num_combine_tiles - 1; m >= 0; --m) kernel.run_combine(params, m);

  result.plan = params.plan;
  result.p_dtype = kernel.p_dtype(config_);
  for (int64_t row = 0; row < rows; ++row) {
    for (int32_t d = 0; d < config_.head_dim_v; ++d) {
      result.out.push_back(load_as_float(out.data(), config_.out, row * stride + d));
    }
  }
  result.bytes = std::move(out);
  return result;
}

void AttentionCase::run_workers(const AttentionKernel& kernel, AttentionParams params) const {
  std::mt19937 random(claims_);
  std::atomic<int32_t> next{0};
  params.next_work_tile = &next;
  const int32_t all = params.plan.num_dynamic_tiles;
  while (next < all) {
    params.plan.num_dynamic_tiles = std::min(all, next + 1 + static_cast<int32_t>(random() % 16));
    kernel.run_worker(params, static_cast<int32_t>(random() % static_cast<uint32_t>(params.plan.num_workers)));
  }
}

std::vector<double> AttentionCase::mean_abs_v() {
  std::vector<SegmentArgs> segments = segment_args_;
  std::vector<std::vector<unsigned char>> values;
  for (size_t s = 0; s < segments.size(); ++s) {
    const bool ragged = batch_.segments[s].source == KvSource::kRagged;
    const bool aliased = !ragged && segments[s].cache.v == segments[s].cache.k;
    std::vector<unsigned char>& bytes = values.emplace_back(aliased ? memory_[s].k : memory_[s].v);
    const DType dtype = ragged ? config_.ragged_kv : config_.kv;
    const auto element = static_cast<size_t>(size_of(dtype));
    for (size_t i = element - 1; i < bytes.size(); i += element) {
      if (dtype != DType::kInt8) {
        bytes[i] &= 0x7f;  // the sign
      } else if (bytes[i] >= 0x80) {
        bytes[i] = static_cast<unsigned char>(std::min(0x100 - bytes[i], 0x7f));
      }
    }
    if (ragged) {
      segments[s].ragged.v.data = bytes.data();
    } else {
      segments[s].cache.v = bytes.data();
    }
  }
  AttentionArgs args = args_;
  args.segments = segments;
  std::vector<double> sizes(want_.size());
  std::vector<double> lse(want_lse_.size());
  verify::reference_attention(config_, batch_.view(), args, sizes, lse);
  return sizes;
}

std::string AttentionCase::compare(const Result& result) {
  const BatchView batch = batch_.view();
  const auto dim = static_cast<size_t>(config_.head_dim_v);
  const size_t rows = static_cast<size_t>(num_tokens_) * static_cast<size_t>(config_.num_q_heads);
  if (want_.empty()) {
    want_.resize(rows * dim);
    want_lse_.resize(rows);
    plain_.resize(rows * dim);
    plain_lse_.resize(rows);
    verify::reference_attention(config_, batch, args_, want_, want_lse_);
    verify::plain_attention(config_, batch, args_, plain_, plain_lse_);
  }
  const double p_rounding = rounding(result.p_dtype, 1.0);
  if (result.p_dtype != DType::kFloat32 && sizes_.empty()) sizes_ = mean_abs_v();
  const size_t live = static_cast<size_t>(batch.cu_q[batch.num_requests]) * static_cast<size_t>(config_.num_q_heads);
  // The largest error of a plain float32 computation anywhere in the case: of one row it may be small by luck.
  double plain_error = 0.0;
  double plain_lse_error = 0.0;
  double largest = 0.0;
  for (size_t i = 0; i < live * dim; ++i) {
    plain_error = std::max(plain_error, std::abs(static_cast<double>(plain_[i]) - want_[i]));
    largest = std::max(largest, std::abs(want_[i]));
  }
  for (size_t i = 0; i < live; ++i) {
    if (std::isinf(want_lse_[i])) continue;
    plain_lse_error = std::max(plain_lse_error, std::abs(static_cast<double>(plain_lse_[i]) - want_lse_[i]));
    plain_lse_error = std::max(plain_lse_error, std::abs(want_lse_[i]) * 0x1p-23);
  }
  plain_error = std::max(plain_error, largest * 0x1p-23);
  const double factor = 4.0;  // kernels add in another order and have their own exponential
  const double out_scale = is_fp8(config_.out) ? static_cast<double>(args_.out_scale.value) : 1.0;
  std::ostringstream problem;
  for (size_t row = 0; row < rows; ++row) {
    const bool padding = row >= live;
    const double lse_unit = options_.lse_base == LseBase::k2 ? std::log(2.0) : 1.0;
    const double lse = static_cast<double>(result.lse[row]) * lse_unit;
    if (padding ? !std::isnan(lse)
                : !(lse == want_lse_[row] || std::abs(lse - want_lse_[row]) <= factor * plain_lse_error)) {
      problem << "row " << row << ": lse " << lse << ", want " << (padding ? NAN : want_lse_[row]);
      return problem.str();
    }
    for (size_t d = 0; d < dim; ++d) {
      const double got = static_cast<double>(result.out[row * dim + d]);
      if (padding) {
        if (std::isnan(got)) continue;
        problem << "row " << row << " is padding, but " << got << " was written";
        return problem.str();
      }
      const double want = want_[row * dim + d] / out_scale;
      double allowed = factor * plain_error / out_scale;
      if (!sizes_.empty()) allowed += p_rounding * sizes_[row * dim + d] / out_scale;
      if (std::abs(got - want) <= allowed + rounding(config_.out, std::abs(want) + allowed)) continue;
      problem << "row " << row << " (of " << rows << ") component " << d << ": " << got << ", want " << want
              << ", allowed " << allowed;
      return problem.str();
    }
  }
  return {};
}

}  // namespace folio::inline v0::kernels::testing
