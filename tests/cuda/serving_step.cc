#include "serving_step.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {
namespace {

constexpr size_t kCacheElements =
    size_t{ServingStep::kPages} * ServingStep::kPageSize * ServingStep::kKvHeads * ServingStep::kHeadDim;
constexpr size_t kQElements = size_t{ServingStep::kTokens} * ServingStep::kQHeads * ServingStep::kHeadDim;
constexpr size_t kKvElements = size_t{ServingStep::kTokens} * ServingStep::kKvHeads * ServingStep::kHeadDim;

AttentionOp make_op(const Context& context, Determinism determinism, const std::string& kernel, int32_t shared_levels) {
  AttentionConfig config;
  config.num_q_heads = ServingStep::kQHeads;
  config.num_kv_heads = ServingStep::kKvHeads;
  config.head_dim_qk = config.head_dim_v = ServingStep::kHeadDim;
  config.page_size = ServingStep::kPageSize;
  config.determinism = determinism;
  PrepareOptions options;
  options.force_kernel = kernel;
  options.bounds = GraphBounds{.max_requests = ServingStep::kRequests,
                               .max_tokens = ServingStep::kTokens,
                               .max_q_len = ServingStep::kMaxQLen,
                               .max_kv_len = ServingStep::kMaxKvLen,
                               .max_shared_levels = shared_levels};
  return prepare(context, config, options);
}

std::vector<uint16_t> random_bfloat16(size_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> value(-1.0f, 1.0f);
  std::vector<uint16_t> values(count);
  for (uint16_t& bits : values) bits = float_to_bfloat16(value(random));
  return values;
}

}  // namespace

ServingStep::ServingStep(Determinism determinism, const std::string& kernel, int32_t shared_levels)
    : op_(make_op(context_, determinism, kernel, shared_levels)),
      q_(kLayers * kQElements),
      new_k_(kLayers * kKvElements),
      new_v_(kLayers * kKvElements),
      cache_k_(kLayers * kCacheElements),
      cache_v_(kLayers * kCacheElements),
      out_(kLayers * kQElements),
      lse_(size_t{kLayers} * kTokens * kQHeads),
      workspace_(workspace_size(op_)) {
  workspace_.fill(0xff);
  init_workspace(op_, {workspace_.data(), workspace_.bytes()});
}

StepLengths ServingStep::random_lengths(std::mt19937& random) {
  const auto between = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  StepLengths lengths;
  lengths.cu_q.assign(1, 0);
  const int32_t filled = between(0, kRequests);
  for (int32_t r = 0; r < kRequests; ++r) {
    const int32_t room = std::min(kMaxQLen, kTokens - lengths.cu_q.back());
    const int32_t q_len = r < filled ? between(std::min(room, between(0, 1)), room) : 0;
    lengths.cu_q.push_back(lengths.cu_q.back() + q_len);
    const int32_t most = between(0, 3) == 0 ? kMaxKvLen : 60;
    lengths.kv_len.push_back(r < filled ? std::max(q_len, between(0, most)) : 0);
  }
  return lengths;
}

StepLengths ServingStep::random_lengths(std::mt19937& random, StepKind kind) {
  if (kind == StepKind::kAny) return random_lengths(random);
  const auto between = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  StepLengths lengths;
  lengths.cu_q.assign(1, 0);
  const int32_t several = 3;
  const int32_t filled = between(1, kind == StepKind::kSeveralTokens ? kTokens / several : kRequests);
  for (int32_t r = 0; r < kRequests; ++r) {
    const int32_t room = kTokens - lengths.cu_q.back() - std::max(0, filled - r - 1);
    const bool decodes = kind == StepKind::kDecode || (kind == StepKind::kMixed && r < filled / 2);
    int32_t q_len = kind == StepKind::kSeveralTokens ? several : decodes ? 1 : between(2, kMaxQLen);
    q_len = r < filled ? std::max(1, std::min(q_len, room)) : 0;
    lengths.cu_q.push_back(lengths.cu_q.back() + q_len);
    const bool prompt = kind == StepKind::kPrefill && between(0, 1) == 0;
    lengths.kv_len.push_back(r >= filled ? 0 : prompt ? q_len : between(q_len, between(0, 1) == 0 ? kMaxKvLen : 60));
  }
  return lengths;
}

void ServingStep::set_lengths(const StepLengths& lengths) {
  cu_q_.set(lengths.cu_q);
  kv_len_.set(lengths.kv_len);
}

void ServingStep::set(const StepLengths& lengths, std::mt19937& random) {
  set_lengths(lengths);
  std::vector<int32_t> pages(kPages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<int32_t> table(size_t{kRequests} * kPagesPerRequest, INT32_MAX);  // unused entries are never read
  std::vector<int64_t> slots(kTokens, -1);
  for (int32_t r = 0; r < kRequests; ++r) {
    const size_t row = static_cast<size_t>(r) * kPagesPerRequest;
    const int32_t used = (lengths.kv_len[static_cast<size_t>(r)] + kPageSize - 1) / kPageSize;
    for (int32_t i = 0; i < used; ++i) table[row + static_cast<size_t>(i)] = pages[row + static_cast<size_t>(i)];
    const int32_t begin = lengths.cu_q[static_cast<size_t>(r)];
    const int32_t end = lengths.cu_q[static_cast<size_t>(r) + 1];
    for (int32_t token = begin; token < end; ++token) {
      const int32_t position = lengths.kv_len[static_cast<size_t>(r)] - (end - token);
      slots[static_cast<size_t>(token)] =
          int64_t{table[row + static_cast<size_t>(position / kPageSize)]} * kPageSize + position % kPageSize;
    }
  }
  table_.set(table);
  slots_.set(slots);
  q_.set(random_bfloat16(kLayers * kQElements, random));
  new_k_.set(random_bfloat16(kLayers * kKvElements, random));
  new_v_.set(random_bfloat16(kLayers * kKvElements, random));
  if (filled_) return;
  filled_ = true;
  cache_k_.set(random_bfloat16(kLayers * kCacheElements, random));
  cache_v_.set(random_bfloat16(kLayers * kCacheElements, random));
}

BatchView ServingStep::batch(const StepLengths* host_lengths) {
  BatchView batch;
  batch.where = host_lengths == nullptr ? Where::kDevice : Where::kHost;
  batch.num_requests = kRequests;
  batch.num_tokens = kTokens;
  batch.max_q_len = kMaxQLen;
  batch.max_kv_len = kMaxKvLen;
  batch.cu_q = host_lengths == nullptr ? cu_q_.data() : host_lengths->cu_q.data();
  segment_.kv_len = host_lengths == nullptr ? kv_len_.data() : host_lengths->kv_len.data();
  batch.segments = {&segment_, 1};
  return batch;
}

AttentionPlan ServingStep::enqueue(PlanBuffer& buffer, const StepLengths* host_lengths, Stream stream) {
  const AttentionPlan plan = folio::plan(op_, batch(host_lengths), buffer, stream);
  run_layers(plan, stream);
  return plan;
}

ServingStep::LayerArgs ServingStep::layer_args(size_t layer) const {
  const KvCacheShape shape{kPages, kPageSize, kKvHeads, kHeadDim, kHeadDim, DType::kBFloat16};
  LayerArgs l;
  l.write.k = ConstTensorView(new_k_.data() + layer * kKvElements, DType::kBFloat16, {kTokens, kKvHeads, kHeadDim});
  l.write.v = ConstTensorView(new_v_.data() + layer * kKvElements, DType::kBFloat16, {kTokens, kKvHeads, kHeadDim});
  l.write.slot_mapping = slots_.data();
  l.write.num_slots = kTokens;
  uint16_t* const k = cache_k_.data() + layer * kCacheElements;
  uint16_t* const v = cache_v_.data() + layer * kCacheElements;
  l.write.cache = layer == 0 ? make_nhd_view(shape, k, v) : make_hnd_view(shape, k, v);
  l.segment.cache = l.write.cache;
  l.segment.table.kind = PageTableKind::kDense;
  l.segment.table.indices = table_.data();
  l.segment.table.num_indices = int64_t{kRequests} * kPagesPerRequest;
  l.segment.table.row_stride = kPagesPerRequest;
  l.segment.table.num_rows = kRequests;
  l.args.q = ConstTensorView(q_.data() + layer * kQElements, DType::kBFloat16, {kTokens, kQHeads, kHeadDim});
  l.args.out = TensorView(out_.data() + layer * kQElements, DType::kBFloat16, {kTokens, kQHeads, kHeadDim});
  l.args.lse = {.data = lse_.data() + layer * kTokens * kQHeads, .token_stride = kQHeads, .head_stride = 1};
  return l;
}

void ServingStep::run_layers(const AttentionPlan& plan, Stream stream) {
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const LayerArgs args = layer_args(layer);
    write_kv_cache(context_, args.write, stream);
    run(plan, args.attention(), workspace(), stream);
  }
}

ServingStep::Output ServingStep::output() const {
  Output output{out_.get(), lse_.get()};
  for (float& value : output.lse) {
    if (value != value) value = 1e30f;  // what was not written is NaN, which equals nothing
  }
  return output;
}

void ServingStep::clear_output() {
  out_.fill(0xff);
  lse_.fill(0xff);
}

}  // namespace folio::cuda_test
