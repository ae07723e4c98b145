#pragma once

#include <cstdint>

#include "folio/folio.hpp"
#include "replay/attention_stack.hpp"
#include "replay/memory.hpp"
#include "replay/stack_config.hpp"
#include "replay/step_batch.hpp"

namespace folio::replay {

/// The tensors of one layer in one step: new keys and values and queries, made from what they must be functions of, and
/// room for the outputs. Allocated once, for the largest step.
class StepInputs {
 public:
  explicit StepInputs(const StackConfig& config);

  /// Fills the tensors for the batch's tokens, on the context's threads.
  void make_kv(const Context& context, const StepBatch& batch, int32_t layer);
  void make_q(const Context& context, const StepBatch& batch, int32_t layer);

  ConstTensorView k(int32_t num_tokens) const;
  ConstTensorView v(int32_t num_tokens) const;
  ConstTensorView q(int32_t num_tokens) const;
  TensorView out(int32_t num_tokens) const;
  LayerOutput output(int32_t layer) const;

 private:
  StackConfig config_;
  DType given_;  ///< of the new keys and values: fp8 caches are written from bfloat16, as models do
  MappedMemory k_, v_, q_, out_;
};

}  // namespace folio::replay
