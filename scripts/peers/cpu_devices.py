"""A pytest plugin: tests that ask for CUDA get CPU tensors. It knows nothing of the library whose tests run.

- Device arguments "cuda", "cuda:0", torch.device("cuda") and 0 mean the CPU, wherever torch takes one.
- torch.cuda says that there is one GPU, of compute capability 9.0 unless told another. Tests skip many cases on an
  older one, and some files need 10.0.
- Streams, events and CUDA graphs skip the test: what the test checked before counts for nothing then.
- Products of 16-bit tensors accumulate in float32 and round once, as GPUs do. CPU kernels for float16 are slow, too.
- Tests that need too much memory or time are skipped, and say so.
"""

import os
import resource
import signal
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = tuple(map(int, os.environ.get("FOLIO_PEER_CAPABILITY", "9.0").split(".")))
SECONDS = float(os.environ.get("FOLIO_PEER_TEST_SECONDS", "60"))
MEMORY_GIB = float(os.environ.get("FOLIO_PEER_MEMORY_GIB", "6"))  # for tensors, beyond what Python and torch have mapped
CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = {torch.einsum, torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.nn.functional.linear,
            torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.mm}
STAY = {torch.Tensor.cuda, torch.Tensor.pin_memory}


def cpu_for(value):
    """The CPU where the value is a CUDA device, and the value itself elsewhere."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


def change_tensors(value, dtypes, dtype):
    """The value with its tensors of these dtypes in another one; lists and tuples too."""
    if isinstance(value, torch.Tensor) and value.dtype in dtypes:
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(change_tensors(each, dtypes, dtype) for each in value)
    return value


def half_dtype(value):
    """The dtype of the first 16-bit tensor, or None."""
    if isinstance(value, torch.Tensor):
        return value.dtype if value.dtype in HALVES else None
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(half_dtype, value)), None)
    return None


class CpuTensors(TorchFunctionMode):
    """Sees every call of torch, and replaces CUDA devices in its arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in STAY:
            return args[0]
        args = tuple(map(cpu_for, args))
        kwargs = {name: cpu_for(value) for name, value in kwargs.items() if name != "pin_memory"}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CPU, *args[2:])
        half = half_dtype(args) if func in PRODUCTS and "out" not in kwargs else None
        if half is not None:
            return func(*change_tensors(args, HALVES, torch.float32), **kwargs).to(half)
        return func(*args, **kwargs)


MODE = CpuTensors()


def skipping(what):
    """In place of something that only a GPU has."""

    def skip(*args, **kwargs):
        pytest.skip(f"the test needs {what}")

    return skip


def answer(value=None):
    return lambda *args, **kwargs: value


class Generator(torch.Generator):
    """A class, since annotations name it."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, cpu_for(device))


ANSWERS = dict(
    is_available=answer(True), is_initialized=answer(True), init=answer(), device_count=answer(1),
    current_device=answer(0), set_device=answer(), get_device_capability=answer(CAPABILITY),
    get_device_name=answer("CPU"), synchronize=answer(), empty_cache=answer(), manual_seed=answer(),
    manual_seed_all=answer(), memory_allocated=answer(0), memory_reserved=answer(0), max_memory_allocated=answer(0),
    reset_peak_memory_stats=answer(), is_current_stream_capturing=answer(False),
    mem_get_info=answer((int(MEMORY_GIB * 2**30),) * 2),
    get_device_properties=answer(types.SimpleNamespace(
        name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132,
        total_memory=int(MEMORY_GIB * 2**30), shared_memory_per_block_optin=227 * 1024)),
    Stream=skipping("a CUDA stream"), stream=skipping("a CUDA stream"), current_stream=skipping("a CUDA stream"),
    Event=skipping("a CUDA event"), CUDAGraph=skipping("a CUDA graph"), graph=skipping("a CUDA graph"))


def install():
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator
    torch.compile = skipping("torch.compile for a GPU")
    MODE.__enter__()  # for good: modules of tests make tensors, too
    mapped = int(open("/proc/self/statm", encoding="ascii").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(MEMORY_GIB * 2**30), resource.RLIM_INFINITY))


def interrupt(signum, frame):
    pytest.skip(f"the test takes more than {SECONDS:g} s on this CPU")


def is_about_memory(error):
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """torch takes the mode off while it calls it: where a test is interrupted between, it stays off."""
    if torch._C._len_torch_function_stack() == 0:
        MODE.__enter__()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return (yield)
    except (MemoryError, RuntimeError) as error:
        if is_about_memory(error):
            pytest.skip(f"the test needs more than {MEMORY_GIB:g} GiB")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


install()
