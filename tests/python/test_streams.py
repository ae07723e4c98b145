"""Which stream a call takes where none is given: the current one of the library that its arrays come from. The libraries
here are stand-ins, over arrays that claim to lie on a GPU; test_torch_cuda.py has torch itself."""

import sys
import types

import folio
import numpy as np
import pytest

from foreign_array import CUDA, ForeignArray


class Torch:
    """torch.cuda, as far as it is asked: a current stream for each device."""

    def __init__(self, streams, initialized=True):
        self.streams = streams
        self.is_initialized = lambda: initialized
        self.asked = []

    def current_stream(self, index):
        self.asked.append(index)
        return types.SimpleNamespace(cuda_stream=self.streams[index])


class Cupy:
    """cupy.cuda."""

    def __init__(self, streams):
        self.get_current_stream = lambda index: types.SimpleNamespace(ptr=streams[index])


class TorchArray(ForeignArray):
    pass


class Parameter(TorchArray):
    """A subclass of somebody else's."""


class CupyArray(ForeignArray):
    pass


TorchArray.__module__ = "torch"
CupyArray.__module__ = "cupy._core.core"


@pytest.fixture(name="libraries")
def make_libraries(monkeypatch):
    def install(torch=None, cupy=None):
        for name, cuda in (("torch", torch), ("cupy", cupy)):
            if cuda is None:
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(cuda=cuda))
    return install


def on_gpu(kind, index=0):
    return kind(np.zeros((2, 3), np.float32), device=CUDA, index=index)


def test_the_library_of_the_arrays_says_which(libraries):
    torch = Torch({0: 70, 1: 71})
    libraries(torch, Cupy({0: 80, 1: 81}))
    assert folio.current_stream([on_gpu(TorchArray)]) == 70
    assert folio.current_stream([on_gpu(Parameter, 1)], index=1) == 71
    assert torch.asked == [0, 1]
    assert folio.current_stream([on_gpu(CupyArray, 1)], index=1) == 81
    assert folio.current_stream([on_gpu(ForeignArray), on_gpu(TorchArray)]) == 70
    assert folio.current_stream([folio.TensorView(on_gpu(TorchArray))]) == 70  # a view remembers


def test_two_libraries_must_agree(libraries):
    both = [on_gpu(TorchArray), on_gpu(CupyArray)]
    libraries(Torch({0: 7}), Cupy({0: 7}))
    assert folio.current_stream(both) == 7
    libraries(Torch({0: 7}), Cupy({0: 0}))
    with pytest.raises(folio.InvalidArgument, match="torch's current stream is 7, CuPy's 0; give the one"):
        folio.current_stream(both)


def test_without_such_arrays_the_process_says_which(libraries):
    host = [np.zeros(3, np.float32)]
    libraries()
    assert folio.current_stream(host) == 0 and folio.current_stream() == 0
    libraries(Torch({0: 7}))
    assert folio.current_stream(host) == 7
    libraries(Torch({0: 0}), Cupy({0: 8}))
    assert folio.current_stream([on_gpu(ForeignArray)]) == 8
    libraries(Torch({0: 7}), Cupy({0: 8}))
    with pytest.raises(folio.InvalidArgument, match="torch's current stream is 7, CuPy's 8"):
        folio.current_stream(host)
    unused = Torch({0: 7}, initialized=False)
    libraries(unused, Cupy({0: 8}))
    assert folio.current_stream(host) == 8 and unused.asked == []  # asking would start CUDA in torch


def test_host_arrays_ask_no_library(libraries):
    torch = Torch({0: 7})
    libraries(torch)
    memory = [TorchArray(np.zeros((1, 16, 2, 32), np.float32)) for _ in range(2)]
    new = TorchArray(np.ones((1, 2, 32), np.float32))
    args = folio.CacheWriteArgs(new, new, np.array([3]), folio.make_nhd_view(*memory))
    folio.write_kv_cache(folio.Context.cpu(num_threads=1), args)
    assert memory[0].array[0, 3].all() and torch.asked == []


@pytest.mark.parametrize("stream", [True, -1, 1.0, "main", 2**64, types.SimpleNamespace(cuda_stream="x")])
def test_what_is_no_stream(stream):
    args = folio.CacheWriteArgs(*(np.ones((1, 2, 32), np.float32) for _ in range(2)), np.array([3]),
                                folio.make_nhd_view(*(np.zeros((1, 16, 2, 32), np.float32) for _ in range(2))))
    with pytest.raises(folio.InvalidArgument, match="stream must be None, a cudaStream_t"):
        folio.write_kv_cache(folio.Context.cpu(num_threads=1), args, stream=stream)
