"""What folio-sglang imports of SGLang, where SGLang cannot be imported: the same names and arguments, and of its pools what
the backend reads and writes.

With it the backend runs in every environment that has torch. Where SGLang is there, the tests use SGLang itself, and
test_stand_in.py holds this module against it.
"""

import enum
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

AttentionArch = enum.Enum("AttentionArch", ["MLA", "MHA"])


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(enum.IntEnum):
    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DRAFT_EXTEND_V2 = enum.auto()
    SPLIT_PREFILL = enum.auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY


class SpeculativeAlgorithm(enum.Enum):
    EAGLE = enum.auto()
    STANDALONE = enum.auto()
    NGRAM = enum.auto()
    NONE = enum.auto()

    def is_none(self):
        return self == SpeculativeAlgorithm.NONE

    def is_eagle(self):
        return self == SpeculativeAlgorithm.EAGLE

    def is_standalone(self):
        return self == SpeculativeAlgorithm.STANDALONE


class AttentionBackend:
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        call = self.forward_decode if mode.is_decode() else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class RadixAttention(torch.nn.Module):
    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
                 sliding_window_size=-1, is_cross_attention=False, pos_encoding_mode="NONE",
                 logit_capping_method="tanh", attn_type=AttentionType.DECODER, use_irope=False):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.qk_head_dim = num_heads, num_kv_heads, head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.is_cross_attention = sliding_window_size, is_cross_attention
        self.pos_encoding_mode, self.logit_capping_method = pos_encoding_mode, logit_capping_method
        self.attn_type, self.use_irope, self.xai_temperature_len = attn_type, use_irope, -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None


@dataclass
class KVWriteLoc:
    loc: torch.Tensor

    @classmethod
    def for_batch(cls, forward_batch):
        return cls(forward_batch.out_cache_loc)


class MHATokenToKVPool:
    """Slots 0 to size + page_size - 1 of every layer, [slots, heads, head_dim]."""

    kv_cache_layout = "nhd"
    is_quantized_kv_cache = False

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver):
        self.page_size, self.dtype = page_size, dtype
        self.k_buffer, self.v_buffer = ([
            torch.zeros(size + page_size, head_num, head_dim, dtype=dtype, device=device) for _ in range(layer_num)]
            for _ in range(2))

    def get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        """Divides by the scales in place, as SGLang does."""
        where = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        for buffers, values, scale in ((self.k_buffer, cache_k, k_scale), (self.v_buffer, cache_v, v_scale)):
            if scale is not None and values.dtype != self.dtype:
                values.div_(scale)
            buffers[layer.layer_id][where] = values.to(self.dtype)


class ReqToTokenPool:
    def __init__(self, size, max_context_len, device, enable_memory_saver):
        self.req_to_token = torch.zeros(size + 1, max_context_len, dtype=torch.int32, device=device)


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: int
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list | None = None
    spec_info: object = None


# Where folio-sglang and its tests import each name from.
MODULES = {
    "sglang.srt.configs.model_config": (AttentionArch,),
    "sglang.srt.layers.attention.base_attn_backend": (AttentionBackend,),
    "sglang.srt.layers.radix_attention": (AttentionType, RadixAttention),
    "sglang.srt.mem_cache.memory_pool": (KVWriteLoc, MHATokenToKVPool, ReqToTokenPool),
    "sglang.srt.model_executor.forward_batch_info": (ForwardBatch, ForwardMode),
    "sglang.srt.speculative.spec_info": (SpeculativeAlgorithm,)}


def install():
    for name, contents in MODULES.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:length]), ModuleType(".".join(parts[:length])))
        vars(sys.modules[name]).update({one.__name__: one for one in contents})
