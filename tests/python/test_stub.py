"""The typing stub and the documentation: both know everything that is public."""

import ast
import enum
import os
import pathlib
import subprocess
import sys

import folio
import pytest

import signatures

STUB = pathlib.Path(folio.__file__).parent / "_folio.pyi"


@pytest.fixture(name="stub", scope="module")
def read_stub():
    if not STUB.exists():
        pytest.skip("this build made no stub")
    return ast.parse(STUB.read_text())


def names_in(body):
    """{name: node} of what a module or class defines; of overloads the last."""
    found = {}
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets})
    return found


def public_members(cls):
    return [name for name in vars(cls) if not name.startswith("_")]


def test_every_public_name_is_in_the_stub(stub):
    known = names_in(stub.body)
    assert set(signatures.public_names()) <= set(known)
    for cls in signatures.public_classes():
        assert set(public_members(cls)) <= set(names_in(known[cls.__name__].body)), cls


def test_the_stub_has_the_parameters_that_functions_take(stub):
    known = names_in(stub.body)
    checked = 0
    for name, (function, overloads) in signatures.public_callables().items():
        if len(overloads) != 1:
            continue
        node = known[name.split(".")[0]]
        if isinstance(node, ast.ClassDef):
            node = names_in(node.body)[name.split(".")[1] if "." in name else "__init__"]
        arguments = node.args
        written = [one.arg for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        assert [one for one in written if one != "self"] == [one.name for one in overloads[0]], name
        assert all(one.annotation for one in [*arguments.args, *arguments.kwonlyargs] if one.arg != "self"), name
        checked += 1
    assert checked > 25


def test_every_type_in_the_stub_is_known(stub):
    """A name that the stub uses without having it would make type checkers read Any."""
    known = set(names_in(stub.body)) | set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
    for node in stub.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    members = {name for node in ast.walk(stub) if isinstance(node, ast.ClassDef) for name in names_in(node.body)}
    used = {node.id for node in ast.walk(stub) if isinstance(node, ast.Name)}
    assert used <= known | members


def test_a_dtype_that_may_be_none_says_so(stub):
    config = names_in(stub.body)["AttentionConfig"]
    getters = {node.name: ast.unparse(node.returns) for node in config.body if isinstance(node, ast.FunctionDef)
               and [ast.unparse(one) for one in node.decorator_list] == ["property"]}
    assert getters["out"] == getters["ragged_kv"] == "DType | None" and getters["q"] == "DType"


def test_every_public_name_is_documented():
    undocumented = [name for name in signatures.public_names() if not isinstance(getattr(folio._folio, name), enum.Enum)
                    and not (getattr(folio._folio, name).__doc__ or "").strip()]
    for name, (function, _) in signatures.public_callables().items():
        if "." not in name and hasattr(function, "__nb_signature__"):
            undocumented += [name for entry in function.__nb_signature__ if not entry[1]]
    assert not undocumented


@pytest.mark.parametrize("name", ["Context", "AttentionConfig", "PrepareOptions", "WorkloadMix", "GraphBounds", "KvShard", "RopeArgs",
                                  "Device", "PlanSummary", "KvFormatAdvice", "KernelAnswer", "AttentionOp",
                                  "PlanBuffer", "AttentionPlan", "Workspace", "TensorView", "LseView", "Scale", "KvCacheView",
                                  "PageTableView", "KvSegment", "BatchView", "SegmentArgs", "AttentionArgs"])
def test_members_are_documented(name):
    cls = getattr(folio, name)
    assert [member for member in public_members(cls) if not documented(vars(cls)[member])] == []


def documented(member):
    text = member.__doc__ or ""
    if hasattr(member, "__nb_signature__"):  # its doc begins with the signatures
        return all(entry[1] for entry in member.__nb_signature__)
    return bool(text.strip())


def test_the_package_needs_nothing_but_itself():
    """`import folio` brings no framework in."""
    code = "import sys, folio; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["typed_calls", "typed_torch_calls"])
def test_type_checkers_know_what_is_an_array(name, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    if "torch" in name:
        pytest.importorskip("torch", reason="torch is not installed")
    if not STUB.exists():
        pytest.skip("this build made no stub")
    source = pathlib.Path(__file__).with_name(f"{name}.py")
    expected = [i for i, line in enumerate(source.read_text().split("\n"), 1) if line.endswith("# error")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", tmp_path, "--no-incremental",
         source.name], check=False, capture_output=True, text=True, cwd=source.parent,
        env={**os.environ, "MYPYPATH": str(STUB.parent.parent)})
    refused = [int(line.split(":")[1]) for line in checked.stdout.split("\n") if ": error:" in line and line.startswith(source.name)]
    assert sorted(set(refused)) == expected, checked.stdout + checked.stderr
