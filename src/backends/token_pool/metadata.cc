#include <algorithm>

#include "backends/token_pool/backend_state.hpp"
#include "backends/token_pool/extend_path.hpp"
#include "backends/token_pool/ranks.hpp"
#include "core/error.hpp"
#include "folio/pools.hpp"

namespace folio::inline v0::backends {
namespace {

using token_pool::ReadingChoice;
using token_pool::Step;

bool read_new_tokens_ragged(const TokenPoolConfig& config, const Step& step) {
  if (step.mode != ForwardMode::kExtend && step.mode != ForwardMode::kMixed) return false;
  switch (config.extend_path) {
    case ExtendPath::kRagged: return true;
    case ExtendPath::kPaged: return false;
    case ExtendPath::kAuto: break;
  }
  // What it costs depends on the whole batch, and so would a request's bits.
  if (config.determinism >= Determinism::kBatchInvariant) return false;
  return token_pool::ragged_costs_less(step.cu_q, step.prefix_lens);
}

}  // namespace

bool token_pool::may_read_slots(const TokenPoolConfig& config, const KvPool* pool) {
  return config.kv_format == KvFormat::kStrided &&
         (pool == nullptr || pool->config().layout == KvPoolLayout::kTokenMajor);
}

void TokenPoolBackend::State::plan_step(token_pool::StepSet& set, Stream stream) {
  const Step& step = set.step;
  ReadingChoice& choice = set.choice;
  choice = {.ragged = read_new_tokens_ragged(config, step), .mask = MaskKind::kCausal, .primary = true};
  if (!step.spec_info.tree_mask.empty()) choice.mask = MaskKind::kCustom;
  ++set.number;
  for (size_t w = 0; w < roles.size(); ++w) wrappers[w] = planned(set, w, choice, stream).wrapper();
  current = &set;
  if (is_decode_or_idle(step.mode)) {
    metadata = DecodeMetadata{wrappers};
  } else {
    metadata = PrefillMetadata{wrappers, choice.ragged, step.extend && step.no_prefix};
  }
}

void TokenPoolBackend::init_forward_metadata(const ForwardBatch& batch, Stream stream) {
  State& state = *state_;
  state.metadata = std::monostate();
  state.current = nullptr;
  state.check_reports();
  token_pool::StepSet& set = state.eager;
  set.step.read(state.config, batch, state.on_host, /*captured=*/false);
  const bool pages = std::ranges::all_of(set.step.encoder_lens,
                                         [&](int32_t len) { return token_pool::ends_with_page(state.config, len); });
  set.self_by_slots = !pages && token_pool::may_read_slots(state.config, batch.token_to_kv_pool);
  state.plan_step(set, stream);
}

}  // namespace folio::inline v0::backends
