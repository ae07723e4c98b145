#include "backends/dispatch/dispatch_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

constexpr int32_t kMostDecodeTokens = 256;

bool heads_divide(int32_t num_qo_heads, int32_t num_kv_heads) {
  core::require(num_kv_heads >= 1 && num_qo_heads >= 0, "num_qo_heads is ", num_qo_heads, ", num_kv_heads ",
                num_kv_heads, "; there must be at least one KV head");
  return num_qo_heads % num_kv_heads == 0;
}

}  // namespace

std::optional<bool> KernelDispatch::force_use_trtllm_attention() const {
  return state_->facts.use_block_table_kernels;
}

const ComputeDevice& KernelDispatch::device() const noexcept {
  return state_->facts.device;
}

bool KernelDispatch::can_use_trtllm_attention(int32_t num_qo_heads, int32_t num_kv_heads) const {
  const bool divide = heads_divide(num_qo_heads, num_kv_heads);
  return force_use_trtllm_attention().value_or(true) && supports_trtllm_attention() && divide;
}

bool KernelDispatch::use_trtllm_attention(const TrtllmAttentionQuery& query) const {
  const bool divide = heads_divide(query.num_qo_heads, query.num_kv_heads);
  const OnceLog& log = state_->log;
  const bool forced_on = query.force_use_trtllm.value_or(false);
  const auto say = [&](LogLevel level, const char* line) {
    log(level, line);
    return true;
  };

  if (!query.force_use_trtllm.value_or(true)) return false;
  if (query.dcp_world_size > 1) {
    log(LogLevel::kWarning,
        "Trtllm does not support returning LSE and as a result does not support DCP, reverting to FlashInfer");
    return false;
  }
  if (!supports_trtllm_attention()) {
    if (forced_on) {
      log(LogLevel::kWarning,
          "TRTLLM attention is not supported on this platform, but --attention-config.use_trtllm_attention is set to "
          "1");
    }
    return false;
  }
  if (!divide) {
    if (forced_on) {
      log(LogLevel::kWarning,
          "TRTLLM attention is not supported for this combination of query and key heads, but "
          "--attention-config.use_trtllm_attention is set to 1");
    }
    return false;
  }

  constexpr const char* kForced = "Using TRTLLM attention (--attention-config.use_trtllm_attention is set to 1)";
  if (state_->native()) return forced_on && say(LogLevel::kInfo, kForced);
  if (query.has_spec && !query.is_prefill) {
    return say(LogLevel::kInfo, "Using TRTLLM attention (enabled for speculative decoding).");
  }
  if (query.q_dtype == DType::kFloat8E4M3) {
    return say(LogLevel::kInfo, "Using TRTLLM attention (query is quantized).");
  }
  if (query.has_sinks) return say(LogLevel::kInfo, "Using TRTLLM attention (required for attention sinks).");
  if (forced_on) return say(LogLevel::kInfo, kForced);
  if (query.kv_cache_dtype != "auto") return false;
  if (query.is_prefill) return say(LogLevel::kWarning, "Using TRTLLM prefill attention (auto-detected).");
  return query.num_tokens <= kMostDecodeTokens &&
         say(LogLevel::kWarning, "Using TRTLLM decode attention (auto-detected).");
}

}  // namespace folio::inline v0::backends
