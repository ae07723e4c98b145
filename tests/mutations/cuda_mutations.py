"""Mistakes in what kernels for GPUs say of themselves and in the integers that they rest on: what a machine without a
GPU can catch."""

from mutations import plant

CUDA = "src/kernels/cuda/"
PLAIN = CUDA + "plain/refusal.cc"
SM80 = CUDA + "sm80/refusal.cc"
CONFIG = CUDA + "sm80/config.hpp"
DECODE_CONFIG = CUDA + "sm90/decode/config.hpp"
HOPPER_CONFIG = CUDA + "sm90/common/config.hpp"
PREFILL_CONFIG = CUDA + "sm90/prefill/config.hpp"
MLA_CONFIG = CUDA + "sm90/mla/config.hpp"

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
plant(rule, "decode-chunks-not-exchanged", DECODE_CONFIG, "(chunk % chunks ^ exchange) * 16", "(chunk % chunks ^ exchange / 8) * 16")
plant(rule, "decode-mixed-tokens-overlooked", HOPPER_CONFIG, "(begin < range.all_begin || end > range.all_end)",
      "begin < range.all_begin")
plant(rule, "prefill-chunks-not-swizzled", PREFILL_CONFIG, "swizzle_bytes(dim) == 128 ? ((chunk ^ row) & 7) * 16",
      "swizzle_bytes(dim) == 128 ? (chunk & 7) * 16")
plant(rule, "prefill-last-token-not-masked", HOPPER_CONFIG, "first + tokens > range.all_end;",
      "first + tokens > range.all_end + 1;")
plant(rule, "prefill-tma-tiles-across-pages", PREFILL_CONFIG, "page_size % (2 * tile) == 0", "page_size >= 2 * tile")
plant(rule, "prefill-tma-tiles-left-out", PREFILL_CONFIG, "tokens / warps / tma_tokens",
      "tokens / warps / tma_tokens / 2")
plant(rule, "mla-chunks-not-swizzled", MLA_CONFIG, "((chunk ^ token) & 7) * 16", "(chunk & 7) * 16")
plant(rule, "mla-tma-tiles-across-pages", MLA_CONFIG, "page_size % (2 * tokens) == 0", "page_size >= 2 * tokens")
plant(rule, "mla-fp8-bank-conflicts", MLA_CONFIG, "row ^ (row % 2 * 4)", "row")
plant(rule, "mla-queries-not-swizzled", MLA_CONFIG, "((chunk ^ row) & 7) * 16", "(chunk & 7) * 16")
plant(rule, "mla-last-tma-tile-left-out", MLA_CONFIG, "(end + tokens - 1) / tokens", "end / tokens")

CHECK = CUDA + "common/tables/table_check.hpp"

rule = "validate_tables: what a run reads is checked"
plant(rule, "last-page-is-one-too-many", CHECK, "page >= segment.num_pages", "page > segment.num_pages")
plant(rule, "negative-pages-pass", CHECK, "if (page < 0 || page", "if (page")
plant(rule, "begun-page-not-checked", CHECK, "(int64_t{tile.kv_end} + unit - 1) / unit", "int64_t{tile.kv_end} / unit")
plant(rule, "pages-before-the-window-checked", CHECK, "column = tile.kv_begin / unit + lane", "column = lane")
plant(rule, "dense-row-runs-into-the-next", CHECK, "end = one_row ? all : (tile.kv_row + 1) * table.row_stride;", "end = all;")
plant(rule, "row-ends-not-checked", CHECK, "if (begin < 0 || begin > end || end > all)", "if (begin < 0)")
plant(rule, "tables-not-checked", "src/attention/run.cc", "if (op.context.state().validate_tables)", "if (false)")
