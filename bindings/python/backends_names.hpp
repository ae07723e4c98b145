#pragma once

#include "folio/backends/capability.hpp"
#include "folio/backends/cascade.hpp"
#include "folio/backends/common.hpp"
#include "folio/backends/flashinfer.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"
#include "folio/backends/selection.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/backends/token_pool/draft_tree.hpp"
#include "names.hpp"

/// What Python calls the enumerators of the engine backends.
namespace folio::python {

template <>
struct Names<backends::AttentionType> {
  static constexpr const char* kName = "AttentionType";
  static constexpr const char* kDoc = "What a layer's attention is for. Its strings are vLLM's.";
  static constexpr Enumerator<backends::AttentionType> kAll[] = {
      {"DECODER", backends::AttentionType::kDecoder, "Over the cache; causal unless the batch says otherwise."},
      {"ENCODER", backends::AttentionType::kEncoder, "Over the step's own keys and values."},
      {"ENCODER_ONLY", backends::AttentionType::kEncoderOnly, "Likewise, of models without a decoder."},
      {"ENCODER_DECODER", backends::AttentionType::kEncoderDecoder, "Over an encoder's keys in the cache."}};
};

template <>
struct Names<backends::BackendProfile> {
  static constexpr const char* kName = "BackendProfile";
  static constexpr const char* kDoc = "Whose names, limits and refusals a backend answers with.";
  static constexpr Enumerator<backends::BackendProfile> kAll[] = {
      {"NATIVE", backends::BackendProfile::kNative, "What Folio itself can do."},
      {"VLLM_2025_07", backends::BackendProfile::kVllm2025_07, "vLLM v1 of July 2025."},
      {"VLLM_2025_12", backends::BackendProfile::kVllm2025_12, "vLLM v1 of December 2025."},
      {"VLLM_2026_03", backends::BackendProfile::kVllm2026_03, "vLLM v1 of March 2026."}};
};

template <>
struct Names<backends::KvCacheLayout> {
  static constexpr const char* kName = "KvCacheLayout";
  static constexpr const char* kDoc = "The order of tokens and KV heads inside a page.";
  static constexpr Enumerator<backends::KvCacheLayout> kAll[] = {
      {"NHD", backends::KvCacheLayout::kNhd, "[token, head, dim]"},
      {"HND", backends::KvCacheLayout::kHnd, "[head, token, dim]"}};
};

template <>
struct Names<backends::DecodeGraphMode> {
  static constexpr const char* kName = "DecodeGraphMode";
  static constexpr const char* kDoc = "Which batches the engine replays from captured graphs.";
  static constexpr Enumerator<backends::DecodeGraphMode> kAll[] = {{"NONE", backends::DecodeGraphMode::kNone, nullptr},
                                                                   {"FULL", backends::DecodeGraphMode::kFull, nullptr}};
};

template <>
struct Names<backends::CascadeMode> {
  static constexpr const char* kName = "CascadeMode";
  static constexpr const char* kDoc = "Who decides whether shared prefixes are read once for all who share them.";
  static constexpr Enumerator<backends::CascadeMode> kAll[] = {
      {"OFF", backends::CascadeMode::kOff, "Nobody: every request reads its whole KV."},
      {"HEURISTIC", backends::CascadeMode::kHeuristic, "The engine, by common_prefix_len."},
      {"AUTO", backends::CascadeMode::kAuto, "Folio: prefixes found in the block table, at several levels."}};
};

template <>
struct Names<backends::Platform> {
  static constexpr const char* kName = "Platform";
  static constexpr const char* kDoc = "Where an engine runs.";
  static constexpr Enumerator<backends::Platform> kAll[] = {{"CPU", backends::Platform::kCpu, nullptr},
                                                            {"CUDA", backends::Platform::kCuda, nullptr},
                                                            {"ROCM", backends::Platform::kRocm, nullptr},
                                                            {"XPU", backends::Platform::kXpu, nullptr}};
};

template <>
struct Names<backends::GraphSupport> {
  static constexpr const char* kName = "GraphSupport";
  static constexpr const char* kDoc =
      "Which batches a backend's metadata can be replayed for. Each includes those above.";
  static constexpr Enumerator<backends::GraphSupport> kAll[] = {
      {"NEVER", backends::GraphSupport::kNever, nullptr},
      {"UNIFORM_SINGLE_TOKEN_DECODE", backends::GraphSupport::kUniformSingleTokenDecode, "One query a request."},
      {"UNIFORM_BATCH", backends::GraphSupport::kUniformBatch, "Equally many queries a request."},
      {"ALWAYS", backends::GraphSupport::kAlways, "Any batch within the captured sizes."}};
};

template <>
struct Names<backends::KvCacheLayoutSource> {
  static constexpr const char* kName = "KvCacheLayoutSource";
  static constexpr const char* kDoc = "Where a layout came from.";
  static constexpr Enumerator<backends::KvCacheLayoutSource> kAll[] = {
      {"REQUIRED", backends::KvCacheLayoutSource::kRequired, "By the selected backend."},
      {"CONFIGURED", backends::KvCacheLayoutSource::kConfigured, "By the user."},
      {"KV_CONNECTOR", backends::KvCacheLayoutSource::kKvConnector, "By what moves caches between machines."},
      {"DEFAULT", backends::KvCacheLayoutSource::kDefault, "NHD."}};
};

template <>
struct Names<backends::LogLevel> {
  static constexpr const char* kName = "LogLevel";
  static constexpr const char* kDoc = "How grave a line of a backend's log is.";
  static constexpr Enumerator<backends::LogLevel> kAll[] = {{"DEBUG", backends::LogLevel::kDebug, nullptr},
                                                            {"INFO", backends::LogLevel::kInfo, nullptr},
                                                            {"WARNING", backends::LogLevel::kWarning, nullptr},
                                                            {"ERROR", backends::LogLevel::kError, nullptr}};
};

template <>
struct Names<backends::KernelFamily> {
  static constexpr const char* kName = "KernelFamily";
  static constexpr const char* kDoc = "Kernels that an engine asks for before it uses them.";
  static constexpr Enumerator<backends::KernelFamily> kAll[] = {
      {"FLASH_INFER", backends::KernelFamily::kFlashInfer, "The library itself."},
      {"CUBIN", backends::KernelFamily::kCubin, "Compiled kernels that need no compiler at run time."},
      {"COMM", backends::KernelFamily::kComm, "Collectives."},
      {"ALL_TO_ALL", backends::KernelFamily::kAllToAll, "All-to-all for experts."},
      {"MOE", backends::KernelFamily::kMoe, "Fused mixture of experts, any."},
      {"CUTLASS_FUSED_MOE", backends::KernelFamily::kCutlassFusedMoe, "Of those, CUTLASS's."},
      {"TRTLLM_FUSED_MOE", backends::KernelFamily::kTrtllmFusedMoe, "Of those, TensorRT-LLM's."},
      {"CUTE_DSL", backends::KernelFamily::kCuteDsl, "Kernels written in CuTe's Python language."},
      {"CUTE_DSL_GROUPED_GEMM", backends::KernelFamily::kCuteDslGroupedGemm, "Of those, the masked grouped GEMM."},
      {"FP8_BLOCKSCALE_GEMM", backends::KernelFamily::kFp8BlockscaleGemm, "fp8 GEMM with scales per block."},
      {"ARTIFACTORY", backends::KernelFamily::kArtifactory, "NVIDIA's server of compiled kernels."},
      {"TRTLLM_ATTENTION", backends::KernelFamily::kTrtllmAttention, "Attention over block tables."}};
};

template <>
struct Names<backends::QuantKey> {
  static constexpr const char* kName = "QuantKey";
  static constexpr const char* kDoc = "A quantisation of the output that a compiler pass would fuse into attention.";
  static constexpr Enumerator<backends::QuantKey> kAll[] = {
      {"FP8_STATIC_TENSOR_SYM", backends::QuantKey::kFp8StaticTensorSym, "e4m3, one scale known beforehand."},
      {"NVFP4", backends::QuantKey::kNvfp4, "e2m1 with a factor for every 16 values."},
      {"FP8_DYNAMIC_TENSOR_SYM", backends::QuantKey::kFp8DynamicTensorSym, "e4m3, a scale found from the values."},
      {"FP8_DYNAMIC_TOKEN_SYM", backends::QuantKey::kFp8DynamicTokenSym, "e4m3, likewise for every token."}};
};

template <>
struct Names<backends::PosEncodingMode> {
  static constexpr const char* kName = "PosEncodingMode";
  static constexpr const char* kDoc = "Positions that the kernel itself applies.";
  static constexpr Enumerator<backends::PosEncodingMode> kAll[] = {
      {"NONE", backends::PosEncodingMode::kNone, nullptr},
      {"ROPE_LLAMA", backends::PosEncodingMode::kRopeLlama, "Rotary embedding, where a kernel has it."},
      {"ALIBI", backends::PosEncodingMode::kAlibi, "The standard slopes; causal attention without sinks."}};
};

template <>
struct Names<backends::ForwardMode> {
  static constexpr const char* kName = "ForwardMode";
  static constexpr const char* kDoc = "What a step does.";
  static constexpr Enumerator<backends::ForwardMode> kAll[] = {
      {"EXTEND", backends::ForwardMode::kExtend, "Requests get new tokens behind their cached prefixes."},
      {"DECODE", backends::ForwardMode::kDecode, "One new token a request."},
      {"MIXED", backends::ForwardMode::kMixed, "Extends and decodes together."},
      {"IDLE", backends::ForwardMode::kIdle, "Nothing: outputs are zeros."},
      {"TARGET_VERIFY", backends::ForwardMode::kTargetVerify, "Drafts, verified at once: chains or trees."},
      {"DRAFT_EXTEND", backends::ForwardMode::kDraftExtend, "A draft model catches up with accepted tokens."}};
};

template <>
struct Names<backends::ExtendPath> {
  static constexpr const char* kName = "ExtendPath";
  static constexpr const char* kDoc = "How extends read the keys of their new tokens.";
  static constexpr Enumerator<backends::ExtendPath> kAll[] = {
      {"AUTO", backends::ExtendPath::kAuto, "Whichever costs less for the batch."},
      {"RAGGED", backends::ExtendPath::kRagged, "From k and v, merged with the cached prefix."},
      {"PAGED", backends::ExtendPath::kPaged, "From the cache."}};
};

template <>
struct Names<backends::WrapperDispatch> {
  static constexpr const char* kName = "WrapperDispatch";
  static constexpr const char* kDoc = "What a backend's two wrappers stand for.";
  static constexpr Enumerator<backends::WrapperDispatch> kAll[] = {
      {"NONE", backends::WrapperDispatch::kNone, "One wrapper, for every layer."},
      {"SLIDING_WINDOW", backends::WrapperDispatch::kSlidingWindow, "0: layers with the window; 1: without."},
      {"CROSS_ATTENTION", backends::WrapperDispatch::kCrossAttention, "0: self attention; 1: cross attention."}};
};

template <>
struct Names<backends::RadixAttentionType> {
  static constexpr const char* kName = "RadixAttentionType";
  static constexpr const char* kDoc = "Which keys a layer's queries see.";
  static constexpr Enumerator<backends::RadixAttentionType> kAll[] = {
      {"DECODER", backends::RadixAttentionType::kDecoder, "Those at or before them."},
      {"DECODER_BIDIRECTIONAL", backends::RadixAttentionType::kDecoderBidirectional, "All keys of the request."},
      {"ENCODER_ONLY", backends::RadixAttentionType::kEncoderOnly, "All new tokens; nothing is cached."}};
};

template <>
struct Names<backends::TreeMaskForm> {
  static constexpr const char* kName = "TreeMaskForm";
  static constexpr const char* kDoc = "How a mask of visible keys is written.";
  static constexpr Enumerator<backends::TreeMaskForm> kAll[] = {
      {"FULL_MASK", backends::TreeMaskForm::kFullMask, "A byte for each of seq_len + n keys."},
      {"QLEN_ONLY", backends::TreeMaskForm::kQlenOnly, "A byte for each of the n nodes."},
      {"QLEN_ONLY_BITPACKING", backends::TreeMaskForm::kQlenOnlyBitpacking, "A word of 8, 16 or 32 bits a row."},
      {"FULL_BITS", backends::TreeMaskForm::kFullBits, "Bits; FlashInfer's packed_custom_mask."},
      {"TAIL_BITS", backends::TreeMaskForm::kTailBits, "Bits of the n nodes alone."}};
};

}  // namespace folio::python

FOLIO_PYTHON_ENUM(folio::backends::AttentionType);
FOLIO_PYTHON_ENUM(folio::backends::BackendProfile);
FOLIO_PYTHON_ENUM(folio::backends::KvCacheLayout);
FOLIO_PYTHON_ENUM(folio::backends::DecodeGraphMode);
FOLIO_PYTHON_ENUM(folio::backends::CascadeMode);
FOLIO_PYTHON_ENUM(folio::backends::Platform);
FOLIO_PYTHON_ENUM(folio::backends::GraphSupport);
FOLIO_PYTHON_ENUM(folio::backends::KvCacheLayoutSource);
FOLIO_PYTHON_ENUM(folio::backends::LogLevel);
FOLIO_PYTHON_ENUM(folio::backends::KernelFamily);
FOLIO_PYTHON_ENUM(folio::backends::QuantKey);
FOLIO_PYTHON_ENUM(folio::backends::PosEncodingMode);
FOLIO_PYTHON_ENUM(folio::backends::ForwardMode);
FOLIO_PYTHON_ENUM(folio::backends::ExtendPath);
FOLIO_PYTHON_ENUM(folio::backends::WrapperDispatch);
FOLIO_PYTHON_ENUM(folio::backends::RadixAttentionType);
FOLIO_PYTHON_ENUM(folio::backends::TreeMaskForm);
