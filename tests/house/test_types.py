"""Every type of the package has a name of its own."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

from .sources import modules

ALIASES_ALLOWED = {"T": "a type variable, by its usual name"}


def alias_of(node: ast.AST) -> str | None:
    """The name that a statement gives to a type: an alias, a new type, a type variable."""
    if type(node).__name__ == "TypeAlias":  # ``type X = ...``, of Python 3.12
        return str(node.name.id)  # type: ignore[attr-defined]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        if not ast.unparse(node.annotation).endswith("TypeAlias"):
            return None
        target, value = node.target, node.value
    elif isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2]
        is_type = made in ("NewType", "NamedTuple", "namedtuple", "TypedDict", "TypeVar")
        is_type |= isinstance(value, ast.Subscript | ast.Name | ast.Attribute)
        is_type |= isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)
        if not is_type:
            return None
    else:
        return None
    if not isinstance(target, ast.Name):
        return None
    is_named_as_one = re.fullmatch(r"_?[A-Z](?=.*[a-z])[A-Za-z0-9]*|_?[A-Z]", target.id)
    return target.id if is_named_as_one else None


def type_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every class and alias of a module, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
        elif (name := alias_of(node)) is not None and name not in ALIASES_ALLOWED:
            yield name, node.lineno  # type: ignore[attr-defined]


def test_class_names_occur_once() -> None:
    places = defaultdict(list)
    for name, tree in modules():
        for each, line in type_names(tree):
            places[each].append(f"{name}:{line}")
    offenders = [f"{each}: {', '.join(at)}" for each, at in places.items() if len(at) > 1]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    "text",
    [
        "Way = Literal['read', 'write']",
        "Way: TypeAlias = int | str",
        "Way = Callable[[int], None]",
        "Way = int | None",
        "Way = NewType('Way', int)",
        "Way = NamedTuple('Way', [('a', int)])",
        "Way = typing.TypeVar('Way')",
        "class Way: ...",
        pytest.param(
            "type Way = int | str",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="3.12 has them"),
        ),
    ],
)
def test_name_of_a_type_is_seen_in_every_form(text: str) -> None:
    assert [name for name, _ in type_names(ast.parse(text))] == ["Way"]


def test_names_of_values_are_no_names_of_types() -> None:
    text = (
        "WAYS = KINDS[0]\nway = Literal['a']\nWay = make()\nWay.name = int | str\nT = TypeVar('T')"
    )
    assert not list(type_names(ast.parse(text)))
