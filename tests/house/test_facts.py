"""A fact is written in one place, and in one way.

Each test names every offender at once. An exception stands here with its reason, in one line.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from .sources import PACKAGE, assigned, modules, texts

SAID_TWICE = {
    "T": "a type variable, whose name is its value",
    "VERSION": "of different forms of files, which grow apart",
    "LOG": "the logger of a module, or of a room",
    "TIE": "how near two floats count as one: of searches that compare other things",
    "ROUNDING": "the same of gains and of scores",
    "TURNS": "of measurements of other things",
    "WEIGHTS": "the name of a kind of tensor, of vLLM's plans and of runs of transformers",
}
"""Constants that two modules may have with one value, since it is not one fact."""


def constants() -> Iterator[tuple[str, str, str]]:
    """Name without underscores, value as it is written, and module, of every constant."""
    for name, tree in modules():
        for constant, value in assigned(tree):
            if re.fullmatch(r"_?[A-Z][A-Z0-9_]*", constant):
                yield constant.strip("_"), ast.unparse(value), name


def test_no_two_modules_know_the_same_constant() -> None:
    places = defaultdict(list)
    for constant, value, module in constants():
        places[constant, value].append(module)
    doubled = {each: at for each, at in places.items() if len(at) > 1}
    offenders = [
        f"{constant} = {value}: {', '.join(at)}"
        for (constant, value), at in doubled.items()
        if constant not in SAID_TWICE
    ]
    offenders += [
        f"{constant} is in one module only; take it off the list"
        for constant in SAID_TWICE
        if not any(constant == each for each, _ in doubled)
    ]
    assert not offenders, "\n".join(offenders)


def test_constants_are_seen_one_by_one_and_several_at_once() -> None:
    tree = ast.parse("A = B = 1\nC: int = 2\nD, (E, F) = 3, (4, 5)\nG, H = pair()\nx.y = 6\nI: int")
    found = {name: ast.unparse(value) for name, value in assigned(tree)}
    numbers = {name: str(at) for at, name in enumerate("CDEF", 2)}
    assert found == {"A": "1", "B": "1", **numbers, "G": "pair()", "H": "pair()"}


ONE_PLACE = {
    r"\"/sys/bus/pci/devices\"": ("topology/tree.py",),
    r"\"CXL_OFFLOAD_PLAN\"": (
        "plan/environment.py",
        "integrations/autostart/sitecustomize.py",  # begins before the package can be loaded
    ),
    r", 255\)": (),  # a distance without a path, as a default: NO_PATH_DISTANCE
    r"\bgroup(_size|_elements)?(: int)? ?= ?64\b": (),  # plan/kv_types.py has FlexGen's GROUP
    r"(Usable|Margin) = 0\.\d|\] = 0\.8,": (),  # plan/usable.py
    r"= 256,": (),  # plan/vllm/defaults.py
}
"""Facts that were written more than once, and the modules that may have them now."""


def test_facts_are_written_in_one_place() -> None:
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            offenders += [
                f"{name}:{number}: {line.strip()}"
                for fact, homes in ONE_PLACE.items()
                if re.search(fact, line) and name not in homes
            ]
    assert not offenders, "\n".join(offenders)


def test_public_names_are_listed_only_where_they_are_handed_on() -> None:
    """Elsewhere the underscore says what is private; a list would say it a second time."""
    offenders = []
    for name, tree in modules():
        defined = {getattr(node, "name", "") for node in tree.body}
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in tree.body:
            if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "__all__":
                continue
            if not name.endswith("__init__.py") and set(ast.literal_eval(node.value)) <= defined:
                offenders.append(f"{name}: __all__ names nothing that comes from elsewhere")
    assert not offenders, "\n".join(offenders)


def test_the_core_asks_no_object_for_its_type() -> None:
    """A contract says what differs (csrc/memory/region.h), and an error is caught by its type."""
    sources = [text for name, text in texts() if name.startswith("csrc/")]
    assert any("static_cast<" in text for text in sources)
    found = [name for name, text in texts() if name.startswith("csrc/") and "dynamic_cast" in text]
    assert not found, found


def test_no_contract_of_the_core_names_a_class_that_keeps_it() -> None:
    """Or who asks the contract learns the class, as a cast would tell."""
    core = [text for name, text in texts() if name.startswith("csrc/")]
    keepers = [
        (contract, keeper)
        for text in core
        for keeper, contract in re.findall(r"^class (\w+) final : public ([\w:]+)", text, re.M)
    ]
    assert ("Region", "NumaRegion") in keepers
    found = [
        f"{contract} names {keeper}"
        for contract, keeper in keepers
        for text in core
        if re.search(rf"^class {contract.rpartition(':')[2]} {{", text, re.M)
        and re.search(rf"\b{keeper}\b", text)
    ]
    assert not found, found


def test_decisions_have_a_number_each_and_say_it() -> None:
    files = sorted((PACKAGE.parent / "docs" / "adr").glob("0*.md"))
    numbers = [int(file.name.partition("-")[0]) for file in files]
    assert numbers == list(range(1, len(files) + 1)), [file.name for file in files]
    heads = [file.read_text().partition("\n")[0] for file in files]
    wrong = [
        head for head, number in zip(heads, numbers, strict=True) if f"# {number}. " not in head
    ]
    assert not wrong, wrong


def test_benchmarks_are_run_in_one_way() -> None:
    """As ``python -m benchmarks.NAME``, where a bare import of what is beside them fails."""
    folder = PACKAGE.parent / "benchmarks"
    beside = {path.stem for path in folder.glob("*.py")}
    found = [
        f"benchmarks/{path.name}:{node.lineno}"
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in beside
    ]
    pages = [*PACKAGE.parent.glob("*.md"), *(PACKAGE.parent / "docs").rglob("*.md")]
    found += [page.name for page in pages if "python benchmarks/" in page.read_text()]
    assert not found, found
