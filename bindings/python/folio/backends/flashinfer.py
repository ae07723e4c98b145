"""vLLM's FlashInfer backend on Folio's kernels (docs/backends.md)."""

from .._folio import (
    FlashInferBackend,
    FlashInferFacts,
    FlashInferImpl,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
    FlashInferOptions,
    KernelDispatch,
    KernelFamily,
    QuantKey,
)

__all__ = [
    "FlashInferBackend",
    "FlashInferFacts",
    "FlashInferImpl",
    "FlashInferMetadata",
    "FlashInferMetadataBuilder",
    "FlashInferOptions",
    "KernelDispatch",
    "KernelFamily",
    "QuantKey",
]
