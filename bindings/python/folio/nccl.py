"""Groups of GPUs over NVIDIA's NCCL: one process or thread a GPU.

    group = folio.nccl.make_group(context, id=id, rank=rank, size=size)     # id: rank 0's folio.nccl.unique_id()
    group = folio.nccl.from_torch(context)                                  # over torch.distributed's communicator

What they return is a `folio.NcclGroup`, a `folio.ProcessGroup` for combines, `DcpAttention` and the backends' builders.
libnccl is not linked: the one that the process has loaded (torch's) is taken, else the system's, else that of the
package nvidia-nccl-cu13 or nvidia-nccl-cu12.
"""

import ctypes
import importlib.util
import os
import pathlib

from . import _folio

__all__ = ["from_torch", "is_built", "make_group", "unique_id"]

_SONAME = "libnccl.so.2"


def _loads(mode):
    try:
        ctypes.CDLL(_SONAME, mode=os.RTLD_NOW | mode)
    except OSError:
        return False
    return True


def _library(named):
    """The file to load; empty: what the process or the system has, which the library finds by itself."""
    if named is not None:
        return os.fspath(named)
    if _loads(os.RTLD_NOLOAD) or _loads(os.RTLD_LOCAL):
        return ""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        file = pathlib.Path(place) / "nccl" / "lib" / _SONAME
        if file.is_file():
            return str(file)
    return ""


def is_built():
    """Whether this build of Folio has the group. Whether there is a libnccl shows when the first is made."""
    return _folio._has_nccl


def unique_id(library=None):
    """128 bytes for one group, made by one of its ranks and brought to all by any channel.

    library: the file of libnccl.so.2, where none of those above is meant.
    """
    return _folio._nccl_unique_id(_library(library))


def make_group(
    context,
    *,
    id=None,
    rank=0,
    size=0,
    communicator=None,
    control=None,
    timeout=300.0,
    scratch_bytes=0,
    sums="rank_order",
    library=None,
    owner=None,
):
    """This rank's handle of a group, a `folio.NcclGroup`. Collective: every rank makes its own at the same time.

    context: a GPU's. One of these brings the ranks together:
      id, rank, size: a communicator of the group's own, from one rank's unique_id();
      control: a ProcessGroup of the same ranks over the host's memory, which brings an id;
      communicator: the address of an engine's ncclComm_t. It is used, never destroyed, and kept alive by `owner`.
    control, beside either of the others, carries what ranks tell each other on the host, which then waits for no GPU.
    timeout: seconds that other ranks are waited for in one operation before the group fails.
    scratch_bytes: device memory for sums, made at once; graphs need it. sums: a NcclSums.
    """
    return _folio._make_nccl_group(
        context,
        id=id,
        rank=rank,
        size=size,
        communicator=communicator,
        control=control,
        timeout=timeout,
        scratch_bytes=scratch_bytes,
        sums=sums,
        library=_library(library),
        owner=owner,
    )


def from_torch(context, group=None, **options):
    """A group over the communicator of a torch.distributed process group: the default one where `group` is None.

    The communicator must be there: torch makes it in the group's first collective on that device, or at once where
    init_process_group gets a device_id. Raises ValueError where it is not, or where the group is not NCCL's.
    options: as make_group's, without id, rank, size, communicator and owner.
    """
    import torch

    if group is None:
        group = torch.distributed.group.WORLD
        if group is None:
            raise ValueError("group: torch.distributed has no default process group; call init_process_group first")
    device = torch.device("cuda", context.device.index)
    backend = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise ValueError(
            f"group: its backend for {device} is {type(backend).__name__}, which shows no ncclComm_t (_comm_ptr); "
            "it must be NCCL's, of torch 2.5 or later"
        )
    with torch.cuda.device(device):
        address = backend._comm_ptr()
    if address == 0:
        raise ValueError(
            f"group: it has no communicator for {device} yet; run one of its collectives there first, or give "
            "init_process_group a device_id"
        )
    return make_group(context, communicator=address, owner=group, **options)
