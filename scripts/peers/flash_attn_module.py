"""A pytest plugin: `flash_attn_interface` is folio.flash_attn.v3, and no gradients are computed.

The package `flash_attn` is the checkout's, for its rotary embedding in Triton; its own extension is never imported. On a
CPU, where Triton has no kernels, the embedding is this file's. The tests need einops too.
"""

import os
import pathlib
import sys
import types

os.environ["FLASH_ATTENTION_DISABLE_BACKWARD"] = "TRUE"

import peer_skips  # noqa: E402
import torch  # noqa: E402

import folio.flash_attn.v3  # noqa: E402

torch.set_grad_enabled(False)
sys.modules["flash_attn_interface"] = folio.flash_attn.v3
package = types.ModuleType("flash_attn")
package.__path__ = [str(pathlib.Path(os.environ["FOLIO_PEER_CHECKOUT"]) / "flash_attn")]
sys.modules["flash_attn"] = package


def apply_rotary_emb(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """x [batch, tokens, heads, head_dim] turned: token t of request b stands at position seqlen_offsets[b] + t.

    Positions behind the end of cos are not turned. The arithmetic is float32, as in the kernel that this replaces.
    """
    offsets = torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    positions = offsets + torch.arange(x.shape[1])
    known = (positions < len(cos))[..., None, None]
    cos, sin = (each.float()[positions.clamp(max=len(each) - 1)].unsqueeze(2) for each in (cos, sin))
    half = cos.shape[-1]
    turned, rest = x[..., :2 * half].float(), x[..., 2 * half:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pair = torch.where(known, first * cos - second * sin, first), torch.where(known, first * sin + second * cos, second)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


if os.environ.get("FOLIO_PEER_DEVICE") == "cpu":
    sys.modules["flash_attn.layers.rotary"] = types.ModuleType("flash_attn.layers.rotary")
    sys.modules["flash_attn.layers.rotary"].apply_rotary_emb = apply_rotary_emb


def pytest_collection_modifyitems(config, items):
    peer_skips.mark(items)
    peer_skips.choose(config, items)


def pytest_runtest_teardown():
    peer_skips.give_memory_back()
