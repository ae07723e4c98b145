"""pymllm's and SGLang's token-pool backend on Folio's kernels (docs/token_pool.md).

Slots, request tables and pools are folio.KvPool, folio.ReqToTokenPool and folio.TokenAllocator.
"""

from .._folio import (
    DeviceFaults,
    DeviceReqToTokenPool,
    DraftBranches,
    DraftTreeShape,
    ExtendPath,
    ForwardBatch,
    ForwardMode,
    GraphInputs,
    RadixAttention,
    RadixAttentionType,
    SpecInfo,
    TokenPoolBackend,
    TokenPoolWorkspace,
    TreeMaskForm,
    WrapperDispatch,
    capture_batch_sizes,
    create_kv_indices,
    draft_candidates,
    draft_kv_indices_capacity,
    draft_kv_indices_len,
    draft_parent_list_len,
    draft_row_columns,
    draft_tree_links,
    draft_tree_parents,
    draft_tree_positions,
    fill_tree_mask,
    generate_draft_decode_kv_indices,
    kv_indptr_from_lens,
    select_draft_tokens,
    should_use_tensor_core,
    window_kv_ranges,
    window_prefix_ranges,
)

FlashInferAttnBackend = TokenPoolBackend  # pymllm's and SGLang's name

__all__ = [name for name in dir() if not name.startswith("_")]
