"""A group's metadata of one step: one plan for all its layers, made before the first of them runs."""

from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar

import folio
import torch
from folio.backends.layer_kinds import PreparedKind
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from .cache import FP8, CacheLayout
from .context import context_of, graph_bounds
from .counts import count
from .impl import FolioAttentionImpl, KindStep, refuse
from .options import options_of

SMALLEST_PACKED_PAGE = 16


@dataclass
class FolioMetadata:
    """One step of a group of layers. `plans` has one plan for each kind of layer (LayerKind), nearly always one, with the
    prepared kind that made it, which may be another group's. `steps` has that plan bound to this group's tables, which
    is what a layer's call takes. `tables` has one page table for each segment of the keys: one, or two where requests
    share pages."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    num_shared_pages: int = 0
    tables: list = field(default_factory=list)
    plans: dict = field(default_factory=dict)
    steps: dict = field(default_factory=dict)


class FolioMetadataBuilder(AttentionMetadataBuilder[FolioMetadata]):
    """vLLM's AttentionMetadataBuilder. On CUDA, plans are made on the device, from the device's lengths, outside of
    graphs or inside: nothing waits, and a graph that was captured reads the plan of its own step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        """Chooses the kernels. Raises what folio.prepare raises for a model that no kernel takes."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.options = options_of(vllm_config)
        if self.options.cascade and torch.device(device).type != "cpu":
            refuse("cascade on a GPU, where page tables are not on the host")
        self._impls = self._layer_impls()
        self.page_size = kv_cache_spec.block_size
        self._bounds = graph_bounds(vllm_config) if torch.device(device).type == "cuda" else None
        self._prepared = {}
        self._bind()
        for impl in self._impls:
            impl.writer = self._prepare(impl.kinds[True])

    def _layer_impls(self):
        layers = self.vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in self.layer_names if name in layers]
        for name, impl in zip(self.layer_names, impls):
            if not isinstance(impl, FolioAttentionImpl):
                raise TypeError(f"{name} is a layer of Folio's group, and its implementation is {type(impl).__name__}")
        return impls

    def _bind(self):
        spec = self.kv_cache_spec
        if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "state_content_bytes", None) is not None:
            refuse("caches whose entries are not one token's K and V")
        q_dtype = self.vllm_config.model_config.dtype
        packs = torch.device(self.device).type == "cpu" and all(
            self._recommends_packing(impl, q_dtype) for impl in self._impls)
        for impl in self._impls:
            kv_format = self.options.kv_format or ("cpu_packed" if packs else "strided")
            impl.bind(self._layout(impl, q_dtype, kv_format), q_dtype, self.device, self.options)

    def _layout(self, impl, q_dtype, kv_format):
        spec = self.kv_cache_spec
        dtype = q_dtype if impl.is_encoder else FP8.get(impl.kv_cache_dtype, spec.dtype)
        return CacheLayout(num_kv_heads=impl.num_kv_heads, head_dim_qk=impl.head_size,
                           head_dim_v=getattr(spec, "head_size_v", None) or impl.head_size, page_size=self.page_size,
                           dtype=dtype, kv_format="strided" if impl.is_encoder else kv_format)

    def _recommends_packing(self, impl, q_dtype):
        if impl.is_encoder:
            return True
        if self.page_size % 2 != 0 or self.page_size < SMALLEST_PACKED_PAGE:
            return False
        impl.bind(self._layout(impl, q_dtype, "strided"), q_dtype, self.device, self.options)
        config = impl.kind(causal=True).config(self.options.determinism)
        advice = folio.recommended_kv_format(config, context_of(self.device, self.options.num_threads))
        return advice.format == folio.KvFormat.CPU_PACKED

    def _kinds(self, causal):
        return dict.fromkeys(impl.kinds[causal] for impl in self._impls)  # in the layers' order, each once

    def _prepare(self, kind):
        if kind not in self._prepared:
            self._prepared[kind] = PreparedKind(
                kind, context_of(self.device, self.options.num_threads), self.device, self.options.determinism,
                self._bounds, self.options.force_kernel)
        return self._prepared[kind]

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        """A step's metadata. common_prefix_len: tokens that all requests share, in whole pages; 0 is none known.
        fast_build changes nothing: a plan is always made, and it is quick. Raises NotImplementedError for masks that
        are not offered."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            refuse("masks that differ between the requests of a step")
        if any((getattr(common, "mm_req_doc_ranges", None) or {}).values()):
            refuse("spans of image tokens that see each other (prefix-LM masks)")
        count("builds")
        metadata = FolioMetadata(
            num_actual_tokens=common.num_actual_tokens, query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens, block_table=common.block_table_tensor, slot_mapping=common.slot_mapping,
            causal=bool(common.causal))
        metadata.num_shared_pages = self._shared_pages(common_prefix_len, metadata)
        self._plan(metadata)
        return metadata

    def _shared_pages(self, common_prefix_len, metadata):
        """How many pages at the front of the table all requests share, as we are told or, with `cascade`, as the host's
        table says. A page counts if it is full in every request."""
        if common_prefix_len:
            if torch.device(self.device).type != "cpu":
                refuse("cascade on a GPU, where page tables are not on the host")
            if common_prefix_len % self.page_size != 0 or common_prefix_len > int(metadata.seq_lens.min()):
                raise ValueError(f"common_prefix_len is {common_prefix_len}; it takes whole pages of {self.page_size} "
                                 "tokens that every request has")
            return common_prefix_len // self.page_size
        if not self.options.cascade or len(metadata.seq_lens) < 2:
            return 0
        most = int(metadata.seq_lens.min()) // self.page_size
        table = metadata.block_table[:, :most]
        differs = (table != table[:1]).any(dim=0).nonzero()
        return most if len(differs) == 0 else int(differs[0])

    def _segments(self, metadata, kind):
        if kind.source == "ragged":
            return [folio.KvSegment(metadata.seq_lens, source="ragged")]
        shared = metadata.num_shared_pages * self.page_size
        if shared == 0:
            return [folio.KvSegment(metadata.seq_lens)]
        everyone = torch.tensor([0, len(metadata.seq_lens)], dtype=torch.int32)
        return [folio.KvSegment(torch.tensor([shared], dtype=torch.int32), group_indptr=everyone),
                folio.KvSegment(metadata.seq_lens - shared)]

    def _plan(self, metadata):
        """Fills in the page tables, the plans that the metadata does not have yet, and the steps of both."""
        pages = metadata.num_shared_pages
        if pages > 0:
            count("shared prefixes")
            metadata.tables = [folio.dense_table(metadata.block_table[:1, :pages]),
                               folio.dense_table(metadata.block_table[:, pages:])]
        else:
            metadata.tables = [folio.dense_table(metadata.block_table)]
        metadata.steps = {}
        for kind in self._kinds(metadata.causal):
            if kind not in metadata.plans:
                prepared = self._prepare(kind)
                metadata.plans[kind] = prepared, prepared.plan(
                    metadata.query_start_loc, self._segments(metadata, kind), metadata.num_actual_tokens)
                count("plans")
            prepared, plan = metadata.plans[kind]
            tables = metadata.query_start_loc if kind.source == "ragged" else metadata.tables
            metadata.steps[kind] = KindStep(prepared, prepared.step(plan, tables))

    def update_block_table(self, metadata, blk_table, slot_mapping):
        """The metadata of another group with the same lengths, for this group's table: its plans are used again, and
        only kinds of layers that it has not met are planned. Pages that requests share are this table's own."""
        new = copy(metadata)
        new.block_table, new.slot_mapping = blk_table, slot_mapping
        new.num_shared_pages = self._shared_pages(0, new)
        new.plans = dict(metadata.plans) if new.num_shared_pages == metadata.num_shared_pages else {}
        self._plan(new)
        return new

    def update_draft_decode_metadata(self, metadata):
        """Plans the lengths that the metadata's arrays hold by now, in place. May be captured: a replay plans again."""
        metadata.plans.clear()
        self._plan(metadata)
