"""Folio's attention as torch operators, for models that torch.compile or a CUDA graph runs.

A model's attention is a `folio.torch.Attention` module. The engine binds it to a `folio.Layer` once its cache is there,
and runs the model with the step's tables in use:

    self.attention = folio.torch.Attention("model.layers.0.self_attn")          # in the model
    hidden = self.attention(q, k, v)                                            # in its forward: writes, then attends

    module.bind(folio.Layer(op, cache, sm_scale=...))                           # in the engine, once
    with folio.torch.use(folio.Step(plan, tables, slot_mapping=slots)):         # in the engine, every step
        model(tokens)

Underneath are two operators, whose graphs hold a layer's name and no address of a cache, so that one compiled model
serves every step:

    torch.ops.folio.write(k, v, token, layer)          the layer's cache gets new tokens
    torch.ops.folio.attention(q, out, token, layer)    out is written

`token` is a tensor without elements that stands for the layer's cache. `write` says that it changes it, `attention`
that it reads it: compilers keep their order, and copy nothing.

The kernels' stream is the current one, unless the step has its own. A CUDA graph replays the addresses and the plan
buffer of its capture: plan device lengths into that buffer, inside the capture or before each replay, and keep tables
and slots in the same tensors. There are no gradients: tensors that require one are refused while gradients are enabled.
"""

import contextlib
import contextvars
import itertools
import weakref

import torch

from . import _folio

__all__ = ["Attention", "use"]

_layers = {}  # name: (layer, hash of its op), of the modules that are alive and bound
_steps = contextvars.ContextVar("folio.torch.steps", default={})  # hash of an op: the step in use
_modules = weakref.WeakValueDictionary()  # name: module
_numbers = itertools.count()


@contextlib.contextmanager
def use(*steps):
    """Within the block, layers run in these steps: one for each op, which serves all layers of that op.

    To be entered outside of what is compiled. An inner block's step replaces the outer one's of the same op. The steps
    belong to this thread or asyncio task.
    Raises ValueError for two steps of one op.
    """
    given = {hash(step.op): step for step in steps}
    if len(given) != len(steps):
        raise ValueError("steps: two of them belong to one op; a layer of it could take either")
    token = _steps.set({**_steps.get(), **given})
    try:
        yield
    finally:
        _steps.reset(token)


def _find(name):
    """The layer of that name, and the step in use for it."""
    try:
        layer, op = _layers[name]
    except KeyError:
        raise RuntimeError(f"attention layer {name!r} is not bound: call bind(folio.Layer(...)) on its module"
                           ) from None
    try:
        return layer, _steps.get()[op]
    except KeyError:
        raise RuntimeError(f"no step is in use for attention layer {name!r}: run the model within "
                           "`with folio.torch.use(step):`, the step's plan being of the layer's op") from None


def _refuse_gradients(**tensors):
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(f"{name} requires a gradient, which Folio does not compute: "
                               "run under torch.no_grad() or torch.inference_mode(), or detach it")


def _check_write(k, v, token, layer):
    """All that is done with fake tensors: nothing is returned, hence no shape to say."""
    if torch.is_grad_enabled():
        _refuse_gradients(k=k, v=v)


def _check_attention(q, out, token, layer, *, lse=None, ragged=None):
    if torch.is_grad_enabled():
        _refuse_gradients(q=q, out=out, lse=lse, **{f"ragged[{i}]": tensor for i, tensor in enumerate(ragged or ())})


def _plain(tensor):
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


def _write(k, v, token, layer):
    _check_write(k, v, token, layer)
    bound, step = _find(layer)
    bound.write(step, _plain(k), _plain(v))


def _attention(q, out, token, layer, *, lse=None, ragged=None):
    _check_attention(q, out, token, layer, lse=lse, ragged=ragged)
    bound, step = _find(layer)
    if ragged is not None:
        if len(ragged) % 2:
            raise ValueError(f"ragged has {len(ragged)} tensors; it is k, v of one ragged segment after the other")
        ragged = [(_plain(k), _plain(v)) for k, v in zip(ragged[::2], ragged[1::2])]
    bound(step, _plain(q), _plain(out), _plain(lse), ragged)


def _define():
    # Defined by schema: torch.library.custom_op does the same for ten times the host time a call.
    library = torch.library.Library("folio", "DEF")
    tags = [torch.Tag.pt2_compliant_tag]
    tags.append(getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
    for schema, function, fake in (
            ("write(Tensor k, Tensor? v, Tensor(a!) token, str layer) -> ()", _write, _check_write),
            ("attention(Tensor q, Tensor(a!) out, Tensor token, str layer, *, Tensor(b!)? lse=None, "
             "Tensor[]? ragged=None) -> ()", _attention, _check_attention)):
        name = schema.partition("(")[0]
        library.define(schema, tags=tuple(tags))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"folio::{name}", fake, lib=library)
    return library


_library = _define()


class Attention(torch.nn.Module):
    """One attention layer of a model, over a `folio.Layer` that is bound later.

    name: of the layer, as graphs and messages have it; unique among live modules. None makes one up.
    head_dim_v: of the output where `forward` makes it; None is that of q. out_dtype: likewise.
    kv_from: the module whose cache this one reads too, in models whose layers share caches.

    It has no parameters. It cannot be copied or pickled, since its layer is memory of this process.
    """

    def __init__(self, name=None, *, head_dim_v=None, out_dtype=None, kv_from=None):
        super().__init__()
        self.name = f"folio.attention.{next(_numbers)}" if name is None else name
        self.head_dim_v = head_dim_v
        self.out_dtype = out_dtype
        if self.name in _modules:
            raise ValueError(f"name: there is an attention layer {self.name!r} already")
        _modules[self.name] = self
        weakref.finalize(self, _layers.pop, self.name, None)
        self.register_buffer("token", torch.empty(0), persistent=False)
        self._kv_from = (kv_from,)  # in a tuple, so that it is no submodule

    def bind(self, layer):
        """Takes the layer that `forward` runs: its cache, sinks and scales. A later call replaces it."""
        if not isinstance(layer, _folio.Layer):
            raise TypeError(f"layer: expected a folio.Layer, got {type(layer).__name__}")
        _layers[self.name] = (layer, hash(layer.op))

    def forward(self, q, k=None, v=None, *, out=None, lse=None, ragged=None):
        """Writes k and v into the cache where they are given, then attends.

        q: [tokens, q heads, head_dim_qk]. k, v: [tokens, kv heads, head_dim], written to the step's slot_mapping; v is
        None where the cache's V is a part of its K. out: [tokens, q heads, head_dim_v], made if it is None, and
        returned. lse: float32 [tokens, q heads], natural logarithm, written where it is given. ragged: [k, v] of one
        ragged segment of the plan after the other.
        """
        token = (self._kv_from[0] or self).token
        if k is not None:
            torch.ops.folio.write(k, v, token, self.name)
        elif v is not None:
            raise ValueError("v is given without k")
        if out is None:
            width = q.shape[-1] if self.head_dim_v is None else self.head_dim_v
            out = torch.empty((*q.shape[:-1], width), dtype=self.out_dtype or q.dtype, device=q.device)
        torch.ops.folio.attention(q, out, token, self.name, lse=lse, ragged=ragged)
        return out

    def extra_repr(self):
        return f"{self.name!r}, {_layers[self.name][0] if self.name in _layers else 'not bound'}"

    def __reduce_ex__(self, protocol):
        raise TypeError(f"attention layer {self.name!r} cannot be copied or pickled: its layer is memory of this "
                        "process")
