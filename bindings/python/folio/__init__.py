"""Folio: paged attention for LLM serving.

The C++ API over arrays of numpy, torch and whoever else speaks DLPack: prepare once, plan per step, run per layer. Names
are those of the C++ headers; enumerators are upper case (MaskKind.CAUSAL), and their lower-case names are taken as
strings. Arrays are borrowed, never copied; the objects made from them keep them alive. int64 lengths and ids, and lists
of integers, are copied once.
"""

from . import _folio
from ._folio import *  # noqa: F403: the module's public names are Folio's

for _exception in (_folio.Error, _folio.InvalidArgument):
    _exception.__module__ = __name__  # tracebacks say folio.Error

__version__ = _folio.version()
