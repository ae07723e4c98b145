"""SGLang's AttentionBackend over its token pool: step metadata, graphs, decode and extend."""

from dataclasses import dataclass, field

import folio
import torch
from folio.backends.layer_kinds import BoundLayers, LayerKind, PreparedKind, context_of
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


def refuse(what):
    raise NotImplementedError(f"folio-sglang does not offer {what}")


@dataclass
class StepMetadata:
    """One step: lengths and pages of its requests, and for each kind of layer that it has met the prepared kind and its
    plan, bound to the table. cu_q and kv_lens are int32: the host's, or in a graph views of buffers whose addresses it
    keeps."""

    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    table: folio.PageTableView
    num_tokens: int
    in_graph: bool = False
    steps: dict = field(default_factory=dict)


class FolioAttentionBackend(AttentionBackend):
    """Eager steps are planned from the host's lengths, once for all layers of a kind. Captured steps are planned inside
    of the graph, from buffers that `init_forward_metadata_out_graph` fills: page tables, lengths and request ids are
    read there, and nothing that the scheduler shares is read later. The base class' `shared_read_ends` says no more.

    A page is what the pool's page_size says; V and K are read in place, fp8 with the layer's scales.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner, *, determinism="run_to_run", draft_tree_width=0, context_parallel_size=1,
                 cpus=()):
        """Prepares the model's layers. Raises NotImplementedError for what is not offered, and what folio.prepare
        raises where no kernel takes a layer.

        determinism: folio.Determinism in lower case. draft_tree_width: speculative_eagle_topk; 0 is no speculation.
        cpus: those of Folio's threads, where SGLang bound a CPU worker's threads to some.
        """
        super().__init__()
        config, pool = model_runner.model_config, model_runner.token_to_kv_pool
        if config.attention_arch == AttentionArch.MLA:
            refuse("latent attention (MLA)")
        if type(pool) is not MHATokenToKVPool:
            refuse(f"a KV pool of {type(pool).__name__}; it takes MHATokenToKVPool (--disable-hybrid-swa-memory)")
        if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            refuse(f"a KV pool of layout {pool.kv_cache_layout} or of block-scaled types")
        if context_parallel_size > 1:
            refuse("context parallelism")
        if config.is_encoder_decoder:
            refuse("cross attention")
        algorithm = getattr(model_runner, "spec_algorithm", None)
        if algorithm is not None and not algorithm.is_none() and not (
                (algorithm.is_eagle() or algorithm.is_standalone()) and draft_tree_width == 1):
            refuse("speculation with trees; it takes EAGLE and STANDALONE with speculative_eagle_topk 1")
        self.pool, self.req_to_token = pool, model_runner.req_to_token_pool.req_to_token
        self.page_size, self.device = pool.page_size, torch.device(model_runner.device)
        self.q_dtype, self.determinism = model_runner.dtype, determinism
        self.max_context_len = self.req_to_token.shape[1]
        self.context = context_of(self.device, cpus=cpus)
        self.forward_metadata = None
        self._kinds, self._eager, self._captured = {}, {}, {}  # by layer and sinks; prepared ops by kind
        self._bounds, self._sinks, self._layers, self._graph_steps = None, {}, {}, {}
        model = getattr(model_runner, "model", None)
        for layer in [] if model is None else model.modules():
            if isinstance(layer, RadixAttention):
                self._prepare(self._kind(layer, None), self._eager, None)

    # Layers

    def _kind(self, layer, sinks):
        key = (layer.layer_id, sinks is not None)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._make_kind(layer, sinks is not None)
        return kind

    def _make_kind(self, layer, has_sinks):
        if layer.is_cross_attention:
            refuse("cross attention")
        if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
            refuse("decoders that see both ways")
        if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
            refuse(f"logit capping by {layer.logit_capping_method}")
        if layer.xai_temperature_len > 0 or layer.use_irope or layer.pos_encoding_mode != "NONE":
            refuse("temperatures or positions inside attention")
        causal = layer.attn_type == AttentionType.DECODER
        window = layer.sliding_window_size  # how many keys before a query's own it sees
        features = (("soft_cap", layer.logit_cap > 0), ("sinks", has_sinks))
        return LayerKind(
            num_q_heads=layer.tp_q_head_num, num_kv_heads=layer.tp_k_head_num, head_dim_qk=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim, q=self.q_dtype, kv=self.pool.dtype, page_size=self.page_size,
            mask="causal" if causal else "none", window_left=max(window, -1),
            window_right=-1 if causal else max(window, -1),
            features=tuple(name for name, declared in features if declared))

    def _prepare(self, kind, prepared, bounds):
        if kind not in prepared:
            prepared[kind] = PreparedKind(kind, self.context, self.device, self.determinism, bounds)
        return prepared[kind]

    def _step(self, kind, metadata, num_tokens):
        """(prepared kind, folio.Step) of a kind of layers: planned and bound to the table where it is asked for first."""
        found = metadata.steps.get(kind)
        if found is None:
            prepared = self._prepare(kind, self._captured if metadata.in_graph else self._eager,
                                     self._bounds if metadata.in_graph else None)
            plan = prepared.plan(metadata.cu_q, [folio.KvSegment(metadata.kv_lens)], num_tokens)
            found = metadata.steps[kind] = prepared, prepared.step(plan, metadata.table)
        return found

    def _layer(self, prepared, layer, sinks):
        """The pool is asked each time: it waits there for keys that are still being fetched from the host."""
        halves = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        fp8 = self.pool.dtype in FP8 and layer.k_scale is not None
        scales = (layer.k_scale_float, layer.v_scale_float) if fp8 else (1.0, 1.0)
        bound = self._layers.get(layer.layer_id)
        if bound is None:
            bound = self._layers[layer.layer_id] = BoundLayers()
        memory = (halves[0].data_ptr(), halves[1].data_ptr(), scales, None if sinks is None else sinks.data_ptr())
        found = bound.find(prepared, memory)
        return found or bound.add(prepared, memory, self._bind(prepared.op, layer, halves, scales, sinks))

    def _bind(self, op, layer, halves, scales, sinks):
        pages = halves[0].shape[0] // self.page_size
        k, v = (half[:pages * self.page_size].view(pages, self.page_size, *half.shape[1:]) for half in halves)
        return folio.Layer(op, folio.make_nhd_view(k, v), sm_scale=layer.scaling, logits_soft_cap=layer.logit_cap,
                           sinks=sinks, k_scale=scales[0], v_scale=scales[1])

    def _sinks32(self, layer_id, sinks):
        """Sinks in the model's dtype, as float32 at an address that graphs may keep. Copied each time, also in a
        captured graph, because weights may be loaded again."""
        if sinks is None or sinks.dtype == torch.float32:
            return None if sinks is None else sinks.detach()
        if layer_id not in self._sinks:
            self._sinks[layer_id] = torch.empty(sinks.numel(), dtype=torch.float32, device=self.device)
        return self._sinks[layer_id].copy_(sinks.detach())

    # Steps

    def _tokens_a_request(self, batch):
        """How many queries each request of a captured kind of batch has; None for batches of other kinds."""
        if batch.forward_mode.is_decode():
            if batch.spec_info is not None and getattr(batch.spec_info, "kv_indptr", None) is not None:
                refuse("draft decoding; give the draft worker another attention backend")
            return 1
        if batch.forward_mode.is_target_verify():
            return batch.spec_info.num_tokens_per_req
        return None

    def _host_lengths(self, batch):
        """(queries, keys) of every request, lists of integers. Keys of drafts that are verified come on top."""
        keys = batch.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        keys = keys[:batch.batch_size].tolist()
        tokens = self._tokens_a_request(batch)
        if tokens is not None:
            drafts = tokens if batch.forward_mode.is_target_verify() else 0
            return [tokens] * len(keys), [length + drafts for length in keys]
        if batch.forward_mode not in EXTENDS:
            refuse(f"batches of mode {batch.forward_mode.name}")
        queries = batch.extend_seq_lens_cpu
        return (batch.extend_seq_lens.tolist() if queries is None else list(queries)), keys

    def _page_ids(self, batch, longest):
        """int32 [requests, pages of the longest]: entries beyond a request's own keys are never read."""
        slots = self.req_to_token[batch.req_pool_indices[:batch.batch_size], :longest]
        return slots if self.page_size == 1 else slots[:, ::self.page_size] // self.page_size

    def init_forward_metadata(self, forward_batch):
        """Eager steps. Plans are made when the first layer of a kind runs."""
        self.forward_metadata = None
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            return
        queries, keys = self._host_lengths(forward_batch)
        cu_q = torch.zeros(len(queries) + 1, dtype=torch.int32)
        cu_q[1:] = torch.tensor(queries, dtype=torch.int32).cumsum(0)
        table = folio.dense_table(self._page_ids(forward_batch, max(keys)).contiguous())
        self.forward_metadata = StepMetadata(cu_q, torch.tensor(keys, dtype=torch.int32), table, int(cu_q[-1]))

    # Graphs

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        """Takes the memory that captured steps of up to max_bs requests and max_num_tokens queries read."""
        columns = -(-self.max_context_len // self.page_size)
        self._graph_table = torch.zeros(max_bs, columns, dtype=torch.int32, device=self.device)
        self._graph_lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self._graph_rows = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self._graph_cu_q = self._graph_rows.clone()
        self._bounds = folio.GraphBounds(max_requests=max_bs, max_tokens=max_num_tokens, max_q_len=max_num_tokens,
                                         max_kv_len=self.max_context_len + max_num_tokens)
        self._captured, self._graph_steps = {}, {}
        for kind in dict.fromkeys(self._kinds.values()):
            self._prepare(kind, self._captured, self._bounds)

    def get_cuda_graph_seq_len_fill_value(self):
        return 1  # padding reads the pool's slot 0, which holds nobody's token

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        """Fills the buffers that captured steps read. Raises NotImplementedError for batches that are not captured:
        graphs are of decodes and of verifications of draft chains."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        size, tokens = forward_batch.batch_size, self._tokens_a_request(forward_batch)
        if tokens is None:
            refuse(f"captured batches of mode {forward_batch.forward_mode.name}")
        if self._bounds is None:
            raise RuntimeError("init_cuda_graph_state comes before init_forward_metadata_out_graph")
        drafts = tokens if forward_batch.forward_mode.is_target_verify() else 0
        host = forward_batch.seq_lens_cpu
        longest = self.max_context_len if host is None else min(int(host.max()) + drafts, self.max_context_len)
        pages = self._page_ids(forward_batch, longest)
        self._graph_table[:size, :pages.shape[1]].copy_(pages)
        self._graph_lens[:size].copy_(forward_batch.seq_lens[:size])
        self._graph_lens[:size].add_(drafts)
        torch.mul(self._graph_rows[:size + 1], tokens, out=self._graph_cu_q[:size + 1])
        if in_capture:
            self._graph_steps[size, tokens] = StepMetadata(
                self._graph_cu_q[:size + 1], self._graph_lens[:size], folio.dense_table(self._graph_table[:size]),
                size * tokens, in_graph=True)
        if (size, tokens) not in self._graph_steps:
            refuse(f"a replay of {size} requests of {tokens} tokens, which was not captured")
        self.forward_metadata = self._graph_steps[size, tokens]

    def init_forward_metadata_in_graph(self, forward_batch):
        """Plans the step on the device, from the buffers: captured, a replay plans again."""
        step = self.forward_metadata
        if step is None or not step.in_graph:
            return
        step.steps.clear()
        for kind in self._captured:
            self._step(kind, step, step.num_tokens)

    @property
    def verify_mask(self):
        """None: a chain of drafts is verified under the causal mask."""
        return None

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs):
        """Nothing here depends on what the drafts are."""

    # Layers of a step

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **others):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **others):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)

    def _attend(self, q, k, v, layer, batch, save_kv_cache, sinks, others):
        """Writes k and v [tokens, KV heads, head_dim] into the pool, unless they lie there, then attends q. Returns
        [tokens, heads * v_head_dim]; rows of padding are zeros."""
        asked = sorted(name for name, value in others.items() if value is not None)
        if asked:
            refuse(f"attention with {', '.join(asked)}")
        if k is not None and save_kv_cache:
            self._write(k, v, layer, batch)
        metadata = self.forward_metadata
        if metadata is None:
            raise RuntimeError("init_forward_metadata comes before a layer's attention")
        rows = q.shape[0]
        out = getattr(batch, "_attn_output", None)
        shape = (rows, layer.tp_q_head_num, layer.v_head_dim)
        if out is None:
            out = (q.new_empty if rows == metadata.num_tokens else q.new_zeros)(shape)
        heads = out.view(shape)
        prepared, step = self._step(self._kind(layer, sinks), metadata, rows)
        attend = self._layer(prepared, layer, self._sinks32(layer.layer_id, sinks))
        attend(step, q.reshape(rows, layer.tp_q_head_num, layer.qk_head_dim), heads)
        return out.view(rows, -1)

    def _write(self, k, v, layer, batch):
        """Through the pool, whose own hooks then run. It divides by scales in place: those are copies."""
        where = KVWriteLoc.for_batch(batch)
        if layer.k_scale is None:
            self.pool.set_kv_buffer(layer, where, k, v)
        else:
            self.pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
