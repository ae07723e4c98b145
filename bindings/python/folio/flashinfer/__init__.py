"""FlashInfer 0.7's attention API on Folio's kernels: `import folio.flashinfer as flashinfer`.

Names, arguments, defaults, shapes and the LSE's base are FlashInfer's; docs/migration_flashinfer.md says what is the
same, better and refused. Tensors are torch's, on a CPU or a GPU. Nothing is compiled at run time. Attention, paged
caches, rotary embeddings, masks and merges are here; GEMM, MoE, sampling, norms and communication are not.
"""

from . import arguments, attention, cascade, concat_ops, decode, mla, page, pod, prefill, quantization, rope, sparse
from .attention import (BatchAttention, BatchAttentionWithAttentionSinkWrapper,
                        BatchPrefillWithCausalBidirectionalRangesWrapper)
from .cascade import (BatchDecodeWithSharedPrefixPagedKVCacheWrapper, BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
                      MultiLevelCascadeAttentionWrapper, merge_state, merge_state_in_place, merge_states)
from .concat_ops import concat_mla_k
from .decode import (BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan,
                     single_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache)
from .mla import (BatchMLAPagedAttentionWrapper, trtllm_batch_decode_with_kv_cache_mla,
                  xqa_batch_decode_with_kv_cache_mla)
from .page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from .prefill import (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper,
                      single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse,
                      trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek)
from .quantization import packbits, segment_packbits
from .rope import (apply_llama31_rope, apply_llama31_rope_inplace, apply_llama31_rope_pos_ids,
                   apply_llama31_rope_pos_ids_inplace, apply_rope, apply_rope_inplace, apply_rope_pos_ids,
                   apply_rope_pos_ids_inplace, apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace,
                   mla_rope_quantize_fp8, rope_quantize_fp8, rope_quantize_fp8_append_paged_kv_cache)
from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from .xqa import xqa, xqa_mla

__all__ = [name for name in dir() if not name.startswith("_") and name != "arguments"]


def __getattr__(name):
    raise AttributeError(f"folio.flashinfer has no {name}: it has FlashInfer's attention, paged caches, rotary embeddings, "
                         "masks and merges; for anything else import flashinfer itself")
