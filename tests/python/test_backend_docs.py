"""The snippets of docs/python_backends.md run."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python_backends.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_has_a_snippet_for_each_backend():
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number):
    exec(compile(SNIPPETS[number], f"{PAGE.name}, snippet {number}", "exec"), {"__name__": "snippet"})
