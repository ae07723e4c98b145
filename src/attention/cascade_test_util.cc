#include "attention/cascade_test_util.hpp"

#include <cmath>
#include <cstring>
#include <random>
#include <sstream>

#include "testing/reference_attention.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr int32_t kQHeads = 4;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kHeadDim = 32;
constexpr int32_t kFirstColumn = 2;
constexpr float kKScale = 0.5f;
constexpr float kVScale = 2.0f;

AttentionConfig config_of(const CascadeSetup& setup) {
  AttentionConfig config;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim_qk = config.head_dim_v = kHeadDim;
  config.q = setup.q;
  config.kv = setup.kv;
  config.out = DType::kFloat32;
  config.kv_format = setup.layout == CascadeLayout::kPacked ? KvFormat::kCpuPacked : KvFormat::kStrided;
  config.page_size = setup.page_size;
  config.window_left = setup.window_left;
  if (setup.alibi) config.features = config.features | Feature::kAlibi;
  if (setup.sinks) config.features = config.features | Feature::kSinks;
  if (setup.soft_cap != 0.0f) config.features = config.features | Feature::kSoftCap;
  config.determinism = setup.determinism;
  return config;
}

KvCacheView view_of(const CascadeSetup& setup, int32_t num_pages, std::vector<std::byte>& memory) {
  const KvCacheShape shape{num_pages, setup.page_size, kKvHeads, kHeadDim, kHeadDim, setup.kv};
  const auto half = static_cast<size_t>(k_elements(shape) * size_of(setup.kv));
  memory.assign(2 * half, std::byte{0xff});  // NaN in every dtype
  switch (setup.layout) {
    case CascadeLayout::kHnd: return make_hnd_view(shape, memory.data(), memory.data() + half);
    case CascadeLayout::kPacked: return make_cpu_packed_view(shape, memory.data(), memory.data() + half);
    case CascadeLayout::kNhd: break;
  }
  return make_nhd_view(shape, memory.data(), memory.data() + half);
}

}  // namespace

CascadeScene::CascadeScene(const CascadeSetup& setup) : setup_(setup), op_(prepare(context_, config_of(setup))) {
  make_tables();
  make_pool();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const size_t elements = static_cast<size_t>(cu_q.back()) * kQHeads * kHeadDim;
  q_.resize(elements * static_cast<size_t>(size_of(setup.q)));
  for (size_t i = 0; i < elements; ++i) store_from_float(q_.data(), setup.q, static_cast<int64_t>(i), normal(random));
  slopes_ = {0.5f, 0.25f, 0.125f, 0.0625f};
  sinks_ = {0.5f, -1.0f, 2.0f, 0.0f};
  out.assign(elements, -7.0f);
  lse.assign(static_cast<size_t>(cu_q.back()) * kQHeads, -7.0f);
}

/// System prompt of 9 pages; chats of 5 and 3 more; the last request shares nothing.
void CascadeScene::make_tables() {
  const auto fresh = [this](int32_t count) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < count; ++i) ids.push_back(num_pages_++);
    return ids;
  };
  const auto join = [](std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const auto system = fresh(9);
  const auto chats = {join(system, fresh(5)), join(system, fresh(3))};
  const int32_t page = setup_.page_size;
  for (const auto& chat : chats) {
    const auto tokens = static_cast<int32_t>(chat.size()) * page;
    for (const int32_t more : {1, page + 3, 2 * page}) {
      if (&chat == chats.begin() + 1 && more == 1) {  // padding among the others
        pages_.emplace_back();
        kv_len.push_back(0);
        q_len.push_back(0);
      }
      pages_.push_back(join(chat, fresh((more + page - 1) / page)));
      kv_len.push_back(tokens + more);
      q_len.push_back(more == 2 * page ? page + 5 : (more > 1 ? 3 : 1));
    }
  }
  pages_.push_back(join(system, fresh(1)));  // only the system prompt
  kv_len.push_back(9 * page + 2);
  q_len.push_back(1);
  pages_.push_back(fresh(4));
  kv_len.push_back(4 * page);
  q_len.push_back(4 * page);
  for (const int32_t count : q_len) cu_q.push_back(cu_q.back() + count);

  for (const auto& row : pages_) columns_ = std::max(columns_, static_cast<int32_t>(row.size()) + kFirstColumn + 1);
  indptr_.push_back(0);
  for (const auto& row : pages_) {
    if (setup_.dense) table_.insert(table_.end(), kFirstColumn, -1);
    table_.insert(table_.end(), row.begin(), row.end());
    indptr_.push_back(static_cast<int32_t>(table_.size()));
    if (setup_.dense) table_.resize(static_cast<size_t>(columns_) * (indptr_.size() - 1), -1);
  }
}

void CascadeScene::make_pool() {
  cache_ = view_of(setup_, num_pages_, pool_);
  magnitude_cache_ = view_of(setup_, num_pages_, magnitudes_);
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<bool> written(static_cast<size_t>(num_pages_) * static_cast<size_t>(setup_.page_size));
  std::vector<float> k(kKvHeads * kHeadDim), v(k.size());
  for (size_t r = 0; r < pages_.size(); ++r) {
    for (int32_t position = 0; position < kv_len[r]; ++position) {
      const auto page = static_cast<size_t>(position / setup_.page_size);
      const int64_t slot = int64_t{pages_[r][page]} * setup_.page_size + position % setup_.page_size;
      if (written[static_cast<size_t>(slot)]) continue;
      written[static_cast<size_t>(slot)] = true;
      for (float& value : k) value = normal(random);
      for (float& value : v) value = normal(random);
      CacheWriteArgs write;
      write.slot_mapping = &slot;
      write.num_slots = 1;
      if (is_fp8(setup_.kv)) {
        write.k_scale.value = kKScale;
        write.v_scale.value = kVScale;
      }
      for (const KvCacheView& cache : {cache_, magnitude_cache_}) {
        write.cache = cache;
        write.k = ConstTensorView(k.data(), DType::kFloat32, {1, kKvHeads, kHeadDim});
        write.v = ConstTensorView(v.data(), DType::kFloat32, {1, kKvHeads, kHeadDim});
        write_kv_cache(context_, write);
        for (float& value : v) value = std::abs(value);
      }
    }
  }
}

PageTableView CascadeScene::table() const {
  const auto rows = static_cast<int32_t>(pages_.size());
  return setup_.dense ? dense_table(table_, rows, columns_, kFirstColumn) : csr_table(table_, indptr_);
}

CascadeBatch CascadeScene::batch() const {
  return {static_cast<int32_t>(kv_len.size()), cu_q.data(), kv_len.data(), table()};
}

CascadeCosts CascadeScene::eager_costs() const {
  CascadeCosts costs = cascade_costs(op_);
  costs.tile_rows = 1 << 20;
  costs.tile_tokens = 1;
  costs.q_row_bytes = costs.partial_row_bytes = 0;
  costs.window_left = -1;
  return costs;
}

AttentionArgs CascadeScene::layer_args() const {
  AttentionArgs args;
  args.q = ConstTensorView(q_.data(), setup_.q, {cu_q.back(), kQHeads, kHeadDim});
  if (setup_.alibi) args.alibi_slopes = slopes_.data();
  if (setup_.sinks) args.sinks = sinks_.data();
  args.logits_soft_cap = setup_.soft_cap;
  return args;
}

PlanSummary CascadeScene::run_with(const Cascade& cascade) {
  BatchView view;
  view.num_requests = static_cast<int32_t>(kv_len.size());
  view.num_tokens = cu_q.back();
  view.cu_q = cu_q.data();
  view.segments = cascade.segments;
  PlanBuffer buffer = make_plan_buffer(op_);
  const AttentionPlan planned = plan(op_, view, buffer);
  core::AlignedBuffer memory(workspace_size(planned), core::AlignedBuffer::kWorkspaceAlignment);
  std::memset(memory.data(), 0xff, memory.bytes());
  const Workspace workspace{memory.data(), memory.bytes()};
  std::vector<SegmentArgs> segments(cascade.segments.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    segments[s].cache = cache_;
    segments[s].table = cascade.tables[s];
    if (is_fp8(setup_.kv)) {
      segments[s].k_scale.value = kKScale;
      segments[s].v_scale.value = kVScale;
    }
  }
  AttentionArgs args = layer_args();
  args.segments = segments;
  args.out = TensorView(out.data(), DType::kFloat32, {cu_q.back(), kQHeads, kHeadDim});
  args.lse = {lse.data(), kQHeads, 1, LseBase::kE};
  run(planned, args, workspace);
  return summary(planned);
}

std::string CascadeScene::wrong_result() const {
  KvSegment segment;
  segment.kv_len = kv_len.data();
  BatchView view;
  view.num_requests = static_cast<int32_t>(kv_len.size());
  view.num_tokens = cu_q.back();
  view.cu_q = cu_q.data();
  view.segments = {&segment, 1};
  SegmentArgs segment_args;
  segment_args.table = table();
  if (is_fp8(setup_.kv)) {
    segment_args.k_scale.value = kKScale;
    segment_args.v_scale.value = kVScale;
  }
  AttentionArgs args = layer_args();
  args.segments = {&segment_args, 1};
  std::vector<double> expected(out.size()), expected_lse(lse.size()), magnitude(out.size()), unused(lse.size());
  segment_args.cache = cache_;
  verify::reference_attention(op_.config(), view, args, expected, expected_lse);
  segment_args.cache = magnitude_cache_;
  verify::reference_attention(op_.config(), view, args, magnitude, unused);
  // Kernels may round p, once, to p_dtype; the rest is float32: logits, exponentials and sums of at
  // most 2^8 roundings each.
  const double p_unit = op_.p_dtype() == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double unit = (op_.p_dtype() == DType::kFloat32 ? 0.0 : p_unit) + 0x1p-24 * 256;
  std::ostringstream text;
  for (size_t i = 0; i < out.size(); ++i) {
    if (!(std::abs(out[i] - expected[i]) <= unit * magnitude[i])) {  // NaN is wrong too
      text << "row " << i / kHeadDim << ", component " << i % kHeadDim << ": " << out[i] << " instead of "
           << expected[i] << ", allowed " << unit * magnitude[i];
      return text.str();
    }
  }
  for (size_t i = 0; i < lse.size(); ++i) {
    if (!(std::abs(lse[i] - expected_lse[i]) <= 0x1p-24 * 256 * (1.0 + std::abs(expected_lse[i])))) {
      text << "LSE of row " << i << ": " << lse[i] << " instead of " << expected_lse[i];
      return text.str();
    }
  }
  return {};
}

}  // namespace folio::inline v0::attention
