#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "folio/backends/capability.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/once_log.hpp"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"
#include "folio/types/device.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// Kernels that an engine asks for before it uses them. Names and rules are those of vLLM's module of wrappers around
/// FlashInfer.
enum class KernelFamily : int32_t {
  kFlashInfer = 0,          ///< the library itself
  kCubin = 1,               ///< compiled kernels that need no compiler at run time
  kComm = 2,                ///< collectives
  kAllToAll = 3,            ///< all-to-all for experts
  kMoe = 4,                 ///< fused mixture of experts, any
  kCutlassFusedMoe = 5,     ///< of those, CUTLASS's
  kTrtllmFusedMoe = 6,      ///< of those, TensorRT-LLM's
  kCuteDsl = 7,             ///< kernels written in CuTe's Python language
  kCuteDslGroupedGemm = 8,  ///< of those, the masked grouped product of matrices
  kFp8BlockscaleGemm = 9,   ///< GEMM of fp8 matrices with scales per block
  kArtifactory = 10,        ///< NVIDIA's server of compiled kernels, or kCubin
  kTrtllmAttention = 11,    ///< attention over block tables (TensorRT-LLM's)
};

/// Whether a family can be used; where not, why.
struct FamilyAnswer {
  bool available = false;
  std::string reason;  ///< empty where available
};

/// What answers depend on, stated by the caller: nothing here looks at the machine, the network or the environment.
/// The native profile asks Folio's own registry and takes no probes. The others follow their original's rules.
struct DispatchFacts {
  BackendProfile profile = BackendProfile::kNative;
  ComputeDevice device;
  bool batch_invariant = false;                    ///< VLLM_BATCH_INVARIANT
  std::optional<bool> use_block_table_kernels;     ///< --attention-config.use_trtllm_attention; as in EngineConfig
  bool has_flashinfer_cubin = false;               ///< VLLM_HAS_FLASHINFER_CUBIN
  bool use_flashinfer_fp8_blockscale_gemm = true;  ///< VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER

  std::function<bool(std::string_view module)> has_module;  ///< is it installed? None: nothing is
  std::function<bool(std::string_view module, std::string_view attribute)> has_attribute;  ///< of an installed module
  std::function<bool()> has_nvcc;  ///< is a CUDA compiler on the path? None: no
  /// Asks NVIDIA's server for its page, for at most that many seconds, and returns the HTTP status; throws where it
  /// cannot be reached. None: it cannot.
  std::function<int32_t(int32_t timeout_s)> probe_artifactory;
  LogCallback log;  ///< takes the original's lines, each once
};

/// One batch, as use_trtllm_attention asks about it.
struct TrtllmAttentionQuery {
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t num_tokens = 0;
  int32_t max_seq_len = 0;  ///< part of the original's signature; no rule reads it
  int32_t dcp_world_size = 1;
  std::string_view kv_cache_dtype = "auto";
  DType q_dtype = DType::kBFloat16;
  bool is_prefill = false;
  std::optional<bool> force_use_trtllm;  ///< none: decide; otherwise on or off
  bool has_sinks = false;
  bool has_spec = false;  ///< decodes carry drafts
};

/// The registry of optional kernels and the choices made from it. Every family is looked up once, on first use, and
/// its probes are called no more. A small shared handle: copies share answers; safe for use by several threads.
class FOLIO_API KernelDispatch {
 public:
  /// Throws kInvalidArgument where the native profile is given probes, which it would not ask.
  explicit KernelDispatch(DispatchFacts facts = {});

  BackendProfile profile() const noexcept;  ///< DispatchFacts::profile
  bool batch_invariant() const noexcept;    ///< DispatchFacts::batch_invariant
  /// Throws kInvalidArgument, with both values, where a builder's profile and configuration say otherwise than these
  /// facts: the profile, and of vLLM's profiles batch invariance.
  void check_agrees(BackendProfile profile, const EngineConfig& config) const;

  /// Whether a family can be used, and if not, why. O(1) after the first time.
  const FamilyAnswer& query(KernelFamily family) const;

  bool has_flashinfer() const { return query(KernelFamily::kFlashInfer).available; }
  bool has_flashinfer_cubin() const { return query(KernelFamily::kCubin).available; }
  bool has_flashinfer_comm() const { return query(KernelFamily::kComm).available; }
  bool has_flashinfer_all2all() const { return query(KernelFamily::kAllToAll).available; }
  bool has_flashinfer_moe() const { return query(KernelFamily::kMoe).available; }
  bool has_flashinfer_cutlass_fused_moe() const { return query(KernelFamily::kCutlassFusedMoe).available; }
  bool has_flashinfer_trtllm_fused_moe() const { return query(KernelFamily::kTrtllmFusedMoe).available; }
  bool has_flashinfer_cutedsl() const { return query(KernelFamily::kCuteDsl).available; }
  bool has_flashinfer_cutedsl_grouped_gemm_nt_masked() const {
    return query(KernelFamily::kCuteDslGroupedGemm).available;
  }
  bool has_flashinfer_fp8_blockscale_gemm() const { return query(KernelFamily::kFp8BlockscaleGemm).available; }
  /// That, and use_flashinfer_fp8_blockscale_gemm.
  bool is_flashinfer_fp8_blockscale_gemm_supported() const;
  bool has_nvidia_artifactory() const { return query(KernelFamily::kArtifactory).available; }

  /// vLLM: on 10.x with NVIDIA's server or compiled kernels, outside batch-invariant mode. Native: on every device.
  bool supports_trtllm_attention() const { return query(KernelFamily::kTrtllmAttention).available; }
  std::optional<bool> force_use_trtllm_attention() const;
  const ComputeDevice& device() const noexcept;  ///< DispatchFacts::device
  /// Supported, not forced off, and query heads a multiple of KV heads. Throws kInvalidArgument for num_kv_heads < 1.
  bool can_use_trtllm_attention(int32_t num_qo_heads, int32_t num_kv_heads) const;
  /// Whether a batch goes to the kernels that take block tables. First rule that applies: forced off; context
  /// parallelism; not supported; heads that do not divide (all: no); drafts in decodes; fp8 queries; sinks (all: yes);
  /// not forced: caches of dtype "auto", for decodes of up to 256 tokens; forced on. Native: only where forced on,
  /// since Folio's planned kernels do all that these do. Says which to the log, once each. Throws as
  /// can_use_trtllm_attention.
  bool use_trtllm_attention(const TrtllmAttentionQuery& query) const;

  /// Whether a module of the library is there (the original's _get_submodule, which returns it or None).
  bool has_submodule(std::string_view module) const;
  /// Whether the library, that module and that function of it are there.
  bool has_entry_point(std::string_view module, std::string_view attribute) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Throws kUnavailable with vLLM's text for a library that is not installed.
[[noreturn]] FOLIO_API void missing_flashinfer();

template <typename Signature>
class LazyEntryPoint;

/// A function of the library that is looked up on the first call, and once only, also where it is absent: the
/// original's _lazy_import_wrapper. Safe for use by several threads.
template <typename Result, typename... Args>
class LazyEntryPoint<Result(Args...)> {
 public:
  using Function = std::function<Result(Args...)>;

  /// `bind` gives the function where the dispatch has it (an empty one counts as absent); `fallback` is called with the
  /// arguments where it does not: by default missing_flashinfer.
  LazyEntryPoint(KernelDispatch dispatch, std::string module, std::string attribute, std::function<Function()> bind,
                 Function fallback = {})
      : dispatch_(std::move(dispatch)),
        module_(std::move(module)),
        attribute_(std::move(attribute)),
        bind_(std::move(bind)),
        fallback_(std::move(fallback)) {}

  Result operator()(Args... args) const {
    std::call_once(bound_, [this] {
      if (dispatch_.has_entry_point(module_, attribute_)) function_ = bind_();
    });
    if (function_) return function_(std::forward<Args>(args)...);
    if (fallback_) return fallback_(std::forward<Args>(args)...);
    missing_flashinfer();
  }

 private:
  KernelDispatch dispatch_;
  std::string module_;
  std::string attribute_;
  std::function<Function()> bind_;
  Function fallback_;
  mutable std::once_flag bound_;
  mutable Function function_;
};

/// flashinfer.concat_mla_k: Folio's own (folio/kv_cache.hpp).
using folio::concat_mla_k;

}  // namespace folio::inline v0::backends
