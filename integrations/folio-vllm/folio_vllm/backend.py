"""What vLLM asks of a backend before it takes it: names, sizes, dtypes, features."""

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from .builder import FolioMetadataBuilder
from .cache import CACHE_DTYPES
from .impl import FolioAttentionImpl


class FolioBackend(AttentionBackend):
    """What the two devices have in common."""

    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes = list(CACHE_DTYPES)

    @staticmethod
    def get_impl_cls():
        return FolioAttentionImpl

    @staticmethod
    def get_builder_cls():
        return FolioMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size):
        return 0 < head_size <= 576 and head_size % 8 == 0

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_non_causal(cls):
        return True

    @classmethod
    def supports_batch_invariance(cls):
        return True

    @classmethod
    def supports_per_head_quant_scales(cls):
        return True


class FolioCpuBackend(FolioBackend):
    """Replaces CPU_ATTN, whose name it must bear: vLLM's CPU platform takes no other."""

    supported_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # packed pages need a head's tokens side by side


class FolioCudaBackend(FolioBackend):
    """`--attention-backend CUSTOM`. Takes every layout of the cache, and fused writes into it."""

    supported_dtypes = [torch.bfloat16, torch.float16]
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name():
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, capability):
        return capability.major >= 8
