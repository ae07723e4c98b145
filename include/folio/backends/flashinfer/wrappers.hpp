#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "folio/backends/engine_config.hpp"
#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "folio/types/tensor_view.hpp"

/// FlashInfer's attention wrappers, by name and meaning, on Folio's ops and plans: `plan` once a step with CSR page
/// tables, `run` once a layer. Semantics: FlashInfer 0.6, flashinfer/{decode,prefill,cascade}.py. Where the originals
/// ignore an argument or compute with wrong positions, these refuse or do it right.
/// - Arrays given to `plan` are host memory (but for WrapperPages::indices_where) and copied; a wrapper owns its plan
/// and
///   its workspace. Warm calls (the same configuration, no larger batch) allocate nothing. Not safe for simultaneous
///   use by several threads.
/// - On a GPU tensors, sinks and LSE are device memory; `plan` plans on the host and enqueues its copies on `stream`,
///   `run` its kernels, and neither waits when warm. Both belong on one stream. `run` of a decode wrapper of the form
///   for graphs may be captured, and replayed after every later `plan` of the same q_len_per_req and options.
/// - LSE: float32 [tokens, num_qo_heads], base 2. A query without keys: out 0, LSE -infinity.
/// - All functions throw kInvalidArgument for contradictions, naming the argument, before anything is written;
///   kUnsupported for what no kernel takes. After a `plan` that failed there is no plan.
namespace folio::inline v0::backends {

enum class PosEncodingMode : int32_t {
  kNone = 0,
  kRopeLlama = 1,  ///< the kernel turns queries and keys (RopeArgs); refused where no kernel does (Feature::kRopeLlama)
  kAlibi = 2,      ///< the standard slopes; causal attention without sinks
};

/// The standard ALiBi slope of a head: 2^(-8 (h + 1) / n) for n heads, n a power of two; beyond the largest power of
/// two p in n, the odd steps of 2p heads.
FOLIO_API float standard_alibi_slope(int32_t head, int32_t num_heads);

/// What every `plan` takes besides lengths and tables.
struct WrapperPlanOptions {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;  ///< 0 = head_dim_qk
  int32_t page_size = 1;    ///< of paged KV
  bool causal = false;      ///< right-aligned: row i of q_len sees key j iff j + q_len <= kv_len + i
  PosEncodingMode pos_encoding_mode = PosEncodingMode::kNone;
  float sm_scale = 0.0f;         ///< 0 = 1 / sqrt(head_dim_qk)
  int32_t window_left = -1;      ///< keys left of the query that it sees; -1 = all
  float logits_soft_cap = 0.0f;  ///< 0 = off
  float rope_scale = 1.0f;       ///< divides positions; with kRopeLlama, as is
  float rope_theta = 1e4f;       ///< the angles' base
  bool sinks = false;            ///< `run` will be given sinks
  DType q_data_type = DType::kFloat16;
  DType kv_data_type = DType::kUnset;  ///< kUnset = q_data_type
  DType o_data_type = DType::kUnset;   ///< kUnset = q_data_type, bfloat16 for fp8 queries
  /// In place of fixed_split_size and disable_split_kv: what must not change a result's bits.
  Determinism determinism = Determinism::kRunToRun;
};

/// A custom mask, one bool for every (row, key) of request after request, row-major; or the same packed: little-endian
/// bits, every request from a byte of its own. Give one. It replaces `causal`; the window still applies.
struct WrapperMask {
  std::span<const uint8_t> bools;   ///< [sum q_len * kv_len], 0 or not
  std::span<const uint8_t> packed;  ///< [sum ceil(q_len * kv_len / 8)]
};

/// What every `run` takes besides the tensors. Scales multiply stored values; each is applied once, whatever the dtype.
struct WrapperRunArgs {
  float q_scale = 1.0f;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  const float* sinks = nullptr;  ///< [num_qo_heads], natural units; needs WrapperPlanOptions::sinks
  float* lse = nullptr;          ///< [tokens, num_qo_heads], packed; null = not wanted
};

/// A KV cache as FlashInfer's callers hold it: one tensor [pages, 2, ...] or one each for K and V [pages, ...], in the
/// layout's own order of dimensions: NHD [.., page_size, num_kv_heads, head_dim], HND [.., num_kv_heads, page_size,
/// head_dim].
struct WrapperKvCache {
  ConstTensorView k;
  ConstTensorView v;
  WrapperKvCache(const ConstTensorView& k_cache, const ConstTensorView& v_cache) : k(k_cache), v(v_cache) {}
  /// Throws kInvalidArgument unless it is [pages, 2, ., ., .].
  FOLIO_API explicit WrapperKvCache(const ConstTensorView& kv_cache);
};

/// A batch's pages: request r has indices[indptr[r]] to indices[indptr[r + 1]], of the last one last_page_len[r] tokens
/// (1 to page_size; 0 where there are no pages). A slice's indptr need not begin at 0.
struct WrapperPages {
  std::span<const int32_t> indptr;
  std::span<const int32_t> indices;
  std::span<const int32_t> last_page_len;
  Where indices_where = Where::kHost;  ///< kDevice: on a GPU, `indices` lie in its memory; the others never do
};

namespace detail {
class WrapperState;
}

/// What the wrappers share.
class FOLIO_API AttentionWrapper {
 public:
  AttentionWrapper(AttentionWrapper&&) noexcept;
  AttentionWrapper& operator=(AttentionWrapper&&) noexcept;
  ~AttentionWrapper();

  /// Bytes of workspace that the present plan uses.
  size_t workspace_size() const;
  /// Which kernel runs. Throws kInvalidArgument before the first plan.
  std::string kernel_name() const;

 protected:
  AttentionWrapper(const Context& context, KvCacheLayout kv_layout);
  detail::WrapperState& state() const { return *state_; }

 private:
  std::unique_ptr<detail::WrapperState> state_;
};

class FOLIO_API BatchPrefillWithPagedKVCacheWrapper : public AttentionWrapper {
 public:
  explicit BatchPrefillWithPagedKVCacheWrapper(const Context& context, KvCacheLayout kv_layout = KvCacheLayout::kNhd);
  /// qo_indptr: [R + 1], from 0.
  void plan(std::span<const int32_t> qo_indptr, const WrapperPages& pages, const WrapperPlanOptions& options,
            const WrapperMask& custom_mask = {}, Stream stream = {});
  /// q [qo_indptr[R], num_qo_heads, head_dim_qk]; out [qo_indptr[R], num_qo_heads, head_dim_vo].
  void run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache, const TensorView& out,
           const WrapperRunArgs& args = {}, Stream stream = {}) const;
};

class FOLIO_API BatchPrefillWithRaggedKVCacheWrapper : public AttentionWrapper {
 public:
  explicit BatchPrefillWithRaggedKVCacheWrapper(const Context& context);
  /// kv_indptr: [R + 1], tokens of k and v.
  void plan(std::span<const int32_t> qo_indptr, std::span<const int32_t> kv_indptr, const WrapperPlanOptions& options,
            const WrapperMask& custom_mask = {}, Stream stream = {});
  /// k [tokens, num_kv_heads, head_dim_qk]; v [tokens, num_kv_heads, head_dim_vo].
  void run(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
           const WrapperRunArgs& args = {}, Stream stream = {}) const;
};

/// Decode: every request has `q_len_per_req` queries, the last of its tokens; causal among them.
class FOLIO_API BatchDecodeWithPagedKVCacheWrapper : public AttentionWrapper {
 public:
  explicit BatchDecodeWithPagedKVCacheWrapper(const Context& context, KvCacheLayout kv_layout = KvCacheLayout::kNhd);
  /// The form for graphs: every batch has `fixed_batch_size` requests of at most `max_num_pages` pages together.
  BatchDecodeWithPagedKVCacheWrapper(const Context& context, KvCacheLayout kv_layout, int32_t fixed_batch_size,
                                     int64_t max_num_pages);
  bool is_cuda_graph_enabled() const noexcept { return fixed_batch_size_.has_value(); }
  std::optional<int32_t> fixed_batch_size() const noexcept { return fixed_batch_size_; }

  void plan(const WrapperPages& pages, const WrapperPlanOptions& options, int32_t q_len_per_req = 1,
            Stream stream = {});
  /// q [R * q_len_per_req, num_qo_heads, head_dim_qk], request after request.
  void run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache, const TensorView& out,
           const WrapperRunArgs& args = {}, Stream stream = {}) const;

 private:
  friend void fast_plan_decode(BatchDecodeWithPagedKVCacheWrapper&, const WrapperPages&, const WrapperPlanOptions&,
                               Stream);
  void check_fixed_shape(const WrapperPages& pages) const;

  std::optional<int32_t> fixed_batch_size_;
  int64_t max_num_pages_ = 0;
  bool planned_ = false;
};

/// `plan` for a decode wrapper in a step's hot path. Without graphs, and at a graph wrapper's first call, it is `plan`;
/// from then on the shape is fixed: another batch size, or more page indices than the wrapper has room for, is refused
/// with the original's texts, an error of the planner is kUnavailable, "Error in tensor core plan: ...".
FOLIO_API void fast_plan_decode(BatchDecodeWithPagedKVCacheWrapper& wrapper, const WrapperPages& pages,
                                const WrapperPlanOptions& options, Stream stream = {});

/// Several levels of shared prefixes: level 0 is shared by most queries, the last level is each request's own.
class FOLIO_API MultiLevelCascadeAttentionWrapper : public AttentionWrapper {
 public:
  /// Up to kMaxLevels of them.
  MultiLevelCascadeAttentionWrapper(const Context& context, int32_t num_levels,
                                    KvCacheLayout kv_layout = KvCacheLayout::kNhd);
  static constexpr int32_t kMaxLevels = 8;

  /// qo_indptr_arr[l]: which tokens share each row of level l; every level's bounds are bounds of requests (the last
  /// level's rows), from 0 to the same end. A request's keys are those of its row of level 0, then of level 1, and so
  /// on; `causal` and the window mean positions in that whole sequence (the originals' window does not). Requests of
  /// one row of a level must have equally many keys before it.
  void plan(std::span<const std::span<const int32_t>> qo_indptr_arr, std::span<const WrapperPages> pages_arr,
            const WrapperPlanOptions& options, Stream stream = {});
  void run(const ConstTensorView& q, const WrapperKvCache& paged_kv_cache, const TensorView& out,
           const WrapperRunArgs& args = {}, Stream stream = {}) const;

 private:
  int32_t num_levels_;
};

}  // namespace folio::inline v0::backends
