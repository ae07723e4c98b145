#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "folio/backends/cascade.hpp"
#include "folio/folio.hpp"

namespace folio::replay {

/// How the KV pool is laid out.
enum class KvLayout { kRecommended, kStridedNhd, kStridedHnd, kCpuPacked };

/// `name` of a layout as the command line has it ("recommended", "strided-nhd", "strided-hnd", "cpu-packed").
std::string_view to_string(KvLayout layout);

/// The format that a layout stands for. "Recommended" asks recommended_kv_format, and is strided where the advice needs
/// larger or even pages than the config has.
KvFormat choose_format(KvLayout layout, const AttentionConfig& config, const Context& context,
                       const WorkloadMix& mix = {});

/// Who serves the layers: Folio's own calls, or one of its engine backends.
enum class ServingBackend { kNone, kFlashInfer, kFlashAttention, kTokenPool };

/// "none", "flashinfer", "flash_attn", "token_pool".
std::string_view to_string(ServingBackend backend);

/// A stack of attention layers, as a model of so many would have them.
struct StackConfig {
  ServingBackend backend = ServingBackend::kNone;
  int32_t num_layers = 2;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_v = 0;
  DType q = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  KvLayout layout = KvLayout::kRecommended;
  int32_t page_size = 16;
  int32_t window_left = -1;
  int32_t full_every = 0;  ///< with a window: layers l with (l + 1) % full_every == 0 have none; 0 = all have it
  float logits_soft_cap = 0.0f;
  Determinism determinism = Determinism::kRunToRun;
  backends::CascadeMode cascade = backends::CascadeMode::kOff;
  bool plan_only = false;  ///< steps are planned and their work is counted; there is no KV pool and no attention
  uint64_t seed = 1;
  int64_t num_pages = 0;       ///< of each layer's pool
  int64_t window_pages = 0;    ///< token_pool: of the pool of layers with a window; 0 = as many as the others'
  int32_t max_tokens = 0;      ///< of a step
  int32_t draft_topk = 1;      ///< children of a draft, where drafts are verified
  int32_t max_requests = 0;    ///< of a step; 0 = not known
  int32_t ranks = 1;           ///< ranks that divide every request's KV by tokens, and the query heads; backends only
  int32_t dcp_interleave = 1;  ///< neighbouring tokens that stay on one rank; divides the page size
  std::string dcp_comm_backend = "ag_rs";  ///< how ranks combine results: ag_rs, a2a

  bool has_window(int32_t layer) const {
    return window_left >= 0 && (full_every == 0 || (layer + 1) % full_every != 0);
  }
  /// Tokens that one page id stands for: pages of all ranks.
  int32_t tokens_per_page_id() const { return page_size * ranks; }
  /// Bytes of a token and KV head in the cache, token scales included.
  int64_t token_bytes() const {
    const int64_t scales = kv == DType::kInt8 ? 2 * int64_t{sizeof(float)} : 0;
    return int64_t{head_dim_qk + head_dim_v} * size_of(kv) + scales;
  }
  /// The dtype of outputs.
  DType out() const { return is_fp8(q) ? DType::kBFloat16 : q; }
};

/// Scale of fp8 caches: spreads the synthetic values, within (-2, 2), over (-256, 256). A power of two: dividing is
/// exact.
inline constexpr float kFp8Scale = 1.0f / 128.0f;

/// The scale of a cache of that dtype.
inline Scale cache_scale(DType kv) {
  Scale scale;
  if (is_fp8(kv)) scale.value = kFp8Scale;
  return scale;
}

}  // namespace folio::replay
