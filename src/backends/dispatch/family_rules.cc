#include "backends/dispatch/family_rules.hpp"

namespace folio::inline v0::backends::dispatch {
namespace {

constexpr std::string_view kMoeModule = "flashinfer.fused_moe";

constexpr std::array<FamilyRule, 8> kRules{{
    {KernelFamily::kComm, "collectives", KernelFamily::kFlashInfer, {}, {{{"flashinfer.comm", ""}}}},
    {KernelFamily::kAllToAll,
     "all-to-all for experts",
     KernelFamily::kComm,
     {},
     {{{"flashinfer.comm", "Mapping"},
       {"flashinfer.comm.mnnvl", "MnnvlMemory"},
       {"flashinfer.comm.trtllm_alltoall", "MnnvlMoe"},
       {"flashinfer.comm.trtllm_alltoall", "MoEAlltoallInfo"}}}},
    {KernelFamily::kMoe, "fused mixture of experts", KernelFamily::kFlashInfer, {}, {{{kMoeModule, ""}}}},
    {KernelFamily::kCutlassFusedMoe,
     "CUTLASS's fused mixture of experts",
     KernelFamily::kMoe,
     {},
     {{{kMoeModule, "cutlass_fused_moe"},
       {"flashinfer", "fp4_quantize"},
       {"flashinfer", "nvfp4_block_scale_interleave"},
       {kMoeModule, "trtllm_fp4_block_scale_moe"}}}},
    {KernelFamily::kTrtllmFusedMoe,
     "TensorRT-LLM's fused mixture of experts",
     KernelFamily::kMoe,
     {},
     {{{kMoeModule, "trtllm_fp8_block_scale_moe"},
       {kMoeModule, "trtllm_fp8_per_tensor_scale_moe"},
       {kMoeModule, "trtllm_fp4_block_scale_moe"},
       {kMoeModule, "trtllm_mxint4_block_scale_moe"}}}},
    {KernelFamily::kCuteDsl,
     "kernels in CuTe's Python language",
     KernelFamily::kFlashInfer,
     {},
     {{{"flashinfer.cute_dsl", ""}}}},
    {KernelFamily::kCuteDslGroupedGemm,
     "the masked grouped product of matrices",
     KernelFamily::kCuteDsl,
     {},
     {{{"flashinfer.cute_dsl.blockscaled_gemm", "grouped_gemm_nt_masked"},
       {"flashinfer", "scaled_fp4_grouped_quantize"},
       {"flashinfer", "silu_and_scaled_nvfp4_experts_quantize"}}}},
    {KernelFamily::kFp8BlockscaleGemm,
     "GEMM of fp8 matrices with scales per block",
     KernelFamily::kFlashInfer,
     DeviceCapability{9, 0},
     {{{"flashinfer.gemm", "fp8_blockscale_gemm_sm90"}}}},
}};

constexpr std::array<EntryPoint, 7> kFolioEntryPoints{{
    {"flashinfer", ""},
    {"flashinfer.concat_ops", ""},
    {"flashinfer.concat_ops", "concat_mla_k"},
    {"flashinfer.decode", ""},
    {"flashinfer.decode", "trtllm_batch_decode_with_kv_cache"},
    {"flashinfer.prefill", ""},
    {"flashinfer.prefill", "trtllm_batch_context_with_kv_cache"},
}};

}  // namespace

std::span<const FamilyRule> family_rules() noexcept {
  return kRules;
}

std::span<const EntryPoint> folio_entry_points() noexcept {
  return kFolioEntryPoints;
}

}  // namespace folio::inline v0::backends::dispatch
