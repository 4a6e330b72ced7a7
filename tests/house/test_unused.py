"""Nothing stays that nobody uses, and no function is written twice.

Each test names every offender at once. An exception stands here with its reason, in one line.
"""

from __future__ import annotations

import ast
import collections
import copy
import re
from collections.abc import Iterable, Iterator

import pytest

from .sources import PACKAGE, functions, modules, parse, texts

FLEXGEN = "FlexGen calls it"
HUGGING_FACE = "transformers calls it"
VLLM = "vLLM calls it"

CALLED_BY_OTHERS = {
    "_process_model_after_weight_loading": HUGGING_FACE,
    "_process_model_before_weight_loading": HUGGING_FACE,
    "batch_repeat_interleave": HUGGING_FACE,
    "batch_select_indices": HUGGING_FACE,
    "delete_cache": FLEXGEN,
    "drain_jobs": VLLM,
    "extend_attention_mask": FLEXGEN,
    "extra_repr": "torch prints modules with it",
    "get_finished_jobs": VLLM,
    "get_manager": VLLM,
    "get_max_length": HUGGING_FACE,
    "get_weight_conversions": HUGGING_FACE,
    "get_worker": VLLM,
    "handleError": "logging calls it",
    "is_serializable": HUGGING_FACE,
    "is_trainable": HUGGING_FACE,
    "log_message": "http.server calls it",
    "reorder_cache": HUGGING_FACE,
    "synchronize_staging": "torch.distributed.checkpoint calls it",
}
"""Names that only code outside of this repository uses, or that are to go."""

PLAIN = {"property", "staticmethod", "classmethod", "override", "cache", "contextmanager"}
"""Decorators that hand a function to nobody else; others do, as that of a command does."""

Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def used(tree: ast.AST) -> Iterator[str]:
    """Names that code loads, imports, or has in texts other than docstrings."""
    sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from () if id(node) in sentences else re.findall(r"\w+", node.value)


def defined(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes, methods and constants, but for what a decorator hands to others."""
    for node in ast.walk(tree):
        if isinstance(node, Defined):
            decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
            if not decorators - PLAIN:
                yield node.name, node
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def calls_itself(name: str, node: ast.AST) -> int:
    """How often a definition names itself; a method that calls its own of before does not."""
    loads = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return sum(each.id == name and isinstance(each.ctx, ast.Load) for each in loads)


def unused(trees: list[tuple[str, ast.Module]], elsewhere: collections.Counter[str]) -> set[str]:
    """Names of modules that neither they use, outside of the definition itself, nor others."""
    uses = elsewhere + collections.Counter(name for _, tree in trees for name in used(tree))
    return {
        name
        for _, tree in trees
        for name, node in defined(tree)
        if not name.startswith("__")
        and (not uses[name] or (uses[name] < 3 and uses[name] == calls_itself(name, node)))
    }


def used_elsewhere() -> collections.Counter[str]:
    """By examples and benchmarks, and by words of pages and of the core, which calls back."""
    found: collections.Counter[str] = collections.Counter()
    for name, text in texts():
        if name.startswith(("benchmarks/", "examples/")) and name.endswith(".py"):
            found.update(used(parse(PACKAGE.parent / name)))
        elif not name.startswith(("tests/", "cxl_offload/")) and name != "CHANGELOG.md":
            found.update(re.findall(r"\w+", text))
    return found


@pytest.mark.slow(reason="reads every file")
def test_nothing_is_there_that_only_tests_use() -> None:
    found = unused(list(modules()), used_elsewhere())
    assert not (left := sorted(found - set(CALLED_BY_OTHERS))), left
    assert not (stale := sorted(set(CALLED_BY_OTHERS) - found)), f"take off the list: {stale}"


def test_what_is_unused_is_found_also_where_it_calls_itself_or_a_docstring_names_it() -> None:
    text = '''
"""Says ``left``."""
TAKEN, LEFT = 1, 2
def left(): return left()
def taken(): return TAKEN
@app.command("taken")
def command(): return taken()
class Left:
    @property
    def gone(self): return self.there
    def there(self): pass
    def __len__(self): return 0
'''
    text = text.replace("TAKEN, LEFT = 1, 2", "TAKEN = 1\nLEFT = 2")
    assert unused([("a.py", ast.parse(text))], collections.Counter()) == {
        "LEFT",
        "Left",
        "gone",
        "left",
    }
    assert "LEFT" not in unused([("a.py", ast.parse(text))], collections.Counter(["LEFT"]))


def asked_by(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of what a module takes out of another, imported or through the module."""
    handles: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield node.module, each.name
                handles[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield handles.get(node.value.id, ""), node.attr


CALLED_BY_NAME = {
    "CxlOffloadingSpec": "vLLM loads it by the name in its options",
    "RULES": "a plan loads those of its executor by the name of the room",
    "TierStager": "it is handed out where torch has what it is of",
    "float_state_dict": "docs/adam.md has it for checkpoints that other optimizers read",
    "int4_from_packed": "docs/attention.md has it for caches that FlexGen packed",
    "lost_error": "the core calls it",
    "register": "the command line and vLLM load it by name",
    "start_from_environment": "a process loads it as its variables ask for it",
}
"""Names that no import or call in the package has."""


def asked_by_nobody(trees: list[tuple[str, ast.Module]], used_by: list[ast.Module]) -> list[str]:
    """Functions, classes and constants that neither their module uses, nor any other imports.

    Unlike :func:`unused`, this is not misled by something else of that name.
    """
    asked = {pair for tree in (*(tree for _, tree in trees), *used_by) for pair in asked_by(tree)}
    found = []
    for module, tree in trees:
        place = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        loads = collections.Counter(
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )
        at_top = {id(node) for node in tree.body}
        found += [
            f"{module} {name}"
            for name, node in defined(tree)
            if id(node) in at_top
            and not name.startswith("__")
            and loads[name] == (calls_itself(name, node) if isinstance(node, Defined) else 0)
            and (f"cxl_offload.{place}", name) not in asked
        ]
    return found


@pytest.mark.slow(reason="reads every file")
def test_no_name_is_kept_by_another_one_that_is_spelled_alike() -> None:
    outside = [PACKAGE.parent / room for room in ("benchmarks", "examples")]
    others = [parse(path) for room in outside for path in room.glob("*.py")]
    found = asked_by_nobody(list(modules()), others)
    names = {each.split()[-1] for each in found}
    left = [each for each in found if each.split()[-1] not in CALLED_BY_NAME]
    assert not left, "\n".join(left)
    assert not (stale := CALLED_BY_NAME.keys() - names), f"take off the list: {stale}"


def test_name_that_something_else_has_too_does_not_count_as_used() -> None:
    first = "def place(): pass\ndef kept(): return 1\nclass Own: pass\nfound = Own()"
    second = "from cxl_offload.first import kept\nself.place()\nother.place = kept"
    trees = [("first.py", ast.parse(first)), ("second.py", ast.parse(second))]
    assert asked_by_nobody(trees, []) == ["first.py place", "first.py found"]


def for_validation_alone(trees: list[tuple[str, ast.Module]]) -> list[str]:
    """Public functions and classes of the planner that nothing but the validation asks for."""
    askers = collections.defaultdict(set)
    for module, tree in trees:
        for place, name in asked_by(tree):
            askers[place, name].add(module.partition("/")[0])
    found = []
    for module, tree in trees:
        place = "cxl_offload." + module.removesuffix(".py").replace("/", ".")
        own = set(used(tree))
        for node in tree.body if module.startswith("plan/") else ():
            if isinstance(node, Defined) and node.name not in own:
                rooms = askers[place, node.name] | askers[place.rpartition(".")[0], node.name]
                found += [f"{module} {node.name}"] if rooms == {"validation"} else []
    return found


@pytest.mark.slow(reason="reads every file")
def test_planner_has_no_equation_that_only_the_validation_calls() -> None:
    assert for_validation_alone(list(modules())) == []


def test_equation_for_the_validation_alone_is_found_however_it_is_imported() -> None:
    plan = "def direct(): pass\ndef through(): pass\ndef planned(): pass\ndef own(): return own()"
    judge = (
        "from cxl_offload.plan import rates\nfrom cxl_offload.plan.rates import direct, planned\n"
        "rates.through()"
    )
    trees = [
        ("plan/rates.py", ast.parse(plan)),
        ("plan/search.py", ast.parse("from cxl_offload.plan.rates import planned")),
        ("validation/judge.py", ast.parse(judge)),
    ]
    assert for_validation_alone(trees) == ["plan/rates.py direct", "plan/rates.py through"]


LEAST_NODES = 16
"""Of the syntax tree of a body that counts: shorter ones are alike by chance."""

ALIKE = {
    "_scaled scaled": "of bytes that a run moved, and of planned ones",
    "note": "of two readers; each keeps its own notes",
}
"""Functions that have one body, by their names in order, and why they have."""


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)


def _statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return function.body[ast.get_docstring(function, clean=False) is not None :]


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """What it does, whatever its own names are; empty where that is too little to compare."""
    body = _statements(function)
    if sum(1 for part in body for _ in ast.walk(part)) < LEAST_NODES:
        return ""
    given = function.args
    own = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.append(node.id)
    renamed = _Renamed({name: f"its_{at}" for at, name in enumerate(dict.fromkeys(own))})
    return "\n".join(ast.dump(renamed.visit(copy.deepcopy(part))) for part in body)


def written_twice(trees: Iterable[tuple[str, ast.Module]]) -> list[list[str]]:
    """Functions whose bodies are the same, each as its module and its name."""
    shapes = collections.defaultdict(list)
    for module, tree in trees:
        for name, function in functions(tree):
            shape = tuple(type(each) for part in _statements(function) for each in ast.walk(part))
            shapes[len(shape), hash(shape)].append((f"{module} {name}", function))
    found = collections.defaultdict(list)
    for of_one_shape in shapes.values():
        for place, function in of_one_shape if len(of_one_shape) > 1 else ():
            if body := body_of(function):
                found[body].append(place)
    return [alike for alike in found.values() if len(alike) > 1]


@pytest.mark.slow(reason="reads every file")
def test_no_function_is_written_twice() -> None:
    found = {
        " ".join(sorted({re.split(r"[ .]", each)[-1] for each in alike})): " is ".join(alike)
        for alike in written_twice(modules())
    }
    assert not (left := [found[names] for names in found.keys() - ALIKE.keys()]), "\n".join(left)
    assert not (stale := ALIKE.keys() - found.keys()), f"take off the list: {stale}"


def test_functions_are_alike_whatever_their_own_names_are() -> None:
    text = "def {0}({1}, *, most):\n    {2}\n    x = [{1} * n for _ in range(3)]\n    return {3}"
    first = text.format("a", "b", '"""One."""', "sum(x)").replace("x", "found")
    second = text.format("c", "d", '"""Two."""', "sum(x)").replace("x", "kept")
    other = text.format("e", "f", "", "max(x)")
    trees = [("m.py", ast.parse(first)), ("n.py", ast.parse(second)), ("o.py", ast.parse(other))]
    assert written_twice(trees) == [["m.py a", "n.py c"]]
    assert written_twice(trees[1:]) == []
