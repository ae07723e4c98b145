"""The stand-in for vLLM has what vLLM has: otherwise the other tests would pass against nothing."""

import dataclasses
import enum
import importlib
import inspect

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import vllm_stand_in  # noqa: E402

pytestmark = pytest.mark.needs_vllm
NAMES = [(module, one) for module, contents in vllm_stand_in.MODULES.items() for one in contents]


def fields_of(cls):
    return getattr(cls, "_fields", None) or [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("module, stand_in", NAMES, ids=[one.__name__ for _, one in NAMES])
def test_it_is_as_in_vllm(module, stand_in):
    real = getattr(importlib.import_module(module), stand_in.__name__)
    if inspect.isfunction(stand_in):
        assert inspect.signature(real).parameters.keys() == inspect.signature(stand_in).parameters.keys()
    elif issubclass(stand_in, enum.Enum):
        assert {one.name for one in stand_in} <= {one.name for one in real}
        if issubclass(stand_in, str):
            assert {one.value for one in stand_in} == {one.value for one in real}
    elif dataclasses.is_dataclass(stand_in) or hasattr(stand_in, "_fields"):
        assert set(fields_of(stand_in)) <= set(fields_of(real))
        needed = {name for name, one in inspect.signature(real).parameters.items() if one.default is one.empty}
        assert needed <= set(fields_of(stand_in)), "the stand-in is made without what vLLM's must be given"
    else:
        for name, function in inspect.getmembers(stand_in, inspect.isfunction):
            assert inspect.signature(getattr(real, name)).parameters.keys() == inspect.signature(function).parameters.keys()
