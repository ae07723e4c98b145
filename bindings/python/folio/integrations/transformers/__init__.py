"""Hugging Face transformers over Folio.

    import folio.integrations.transformers as folio_transformers
    folio_transformers.register()
    model.set_attn_implementation("folio")         # generate, forward: transformers' caches
    model.generate(..., past_key_values=folio_transformers.FolioCache())  # Folio's pages: nothing is concatenated
    model.generate_batch(...)                      # continuous batching takes "paged|folio" by itself

No model code changes. Continuous batching needs transformers 5.17: 5.23 runs its own implementations only. The rest runs on
both. Left and right padding is not computed; windows, soft caps, sinks
and masks of four dimensions are taken; what is not offered is refused with the reason. There is no backward pass.
"""

import transformers
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .cache import FolioCache
from .dense import attention
from .masks import ranges_mask
from .paged import paged_attention
from .plans import reset_statistics, statistics

__all__ = ["CONTINUOUS_BATCHING", "FolioCache", "register", "reset_statistics", "statistics"]

#: Whether continuous batching of the transformers that is installed takes "paged|folio".
CONTINUOUS_BATCHING = transformers.__version__.startswith("5.17.")


def register():
    """Makes "folio" and, where CONTINUOUS_BATCHING is true, "paged|folio" known to transformers; may be called again."""
    AttentionInterface.register("folio", attention)
    if CONTINUOUS_BATCHING:
        AttentionInterface.register("paged|folio", paged_attention)
    AttentionMaskInterface.register("folio", ranges_mask)
