"""folio.flashinfer's functions take FlashInfer's arguments: names, order and defaults of the version that the data
names."""

import importlib
import inspect
import json
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "flashinfer" / "python_signatures.json"
SIGNATURES = json.loads(GOLDEN.read_text())["signatures"]
# The original takes what stands behind page_size as *args or by keyword, in this order.
LEGACY = {"decode.BatchDecodeWithPagedKVCacheWrapper.plan": [
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type", "data_type",
    "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens", "fixed_split_size",
    "disable_split_kv", "q_len_per_req"]}
# Subclasses of folio's take run with the base's signature.
VARIADIC = {"*args", "*deprecated_positional_args", "**kwargs"}


def find(name):
    module, *path = name.split(".")
    found = importlib.import_module(f"folio.flashinfer.{module}")
    for part in path:
        found = getattr(found, part)
    return found


def value_of(text):
    return eval(text, {"torch": torch, "ConcatMLABackend": None})  # noqa: S307: our own data


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name):
    given = [parameter for parameter in inspect.signature(find(name)).parameters.values() if parameter.name != "self"]
    names = [parameter.name for parameter in given]
    if names == ["args", "kwargs"]:
        return  # workspace_size takes all that plan takes
    wanted = [(each, default) for each, default in SIGNATURES[name] if each not in VARIADIC]
    wanted += [(each, None) for each in LEGACY.get(name, [])]
    fixed = [parameter for parameter in given
             if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)]
    by_name = {parameter.name: parameter for parameter in fixed}
    assert [each for each, _ in wanted] == [p.name for p in fixed][:len(wanted)], names
    for each, default in wanted:
        if default is not None:
            assert by_name[each].default == value_of(default), each
        elif name not in LEGACY and not each.startswith("int_workspace"):  # it is not used, and may be left out
            assert by_name[each].default is inspect.Parameter.empty, each
    # What folio adds has defaults.
    assert all(p.default is not inspect.Parameter.empty for p in fixed[len(wanted):])


@pytest.mark.parametrize("module,name", [
    ("decode", "get_seq_lens"), ("decode", "trtllm_batch_decode_with_kv_cache_mla"), ("decode", "xqa"),
    ("decode", "xqa_batch_decode_with_kv_cache_mla"), ("decode", "xqa_mla"), ("prefill", "get_seq_lens"),
    ("prefill", "packbits"), ("prefill", "segment_packbits"),
])
def test_names_that_stand_in_a_second_module(module, name):
    """FlashInfer has these names there too, and programs import them from there."""
    assert find(f"{module}.{name}") in [find(f"{other}.{name}") for other in ("mla", "page", "quantization", "xqa")
                                        if hasattr(importlib.import_module(f"folio.flashinfer.{other}"), name)]
