"""What folio-vllm imports of vLLM, where vLLM is not installed: the same names and signatures, none of its behaviour.

With it builder and implementation run in every environment that has torch. Where vLLM is there, the tests use vLLM
itself, and test_stand_in.py holds this module against it.
"""

import enum
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, NamedTuple, TypeVar

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class KVCacheLayout(enum.Enum):
    LBHNC = "LBHNC"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    pass


class AttentionImpl:
    dcp_world_size = pcp_world_size = 1


Metadata = TypeVar("Metadata")


class AttentionMetadataBuilder(Generic[Metadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata, fast_build=True)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict | None = None


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class DeviceCapability(NamedTuple):
    major: int
    minor: int


def get_current_vllm_config_or_none():
    return None


# Where folio-vllm and its tests import each name from.
MODULES = {
    "vllm": (), "vllm.v1": (), "vllm.v1.attention": (), "vllm.platforms": (),
    "vllm.config": (get_current_vllm_config_or_none,),
    "vllm.platforms.interface": (DeviceCapability,),
    "vllm.v1.kv_cache_interface": (FullAttentionSpec, KVCacheLayout),
    "vllm.v1.attention.backend": (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
                                  AttentionType, CommonAttentionMetadata, MultipleOf)}


class _Envs(ModuleType):
    @property
    def VLLM_BATCH_INVARIANT(self):
        return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


def install():
    modules = {name: ModuleType(name) for name in MODULES} | {"vllm.envs": _Envs("vllm.envs")}
    for name, contents in MODULES.items():
        vars(modules[name]).update({one.__name__: one for one in contents})
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
