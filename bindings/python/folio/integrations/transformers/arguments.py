"""What transformers hands to an attention function beside tensors: used, or refused in one sentence."""

import torch

# Arguments that change what attention means and that Folio does not offer here.
_REFUSED = {
    "indices": "sparse attention over `indices` (DSA) is not offered; load the model with another attn_implementation",
    "position_bias": "position_bias is not offered: Folio adds no learned bias to logits",
    "head_mask": "head_mask is not offered",
}


def check_call(module, query, key, value, dropout, extra):
    """Raises for what Folio would have to ignore."""
    for name, why in _REFUSED.items():
        if extra.get(name) is not None:
            raise NotImplementedError(f"folio: {why}")
    if dropout:
        raise NotImplementedError(f"folio: dropout is {dropout}; Folio is for inference: call model.eval()")
    if extra.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise NotImplementedError(
            "folio: output_attentions is not offered, since attention weights are never in memory; use eager"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise NotImplementedError(
            "folio: there is no backward pass; call the model under torch.no_grad() or torch.inference_mode()"
        )


def scale_of(scaling):
    """AttentionArgs.sm_scale, where 0 stands for 1 / sqrt(head_dim)."""
    if scaling is None:
        return 0.0
    if scaling == 0:
        raise ValueError("folio: scaling is 0; every key would weigh the same")
    return float(scaling)


def sinks_of(s_aux):
    """AttentionArgs.sinks: float32 [q heads]."""
    return None if s_aux is None else s_aux.detach().reshape(-1).float().contiguous()
