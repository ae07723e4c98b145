"""attn_implementation="folio": attention over the tensors of transformers' own caches, or over a FolioCache's pages."""

import folio
import torch

from .arguments import check_call
from .layouts import TensorLayout
from .plans import OpKey, op_of
from .visibility import find_visibility

_REASON = "Folio plans on the host from what masks hold; torch.compile takes it as a break in the graph"


@torch.compiler.disable(reason=_REASON)
def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    is_causal=None,
    **extra,
):
    """An attention function of transformers: (out [batch, queries, heads, head_dim_v], None).

    query [batch, heads, queries, head_dim]; key, value [batch, KV heads, keys, head_dim], read where they lie except
    where a batch's keys lie so that they must be copied (see _Layout). attention_mask: what find_visibility takes; a
    mask decides alone, `sliding_window` and `is_causal` only where there is none. Padding is not computed: its output
    is 0. s_aux: one sink a head.
    """
    check_call(module, query, key, value, dropout, extra)
    if extra.get("cu_seq_lens_q") is not None:
        raise NotImplementedError(
            'folio: cu_seq_lens_q packs several sequences into one row; give position_ids alone, or use "paged|folio"'
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and sliding_window is not None and not causal:
        raise NotImplementedError("folio: a sliding window that is not causal needs an attention_mask")
    batch, _, q_length, _ = query.shape
    pages = getattr(key, "folio_pages", None)
    kv_length = key.shape[2] if pages is None else pages.length
    visible = find_visibility(attention_mask, batch, q_length, kv_length, causal=causal, window=sliding_window)
    if pages is None:
        layout = TensorLayout(query, key, value, visible, together=s_aux is not None)
    else:
        layout = pages.layout(query, visible)
    op = op_of(
        OpKey(
            device=query.device,
            num_q_heads=layout.q.shape[1],
            num_kv_heads=layout.num_kv_heads,
            head_dim_qk=query.shape[3],
            head_dim_v=value.shape[3],
            q=query.dtype,
            kv=key.dtype,
            mask=_mask_kind(layout.visible),
            window_left=layout.visible.window_left,
            soft_cap=bool(softcap),
            sinks=s_aux is not None,
            page_size=layout.page_size,
            kv_format=layout.kv_format,
        )
    )
    planned = op.plan(layout.key, layout.describe)
    step = planned.step
    if step is None or layout.visible.bits is not None:  # equal keys may have other bits
        mask = layout.custom_mask(query.device)
        step = planned.step = folio.Step(planned.plan, planned.facts, op.workspace, custom_mask=mask)
    out = query.new_empty(layout.q.shape[0], layout.q.shape[1], value.shape[3])
    layer = op.layer(op.layers if pages is None else pages.layers, layout.cache, scaling, softcap, s_aux)
    layer(step, layout.q.detach(), out, ragged=layout.ragged)
    op.counted()
    return layout.unfold(out), None


def _mask_kind(visible):
    if visible.bits is not None:
        return folio.MaskKind.CUSTOM
    return folio.MaskKind.CAUSAL if visible.causal else folio.MaskKind.NONE
