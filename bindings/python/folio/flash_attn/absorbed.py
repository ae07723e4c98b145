"""qv: logits are q . k + qv . v, as in the absorbed form of multi-head latent attention.

A key is then k beside v, and the value a part of that key. Where k and v are neighbouring parts of one buffer, it is
read as it lies.
"""

from typing import NamedTuple

import torch


class Absorbed(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor  # a part of k
    v_first: bool  # v lies before k in the buffer

    def of_new(self, k, v):
        """New tokens for the same buffer."""
        return torch.cat((v, k) if self.v_first else (k, v), -1)


def absorb(q, qv, k, v, copies):
    """The same attention without qv. `copies`: k and v that lie apart may be copied beside each other."""
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected or qv.dtype != q.dtype or qv.device != q.device:
        raise ValueError(f"folio.flash_attn: qv is {qv.dtype} {list(qv.shape)} on {qv.device}; with this q and v it must be "
                         f"{q.dtype} {list(expected)} on {q.device}")
    if v.data_ptr() + v.shape[-1] * v.element_size() == k.data_ptr() and _share_rows(k, v):
        key, v_first = _widened(v, k.shape[-1]), True
    elif k.data_ptr() + k.shape[-1] * k.element_size() == v.data_ptr() and _share_rows(k, v):
        key, v_first = _widened(k, v.shape[-1]), False
    elif copies:
        key, v_first = torch.cat((v, k), -1), True
    else:
        raise NotImplementedError("folio.flash_attn: qv is given, and k_cache and v_cache lie apart; make them "
                                  "neighbouring slices of one buffer [..., headdim_v + headdim]")
    width = v.shape[-1]
    value = key[..., :width] if v_first else key[..., key.shape[-1] - width :]
    return Absorbed(torch.cat((qv, q) if v_first else (q, qv), -1), key, value, v_first)


def _share_rows(k, v):
    one_buffer = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    return one_buffer and k.stride() == v.stride() and k.shape[:-1] == v.shape[:-1] and k.dtype == v.dtype


def _widened(first, more):
    return first.as_strided((*first.shape[:-1], first.shape[-1] + more), first.stride())
