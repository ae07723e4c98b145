"""A pytest plugin: `import flashinfer` and its submodules are folio.flashinfer.

flashinfer.jit is answered with functions that do nothing, because Folio compiles nothing at run time. flashinfer.utils
says what the GPU is. Other names are stand-ins: a test that calls one is skipped, and says which. The tests need einops
and scipy too.
"""

import importlib
import sys
import types
from typing import NamedTuple

import peer_skips
import pytest
import torch

import folio.flashinfer

PARTS = ("attention", "cascade", "concat_ops", "decode", "mla", "page", "pod", "prefill", "quantization", "rope",
         "sparse", "xqa")


class NotOffered:
    """A name of FlashInfer's that folio.flashinfer does not have."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return NotOffered(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        pytest.skip(f"{self._name} is not offered by folio.flashinfer")

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):  # in an annotation
        return other

    __ror__ = __or__


class Module(types.ModuleType):
    """A module of FlashInfer's: folio's names, then stand-ins."""

    def __init__(self, name, source=None, **names):
        super().__init__(name)
        self.__path__ = []
        self.__source__ = source
        vars(self).update(names)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        source = vars(self)["__source__"]
        if source is not None and hasattr(source, name):
            return getattr(source, name)
        if self.__name__.startswith("flashinfer.jit") or name.startswith("gen_"):
            return do_nothing
        return NotOffered(f"{self.__name__}.{name}")


def do_nothing(*args, **kwargs):
    """In place of what compiles kernels."""


def capability(device=None):
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def is_capability(*wanted):
    return lambda device=None: capability(device) in wanted


def yes(*args, **kwargs):
    return True


def ceil_div(x, y):
    return -(-x // y)


def round_up(x, y):
    return ceil_div(x, y) * y


def sm_count(device=None):
    return torch.cuda.get_device_properties(device).multi_processor_count


class MLAHeadDimensions(NamedTuple):
    """Sizes of a head of multi-head latent attention."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


class MLALayerDimensions(NamedTuple):
    """Those of a layer's heads, and how many."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


DEEPSEEK, SMALLER = MLAHeadDimensions(128, 64, 128, 512), MLAHeadDimensions(64, 64, 128, 256)
MLA = dict(
    MLAHeadDimensions=MLAHeadDimensions, MLALayerDimensions=MLALayerDimensions, deepseek_mla_dimensions=DEEPSEEK,
    smaller_mla_dimensions=SMALLER, supported_mla_layer_dimensions=[
        MLALayerDimensions(DEEPSEEK, 128), MLALayerDimensions(DEEPSEEK, 64), MLALayerDimensions(SMALLER, 32)])
UTILS = dict(
    get_compute_capability=capability, has_flashinfer_jit_cache=lambda: True,
    is_sm90a_supported=is_capability((9, 0)), is_fa3_backend_supported=lambda *args, **kwargs: capability() == (9, 0),
    is_fa3_prefill_head_dim_supported=yes, is_sm100a_supported=is_capability((10, 0)),
    is_sm100f_supported=is_capability((10, 0), (10, 3)), is_sm103a_supported=is_capability((10, 3)),
    is_sm107a_supported=is_capability((10, 7)), is_sm110a_supported=is_capability((11, 0)),
    is_sm120a_supported=is_capability((12, 0)), is_sm121a_supported=is_capability((12, 1)),
    is_sm12x_supported=is_capability((12, 0), (12, 1)), is_cvt_rs_supported=is_capability(()),
    ceil_div=ceil_div, round_up=round_up, get_device_sm_count=sm_count,
    get_trtllm_gen_multi_ctas_kv_counter_bytes=lambda requests, heads, sms: 4 * round_up(max(requests * heads, sms), 8),
    GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}))
DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def install():
    modules = {"flashinfer": Module("flashinfer", folio.flashinfer)}
    for part in PARTS:
        modules[f"flashinfer.{part}"] = Module(f"flashinfer.{part}",
                                               importlib.import_module(f"folio.flashinfer.{part}"))
    vars(modules["flashinfer.mla"]).update(MLA)
    modules["flashinfer.utils"] = Module("flashinfer.utils", **UTILS)
    for name in ("jit", "jit.attention", "jit.xqa", "jit.mla", "jit.core"):
        modules[f"flashinfer.{name}"] = Module(f"flashinfer.{name}", JitSpec=object, MissingJITCacheError=RuntimeError)
    modules["flashinfer.jit.utils"] = Module("flashinfer.jit.utils", filename_safe_dtype_map=DTYPE_NAMES)
    modules["flashinfer.jit.attention.variants"] = Module("flashinfer.jit.attention.variants",
                                                          attention_sink_decl={"fa2": "", "fa3": ""})
    modules["flashinfer.cute_dsl"] = Module("flashinfer.cute_dsl")
    modules["flashinfer.cute_dsl.utils"] = Module("flashinfer.cute_dsl.utils", is_cute_dsl_arch_supported=yes)
    for name in ("fp4_quantization", "cutile", "cutile.cutile_common", "gemm", "norm", "sampling", "activation",
                 "quantization.nvfp4_quantization_utils"):
        modules[f"flashinfer.{name}"] = Module(f"flashinfer.{name}")
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and child != "xqa":  # flashinfer.xqa is the function
            setattr(modules[parent], child, module)


install()


def pytest_collection_modifyitems(config, items):
    peer_skips.mark(items)
    peer_skips.choose(config, items)


def pytest_runtest_teardown():
    peer_skips.give_memory_back()
