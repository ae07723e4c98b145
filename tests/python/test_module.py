"""What the module offers besides attention itself."""

import math
import pathlib
import re

import folio
import pytest

import problems

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_version():
    header = (ROOT / "include/folio/version.hpp").read_text()
    assert folio.__version__ == folio.version() == re.search(r'VERSION_STRING "(.*)"', header).group(1)


DTYPES = {"kFloat32": "float32", "kFloat16": "float16", "kBFloat16": "bfloat16", "kFloat8E4M3": "float8_e4m3fn",
          "kFloat8E5M2": "float8_e5m2", "kFloat4E2M1x2": "float4_e2m1fn_x2", "kInt8": "int8"}


def python_name(enum, enumerator):
    """kAsConfig is AS_CONFIG; element types have torch's names; what no constant is named, such as kUnset, is None."""
    if enumerator in ("kOk", "kUnset"):
        return None
    if enum == "DType":
        return DTYPES[enumerator]
    return "TWO" if enumerator == "k2" else re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=Fp8)", "_", enumerator[1:]).upper()


def test_every_public_enumerator_is_there():
    made_by_functions = {"PageTableKind"}  # csr_table, dense_table
    text = "".join(path.read_text() for path in (ROOT / "include/folio/types").glob("*.hpp"))
    for name, body in re.findall(r"enum class (\w+) : \w+ \{(.*?)\};", text, re.DOTALL):
        wanted = set(re.findall(r"^\s*(k\w+) =|[{,]\s*(k\w+) =", body, re.MULTILINE))
        if name in made_by_functions:
            continue
        wanted = {python_name(name, first or second) for first, second in wanted} - {None}
        assert wanted == set(getattr(folio, name).__members__), name


def test_choice_of_kernels():
    context, config = folio.Context.cpu(num_threads=3), problems.make("bfloat16").config
    answers = folio.explain(context, config)
    usable = [answer.name for answer in answers if not answer.refusal]
    assert usable and all(answer.available or answer.refusal for answer in answers)
    assert folio.prepare(context, config).kernel_name == usable[0]
    for name in usable:
        forced = folio.prepare(context, config, folio.PrepareOptions(force_kernel=name))
        p_dtype = folio.bfloat16 if name in ("avx512-bf16", "amx") else folio.float32
        assert (forced.kernel_name, forced.p_dtype) == (name, p_dtype)
    permitted = folio.prepare(context, config, folio.PrepareOptions(allow_fp8_mma=True))
    assert not permitted.fp8_mma  # no kernel of a CPU has them
    assert not folio.prepare(folio.Context.cpu(allow_fp8_mma=True), config).fp8_mma
    assert (context.concurrency, context.device.type) == (3, folio.DeviceType.CPU)
    advice = folio.recommended_kv_format(config, context)
    assert advice.page_size > 0 and isinstance(advice.format, folio.KvFormat)
    assert advice == folio.recommended_kv_format(config, context, folio.WorkloadMix(decode_tokens=1, prefill_tokens=4))


def test_a_mix_is_used_or_refused():
    context, config = folio.Context.cpu(num_threads=1), problems.make("bfloat16").config
    decode = folio.WorkloadMix(decode_tokens=1)
    assert folio.recommended_kv_format(config, context, mix=decode).page_size > 0
    chosen = next(answer.name for answer in folio.explain(context, config, mix=decode) if not answer.refusal)
    assert folio.prepare(context, config, folio.PrepareOptions(mix=decode)).kernel_name == chosen
    for wrong in (-1.0, math.nan, math.inf):
        for mix in (folio.WorkloadMix(decode_tokens=wrong), folio.WorkloadMix(decode_tokens=1, prefill_tokens=wrong)):
            for call in (lambda: folio.recommended_kv_format(config, context, mix),
                         lambda: folio.explain(context, config, mix),
                         lambda: folio.prepare(context, config, folio.PrepareOptions(mix=mix))):
                with pytest.raises(folio.InvalidArgument, match=r"mix\.(decode|prefill)_tokens is"):
                    call()


def test_features_of_the_cpu_are_sorted():
    assert folio.cpu_features() == sorted(folio.cpu_features())


def test_configurations():
    config = problems.make(cap=2.0, sinks=True).config
    assert config.features == folio.Feature.SOFT_CAP | folio.Feature.SINKS
    op = folio.prepare(folio.Context.cpu(num_threads=1), config)
    assert op.config.out == folio.float32 and config.out == None


def test_bounds():
    problem = problems.make()
    bounds = folio.GraphBounds(max_requests=4, max_tokens=9, max_q_len=5, max_kv_len=40)
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config, folio.PrepareOptions(bounds=bounds))
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    assert folio.workspace_size(plan) <= folio.workspace_size(op)
    assert folio.summary(plan).num_work_tiles > 0 and (plan.num_requests, plan.num_tokens) == (4, 9)


def test_plans_on_a_cpu_have_nothing_to_report():
    problem = problems.make()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    buffer = folio.make_plan_buffer(op)
    folio.plan(op, problem.batch_view(), buffer)
    assert folio.check_plans(buffer) is None
