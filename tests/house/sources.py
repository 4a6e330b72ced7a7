"""The sources that the rules of the house are read off, as syntax trees and as texts."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "cxl_offload"


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Path inside of the package, and its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), parse(path)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function by its name, a method by that of its class and its own."""
    owner = {
        child: f"{node.name}."
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner.get(node, "") + node.name, node


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What a module's body gives names to, several at once too: each name, and its value."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _pairs(node.target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        is_each = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values = value.elts if is_each else [value] * len(target.elts)
        for each, its in zip(target.elts, values, strict=True):
            yield from _pairs(each, its)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each.arg for each in given if each.arg not in ("self", "cls")]


def texts() -> Iterator[tuple[str, str]]:
    """Path from the root, and text, of what people read."""
    root = PACKAGE.parent
    for folder in ("benchmarks", "csrc", "cxl_offload", "docs", "examples", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cc", ".cu", ".h", ".md", ".py", ".pyi"):
                yield path.relative_to(root).as_posix(), path.read_text()
    for path in sorted(root.glob("*.md")):
        yield path.name, path.read_text()
