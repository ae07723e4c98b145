"""folio.nccl: what a machine without GPUs can say of it."""

import ctypes
import importlib.machinery
import types

import pytest

import folio
import folio.nccl as nccl


def context_of(index):
    """What from_torch reads of a GPU's context."""
    return types.SimpleNamespace(device=types.SimpleNamespace(index=index))


def test_a_cpu_context_or_a_build_without_it_is_refused():
    context = folio.Context.cpu(num_threads=1)
    if nccl.is_built():
        with pytest.raises(folio.InvalidArgument, match="the context is a CPU's"):
            nccl.make_group(context, id=bytes(128), rank=0, size=1)
    else:
        with pytest.raises(folio.Error, match="this build of Folio has no NCCL group") as raised:
            nccl.make_group(context, id=bytes(128), rank=0, size=1)
        assert raised.value.code == folio.ErrorCode.UNAVAILABLE
        with pytest.raises(folio.Error, match="no NCCL group"):
            nccl.unique_id()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"id": bytes(127), "rank": 0, "size": 1}, "id has 127 bytes; unique_id\\(\\) returns 128"),
        ({"communicator": 0}, "communicator is a null pointer"),
        ({"id": bytes(128), "timeout": 0.0}, "timeout is 0.0+ seconds"),
        ({"id": bytes(128), "timeout": float("nan")}, "timeout is"),
    ],
)
def test_arguments_are_checked(options, text):
    with pytest.raises(folio.InvalidArgument, match=text):
        nccl.make_group(folio.Context.cpu(num_threads=1), **options)


def test_sums_are_named():
    assert folio.NcclSums.RANK_ORDER != folio.NcclSums.NCCL
    with pytest.raises((TypeError, ValueError)):
        nccl.make_group(folio.Context.cpu(num_threads=1), id=bytes(128), sums="sometimes")


class TestLibrary:
    def load_nothing(self, monkeypatch):
        def refuse(name, mode):
            raise OSError(name)

        monkeypatch.setattr(ctypes, "CDLL", refuse)

    def test_what_is_loaded_comes_first(self, monkeypatch):
        asked = []
        monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append(name))
        assert nccl._library(None) == ""
        assert asked == ["libnccl.so.2"]

    def test_a_file_that_is_named_is_taken(self, monkeypatch, tmp_path):
        self.load_nothing(monkeypatch)
        assert nccl._library(tmp_path / "x.so") == str(tmp_path / "x.so")

    def test_the_package_of_pip_comes_last(self, monkeypatch, tmp_path):
        self.load_nothing(monkeypatch)
        spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "elsewhere"), str(tmp_path)]
        monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
        assert nccl._library(None) == ""
        file = tmp_path / "nccl" / "lib" / "libnccl.so.2"
        file.parent.mkdir(parents=True)
        file.touch()
        assert nccl._library(None) == str(file)
        monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda name: None)
        assert nccl._library(None) == ""


class TestTorch:
    @pytest.fixture()
    def distributed(self):
        torch = pytest.importorskip("torch")
        if not torch.distributed.is_available() or torch.distributed.is_initialized():
            pytest.skip("torch.distributed is not free")
        yield torch.distributed
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def test_without_a_process_group(self, distributed):
        with pytest.raises(ValueError, match="no default process group"):
            nccl.from_torch(context_of(0))

    def test_a_group_that_is_not_nccls(self, distributed):
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
        with pytest.raises(ValueError, match="ProcessGroupGloo, which shows no ncclComm_t"):
            nccl.from_torch(context_of(0))

    def test_the_address_goes_on(self, monkeypatch):
        torch = pytest.importorskip("torch")
        made = {}
        address = 4096

        class Group:
            def _get_backend(self, device):
                assert device == torch.device("cuda", 1)
                return types.SimpleNamespace(_comm_ptr=lambda: address)

        class OnDevice:
            def __init__(self, device):
                assert device.index == 1

            def __enter__(self):
                return self

            def __exit__(self, *unused):
                return False

        monkeypatch.setattr(torch.cuda, "device", OnDevice)
        monkeypatch.setattr(nccl, "make_group", lambda context, **options: made.update(options) or "a group")
        group = Group()
        assert nccl.from_torch(context_of(1), group, timeout=7.0) == "a group"
        assert made == {"communicator": 4096, "owner": group, "timeout": 7.0}
        address = 0
        with pytest.raises(ValueError, match="has no communicator for cuda:1 yet"):
            nccl.from_torch(context_of(1), group)
