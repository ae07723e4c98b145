"""Folio's drop-ins, called as the originals are: what their calls cost beside Folio's own."""

import folio.flash_attn.v3
import folio.flashinfer

from programs.paged_kvcache_call import PagedKvCacheCall
from programs.paged_prefill_wrapper import PagedPrefillWrapper


class FolioFlashInfer(PagedPrefillWrapper):
    name = "folio_flashinfer"
    library = folio.flashinfer


class FolioFlashAttn(PagedKvCacheCall):
    name = "folio_flash_attn"
    library = folio.flash_attn.v3

    def __init__(self, device):
        pass
