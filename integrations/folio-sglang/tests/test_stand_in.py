"""The stand-in for SGLang has what SGLang has: otherwise the other tests would pass against nothing."""

import dataclasses
import enum
import importlib
import inspect

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import sglang_stand_in  # noqa: E402

pytestmark = pytest.mark.needs_sglang
NAMES = [(module, one) for module, contents in sglang_stand_in.MODULES.items() for one in contents]


@pytest.mark.parametrize("module, stand_in", NAMES, ids=[one.__name__ for _, one in NAMES])
def test_it_is_as_in_sglang(module, stand_in):
    real = getattr(importlib.import_module(module), stand_in.__name__)
    if issubclass(stand_in, enum.Enum):
        assert {one.name for one in stand_in} <= {one.name for one in real}
    elif dataclasses.is_dataclass(stand_in):
        assert {one.name for one in dataclasses.fields(stand_in)} <= {one.name for one in dataclasses.fields(real)}
    for name, function in vars(stand_in).items():
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            taken = inspect.signature(getattr(real, name)).parameters.keys()
            assert inspect.signature(function).parameters.keys() <= taken, name
