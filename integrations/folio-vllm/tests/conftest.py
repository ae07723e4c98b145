"""vLLM where it is installed, else a stand-in for what is imported of it."""

import importlib.util

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None

if HAS_TORCH and not HAS_VLLM:
    import vllm_stand_in

    vllm_stand_in.install()


@pytest.fixture(autouse=True)
def skip_what_needs_vllm(request):
    if request.node.get_closest_marker("needs_vllm") and not HAS_VLLM:
        pytest.skip("vllm is not installed")


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_vllm: what vLLM itself does is tested")
