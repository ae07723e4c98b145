"""FlashAttention-3 over paged caches (flash_attn_interface, as its hopper/ directory installs it)."""

import flash_attn_interface

from programs.paged_kvcache_call import PagedKvCacheCall


class FlashAttn3(PagedKvCacheCall):
    name = "flash_attn_3"
    library = flash_attn_interface

    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("FlashAttention-3 runs on GPUs")
