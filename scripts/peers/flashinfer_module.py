"""A pytest plugin: `import flashinfer` and its submodules are folio.flashinfer.

flashinfer.jit is answered with functions that do nothing, because Folio compiles nothing at run time. flashinfer.utils
says what the GPU is. Other names are stand-ins: a test that calls one is skipped, and says which.
"""

import importlib
import sys
import types

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


def head_dim_is_taken(*args, **kwargs):
    return True


UTILS = dict(
    get_compute_capability=capability, has_flashinfer_jit_cache=lambda: True,
    is_sm90a_supported=is_capability((9, 0)), is_fa3_backend_supported=lambda *args, **kwargs: capability() == (9, 0),
    is_fa3_prefill_head_dim_supported=head_dim_is_taken, is_sm100a_supported=is_capability((10, 0)),
    is_sm100f_supported=is_capability((10, 0), (10, 3)), is_sm103a_supported=is_capability((10, 3)),
    is_sm107a_supported=is_capability((10, 7)), is_sm110a_supported=is_capability((11, 0)),
    is_sm120a_supported=is_capability((12, 0)), is_sm121a_supported=is_capability((12, 1)),
    is_sm12x_supported=is_capability((12, 0), (12, 1)), is_cvt_rs_supported=is_capability(()),
    GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}))
DTYPE_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def install():
    modules = {"flashinfer": Module("flashinfer", folio.flashinfer)}
    for part in PARTS:
        modules[f"flashinfer.{part}"] = Module(f"flashinfer.{part}",
                                               importlib.import_module(f"folio.flashinfer.{part}"))
    modules["flashinfer.utils"] = Module("flashinfer.utils", **UTILS)
    for name in ("jit", "jit.attention", "jit.xqa", "jit.mla", "jit.core"):
        modules[f"flashinfer.{name}"] = Module(f"flashinfer.{name}", JitSpec=object, MissingJITCacheError=RuntimeError)
    modules["flashinfer.jit.utils"] = Module("flashinfer.jit.utils", filename_safe_dtype_map=DTYPE_NAMES)
    modules["flashinfer.jit.attention.variants"] = Module("flashinfer.jit.attention.variants",
                                                          attention_sink_decl={"fa2": "", "fa3": ""})
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
    peer_skips.choose(config, items)
    peer_skips.mark(items)
