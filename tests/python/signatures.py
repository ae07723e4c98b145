"""What the module's functions take, read from the signatures that nanobind writes."""

import ast
import dataclasses
import re

import folio


@dataclasses.dataclass
class Parameter:
    name: str
    type: str
    required: bool


def parse(text):
    """The parameters of "def f(self, a: int, *, b: _folio.X | None = \\\\0) -> None", self apart."""
    source = re.sub(r"\\\d+", "...", text.rpartition(") -> ")[0])
    source = re.sub(r"^def *\(", "def f(", re.sub(r"ndarray\[.*?\]", "ndarray", source)) + "): ..."
    arguments = ast.parse(source).body[0].args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    everything = [*zip(plain, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return [Parameter(one.arg, ast.unparse(one.annotation) if one.annotation else "", default is None)
            for one, default in everything if one.arg != "self"]


def overloads(function):
    """[parameters], one a signature."""
    return [parse(entry[0]) for entry in function.__nb_signature__]


def public_names():
    """What the extension module offers."""
    return sorted(name for name in dir(folio._folio) if not name.startswith("_"))


def public_classes():
    values = (getattr(folio._folio, name) for name in public_names())
    return [value for value in values if isinstance(value, type)]


def public_callables():
    """{how it is written: (what to call, overloads)}: functions, constructors, and static functions."""
    found = {}
    for name in public_names():
        value = getattr(folio._folio, name)
        if hasattr(value, "__nb_signature__"):
            found[name] = (value, overloads(value))
        elif isinstance(value, type):
            if hasattr(value.__init__, "__nb_signature__"):
                found[name] = (value, overloads(value.__init__))
            for member, inside in vars(value).items():
                if type(inside).__name__ == "nb_func" and not member.startswith("_"):
                    found[f"{name}.{member}"] = (inside, overloads(inside))
    return found
