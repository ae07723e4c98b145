#include "distributed/dcp_case_test_util.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <type_traits>
#include <utility>

#include "core/aligned_buffer.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"
#include "folio/reference.hpp"
#include "folio/types/float_convert.hpp"
#include "testing/random.hpp"

namespace folio::inline v0::distributed::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::byte kUnwritten{0x5a};

/// Calls `visit` with the dtype as a constant: a loop over millions of values then decides nothing for each.
template <typename Visit>
auto with_constant(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kBFloat16: return visit(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16: return visit(std::integral_constant<DType, DType::kFloat16>());
    case DType::kFloat8E4M3: return visit(std::integral_constant<DType, DType::kFloat8E4M3>());
    case DType::kFloat8E5M2: return visit(std::integral_constant<DType, DType::kFloat8E5M2>());
    default: return visit(std::integral_constant<DType, DType::kFloat32>());
  }
}

template <DType kDType>
float rounded(float value) {
  std::byte memory[4];
  store_from_float(memory, kDType, 0, value);
  return load_as_float(memory, kDType, 0);
}

std::vector<std::byte> tensor(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> memory(values.size() * static_cast<size_t>(size_of(dtype)));
  with_constant(dtype, [&](auto constant) {
    for (size_t i = 0; i < values.size(); ++i) {
      store_from_float(memory.data(), constant, static_cast<int64_t>(i), values[i]);
    }
  });
  return memory;
}

/// Appends `count` values in [-amplitude, amplitude).
void add_values(std::vector<float>& values, size_t count, DType dtype, float amplitude, uint64_t seed) {
  verify::Random random(seed);
  uint64_t bits = 0;
  const size_t begin = values.size();
  values.resize(begin + count);
  with_constant(dtype, [&](auto constant) {
    for (size_t i = 0; i < count; ++i, bits >>= 32) {
      if (i % 2 == 0) bits = random.next();
      const float value = (static_cast<float>(static_cast<uint32_t>(bits) >> 8) * 0x1p-23f - 1.0f) * amplitude;
      values[begin + i] = rounded<constant()>(value);
    }
  });
}

/// Values [begin, end) as a cache of that dtype and scale gives them back.
void quantize(std::vector<float>& values, size_t begin, size_t end, DType dtype, float scale) {
  with_constant(dtype, [&](auto constant) {
    for (size_t i = begin; i < end; ++i) values[i] = rounded<constant()>(values[i] / scale) * scale;
  });
}

/// One seed for every (what, of whom, where).
uint64_t seed_of(uint32_t seed, uint64_t what, uint64_t id, uint64_t position = 0) {
  return verify::Random(verify::Random(seed + (what << 32)).fork(id).next()).fork(position).next();
}
constexpr uint64_t kKeys = 1, kValues = 2, kQueries = 3;

/// Relative error of rounding to nearest.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat16: return 0x1p-11;
    case DType::kFloat8E4M3: return 0x1p-4;
    default: return 0x1p-24;
  }
}

/// Half a step between the smallest numbers, which are not normal: what rounding those is off by at most.
double half_of_least(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-25 : 0.0;
}

}  // namespace

DcpCase::DcpCase(const DcpSetup& given, uint32_t seed) : setup(given) {
  for (const RequestLengths& request : setup.requests) {
    cu_q.push_back(cu_q.back() + request.q_len);
    seq_lens.push_back(request.seq_len);
    indptr_.push_back(indptr_.back() + request.seq_len);
  }
  ranks.resize(static_cast<size_t>(setup.world));
  make_keys(seed);
  for (int32_t r = 0; r < setup.world; ++r) make_rank(r, seed + 17);
  make_queries(seed + 31);
}

uint32_t DcpCase::id_of(size_t request) const {
  const int32_t id = setup.requests[request].id;
  return id < 0 ? static_cast<uint32_t>(request) : static_cast<uint32_t>(id);
}

int32_t DcpCase::num_new(size_t request) const {
  return setup.cross ? setup.requests[request].seq_len : setup.requests[request].q_len;
}

Scale DcpCase::q_scale() const {
  Scale scale;
  if (setup.q_scales.empty()) return scale;
  scale.data = setup.q_scales.data();
  scale.granularity = setup.q_granularity;
  if (scale.granularity == ScaleGranularity::kPerRequestAndHead) scale.request_stride = setup.kv_heads;
  return scale;
}

/// A token's values depend on its request's id and its position alone, so that they are the same in other batches.
void DcpCase::make_keys(uint32_t seed) {
  const auto k_row = static_cast<size_t>(setup.kv_heads * setup.dim_qk);
  const auto v_row = static_cast<size_t>(setup.kv_heads * setup.dim_v);
  keys_.reserve(static_cast<size_t>(indptr_.back()) * k_row);
  values_.reserve(static_cast<size_t>(indptr_.back()) * v_row);
  for (size_t r = 0; r < setup.requests.size(); ++r) {
    const auto seq_len = static_cast<size_t>(setup.requests[r].seq_len);
    const auto fresh = static_cast<std::ptrdiff_t>(num_new(r));
    add_values(keys_, seq_len * k_row, setup.model, setup.kv_amplitude, seed_of(seed, kKeys, id_of(r)));
    add_values(values_, seq_len * v_row, setup.model, setup.kv_amplitude, seed_of(seed, kValues, id_of(r)));
    new_keys_.insert(new_keys_.end(), keys_.end() - fresh * static_cast<std::ptrdiff_t>(k_row), keys_.end());
    new_values_.insert(new_values_.end(), values_.end() - fresh * static_cast<std::ptrdiff_t>(v_row), values_.end());
  }
  model_keys_ = tensor(keys_, setup.model);
  model_values_ = tensor(values_, setup.model);
}

void DcpCase::make_rank(int32_t r, uint32_t seed) {
  Rank& rank = ranks[static_cast<size_t>(r)];
  for (const RequestLengths& request : setup.requests) {
    const int32_t local = shard_len(request.seq_len, setup.world, r, setup.interleave);
    rank.num_pages += pages_for(local, setup.page_size);
    // A row of the table covers whole stripes, so that every rank has the page of any position.
    const int32_t most = max_dcp_context_len(request.seq_len, setup.world, setup.interleave);
    rank.columns = std::max(rank.columns, pages_for(most, setup.page_size));
  }
  std::mt19937 random(seed + static_cast<uint32_t>(r));
  std::vector<int32_t> pages(static_cast<size_t>(rank.num_pages));
  rank.num_pages += 1;  // page 0 is nobody's
  std::iota(pages.begin(), pages.end(), 1);
  std::ranges::shuffle(pages, random);
  std::vector<int32_t> token_row, positions;
  size_t next = 0;
  for (size_t i = 0; i < setup.requests.size(); ++i) {
    const int32_t seq_len = setup.requests[i].seq_len;
    const int32_t owned = pages_for(shard_len(seq_len, setup.world, r, setup.interleave), setup.page_size);
    for (int32_t c = 0; c < rank.columns; ++c) rank.table.push_back(c < owned ? pages[next++] : 0);
    for (int32_t p = 0; p < seq_len; ++p) {
      token_row.push_back(static_cast<int32_t>(i));
      positions.push_back(p);
    }
  }
  const auto slots_all = static_cast<size_t>(rank.num_pages * setup.page_size * setup.kv_heads);
  rank.cache =
      tensor(std::vector<float>(slots_all * static_cast<size_t>(setup.dim_qk + setup.dim_v), kNan), setup.cache);

  std::vector<int64_t> slots(positions.size());
  slot_mapping(dense_table(rank.table, static_cast<int32_t>(setup.requests.size()), rank.columns), token_row, positions,
               setup.page_size, slots, setup.world, r, setup.interleave);
  std::vector<int64_t> later(setup.write_new_tokens ? 0 : slots.size(), -1);
  for (size_t i = 0; i < setup.requests.size(); ++i) {
    for (int32_t at = indptr_[i + 1] - num_new(i); at < indptr_[i + 1]; ++at) {
      int64_t& slot = slots[static_cast<size_t>(at)];
      rank.new_slots.push_back(slot);
      if (!setup.write_new_tokens) later[static_cast<size_t>(at)] = std::exchange(slot, -1);
    }
  }
  rank.new_slots.insert(rank.new_slots.end(), static_cast<size_t>(setup.padding_slots), -1);
  CacheWriteArgs write;
  const int64_t total = indptr_.back();
  write.k = ConstTensorView(model_keys_.data(), setup.model, {total, setup.kv_heads, setup.dim_qk});
  write.v = ConstTensorView(model_values_.data(), setup.model, {total, setup.kv_heads, setup.dim_v});
  write.slot_mapping = slots.data();
  write.num_slots = total;
  write.cache = cache_view(rank, rank.cache);
  write.k_scale.value = setup.k_scale;
  write.v_scale.value = setup.v_scale;
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  write_kv_cache(context, write);
  if (setup.write_new_tokens) return;
  rank.cache_afterwards = rank.cache;
  write.cache = cache_view(rank, rank.cache_afterwards);
  write.slot_mapping = later.data();
  write_kv_cache(context, write);
}

void DcpCase::make_queries(uint32_t seed) {
  const auto with_padding = [](std::vector<float> values, int32_t num_rows, size_t row, DType dtype) {
    values.resize(static_cast<size_t>(num_rows) * row, kNan);
    return tensor(values, dtype);
  };
  const auto q_row = static_cast<size_t>(setup.heads * setup.dim_qk);
  const auto count = static_cast<size_t>(tokens());
  std::vector<float> all(setup.replicated_queries ? static_cast<size_t>(rows()) * q_row * ranks.size() : 0, kNan);
  std::vector<float> slopes;
  for (size_t r = 0; r < ranks.size(); ++r) {
    std::vector<float> own;
    own.reserve(count * q_row);
    for (size_t i = 0; i < setup.requests.size(); ++i) {
      const RequestLengths& request = setup.requests[i];
      for (int32_t position = request.seq_len - request.q_len; position < request.seq_len; ++position) {
        const uint64_t token = seed_of(seed, kQueries, id_of(i), static_cast<uint64_t>(position));
        add_values(own, q_row, query_dtype(), setup.query_amplitude, token + r);
      }
    }
    ranks[r].q = with_padding(own, rows(), q_row, query_dtype());
    for (size_t t = 0; t < count && setup.replicated_queries; ++t) {
      std::copy_n(own.begin() + static_cast<std::ptrdiff_t>(t * q_row), q_row,
                  all.begin() + static_cast<std::ptrdiff_t>((t * ranks.size() + r) * q_row));
    }
    ranks[r].k = with_padding(new_keys_, key_rows(), static_cast<size_t>(setup.kv_heads * setup.dim_qk), setup.model);
    ranks[r].v = with_padding(new_values_, key_rows(), static_cast<size_t>(setup.kv_heads * setup.dim_v), setup.model);
    for (int32_t h = 0; h < setup.heads; ++h) {
      slopes.push_back(0.02f * static_cast<float>(slopes.size() + 1));
      const auto place = static_cast<float>(static_cast<int32_t>(r) * setup.heads + h);
      const auto last = static_cast<float>(std::max(setup.world * setup.heads - 1, 1));
      ranks[r].sinks.push_back(setup.sink_range
                                   ? std::lerp((*setup.sink_range)[0], (*setup.sink_range)[1], place / last)
                                   : 0.3f * static_cast<float>(h) - 0.4f + static_cast<float>(r));
    }
    ranks[r].slopes.assign(slopes.end() - setup.heads, slopes.end());
    all_sinks_.insert(all_sinks_.end(), ranks[r].sinks.begin(), ranks[r].sinks.end());
  }
  for (Rank& rank : ranks) {
    if (setup.replicated_queries) {
      rank.q = tensor(all, query_dtype());
      rank.slopes = slopes;
    }
  }
  // From here on the keys are what the step sees of them: rounded to the cache's dtype, but for new tokens beside it.
  const auto k_row = static_cast<size_t>(setup.kv_heads * setup.dim_qk);
  const auto v_row = static_cast<size_t>(setup.kv_heads * setup.dim_v);
  for (size_t r = 0; r < setup.requests.size(); ++r) {
    const RequestLengths& request = setup.requests[r];
    const bool cached = static_cast<int32_t>(r) < setup.num_cached;
    const auto begin = static_cast<size_t>(indptr_[r]);
    const auto end = begin + static_cast<size_t>(cached ? request.seq_len : request.seq_len - request.q_len);
    if (setup.cache == setup.model && setup.k_scale == 1.0f && setup.v_scale == 1.0f) continue;
    quantize(keys_, begin * k_row, end * k_row, setup.cache, setup.k_scale);
    quantize(values_, begin * v_row, end * v_row, setup.cache, setup.v_scale);
  }
}

KvCacheView DcpCase::cache_view(const Rank& rank, std::vector<std::byte>& memory) const {
  KvCacheShape shape;
  shape.num_pages = rank.num_pages;
  shape.page_size = setup.page_size;
  shape.num_kv_heads = setup.kv_heads;
  shape.head_dim_qk = setup.dim_qk;
  shape.head_dim_v = setup.dim_v;
  shape.dtype = setup.cache;
  const int64_t k_half = k_elements(shape) * size_of(setup.cache);
  return setup.hnd ? make_hnd_view(shape, memory.data(), memory.data() + k_half)
                   : make_nhd_view(shape, memory.data(), memory.data() + k_half);
}

DcpConfig DcpCase::config() const {
  DcpConfig config;
  AttentionConfig& attention = config.attention;
  attention.num_q_heads = setup.heads;
  attention.num_kv_heads = setup.kv_heads;
  attention.head_dim_qk = setup.dim_qk;
  attention.head_dim_v = setup.dim_v;
  attention.q = query_dtype();
  attention.out = setup.model;
  attention.kv = setup.cache;
  attention.page_size = setup.page_size;
  attention.mask = setup.mask;
  attention.window_left = setup.window_left;
  attention.window_right = setup.window_right;
  attention.attention_chunk = setup.attention_chunk;
  attention.determinism = setup.determinism;
  if (setup.alibi) attention.features = attention.features | Feature::kAlibi;
  if (setup.sinks) attention.features = attention.features | Feature::kSinks;
  if (setup.soft_cap > 0.0f) attention.features = attention.features | Feature::kSoftCap;
  config.interleave = setup.interleave;
  config.combine = setup.combine;
  config.replicated_queries = setup.replicated_queries;
  config.all_heads_out = setup.all_heads_out;
  config.partial_dtype = setup.partial;
  return config;
}

DcpBatch DcpCase::batch() const {
  DcpBatch batch{static_cast<int32_t>(setup.requests.size()), cu_q.data(), seq_lens.data(), setup.num_cached};
  batch.cross_attention = setup.cross;
  return batch;
}

DcpArgs DcpCase::args(int32_t r) {
  Rank& rank = ranks[static_cast<size_t>(r)];
  DcpArgs args;
  const int64_t q_heads = setup.heads * (setup.replicated_queries ? setup.world : 1);
  args.q = ConstTensorView(rank.q.data(), query_dtype(), {rows(), q_heads, setup.dim_qk});
  args.q_scale = q_scale();
  if (setup.num_cached < static_cast<int32_t>(setup.requests.size())) {
    args.k = ConstTensorView(rank.k.data(), setup.model, {rows(), setup.kv_heads, setup.dim_qk});
    args.v = ConstTensorView(rank.v.data(), setup.model, {rows(), setup.kv_heads, setup.dim_v});
  }
  args.cache = cache_view(rank, rank.cache);
  args.table = dense_table(rank.table, static_cast<int32_t>(setup.requests.size()), rank.columns);
  args.k_scale.value = setup.k_scale;
  args.v_scale.value = setup.v_scale;
  const auto row_values = static_cast<size_t>(rows() * out_heads());
  rank.out.assign(row_values * static_cast<size_t>(setup.dim_v * size_of(setup.model)), kUnwritten);
  rank.lse.assign(row_values, -77.0f);
  args.out = TensorView(rank.out.data(), setup.model, {rows(), out_heads(), setup.dim_v});
  args.lse = {rank.lse.data(), out_heads(), 1, LseBase::kE};
  args.logits_soft_cap = setup.soft_cap;
  args.alibi_slopes = setup.alibi ? rank.slopes.data() : nullptr;
  args.sinks = setup.sinks ? (setup.all_heads_out ? all_sinks_ : rank.sinks).data() : nullptr;
  return args;
}

void DcpCase::run(DcpAttention& attention) {
  const int32_t r = attention.group().rank();
  const DcpPlan plan = attention.plan(batch());
  core::AlignedBuffer workspace(attention.workspace_size(plan), core::AlignedBuffer::kWorkspaceAlignment);
  std::fill_n(workspace.as<float>(), workspace.bytes() / sizeof(float), kNan);
  attention.run(plan, args(r), {workspace.data(), workspace.bytes()});
  ranks[static_cast<size_t>(r)].p_dtype = attention.cached_op().p_dtype() == DType::kFloat32
                                              ? attention.fresh_op().p_dtype()
                                              : attention.cached_op().p_dtype();
}

void DcpCase::run(ProcessGroup& group, const Context& context) {
  DcpAttention attention(context, group, config());
  run(attention);
}

void DcpCase::run_in_threads() {
  run_ranks(setup.world, [&](ProcessGroup& group) {
    run(group, Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}));
  });
}

std::string DcpCase::wrong_outputs() const {
  for (int32_t r = 0; r < setup.world; ++r) {
    const std::string wrong = wrong_output(r);
    if (!wrong.empty()) return setup.name + ", rank " + std::to_string(r) + ": " + wrong;
  }
  return {};
}

std::string DcpCase::wrong_cache(int32_t r) const {
  const Rank& rank = ranks[static_cast<size_t>(r)];
  if (rank.cache == rank.cache_afterwards) return {};
  const auto differ = std::ranges::mismatch(rank.cache, rank.cache_afterwards).in1 - rank.cache.begin();
  return "rank " + std::to_string(r) + ": byte " + std::to_string(differ) + " of the cache is wrong";
}

std::string DcpCase::wrong_output(int32_t r) const {
  const Rank& rank = ranks[static_cast<size_t>(r)];
  AttentionConfig config = this->config().attention;
  config.ragged_kv = DType::kFloat32;
  KvSegment lengths;
  lengths.source = KvSource::kRagged;
  lengths.kv_len = seq_lens.data();
  BatchView view;
  view.num_requests = static_cast<int32_t>(setup.requests.size());
  view.num_tokens = tokens();
  view.cu_q = cu_q.data();
  view.segments = {&lengths, 1};
  std::vector<float> magnitudes(values_.size());
  std::ranges::transform(values_, magnitudes.begin(), [](float value) { return std::abs(value); });
  // Each rank's heads by themselves: they divide the KV heads among them.
  const auto reference = [&](const std::vector<float>& v, int32_t token, int32_t out_head, std::vector<double>& out) {
    const int32_t owner = setup.all_heads_out ? out_head / setup.heads : r, head = out_head % setup.heads;
    SegmentArgs segment;
    segment.ragged.k = ConstTensorView(keys_.data(), DType::kFloat32, {indptr_.back(), setup.kv_heads, setup.dim_qk});
    segment.ragged.v = ConstTensorView(v.data(), DType::kFloat32, {indptr_.back(), setup.kv_heads, setup.dim_v});
    segment.ragged.indptr = indptr_.data();
    AttentionArgs args;
    const int32_t first = setup.replicated_queries ? owner * setup.heads : 0;
    const int64_t q_heads = setup.heads * (setup.replicated_queries ? setup.world : 1);
    args.q = ConstTensorView(rank.q.data() + first * setup.dim_qk * size_of(query_dtype()), query_dtype(),
                             {tokens(), q_heads, setup.dim_qk});
    args.q_scale = q_scale();
    args.q.shape[1] = setup.heads;
    args.segments = {&segment, 1};
    args.logits_soft_cap = setup.soft_cap;
    args.alibi_slopes = setup.alibi ? rank.slopes.data() + first : nullptr;
    args.sinks = setup.sinks ? ranks[static_cast<size_t>(owner)].sinks.data() : nullptr;
    return verify::reference_row(config, view, args, token, head, out);
  };
  // Output and, in some kernels, probabilities p are rounded once; the rest is float32: logits, exponentials, sums and
  // the factors of two merges, of at most 2^6 roundings each, those of a logit relative to its size.
  constexpr double kFloat32Work = 0x1p-24 * 64;
  const double farthest = setup.window_left < 0 ? std::ranges::max(seq_lens) : setup.window_left;
  const double largest_q_scale = setup.q_scales.empty() ? 1.0 : std::ranges::max(setup.q_scales);
  const double largest_logit =
      largest_q_scale * static_cast<double>(setup.query_amplitude * setup.kv_amplitude) * std::sqrt(setup.dim_qk) +
      (setup.alibi ? static_cast<double>(rank.slopes.back()) * farthest : 0.0);
  const double work = kFloat32Work * (1.0 + largest_logit);
  std::vector<double> expected(static_cast<size_t>(setup.dim_v)), magnitude(expected.size());
  // Each rank's partial result is rounded once, and sums to no more than `magnitude`; of all heads what a rank makes of
  // its own ones is rounded as well.
  const bool rounds = size_of(setup.partial) == 2 && setup.world > 1;
  const double partials = rounds ? (setup.all_heads_out ? 2.0 : 1.0) : 0.0;
  // Of a large batch a sample: an odd step meets every head.
  const int32_t num_rows = tokens() * out_heads();
  const int32_t step = setup.sampled_rows == 0 ? 1 : (num_rows / setup.sampled_rows) | 1;
  for (int32_t row = 0; row < num_rows; row += step) {
    const int32_t token = row / out_heads(), head = row % out_heads();
    const double lse = reference(values_, token, head, expected);
    reference(magnitudes, token, head, magnitude);
    const float actual_lse = rank.lse[static_cast<size_t>(row)];
    const bool lse_fits = std::isinf(lse) ? actual_lse == lse : std::abs(actual_lse - lse) <= work;
    std::ostringstream text;
    if (setup.lse && !lse_fits) {
      text << "token " << token << ", head " << head << ": LSE " << actual_lse << " instead of " << lse;
      return text.str();
    }
    for (size_t d = 0; d < expected.size(); ++d) {
      const double allowed = std::max(unit_roundoff(setup.model) * std::abs(expected[d]), half_of_least(setup.model)) +
                             (unit_roundoff(rank.p_dtype) + work) * magnitude[d] +
                             partials * (unit_roundoff(setup.partial) * magnitude[d] + half_of_least(setup.partial));
      const float actual =
          load_as_float(rank.out.data(), setup.model, int64_t{row} * setup.dim_v + static_cast<int64_t>(d));
      if (!(std::abs(actual - expected[d]) <= allowed)) {
        text << "token " << token << ", head " << head << ", component " << d << ": " << actual << " instead of "
             << expected[d] << ", allowed " << allowed;
        return text.str();
      }
    }
  }
  const auto written = static_cast<std::ptrdiff_t>(num_rows * setup.dim_v * size_of(setup.model));
  const bool untouched =
      std::all_of(rank.out.begin() + written, rank.out.end(), [](std::byte byte) { return byte == kUnwritten; }) &&
      std::all_of(rank.lse.begin() + num_rows, rank.lse.end(), [](float value) { return value == -77.0f; });
  return untouched ? "" : "padding rows were written";
}

}  // namespace folio::inline v0::distributed::testing
