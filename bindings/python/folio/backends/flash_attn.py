"""vLLM's FlashAttention backend on Folio's kernels (docs/flash_attn.md)."""

from .._folio import (
    FlashAttentionBackend,
    FlashAttentionFacts,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
    FlashAttentionOptions,
    FlashAttentionPlatform,
    get_flash_attn_version,
)

__all__ = [
    "FlashAttentionBackend",
    "FlashAttentionFacts",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "FlashAttentionOptions",
    "FlashAttentionPlatform",
    "get_flash_attn_version",
]
