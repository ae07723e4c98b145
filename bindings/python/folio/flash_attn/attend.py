"""The one path of every function: a layer and a step are found or made, and attention runs."""

import re
import threading
import weakref

import folio
import torch

from . import new_tokens
from .arguments import FP8, by_head, check_heads, is_read_in_place, plain, scale_of, slopes_of
from .plans import OpKey, family_of, place_of


class Layer:
    """What calls with the same cache, rules and arrays share. It keeps no cache alive that nobody else does."""

    __slots__ = ("k", "v", "memory", "pages", "family", "view", "rules", "arrays", "like_q", "layers", "short_keys",
                 "by_head")

    def layer_of(self, planner, q, lengths):
        """The folio.Layer of a planner's op; descales are a request's, hence a batch's."""
        if self.arrays is None:
            key = planner
        elif planner.captured or self._copies_descales(lengths.rows):
            return self._make(planner.op, q, lengths)  # what it copies is the graph's, or may be written to
        else:
            key = planner, lengths.kv_len.shape[0]
        layer = self.layers.get(key)
        if layer is None:
            if len(self.layers) >= 64:
                self.layers.clear()
            layer = self.layers[key] = self._make(planner.op, q, lengths)
        return layer

    def _descales(self):
        """(name of the Layer's argument, descale) of q, k and v that are fp8.

        FlashAttention-3 reads descales of fp8 tensors alone, and engines give them always.
        """
        key, arrays = self.family.key, self.arrays
        source = "" if self.family.paged else "ragged_"
        of = {"q": (key.q, arrays.q_descale), source + "k": (key.kv, arrays.k_descale),
              source + "v": (key.kv, arrays.v_descale)}
        return [(name, descale) for name, (dtype, descale) in of.items() if dtype in FP8 and descale is not None]

    def _copies_descales(self, rows):
        return any(rows > 1 or not is_read_in_place(descale) for _, descale in self._descales())

    def _make(self, op, q, lengths):
        rules = self.rules
        given = dict(self.by_head)
        if self.arrays is not None:
            heads = self.family.key.num_kv_heads
            for name, descale in self._descales():
                requests = lengths.kv_len.shape[0] // lengths.rows
                scale = scale_of(descale, q, name[-1] + "_descale", requests, heads)
                if lengths.rows > 1:
                    repeated = descale.detach().repeat_interleave(lengths.rows, 0)
                    scale = scale_of(repeated, q, name[-1] + "_descale", requests * lengths.rows, heads)
                given[name + "_scale"] = scale
        return folio.Layer(op, self.view, sm_scale=rules.softmax_scale or 0.0, logits_soft_cap=rules.softcap, **given)


class _Layers(threading.local):
    def __init__(self):
        self.found = {}
        self.short = {}  # the same layers, by what a call's arguments are before they are brought to one form
        self.last = None  # (layer, step) of the call before


_layers = _Layers()
_KEPT_LAYERS = 4096


def again(layer_key, step_key, q, k, v, paged):
    """Attention of a layer and a step that `remember` knows, or None if anything may be different.

    The keys have ids of tensors. A step keeps its tensors, and a layer is told when its caches end, so an id is theirs.
    """
    layer = _layers.short.get(layer_key)
    if layer is None:
        return None
    family = layer.family
    step = family.short.get(step_key)
    if step is None or q.requires_grad or not q.is_contiguous():
        return None
    if paged:
        memory = k.data_ptr(), v.data_ptr(), k.stride(), v.stride()  # as _memory_of has it
        if layer.k() is not k or layer.v() is not v or layer.memory != memory or layer.pages < step.lengths.pages:
            return None
    elif (q.device != family.key.device or k.requires_grad or v.requires_grad
          or not (k.is_contiguous() and v.is_contiguous())):
        return None
    try:
        for tensor, version, address in step.checks:
            if tensor._version != version or tensor.data_ptr() != address:
                return None
    except RuntimeError:  # `.data` has made one a tensor of inference mode, without a version
        return None
    if step.place is not None and step.place != place_of(q.device.index):
        return None
    bound = layer.layers.get(step.planner)
    if bound is None:
        return None
    if layer.like_q:
        out = torch.empty_like(q)
    else:
        out = q.new_empty((*q.shape[:-1], family.key.head_dim_v), dtype=family.key.out)
    return bound(step.step, q, out) if paged else bound(step.step, q, out, None, (k, v))


def remember(layer_key, step_key, paged):
    """Lets `again` find the layer and the step of this thread's last call, if they are of the kind that it looks for."""
    if _layers.last is None:
        return
    layer, step = _layers.last
    _layers.last = None
    # Keys and values without one stride become pages, and `again` would give them to a call with ragged ones.
    if step.versions is None or layer.arrays is not None or layer.family.paged != paged:
        return
    if _layers.short.get(layer_key) is not layer:
        if _can_change(layer_key):
            return
        if len(_layers.short) >= _KEPT_LAYERS:
            _layers.short.clear()
        _layers.short[layer_key] = layer
        layer.short_keys.append(layer_key)
    family = layer.family
    if family.short.get(step_key) is not step and not _can_change(step_key):
        family.short[step_key] = step
        step.short_keys.append(step_key)


def _can_change(key):
    """Whether the key has a tensor, such as a scale: it is equal to itself whatever is written into it."""
    return any(isinstance(part, torch.Tensor) or (type(part) is tuple and _can_change(part)) for part in key)


def attend(q, k, v, rules, arrays, make, sources, facts, paged, out=None, lse=None, new=None, left_padded=False):
    """Attention of q [..., q heads, head_dim]. Returns out, of q's leading dimensions.

    make(q, k, v, rules, sources, facts) says the step's Lengths. `sources` are the tensors that it reads, or None;
    `facts` what else it depends on beside q's shape. k and v are caches [pages, page_size, KV heads, head_dim] if
    `paged`, else keys and values [..., KV heads, head_dim] of all requests. lse: float32 [tokens, q heads], written.
    new: the NewKv that are appended to the caches first. left_padded: the Lengths have a kv_start.
    """
    if q.requires_grad:
        q = plain(q, "q")
    shape = q.shape
    place = place_of(q.device.index) if q.is_cuda else None
    cache = (id(k), id(v)) if paged else (k.dtype, v.dtype, k.shape[-2:], v.shape[-2:])
    # Slopes and sinks may be copied: a copy is of its stream.
    per_layer = None if arrays is None else (place, arrays.key())
    layer_key = (cache, q.device, q.dtype, shape[-2:], per_layer, rules, left_padded,
                 None if out is None else out.dtype)
    layer = _layers.found.get(layer_key)
    if layer is None or (paged and (layer.k() is not k or layer.v() is not v or layer.memory != _memory_of(k, v))):
        captured = place is not None and place[1] != 0  # what is copied for it under capture is the graph's
        kept = not captured and (arrays is None or arrays.has_versions())
        layer = _make_layer(layer_key, q, k, v, rules, arrays, paged, out, left_padded, kept)
    family = layer.family
    step_key = make, facts, shape, place, *[id(source) for source in sources]
    step = family.steps.get(step_key)
    if step is None or not step.is_current():
        lengths = make(q, k, v, rules, sources, facts)
        try:
            step = family.plan(step_key, place, lengths, [source for source in sources if source is not None])
        except folio.InvalidArgument as error:
            raise folio.InvalidArgument(_in_words_of_the_call(str(error), make.names)) from None
    lengths = step.lengths
    if paged and layer.pages < lengths.pages:
        raise ValueError(f"folio.flash_attn: k_cache has {layer.pages} sequences; this batch needs {lengths.pages}")
    if new is not None:
        q = new_tokens.write(layer, lengths, new, q)
    if not q.is_contiguous():
        q = _one_stride(q)
    if out is None:
        if layer.like_q and q.is_contiguous():
            out = torch.empty_like(q)
        else:
            out = q.new_empty((*shape[:-1], family.key.head_dim_v), dtype=family.key.out)
    try:
        layer.layer_of(step.planner, q, lengths)(step.step, q, out, lse, None if paged else (k, v))
    except folio.InvalidArgument as error:
        raise folio.InvalidArgument(_in_words_of_the_call(str(error), make.names)) from None
    _layers.last = layer, step
    return out


def _in_words_of_the_call(message, names):
    said = [f"{core} is {name}" for core, name in names.items() if re.search(rf"\b{re.escape(core)}\b", message)]
    return f"folio.flash_attn: {message}" + (f" ({'; '.join(said)})" if said else "")


def remember_nothing():
    """The last call's layer and step were not its caller's."""
    _layers.last = None


def _memory_of(k, v):
    """Where a cache lies: a tensor can be given other memory or strides in place."""
    return k.data_ptr(), v.data_ptr(), k.stride(), v.stride()


def _one_stride(q):
    """q, copied where no one stride covers its tokens or where a head's components lie apart."""
    if q.stride(-1) != 1 or (q.dim() > 3 and q.shape[0] > 1 and q.shape[1] > 1
                             and q.stride(0) != q.shape[1] * q.stride(1)):
        return q.contiguous()
    return q


def _make_layer(key, q, k, v, rules, arrays, paged, out, left_padded, kept):
    check_heads(q, k, v)
    found = _layers.found
    if len(found) >= _KEPT_LAYERS:
        found.clear()
    layer = Layer()
    layer.rules = rules
    layer.arrays = arrays
    layer.layers = {}
    layer.short_keys = []
    layer.view = layer.memory = layer.k = layer.v = None
    layer.pages = 0
    layer.by_head = {}
    if arrays is not None:
        layer.by_head = {"alibi_slopes": slopes_of(arrays.alibi_slopes, q), "sinks": by_head(arrays.sinks, q, "the sink")}
    if paged:

        def forget(_, short=_layers.short, keys=layer.short_keys):
            found.pop(key, None)
            for short_key in keys:
                short.pop(short_key, None)

        layer.k, layer.v = weakref.ref(k, forget), weakref.ref(v, forget)
        layer.memory = _memory_of(k, v)
        layer.pages = k.shape[0]
        # Other tensors of the same memory: the caller's own are not kept alive, so that their end is seen.
        layer.view = folio.make_nhd_view(k.detach(), v.detach())
    dtype = q.dtype if out is None else out.dtype
    if out is None and dtype in FP8:
        dtype = torch.bfloat16
    layer.family = family_of(
        OpKey(
            device=q.device,
            threads=torch.get_num_threads() if q.device.type == "cpu" else 0,
            num_q_heads=q.shape[-2],
            num_kv_heads=k.shape[-2],
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            q=q.dtype,
            kv=k.dtype,
            out=dtype,
            page_size=k.shape[-3] if paged else 0,
            causal=rules.causal,
            window_left=rules.window_left,
            window_right=rules.window_right,
            soft_cap=rules.softcap > 0,
            alibi=arrays is not None and arrays.alibi_slopes is not None,
            sinks=arrays is not None and arrays.sinks is not None,
            num_splits=rules.num_splits,
            sm_margin=rules.sm_margin,
            attention_chunk=rules.attention_chunk,
            left_padded=left_padded,
        )
    )
    layer.like_q = dtype == q.dtype and q.shape[-1] == v.shape[-1]
    if kept:
        found[key] = layer
    return layer
