"""Types for annotations: what the functions of `folio` take where they take more than one kind of thing.

Nothing here is a class of its own: an array of numpy, torch, CuPy, JAX or ml_dtypes is an Array as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Union

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ._folio import LseView, PageTableView, PrefixKey, Scale

__all__ = ["Array", "CacheHalves", "Flags", "IntArray", "IntMatrix", "Lse", "Mask", "PrefixTokens", "ScaleValue",
           "Stream", "SupportsCudaStream", "SupportsDLPack", "Tables"]


class SupportsDLPack(Protocol):
    """An array of a library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsCudaStream(Protocol):
    """A stream of torch."""

    @property
    def cuda_stream(self) -> int: ...


# Memory that is borrowed: folio.TensorView is one too.
Array = Union[SupportsDLPack, "Buffer"]
# Lengths, slots, ids: int32 or int64 [n], or a list of integers, which is copied.
IntArray = Union[Array, list[int], tuple[int, ...], range]
# Page ids [rows, columns].
IntMatrix = Union[Array, Sequence[Union[list[int], tuple[int, ...], range]]]
# bool or uint8 [n].
Flags = Union[Array, list[bool], list[int], tuple[bool, ...]]
ScaleValue = Union[float, "Scale"]
# float32 [tokens, q heads], natural logarithms; an LseView says its base.
Lse = Union[Array, "LseView"]
# Bools [queries, columns] a request, or their bits.
Mask = Union[Array, Sequence[Array]]
# None is the current stream of the arrays' library.
Stream = Union[int, SupportsCudaStream]
# What a step's segments read: a page table or page ids, or of ragged segments offsets. A list has one a segment.
Tables = Union["PageTableView", Array, Sequence[Union["PageTableView", IntMatrix, IntArray]]]
PrefixTokens = Union["PrefixKey", IntArray]
# One tensor [pages, 2, ...], or K and V.
CacheHalves = Union[Array, tuple[Array, Array]]
