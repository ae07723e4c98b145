"""Mistakes in what kernels for GPUs say of themselves and in the integers that they rest on: what a machine without a
GPU can catch."""

from mutations import plant

CUDA = "src/kernels/cuda/"
PLAIN = CUDA + "plain/refusal.cc"
SM80 = CUDA + "sm80/refusal.cc"
CONFIG = CUDA + "sm80/config.hpp"
PREFILL_SHAPE = CUDA + "sm90/prefill/shape.hpp"
LATENT_SHAPE = CUDA + "sm90/mla/shape.hpp"

rule = "kernels of a GPU: what they take"
plant(rule, "gpu-refuses-large-keys", PLAIN, "kMaxHeadDimQk = 576", "kMaxHeadDimQk = 256",
      SM80, '"head_dim_qk", config.head_dim_qk, kLargeHeadDims.qk', '"head_dim_qk", config.head_dim_qk, 256')
plant(rule, "gpu-refuses-float32", PLAIN, "is_wide_float(input) || is_fp8(input)", "is_fp8(input) || input == DType::kBFloat16")
plant(rule, "gpu-refuses-two-16-bit-types", PLAIN, "  const bool nvfp4 =",
      '  if (config.q != config.kv && !is_fp8(config.kv)) return "two types";\n  const bool nvfp4 =')
plant(rule, "gpu-refuses-rotary-embedding", PLAIN, "  const bool nvfp4 =",
      '  if (config.features.has(Feature::kRopeLlama)) return "rope";\n  const bool nvfp4 =')
plant(rule, "tensor-cores-refuse-nvfp4", SM80, "config.out != DType::kFloat32 && !nvfp4", "config.out != DType::kFloat32")
plant(rule, "nvfp4-of-begun-blocks", PLAIN, "nvfp4 && config.head_dim_v % kNvfp4BlockSize != 0", "false")

rule = "kernels of a GPU: tiles in shared memory"
plant(rule, "chunks-not-swizzled", CONFIG, "row * dim * 2 + ((chunk ^ (row & 7)) << 4)", "row * dim * 2 + (chunk << 4)")
plant(rule, "fp8-chunks-not-swizzled", CONFIG, "chunk ^ (dim % 128 == 0 ? row & 7 : row >> 1 & 3)", "chunk")
plant(rule, "large-head-stages-beyond-the-least-memory", CONFIG, "kLargeHeadStages = 3", "kLargeHeadStages = 4")
plant(rule, "last-token-not-masked", CONFIG, "first + count > range.all_end;", "first + count > range.all_end + 1;")
plant(rule, "mixed-tokens-overlooked", CONFIG, "(begin < range.all_begin || end > range.all_end)", "begin < range.all_begin")
plant(rule, "prefill-pieces-not-exchanged", PREFILL_SHAPE, "span(dim) == 128 ? ((piece ^ token) & 7) * 16",
      "span(dim) == 128 ? (piece & 7) * 16")
plant(rule, "prefill-last-token-not-masked", PREFILL_SHAPE, "first + tokens > sight.all_end;",
      "first + tokens > sight.all_end + 1;")
plant(rule, "prefill-boxes-across-pages", PREFILL_SHAPE, "page_size % (2 * box) == 0", "page_size >= 2 * box")
plant(rule, "prefill-tiles-with-boxes-left-out", PREFILL_SHAPE, "tokens / kGroupWarps / box", "tokens / kGroupWarps / box / 2")
plant(rule, "latent-pieces-not-exchanged", LATENT_SHAPE, "((piece ^ token) & 7) * 16", "(piece & 7) * 16")
plant(rule, "latent-last-token-not-masked", LATENT_SHAPE, "first + kTokens > sight.all_end;",
      "first + kTokens > sight.all_end + 1;")
plant(rule, "latent-boxes-across-pages", LATENT_SHAPE, "page_size % (2 * box) == 0", "page_size >= 2 * box")
plant(rule, "latent-last-box-left-out", LATENT_SHAPE, "(end + box - 1) / box", "end / box")
