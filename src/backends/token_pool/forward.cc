#include <cmath>
#include <cstring>

#include "backends/common/gpu_memory.hpp"
#include "backends/token_pool/backend_state.hpp"
#include "backends/token_pool/ranks.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using token_pool::LayerCall;
using token_pool::ReadingChoice;
using State = TokenPoolBackend::State;

bool given(const ConstTensorView& tensor) {
  return tensor.data != nullptr || tensor.rank != 0;
}

/// [tokens, heads, dim], whether heads came apart or not.
template <typename Tensor>
Tensor heads_apart(const char* name, Tensor tensor, int64_t tokens, int64_t heads, int64_t dim) {
  const bool fused = tensor.rank == 2;
  require(fused || tensor.rank == 3, name, " has rank ", tensor.rank, "; it must be [tokens, heads * head_dim] or ",
          "[tokens, heads, head_dim]");
  if (fused) {
    require(tensor.shape[0] == tokens && tensor.shape[1] == heads * dim, name, " is [", tensor.shape[0], ", ",
            tensor.shape[1], "]; it must be [", tokens, ", ", heads * dim, "]");
    require(tensor.strides[1] == 1, name, "'s innermost stride is ", tensor.strides[1], "; it must be 1");
    tensor.rank = 3;
    tensor.shape[1] = heads;
    tensor.shape[2] = dim;
    tensor.strides[1] = dim;
    tensor.strides[2] = 1;
  }
  require(tensor.shape[0] == tokens && tensor.shape[1] == heads && tensor.shape[2] == dim, name, " is [",
          tensor.shape[0], ", ", tensor.shape[1], ", ", tensor.shape[2], "]; it must be [", tokens, ", ", heads, ", ",
          dim, "]");
  require(tensor.strides[2] == 1, name, "'s innermost stride is ", tensor.strides[2], "; it must be 1");
  require(tensor.data != nullptr || tokens == 0, name, ".data is null");
  return tensor;
}

void check_layer(const TokenPoolConfig& config, const RadixAttention& layer) {
  const int32_t v_head_dim = config.value_head_dim();
  require(layer.num_heads == config.num_heads && layer.num_kv_heads == config.num_kv_heads &&
              layer.head_dim == config.head_dim && layer.value_head_dim() == v_head_dim,
          "the layer has num_heads ", layer.num_heads, ", num_kv_heads ", layer.num_kv_heads, ", head_dim ",
          layer.head_dim, ", v_head_dim ", layer.value_head_dim(), "; the configuration has ", config.num_heads, ", ",
          config.num_kv_heads, ", ", config.head_dim, ", ", v_head_dim);
  require(std::isfinite(layer.scaling), "the layer's scaling is ", layer.scaling, "; it must be finite");
  require(std::isfinite(layer.logit_cap) && layer.logit_cap >= 0.0f, "the layer's logit_cap is ", layer.logit_cap,
          "; it must be finite and not negative (0 = off)");
  require(layer.logit_cap == 0.0f || config.logit_cap, "the layer's logit_cap is ", layer.logit_cap,
          "; the configuration has no logit_cap");
}

/// What a run would refuse, before the cache is written.
void check_pool(const TokenPoolConfig& config, const KvCacheView& cache) {
  require(cache.dtype == config.kv_cache_dtype && cache.format == config.kv_format, "the pool holds ", cache.dtype,
          cache.format == config.kv_format ? "" : " in another format", "; the configuration's kv_cache_dtype is ",
          config.kv_cache_dtype);
  const int32_t v_head_dim = config.value_head_dim();
  require(cache.num_kv_heads == config.num_kv_heads && cache.head_dim_qk == config.head_dim &&
              cache.head_dim_v == v_head_dim,
          "the pool has ", cache.num_kv_heads, " KV heads of ", cache.head_dim_qk, " and ", cache.head_dim_v,
          "; the configuration has ", config.num_kv_heads, " of ", config.head_dim, " and ", v_head_dim);
}

/// How the layer's queries read the step.
ReadingChoice choose_reading(const State& state, const RadixAttention& layer, bool has_kv) {
  const token_pool::Step& step = state.current->step;
  ReadingChoice choice = state.current->choice;
  const bool encoder_only = layer.attn_type == RadixAttentionType::kEncoderOnly;
  if (encoder_only) {
    require(step.extend && has_kv && step.no_prefix && !layer.is_cross_attention,
            "an encoder-only layer takes extends without prefix, with k and v");
    return {.ragged = true, .mask = MaskKind::kNone, .primary = false};
  }
  if (choice.ragged && !has_kv) {
    choice = {.ragged = false, .mask = choice.mask, .primary = false};  // the new tokens are in the cache only
  }
  if (layer.attn_type == RadixAttentionType::kDecoderBidirectional && !is_decode_or_idle(step.mode)) {
    if (is_target_verify(step.mode)) {
      core::fail(ErrorCode::kUnsupported, "target_verify of a bidirectional layer; decoders are offered");
    }
    choice.mask = MaskKind::kNone;
    choice.primary = false;
  }
  return choice;
}

/// Once per step and array: a token that is stored elsewhere than its row says would be lost.
void check_new_slots(State& state, std::span<const int64_t> slots, bool window_pool) {
  if (!state.on_host) return;
  token_pool::StepSet& set = *state.current;
  token_pool::CheckedSlots& checked = window_pool ? set.checked_window : set.checked;
  if (checked.step == set.number && checked.slots.data() == slots.data() && checked.slots.size() == slots.size()) {
    return;
  }
  const TokenPoolConfig& config = state.config;
  const PageTableView& table = window_pool ? config.window_req_to_token : config.req_to_token;
  set.step.check_new_slots(token_pool::slot_table(table), token_pool::shard_of(config), slots,
                           window_pool ? "window_out_cache_loc" : "out_cache_loc");
  checked = {set.number, slots};
}

void forward_step(State& state, const TokenPoolBackend& backend, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const RadixAttention& layer, const ForwardBatch& batch,
                  const TensorView& out, bool save_kv_cache, Stream stream) {
  const TokenPoolConfig& config = state.config;
  check_layer(config, layer);
  const auto wrapper = static_cast<size_t>(backend.wrapper_index(layer));
  const bool window_pool = config.window_req_to_token.indices != nullptr && wrapper == 0;
  const KvPool* const layer_pool = window_pool ? batch.window_token_to_kv_pool : batch.token_to_kv_pool;
  require(layer_pool != nullptr, window_pool ? "window_token_to_kv_pool" : "token_to_kv_pool", " is null");
  const KvPool& pool = *layer_pool;
  const bool has_kv = given(k);
  require(has_kv == given(v), "k and v are both given, or both left out");
  const int64_t tokens = state.current->step.num_tokens;
  LayerCall call;
  call.q = heads_apart("q", q, tokens, token_pool::query_heads(config), config.head_dim);
  call.out = heads_apart("out", out, tokens, token_pool::out_heads(config), layer.value_head_dim());
  require(call.q.dtype == config.q_dtype && call.out.dtype == config.q_dtype, "q is ", q.dtype, " and out ", out.dtype,
          "; the configuration's q_dtype is ", config.q_dtype);
  call.sm_scale = layer.scaling;
  call.logit_cap = layer.logit_cap;
  const int32_t page_size = state.page_size_of(*state.current, wrapper);
  call.cache = page_size == pool.config().page_size ? pool.view(layer.layer_id) : pool.view(layer.layer_id, page_size);
  check_pool(config, call.cache);
  call.k_scale = pool.k_scale(layer.layer_id);
  call.v_scale = pool.v_scale(layer.layer_id);
  const ReadingChoice choice = choose_reading(state, layer, has_kv);
  if (choice.ragged && !layer.is_cross_attention) {
    call.k = heads_apart("k", k, tokens, config.num_kv_heads, config.head_dim);
    call.v = heads_apart("v", v, tokens, config.num_kv_heads, layer.value_head_dim());
    require(k.dtype == config.q_dtype && v.dtype == config.q_dtype, "k is ", k.dtype, " and v ", v.dtype,
            "; the configuration's q_dtype is ", config.q_dtype);
  }
  token_pool::KvReading& reading = state.planned(*state.current, wrapper, choice, stream);
  reading.check_pages(call.cache.num_pages);
  const bool encoder_only = layer.attn_type == RadixAttentionType::kEncoderOnly;
  if (has_kv && save_kv_cache && !encoder_only) {
    const std::span<const int64_t> own_slots = window_pool ? batch.window_out_cache_loc : batch.out_cache_loc;
    const std::span<const int64_t> slots = layer.is_cross_attention ? batch.encoder_out_cache_loc : own_slots;
    if (!layer.is_cross_attention) check_new_slots(state, slots, window_pool);
    write_kv_cache(state.context, pool.write_args(layer.layer_id, k, v, slots), stream);
  }
  reading.run(call, state.workspace_of(*state.current), stream);
}

}  // namespace

void TokenPoolBackend::forward_extend(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                      const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out,
                                      bool save_kv_cache, Stream stream) {
  require(std::holds_alternative<PrefillMetadata>(state_->metadata),
          "forward_extend: the present metadata is not an extend's; call init_forward_metadata with the batch");
  forward_step(*state_, *this, q, k, v, layer, batch, out, save_kv_cache, stream);
}

void TokenPoolBackend::forward_decode(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                      const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out,
                                      bool save_kv_cache, Stream stream) {
  require(std::holds_alternative<DecodeMetadata>(state_->metadata),
          "forward_decode: the present metadata is not a decode's; call init_forward_metadata with the batch");
  forward_step(*state_, *this, q, k, v, layer, batch, out, save_kv_cache, stream);
}

void TokenPoolBackend::forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                               const RadixAttention& layer, const ForwardBatch& batch, const TensorView& out,
                               bool save_kv_cache, Stream stream) {
  if (is_idle(batch.forward_mode)) {
    require(q.rank >= 1 && out.rank >= 1 && q.shape[0] == out.shape[0], "q and out have different numbers of tokens");
    const TensorView rows =
        heads_apart("out", out, out.shape[0], token_pool::out_heads(state_->config), layer.value_head_dim());
    if (rows.shape[0] == 0) return;  // an empty tensor may have no address
    const int64_t element = size_of(rows.dtype);
    const int64_t row_bytes = rows.shape[2] * element;
    for (int64_t head = 0; head < rows.shape[1]; ++head) {
      auto* first = static_cast<std::byte*>(rows.data) + head * rows.strides[1] * element;
      if (!state_->on_host) {
        gpu::zero_rows(state_->context.device().index, first, rows.strides[0] * element, row_bytes, rows.shape[0],
                       stream);
        continue;
      }
      for (int64_t token = 0; token < rows.shape[0]; ++token) {
        std::memset(first + token * rows.strides[0] * element, 0, static_cast<size_t>(row_bytes));
      }
    }
    return;
  }
  if (is_decode(batch.forward_mode)) {
    forward_decode(q, k, v, layer, batch, out, save_kv_cache, stream);
  } else {
    forward_extend(q, k, v, layer, batch, out, save_kv_cache, stream);
  }
}

}  // namespace folio::inline v0::backends
