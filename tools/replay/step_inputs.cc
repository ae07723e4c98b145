#include "replay/step_inputs.hpp"

#include <algorithm>
#include <cstring>

#include "replay/gpu.hpp"
#include "replay/synthetic.hpp"

namespace folio::replay {
namespace {

/// Calls fill(token) for every token on the context's threads.
template <typename Fill>
void for_each_token(const Context& context, int32_t num_tokens, const Fill& fill) {
  constexpr int32_t kTokensPerTask = 8;
  struct Task {
    const Fill* fill;
    int32_t num_tokens;
  } task{&fill, num_tokens};
  context.parallel_for((num_tokens + kTokensPerTask - 1) / kTokensPerTask,
                       [](void* self, int64_t index) noexcept {
                         const Task& work = *static_cast<const Task*>(self);
                         const auto first = static_cast<int32_t>(index) * kTokensPerTask;
                         for (int32_t t = first; t < std::min(first + kTokensPerTask, work.num_tokens); ++t)
                           (*work.fill)(t);
                       },
                       &task);
}

size_t bytes_of(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements) * static_cast<size_t>(size_of(dtype));
}

}  // namespace

StepInputs::StepInputs(const Context& context, const StackConfig& config)
    : host_(gpu::is_gpu(context) ? Context::cpu() : context),
      config_(config),
      given_(is_fp8(config.kv) || config.kv == DType::kInt8 ? DType::kBFloat16 : config.kv) {
  const int64_t tokens = config.max_tokens;
  k_ = MappedMemory::shared_with(context, bytes_of(tokens * config.num_kv_heads * config.head_dim_qk, given_));
  v_ = MappedMemory::shared_with(context, bytes_of(tokens * config.num_kv_heads * config.head_dim_v, given_));
  q_ = MappedMemory::shared_with(context, bytes_of(tokens * config.num_q_heads * config.head_dim_qk, config.q));
  out_ = MappedMemory::shared_with(context, bytes_of(tokens * config.num_q_heads * config.head_dim_v, config.out()));
  if (config.ranks > 1) ordered_ = MappedMemory(out_.bytes());
}

int32_t StepInputs::model_head(int32_t rank, int32_t head) const {
  const int32_t group = config_.num_q_heads / config_.num_kv_heads;
  const int32_t part = group / config_.ranks;
  return head / part * group + rank * part + head % part;
}

void StepInputs::make_kv(const StepBatch& batch, int32_t layer) {
  const StackConfig& c = config_;
  const size_t k_row = bytes_of(c.head_dim_qk, given_);
  const size_t v_row = bytes_of(c.head_dim_v, given_);
  for_each_token(host_, batch.num_tokens(), [&](int32_t t) {
    const uint64_t link = batch.rows[static_cast<size_t>(t)].link;
    for (int32_t head = 0; head < c.num_kv_heads; ++head) {
      const auto row = static_cast<size_t>(t) * static_cast<size_t>(c.num_kv_heads) + static_cast<size_t>(head);
      fill_row(kv_row_key(c.seed, InputKind::kKey, link, layer, head), given_, c.head_dim_qk, k_.data() + row * k_row);
      fill_row(kv_row_key(c.seed, InputKind::kValue, link, layer, head), given_, c.head_dim_v, v_.data() + row * v_row);
    }
  });
}

void StepInputs::make_q(const StepBatch& batch, int32_t layer) {
  const StackConfig& c = config_;
  const size_t q_row = bytes_of(c.head_dim_qk, c.q);
  for_each_token(host_, batch.num_tokens(), [&](int32_t t) {
    const TokenRow& token = batch.rows[static_cast<size_t>(t)];
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      for (int32_t head = 0; head < heads_of_rank(); ++head) {
        const int64_t row = (int64_t{rank} * batch.num_tokens() + t) * heads_of_rank() + head;
        fill_row(query_row_key(c.seed, token.request, token.position, layer, model_head(rank, head)), c.q,
                 c.head_dim_qk, q_.data() + static_cast<size_t>(row) * q_row);
      }
    }
  });
}

ConstTensorView StepInputs::k(int32_t num_tokens) const {
  return ConstTensorView(k_.data(), given_, {num_tokens, config_.num_kv_heads, config_.head_dim_qk});
}

ConstTensorView StepInputs::v(int32_t num_tokens) const {
  return ConstTensorView(v_.data(), given_, {num_tokens, config_.num_kv_heads, config_.head_dim_v});
}

ConstTensorView StepInputs::q(int32_t num_tokens, int32_t rank) const {
  const size_t first = bytes_of(int64_t{rank} * num_tokens * heads_of_rank() * config_.head_dim_qk, config_.q);
  return ConstTensorView(q_.data() + first, config_.q, {num_tokens, heads_of_rank(), config_.head_dim_qk});
}

TensorView StepInputs::out(int32_t num_tokens, int32_t rank) const {
  std::byte* const data = out_.data() + static_cast<size_t>(rank) * output_bytes_of_rank(num_tokens);
  return TensorView(data, config_.out(), {num_tokens, heads_of_rank(), config_.head_dim_v});
}

size_t StepInputs::output_bytes_of_rank(int32_t num_tokens) const {
  return bytes_of(int64_t{num_tokens} * heads_of_rank() * config_.head_dim_v, config_.out());
}

LayerOutput StepInputs::output(int32_t layer, int32_t num_tokens) {
  const DType dtype = config_.out();
  const size_t row_bytes = bytes_of(int64_t{config_.num_q_heads} * config_.head_dim_v, dtype);
  if (config_.ranks == 1) return {layer, dtype, out_.data(), row_bytes};
  const size_t head_bytes = bytes_of(config_.head_dim_v, dtype);
  const std::byte* from = out_.data();
  for (int32_t rank = 0; rank < config_.ranks; ++rank) {
    for (int32_t t = 0; t < num_tokens; ++t) {
      for (int32_t head = 0; head < heads_of_rank(); ++head, from += head_bytes) {
        const auto to = static_cast<size_t>(t) * row_bytes + static_cast<size_t>(model_head(rank, head)) * head_bytes;
        std::memcpy(ordered_.data() + to, from, head_bytes);
      }
    }
  }
  return {layer, dtype, ordered_.data(), row_bytes};
}

}  // namespace folio::replay
