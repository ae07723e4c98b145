"""SGLang where it can be imported, else a stand-in for what is imported of it."""

import importlib
import importlib.util
import sys

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None


def can_import_sglang():
    if not HAS_TORCH or importlib.util.find_spec("sglang") is None:
        return False
    try:
        importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        return False
    return True


HAS_SGLANG = can_import_sglang()
if HAS_TORCH and not HAS_SGLANG:
    import sglang_stand_in

    sglang_stand_in.install()


@pytest.fixture(autouse=True)
def skip_what_needs_sglang(request):
    if request.node.get_closest_marker("needs_sglang") and not HAS_SGLANG:
        pytest.skip("sglang cannot be imported")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_sglang: what SGLang itself does is tested")
