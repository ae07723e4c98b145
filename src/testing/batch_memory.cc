#include "testing/batch_memory.hpp"

#include <algorithm>
#include <limits>

#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"
#include "testing/factors.hpp"

namespace folio::inline v0::verify {
namespace {

constexpr uint8_t kCanaryByte = 0xfb;  // an output that stays so was not written: large and negative in every dtype
constexpr int32_t kHugeId = std::numeric_limits<int32_t>::max();

/// Strides of a [tokens, heads, dim] tensor: packed; in wider rows; heads apart; or heads outside.
std::array<int64_t, kMaxRank> row_strides(Random& random, int64_t tokens, int64_t heads, int64_t dim) {
  switch (random.below(4)) {
    case 0: return {heads * dim, dim, 1};
    case 1: return {heads * dim + random.between(1, 70), dim, 1};
    case 2: return {heads * (dim + 5) + random.below(4), dim + 5, 1};
    default: return {dim + 3, (tokens + 1) * (dim + 3), 1};
  }
}

int64_t extent(const std::array<int64_t, kMaxRank>& strides, int64_t tokens, int64_t heads, int64_t dim) {
  return tokens == 0 ? 0 : (tokens - 1) * strides[0] + (heads - 1) * strides[1] + dim;
}

}  // namespace

Slice whole_problem(const Problem& problem) {
  Slice slice;
  for (size_t r = 0; r < problem.requests.size(); ++r) slice.parts.push_back({r, 0, problem.requests[r].q_len, 0});
  return slice;
}

template <typename T>
const T* BatchMemory::keep(const std::vector<T>& values) {
  memory_.push_back(GuardedBuffer::of(values));
  memory_.back().protect();
  return memory_.back().as<T>();
}

template <typename T>
const T* BatchMemory::keep_length(const std::vector<T>& values) {
  lengths_.push_back(GuardedBuffer::of(values));
  return lengths_.back().as<T>();
}

BatchMemory::BatchMemory(const ConformanceCase& c, const Problem& problem, const KvMemory& kv, const Slice& slice) {
  Random random(c.seed ^ 0x62617463u);
  add_queries(problem, slice, random);
  add_outputs(c, problem, random);
  if (problem.config.out == DType::kFloat4E2M1x2) add_block_scales(problem, random);
  segment_args_.resize(problem.segments.size());
  for (size_t s = 0; s < problem.segments.size(); ++s) add_segment(c, problem, kv, slice, s, random);
  if (problem.config.mask == MaskKind::kCustom) add_mask(problem, slice, random);
  add_rules(problem, slice, random);
  view_.segments = segments_;
  args_.segments = segment_args_;
  args_.sm_scale = problem.sm_scale;
  args_.logits_soft_cap = problem.logits_soft_cap;
  args_.rope = problem.rope;
  if (!problem.alibi_slopes.empty()) args_.alibi_slopes = keep(problem.alibi_slopes);
  if (!problem.sinks.empty()) args_.sinks = keep(problem.sinks);
  args_.q_scale = scale_of(problem.q_scale, slice);
  args_.out_scale = scale_of(problem.out_scale, slice);
}

void BatchMemory::add_queries(const Problem& problem, const Slice& slice, Random& random) {
  const AttentionConfig& config = problem.config;
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> first_pos;
  bool as_default = problem.default_q_first_pos;
  int32_t max_keys = 0;
  for (const SlicePart& part : slice.parts) {
    cu_q.push_back(cu_q.back() + part.q_end - part.q_begin);
    const RequestModel& request = problem.requests[part.request];
    first_pos.push_back(request.q_first_pos + part.q_begin);
    as_default = as_default && part.kv_drop == request.q_len - part.q_end;
    max_keys = std::max(max_keys, problem.num_keys(part.request));
    view_.max_q_len = std::max(view_.max_q_len, part.q_end - part.q_begin);
  }
  for (int32_t i = 0; i < slice.padding_requests; ++i) {
    cu_q.push_back(cu_q.back());
    first_pos.push_back(0);
  }
  num_tokens_ = cu_q.back();
  view_.num_requests = static_cast<int32_t>(first_pos.size());
  view_.num_tokens = num_tokens_ + slice.padding_tokens;
  view_.cu_q = keep_length(cu_q);
  if (!as_default) view_.q_first_pos = keep_length(first_pos);
  view_.max_kv_len = max_keys;
  if (random.one_in(2)) view_.max_q_len = view_.max_kv_len = 0;  // computed

  const std::array<int64_t, kMaxRank> strides =
      row_strides(random, view_.num_tokens, config.num_q_heads, config.head_dim_qk);
  const int64_t count = extent(strides, view_.num_tokens, config.num_q_heads, config.head_dim_qk);
  GuardedBuffer memory(static_cast<size_t>(count * size_of(config.q)), GuardedEnd::kBack, kNanByte);
  int64_t token = 0;
  for (const SlicePart& part : slice.parts) {
    const float* values = problem.requests[part.request].q.data();
    for (int64_t i = part.q_begin; i < part.q_end; ++i, ++token) {
      for (int64_t h = 0; h < config.num_q_heads; ++h) {
        for (int64_t d = 0; d < config.head_dim_qk; ++d) {
          store_from_float(memory.data(), config.q, token * strides[0] + h * strides[1] + d,
                           values[(i * config.num_q_heads + h) * config.head_dim_qk + d]);
        }
      }
    }
  }
  memory.protect();
  args_.q = ConstTensorView(memory.data(), config.q, {view_.num_tokens, config.num_q_heads, config.head_dim_qk});
  args_.q.strides = strides;
  memory_.push_back(std::move(memory));
}

void BatchMemory::add_outputs(const ConformanceCase& c, const Problem& problem, Random& random) {
  const AttentionConfig& config = problem.config;
  const int64_t tokens = view_.num_tokens;
  const int64_t heads = config.num_q_heads;
  const int64_t elements = config.out == DType::kFloat4E2M1x2 ? config.head_dim_v / 2 : config.head_dim_v;
  const std::array<int64_t, kMaxRank> strides = row_strides(random, tokens, heads, elements);
  const auto count = static_cast<size_t>(extent(strides, tokens, heads, elements));
  const GuardedEnd end = random.one_in(3) ? GuardedEnd::kFront : GuardedEnd::kBack;
  out_memory_ = GuardedBuffer(count * static_cast<size_t>(size_of(config.out)), end, kCanaryByte);
  args_.out = TensorView(out_memory_.data(), config.out, {tokens, heads, elements});
  args_.out.strides = strides;

  const auto wanted = level<LseLevel>(c, verify::kLse);
  if (wanted == LseLevel::kNone) return;
  const bool heads_outside = wanted == LseLevel::kStrided;
  LseView& lse = args_.lse;
  lse.token_stride = heads_outside ? 1 : heads;
  lse.head_stride = heads_outside ? tokens + 3 : 1;
  lse.base = wanted == LseLevel::kBase2 || (heads_outside && random.one_in(2)) ? LseBase::k2 : LseBase::kE;
  const int64_t values = tokens == 0 ? 0 : (tokens - 1) * lse.token_stride + (heads - 1) * lse.head_stride + 1;
  lse_memory_ = GuardedBuffer(static_cast<size_t>(values) * sizeof(float), GuardedEnd::kBack, kCanaryByte);
  lse.data = lse_memory_.as<float>();
}

void BatchMemory::add_block_scales(const Problem& problem, Random& random) {
  const int64_t blocks = int64_t{problem.config.num_q_heads} * problem.config.head_dim_v / kNvfp4BlockSize;
  args_.out_block_scale.first_row = random.below(200);
  const int64_t bytes = nvfp4_scale_bytes(args_.out_block_scale.first_row + view_.num_tokens, blocks);
  block_scale_memory_ = GuardedBuffer(static_cast<size_t>(bytes), GuardedEnd::kBack, kCanaryByte);
  args_.out_block_scale.data = block_scale_memory_.data();
}

/// Whether the last segment of the batch stands at the positions that leaving first_pos out means: for each of its
/// requests, where the keys of the segments before it end.
bool BatchMemory::follows_earlier_segments(const std::vector<int32_t>& first_pos) const {
  const auto row_of = [](const KvSegment& segment, int32_t request) {
    if (segment.group_indptr == nullptr) return request;
    for (int32_t g = 0; g < segment.num_groups; ++g) {
      if (segment.group_indptr[g] <= request && request < segment.group_indptr[g + 1]) return g;
    }
    return -1;
  };
  for (int32_t r = 0; r < view_.num_requests; ++r) {
    int32_t end = 0;
    for (size_t s = 0; s + 1 < segments_.size(); ++s) {
      const KvSegment& segment = segments_[s];
      if (segment.shard.world > 1) return false;
      const int32_t row = row_of(segment, r);
      if (row >= 0) end = (segment.first_pos == nullptr ? end : segment.first_pos[row]) + segment.kv_len[row];
    }
    const int32_t row = row_of(segments_.back(), r);
    if (row >= 0 && first_pos[static_cast<size_t>(row)] != end) return false;
  }
  return true;
}

void BatchMemory::add_segment(const ConformanceCase& c, const Problem& problem, const KvMemory& kv, const Slice& slice,
                              size_t index, Random& random) {
  const SegmentModel& model = problem.segments[index];
  const bool last = index + 1 == problem.segments.size();
  std::vector<const KvRowModel*> rows;
  std::vector<int32_t> kv_len, first_pos, group_indptr;
  std::vector<size_t> numbers;
  if (model.shared) {
    std::vector<int32_t> members(model.rows.size(), 0);
    int32_t begin = 0;  // requests before the first group have none; groups are neighbours from there on
    for (const SlicePart& part : slice.parts) {
      const int32_t group = model.row_of_request[part.request];
      const bool later =
          std::any_of(model.row_of_request.begin(), model.row_of_request.begin() + static_cast<int64_t>(part.request),
                      [](int32_t other) { return other >= 0; });
      if (group >= 0) ++members[static_cast<size_t>(group)];
      begin += group < 0 && !later;
    }
    group_indptr.push_back(begin);
    for (size_t g = 0; g < model.rows.size(); ++g) {
      rows.push_back(&model.rows[g]);
      kv_len.push_back(model.rows[g].kv_len);
      numbers.push_back(g);
      group_indptr.push_back(group_indptr.back() + members[g]);
    }
  } else {
    for (const SlicePart& part : slice.parts) {
      const auto row = static_cast<size_t>(model.row_of_request[part.request]);
      rows.push_back(&model.rows[row]);
      kv_len.push_back(model.rows[row].kv_len - (last ? part.kv_drop : 0));
      numbers.push_back(row);
    }
  }
  for (const KvRowModel* row : rows) first_pos.push_back(row->first_pos);
  if (!model.shared) {
    kv_len.resize(kv_len.size() + static_cast<size_t>(slice.padding_requests), 0);
    first_pos.resize(kv_len.size(), 0);
  }

  KvSegment& segment = segments_.emplace_back();
  segment.source = model.source;
  segment.mask = model.mask;
  segment.shard = model.shard;
  segment.kv_len = keep_length(kv_len);
  if (model.shared) {
    segment.group_indptr = keep_length(group_indptr);
    segment.num_groups = static_cast<int32_t>(model.rows.size());
  }
  if (!follows_earlier_segments(first_pos) || random.one_in(2)) segment.first_pos = keep_length(first_pos);

  SegmentArgs& args = segment_args_[index];
  args.k_scale = scale_of(model.k_scale, slice);
  args.v_scale = scale_of(model.v_scale, slice);
  if (model.source == KvSource::kRagged) {
    args.ragged = kv.ragged(index);
    std::vector<int32_t> indptr;
    indptr.reserve(numbers.size() + 1);
    for (const size_t number : numbers) indptr.push_back(kv.ragged_begin(index, number));
    // Rows may be longer than their length: each ends where the next one of the slice begins, or at the tensor's end.
    indptr.push_back(kv.ragged_begin(index, model.rows.size()));
    indptr.resize(kv_len.size() + 1, indptr.back());
    args.ragged.indptr = keep(indptr);
    return;
  }
  args.cache = kv.cache();
  add_table(c, rows, kv_len, problem.config.page_size, args, random);
}

void BatchMemory::add_table(const ConformanceCase& c, const std::vector<const KvRowModel*>& rows,
                            const std::vector<int32_t>& kv_len, int32_t page_size, SegmentArgs& args, Random& random) {
  PageTableView& table = args.table;
  std::vector<int32_t> entries;
  const auto junk = [&](int32_t count) {
    for (int32_t i = 0; i < count; ++i) entries.push_back(random.one_in(2) ? kHugeId : -1);
  };
  const auto pages = [&](size_t row) { return (kv_len[row] + page_size - 1) / page_size; };
  table.num_rows = static_cast<int32_t>(kv_len.size());
  if (level<TableLevel>(c, verify::kTable) == TableLevel::kCsr) {
    table.kind = PageTableKind::kCsr;
    std::vector<int32_t> indptr;
    junk(random.below(4));
    for (size_t r = 0; r < kv_len.size(); ++r) {
      indptr.push_back(static_cast<int32_t>(entries.size()));
      if (r < rows.size()) entries.insert(entries.end(), rows[r]->pages.begin(), rows[r]->pages.begin() + pages(r));
      if (r + 1 < kv_len.size()) junk(random.below(3));
    }
    indptr.push_back(static_cast<int32_t>(entries.size()));
    table.indptr = keep(indptr);
  } else {
    table.kind = PageTableKind::kDense;
    int32_t columns = 0;
    for (size_t r = 0; r < kv_len.size(); ++r) columns = std::max(columns, pages(r));
    table.first_column = random.below(3);
    table.row_stride = table.first_column + columns + random.below(3);
    for (size_t r = 0; r < kv_len.size(); ++r) {
      entries.resize(r * static_cast<size_t>(table.row_stride), kHugeId);
      junk(table.first_column);
      if (r < rows.size()) entries.insert(entries.end(), rows[r]->pages.begin(), rows[r]->pages.begin() + pages(r));
    }
  }
  table.num_indices = static_cast<int64_t>(entries.size());
  table.indices = keep(entries);
}

/// Masks as rules. Padding requests have any; padding tokens have none.
void BatchMemory::add_rules(const Problem& problem, const Slice& slice, Random& random) {
  const Features features = problem.config.features;
  std::vector<int32_t> kv_start;
  std::vector<int32_t> spans;
  std::vector<uint8_t> causal;
  for (const SlicePart& part : slice.parts) {
    const RequestModel& request = problem.requests[part.request];
    kv_start.push_back(request.kv_start);
    causal.push_back(request.causal ? static_cast<uint8_t>(random.between(1, 255)) : uint8_t{0});
    for (int32_t i = part.q_begin; i < part.q_end && !request.spans.empty(); ++i) {
      spans.push_back(request.spans[static_cast<size_t>(i)].begin);
      spans.push_back(request.spans[static_cast<size_t>(i)].end);
    }
  }
  kv_start.resize(kv_start.size() + static_cast<size_t>(slice.padding_requests), kHugeId);
  causal.resize(kv_start.size(), 0);
  if (features.has(Feature::kKvStart)) view_.kv_start = keep_length(kv_start);
  if (features.has(Feature::kRequestCausal)) view_.causal = keep_length(causal);
  if (features.has(Feature::kSpans)) view_.spans = keep_length(spans);
}

void BatchMemory::add_mask(const Problem& problem, const Slice& slice, Random& random) {
  std::vector<uint8_t> bytes;
  std::vector<int32_t> tail_len;
  for (const SlicePart& part : slice.parts) {
    const RequestModel& request = problem.requests[part.request];
    const int32_t columns = request.mask_columns;
    const auto bits = static_cast<size_t>(part.q_end - part.q_begin) * static_cast<size_t>(columns);
    const size_t begin = bytes.size();
    bytes.resize(begin + (bits + 7) / 8, 0);
    const uint8_t* source = request.mask.data() + int64_t{part.q_begin} * columns;
    for (size_t i = 0; i < (bits + 7) / 8 * 8; ++i) {
      const bool bit = i < bits ? source[i] != 0 : random.one_in(2);  // spare bits are junk
      bytes[begin + i / 8] = static_cast<uint8_t>(bytes[begin + i / 8] | static_cast<uint8_t>(bit) << (i % 8));
    }
    tail_len.push_back(columns);
  }
  tail_len.resize(tail_len.size() + static_cast<size_t>(slice.padding_requests), 0);
  view_.custom_mask.scope = problem.mask_scope;
  if (problem.mask_scope == CustomMaskScope::kTail) view_.custom_mask.tail_len = keep_length(tail_len);
  args_.custom_mask_bytes = static_cast<int64_t>(bytes.size());
  args_.custom_mask = keep(bytes);
}

Scale BatchMemory::scale_of(const ScaleModel& model, const Slice& slice) {
  Scale scale;
  if (!model.in_memory) {
    scale.value = model.values[0];
    return scale;
  }
  scale.granularity = model.granularity;
  std::vector<float> values = model.values;
  const bool per_request = model.granularity == ScaleGranularity::kPerRequest ||
                           (model.granularity == ScaleGranularity::kPerRequestAndHead && !model.same_for_all_requests);
  if (per_request) {
    const int32_t heads = model.granularity == ScaleGranularity::kPerRequest ? 1 : model.num_kv_heads;
    const int32_t stride = heads + (heads > 1 || model.granularity == ScaleGranularity::kPerRequestAndHead ? 2 : 0);
    values.clear();
    for (const SlicePart& part : slice.parts) {
      for (int32_t h = 0; h < heads; ++h) values.push_back(model.at(static_cast<int32_t>(part.request), h));
      values.resize(values.size() + static_cast<size_t>(stride - heads), std::numeric_limits<float>::quiet_NaN());
    }
    scale.request_stride = model.granularity == ScaleGranularity::kPerRequestAndHead ? stride : 0;
  }
  scale.data = keep(values);
  return scale;
}

std::vector<const GuardedBuffer*> BatchMemory::buffers() const {
  std::vector<const GuardedBuffer*> all{&out_memory_, &lse_memory_, &block_scale_memory_};
  for (const GuardedBuffer& buffer : memory_) all.push_back(&buffer);
  for (const GuardedBuffer& buffer : lengths_) all.push_back(&buffer);
  return all;
}

void BatchMemory::move_lengths_to_device() {
  view_.where = Where::kDevice;
}

void BatchMemory::spoil_lengths() {
  for (GuardedBuffer& buffer : lengths_) {
    std::fill_n(buffer.as<uint8_t>(), buffer.size(), uint8_t{0x7f});
    buffer.protect();
  }
}

bool BatchMemory::written() const {
  const auto touched = [](std::span<const uint8_t> bytes) {
    return std::any_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte != kCanaryByte; });
  };
  return touched(out_memory_.bytes()) || touched(lse_memory_.bytes()) || touched(block_scale_memory_.bytes());
}

RunOutput BatchMemory::collect() const {
  RunOutput output;
  const TensorView& out = args_.out;
  const auto width = static_cast<size_t>(size_of(out.dtype));
  const auto row_bytes = static_cast<size_t>(out.shape[2]) * width;
  std::vector<uint8_t> rest(out_memory_.bytes().begin(), out_memory_.bytes().end());
  std::vector<uint8_t> lse_rest(lse_memory_.bytes().begin(), lse_memory_.bytes().end());
  const LseView& lse = args_.lse;
  for (int64_t t = 0; t < num_tokens_; ++t) {
    for (int64_t h = 0; h < out.shape[1]; ++h) {
      const auto at = rest.begin() + (t * out.strides[0] + h * out.strides[1]) * static_cast<int64_t>(width);
      output.out.insert(output.out.end(), at, at + static_cast<int64_t>(row_bytes));
      std::fill_n(at, row_bytes, kCanaryByte);
      if (lse.data == nullptr) continue;
      const int64_t element = t * lse.token_stride + h * lse.head_stride;
      output.lse.push_back(lse.data[element]);
      std::fill_n(lse_rest.begin() + element * static_cast<int64_t>(sizeof(float)), sizeof(float), kCanaryByte);
    }
  }
  std::vector<uint8_t> scales_rest(block_scale_memory_.bytes().begin(), block_scale_memory_.bytes().end());
  if (!scales_rest.empty()) {
    const int64_t blocks = out.shape[1] * out.shape[2] * 2 / kNvfp4BlockSize;
    for (int64_t i = 0; i < num_tokens_ * blocks; ++i) {
      const int64_t row = args_.out_block_scale.first_row + i / blocks;
      uint8_t& scale = scales_rest[static_cast<size_t>(nvfp4_scale_index(row, i % blocks, blocks))];
      output.block_scales.push_back(scale);
      scale = kCanaryByte;
    }
  }
  const auto stray = [](const std::vector<uint8_t>& bytes) {
    return std::find_if(bytes.begin(), bytes.end(), [](uint8_t b) { return b != kCanaryByte; });
  };
  if (const auto at = stray(rest); at != rest.end()) {
    output.stray_write =
        "out was written at byte " + std::to_string(at - rest.begin()) + ", which no row of the batch owns";
  } else if (const auto lse_at = stray(lse_rest); lse_at != lse_rest.end()) {
    output.stray_write = "lse was written at byte " + std::to_string(lse_at - lse_rest.begin()) + ", which no row owns";
  } else if (const auto scale_at = stray(scales_rest); scale_at != scales_rest.end()) {
    output.stray_write =
        "block scales were written at byte " + std::to_string(scale_at - scales_rest.begin()) + ", which no row owns";
  }
  return output;
}

}  // namespace folio::inline v0::verify
