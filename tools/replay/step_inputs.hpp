#pragma once

#include <cstdint>

#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"
#include "replay/memory.hpp"
#include "replay/stack_config.hpp"
#include "replay/step_batch.hpp"

namespace folio::replay {

/// The tensors of one layer in one step: new keys and values and queries, made from what they must be functions of, and
/// room for the outputs. Allocated once, for the largest step. Of each KV head's group of query heads every rank has an
/// equal part, in order; queries and outputs lie rank by rank.
class StepInputs {
 public:
  /// For layers of that context.
  StepInputs(const Context& context, const StackConfig& config);

  /// Fills the tensors for the batch's tokens, on threads of the host.
  void make_kv(const StepBatch& batch, int32_t layer);
  void make_q(const StepBatch& batch, int32_t layer);

  ConstTensorView k(int32_t num_tokens) const;
  ConstTensorView v(int32_t num_tokens) const;
  ConstTensorView q(int32_t num_tokens, int32_t rank = 0) const;  ///< [tokens, heads of a rank, head_dim_qk]
  TensorView out(int32_t num_tokens, int32_t rank = 0) const;

  /// Outputs of all ranks, rank by rank: [ranks, num_tokens, heads of a rank, head_dim_v].
  std::byte* outputs() const { return out_.data(); }
  size_t output_bytes_of_rank(int32_t num_tokens) const;

  /// The outputs with the heads in the model's order, once all ranks' are there.
  LayerOutput output(int32_t layer, int32_t num_tokens);

 private:
  Context host_;
  StackConfig config_;
  DType given_;  ///< of the new keys and values: fp8 caches are written from bfloat16, as models do
  int32_t model_head(int32_t rank, int32_t head) const;
  int32_t heads_of_rank() const { return config_.num_q_heads / config_.ranks; }

  MappedMemory k_, v_, q_, out_;
  MappedMemory ordered_;  ///< outputs in the model's order of heads, where that is another
};

}  // namespace folio::replay
