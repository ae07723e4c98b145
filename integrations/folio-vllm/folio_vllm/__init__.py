"""Folio's paged attention as vLLM's attention backend.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. On the CPU, vLLM uses
one backend whatever is selected: it is replaced. On CUDA, Folio is the backend `CUSTOM`, which
`--attention-backend CUSTOM` selects.
"""

from .counts import counts

__all__ = ["counts", "register"]
__version__ = "0.1.0"


def register():
    """Names Folio's backends in vLLM's registry. May be called several times; imports no kernels."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "folio_vllm.backend.FolioCpuBackend")
    register_backend(AttentionBackendEnum.CUSTOM, "folio_vllm.backend.FolioCudaBackend")
