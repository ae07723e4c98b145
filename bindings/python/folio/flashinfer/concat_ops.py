"""Keys of MLA prefills put together (flashinfer.concat_ops)."""

from . import arguments


def concat_mla_k(k, k_nope, k_rope, *, backend="default"):
    """k [tokens, heads, nope + rope] = k_nope [tokens, heads, nope] beside k_rope [tokens, 1, rope], which all heads
    share."""
    if backend != "default":
        arguments.check_backend(backend)
    nope = k_nope.shape[-1]
    if k.shape[-1] != nope + k_rope.shape[-1] or k.shape[:2] != k_nope.shape[:2]:
        raise ValueError(f"k has shape {tuple(k.shape)}; k_nope is {tuple(k_nope.shape)}, k_rope {tuple(k_rope.shape)}")
    k[..., :nope].copy_(k_nope)
    k[..., nope:].copy_(k_rope)
