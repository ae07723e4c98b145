#include "serving_step.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "folio/types/float_convert.hpp"

namespace folio::cuda_test {
namespace {

AttentionOp make_op(const Context& context, Determinism determinism, const std::string& kernel, int32_t shared_levels,
                    const ServingSizes& sizes) {
  AttentionConfig config;
  config.num_q_heads = ServingStep::kQHeads;
  config.num_kv_heads = ServingStep::kKvHeads;
  config.head_dim_qk = config.head_dim_v = sizes.head_dim;
  config.page_size = ServingStep::kPageSize;
  config.window_left = sizes.window_left;
  config.determinism = determinism;
  PrepareOptions options;
  options.force_kernel = kernel;
  options.bounds = GraphBounds{.max_requests = ServingStep::kRequests,
                               .max_tokens = sizes.tokens,
                               .max_q_len = sizes.max_q_len,
                               .max_kv_len = sizes.max_kv_len,
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

ServingStep::ServingStep(Determinism determinism, const std::string& kernel, int32_t shared_levels,
                         const ServingSizes& sizes, int32_t device)
    : sizes_(sizes),
      context_(Context::cuda(device)),
      op_(make_op(context_, determinism, kernel, shared_levels, sizes)),
      table_(static_cast<size_t>(kRequests * pages_per_request())),
      slots_(static_cast<size_t>(sizes.tokens)),
      q_(kLayers * q_elements()),
      new_k_(kLayers * kv_elements()),
      new_v_(kLayers * kv_elements()),
      cache_k_(kLayers * cache_elements()),
      cache_v_(kLayers * cache_elements()),
      out_(kLayers * q_elements()),
      lse_(kLayers * static_cast<size_t>(sizes.tokens) * kQHeads),
      workspace_(workspace_size(op_)) {
  workspace_.fill(0xff);
  init_workspace(op_, {workspace_.data(), workspace_.bytes()});
}

size_t ServingStep::cache_elements() const {
  return static_cast<size_t>(pages()) * kPageSize * kKvHeads * static_cast<size_t>(sizes_.head_dim);
}
size_t ServingStep::q_elements() const {
  return static_cast<size_t>(sizes_.tokens) * kQHeads * static_cast<size_t>(sizes_.head_dim);
}
size_t ServingStep::kv_elements() const {
  return static_cast<size_t>(sizes_.tokens) * kKvHeads * static_cast<size_t>(sizes_.head_dim);
}

StepLengths ServingStep::random_lengths(std::mt19937& random, const ServingSizes& sizes) {
  const auto between = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  StepLengths lengths;
  lengths.cu_q.assign(1, 0);
  const int32_t filled = between(0, kRequests);
  for (int32_t r = 0; r < kRequests; ++r) {
    const int32_t room = std::min(sizes.max_q_len, sizes.tokens - lengths.cu_q.back());
    const int32_t q_len = r < filled ? between(std::min(room, between(0, 1)), room) : 0;
    lengths.cu_q.push_back(lengths.cu_q.back() + q_len);
    const int32_t most = between(0, 3) == 0 ? sizes.max_kv_len : 60;
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
  std::vector<int32_t> shuffled(static_cast<size_t>(pages()));
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  std::vector<int32_t> table(static_cast<size_t>(kRequests * pages_per_request()),
                             INT32_MAX);  // unused entries are never read
  std::vector<int64_t> slots(static_cast<size_t>(sizes_.tokens), -1);
  for (int32_t r = 0; r < kRequests; ++r) {
    const size_t row = static_cast<size_t>(r * pages_per_request());
    const int32_t used = (lengths.kv_len[static_cast<size_t>(r)] + kPageSize - 1) / kPageSize;
    for (int32_t i = 0; i < used; ++i) table[row + static_cast<size_t>(i)] = shuffled[row + static_cast<size_t>(i)];
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
  q_.set(random_bfloat16(kLayers * q_elements(), random));
  new_k_.set(random_bfloat16(kLayers * kv_elements(), random));
  new_v_.set(random_bfloat16(kLayers * kv_elements(), random));
  if (filled_) return;
  filled_ = true;
  cache_k_.set(random_bfloat16(kLayers * cache_elements(), random));
  cache_v_.set(random_bfloat16(kLayers * cache_elements(), random));
}

BatchView ServingStep::batch(const StepLengths* host_lengths) {
  BatchView batch;
  batch.where = host_lengths == nullptr ? Where::kDevice : Where::kHost;
  batch.num_requests = kRequests;
  batch.num_tokens = sizes_.tokens;
  batch.max_q_len = sizes_.max_q_len;
  batch.max_kv_len = sizes_.max_kv_len;
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
  const KvCacheShape shape{pages(), kPageSize, kKvHeads, sizes_.head_dim, sizes_.head_dim, DType::kBFloat16};
  LayerArgs l;
  l.write.k = ConstTensorView(new_k_.data() + layer * kv_elements(), DType::kBFloat16,
                              {sizes_.tokens, kKvHeads, sizes_.head_dim});
  l.write.v = ConstTensorView(new_v_.data() + layer * kv_elements(), DType::kBFloat16,
                              {sizes_.tokens, kKvHeads, sizes_.head_dim});
  l.write.slot_mapping = slots_.data();
  l.write.num_slots = sizes_.tokens;
  uint16_t* const k = cache_k_.data() + layer * cache_elements();
  uint16_t* const v = cache_v_.data() + layer * cache_elements();
  l.write.cache = layer == 0 ? make_nhd_view(shape, k, v) : make_hnd_view(shape, k, v);
  l.segment.cache = l.write.cache;
  l.segment.table.kind = PageTableKind::kDense;
  l.segment.table.indices = table_.data();
  l.segment.table.num_indices = int64_t{kRequests} * pages_per_request();
  l.segment.table.row_stride = pages_per_request();
  l.segment.table.num_rows = kRequests;
  l.args.q =
      ConstTensorView(q_.data() + layer * q_elements(), DType::kBFloat16, {sizes_.tokens, kQHeads, sizes_.head_dim});
  l.args.out =
      TensorView(out_.data() + layer * q_elements(), DType::kBFloat16, {sizes_.tokens, kQHeads, sizes_.head_dim});
  if (!sizes_.lse) return l;
  l.args.lse = {.data = lse_.data() + layer * static_cast<size_t>(sizes_.tokens) * kQHeads,
                .token_stride = kQHeads,
                .head_stride = 1};
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
