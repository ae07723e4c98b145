"""Folio behind an engine's attention layer: what the backends share.

`folio.backends.flash_attn` and `folio.backends.flashinfer` are vLLM's backends on Folio's kernels,
`folio.backends.token_pool` is pymllm's and SGLang's. A backend says what it takes and how its KV cache lies; a metadata
builder is called once a step, an implementation once a layer and step. Here are the configuration, one step's batch
(CommonAttentionMetadata), the order of requests, padding for graphs, and the selection of a backend.
"""

from .._folio import (
    AttentionLayerScales,
    AttentionRequirements,
    AttentionSpec,
    AttentionType,
    BackendCapability,
    BackendProfile,
    CacheConfig,
    CascadeMode,
    CommonAttentionMetadata,
    CompilationConfig,
    ComputeDevice,
    DecodeGraphMode,
    DeviceCapability,
    EngineConfig,
    GraphPadding,
    GraphSupport,
    KvCacheLayout,
    KvCacheLayoutSource,
    LogLevel,
    ModelConfig,
    ParallelConfig,
    Platform,
    SchedulerConfig,
    SelectedBackend,
    SpeculativeConfig,
    backend_priorities,
    default_capture_sizes,
    default_max_capture_size,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    merge_attn_states,
    reorder_batch_threshold,
    reorder_batch_to_split_decodes_and_prefills,
    resolve_kv_cache_layout,
    select_backend,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    use_cascade_attention,
    validate_configuration,
)

__all__ = [name for name in dir() if not name.startswith("_")]
