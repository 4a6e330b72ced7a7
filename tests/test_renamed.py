"""Old names: each still works and warns, and every name of the version before is accounted for."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import cxl_offload
from cxl_offload import former_names
from cxl_offload.former_names import GONE, RENAMED
from cxl_offload.renamed import new_name, renamed_attribute, renamed_keywords

ROOT = Path(__file__).resolve().parents[1]

# Every public module of version 0.1, followed by its names.
PUBLIC_NAMES = ROOT / "tests" / "fixtures" / "public_names_0_1.txt"


def file_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines or hands out, read off its source: nothing is imported."""
    found: set[str] = set()
    body = ast.parse(path.read_text()).body
    for node in (*body, *(each for at in body if isinstance(at, ast.If) for each in at.body)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [each for target in targets for each in ast.walk(target)]
            found |= {each.id for each in named if isinstance(each, ast.Name)}
    return frozenset(found)


def is_there(dotted: str) -> bool:
    if file_of(dotted) is not None:
        return True
    module, _, name = dotted.rpartition(".")
    path = file_of(module)
    return path is not None and name in names_in(path)


def hands_out_old_names(dotted: str) -> bool:
    """Whether the importer, or the module that is still there, finds an old name."""
    module = dotted.rpartition(".")[0]
    path = file_of(module)
    return path is None or "__getattr__" in names_in(path)


def test_every_public_name_of_the_version_before_is_there_or_names_its_successor() -> None:
    lost = []
    for line in PUBLIC_NAMES.read_text().splitlines():
        module, *names = line.split()
        for dotted in (module, *(f"{module}.{name}" for name in names)):
            is_gone = any(dotted == old or dotted.startswith(f"{old}.") for old in GONE)
            is_gone |= dotted == module and any(old.startswith(f"{dotted}.") for old in RENAMED)
            is_gone &= dotted not in RENAMED
            new = new_name(dotted)
            if is_there(dotted) or is_gone:
                continue
            is_found = dotted == module or hands_out_old_names(dotted)
            if new is None or not is_there(new) or not is_found:
                lost.append(f"{dotted} -> {new}")
    assert not lost, "list them in cxl_offload/former_names.py:\n" + "\n".join(lost)


def test_importer_finds_every_module_of_the_version_before() -> None:
    modules = [line.split()[0] for line in PUBLIC_NAMES.read_text().splitlines()]
    moved = [name for name in modules if file_of(name) is None and name not in GONE]
    lost = [name for name in moved if importlib.util.find_spec(name) is None]
    assert lost == []


# Imports every old name that it is given, and prints those that fail, do not warn or warn of
# another place, by what is wrong. Old names that need a framework which is not here are left out.
USE_OLD_NAMES = """
import importlib, json, sys, warnings
from cxl_offload.renamed import new_name

def use(old):
    home, _, name = old.rpartition(".")
    try:
        getattr(importlib.import_module(home), name)
        return new_name(old)
    except AttributeError:
        module = importlib.import_module(old)
    name = next(each for each in vars(importlib.import_module(new_name(old))) if each[0] != "_")
    getattr(module, name)
    return new_name(f"{old}.{name}")

wrong = {}
for old in json.load(sys.stdin):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            new = use(old)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("cxl_offload"):
                wrong[old] = repr(error)
            continue
        except Exception as error:
            wrong[old] = repr(error)
            continue
    said = [str(each.message) for each in warned if each.category is DeprecationWarning]
    if not any(one.startswith(old) and f" is now {new};" in one for one in said):
        wrong[old] = f"no warning of {new}: {said}"
json.dump(wrong, open(sys.argv[1], "w"))
"""


def what_is_wrong(old_names: Sequence[str], tmp_path: Path) -> dict[str, str]:
    """Old name to what is wrong with it, of a process that has imported nothing yet."""
    answer = tmp_path / "wrong.json"
    subprocess.run(
        [sys.executable, "-c", USE_OLD_NAMES, str(answer)],
        input=json.dumps(old_names),
        text=True,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, str] = json.loads(answer.read_text())
    return found


@pytest.mark.slow(reason="imports every old name")
def test_every_old_name_is_imported_with_a_warning_of_the_new_place(tmp_path: Path) -> None:
    gone, new = "cxl_offload.plan.flexgen.terms.rates", "cxl_offload.sim.TensorHome"
    # A module before its names: their import makes it an attribute of its package, without warning.
    wrong = what_is_wrong([*sorted(RENAMED), gone, new], tmp_path)
    assert "rates are in cxl_offload.plan.decoding.engine" in wrong.pop(gone)
    assert "no warning" in wrong.pop(new)
    assert not wrong, "\n".join(f"{old}: {why}" for old, why in wrong.items())


def test_old_name_that_moved_twice_is_found_where_it_is_now() -> None:
    old, new = "validation.threads.assign_threads", "validation.thread_assignment.assign_threads"
    assert new_name(f"cxl_offload.{old}") == f"cxl_offload.{new}"
    with pytest.warns(DeprecationWarning, match=f"{old} is now cxl_offload.{new}"):
        from cxl_offload.validation.threads import assign_threads  # type: ignore[import-not-found]
    from cxl_offload.validation import thread_assignment

    assert assign_threads is thread_assignment.assign_threads


def test_module_without_successor_hands_out_what_was_renamed_and_says_the_rest() -> None:
    with pytest.warns(DeprecationWarning, match=r"flexgen_shape\.throughput"):
        from cxl_offload.plan.flexgen.model import throughput  # type: ignore[import-not-found]
    from cxl_offload.validation import flexgen_shape

    assert throughput is flexgen_shape.throughput
    with pytest.raises(ImportError, match=r"plan\.decoding\.phases has the equations"):
        from cxl_offload.plan.flexgen.model import decode  # noqa: F401


def test_module_without_successor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GONE, "cxl_offload.attic", "look in the cellar")
    with pytest.raises(ModuleNotFoundError, match="is gone: look in the cellar"):
        importlib.import_module("cxl_offload.attic.tiers")


def test_no_old_name_is_listed_that_is_still_there() -> None:
    assert [old for old in (*RENAMED, *GONE) if is_there(old)] == []


def test_old_name_warns_at_the_caller_and_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now cxl_offload\.Session") as warned:
        old = cxl_offload.Memory  # type: ignore[attr-defined]
    assert old is cxl_offload.Session
    assert warned[0].filename == __file__


def test_module_that_moved_is_imported_by_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, "cxl_offload.attic.rooms", "cxl_offload.topology")
    monkeypatch.setitem(RENAMED, "cxl_offload.attic.pair", "cxl_offload.memory.use")
    with pytest.warns(
        DeprecationWarning, match=r"tiers\.assign_tiers is now cxl_offload\.topology"
    ):
        old = importlib.import_module("cxl_offload.attic.rooms.tiers").assign_tiers
    from cxl_offload.topology.tiers import assign_tiers

    assert old is assign_tiers
    with pytest.warns(DeprecationWarning, match="use"):
        from cxl_offload.attic import pair  # type: ignore[import-not-found]
    assert pair is cxl_offload.use


def test_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cxl_offload.never_was")
    with pytest.raises(AttributeError, match="no attribute 'never_was'"):
        _ = cxl_offload.never_was  # type: ignore[attr-defined]


def test_name_without_successor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GONE, "cxl_offload.memory.guess", "ask the pages, with placement_of")
    with pytest.raises(AttributeError, match="'guess': ask the pages"):
        _ = cxl_offload.memory.guess  # type: ignore[attr-defined]


def test_old_keyword_warns_at_the_caller_and_does_the_same() -> None:
    with pytest.warns(DeprecationWarning, match=r"zeros: placement= is now policy=") as warned:
        tensor = cxl_offload.zeros(1 << 12, placement="bind:0")  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    assert cxl_offload.placement_of(tensor).requested == "bind to nodes {0}"
    assert torch.equal(tensor, torch.zeros(1 << 12))


def test_old_and_new_keyword_together_are_refused() -> None:
    @renamed_keywords(placement="policy")
    def place(*, policy: str) -> str:
        return policy

    with pytest.raises(TypeError, match="placement is policy, which is given too"):
        place(policy="bind:0", placement="bind:1")  # type: ignore[call-arg]


def test_old_attribute_warns_and_is_the_new_one() -> None:
    class Share:
        memory = renamed_attribute("memory", "session")

        def session(self) -> str:
            return "a session"

    with pytest.warns(DeprecationWarning, match=r"Share\.memory is now session"):
        assert Share().memory() == "a session"


def test_module_of_old_names_lists_each_once() -> None:
    tree = ast.parse(Path(former_names.__file__).read_text())
    tables = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    keys = [
        ast.literal_eval(key)
        for table in tables
        if isinstance(table, ast.Dict)
        for key in table.keys
        if key is not None
    ]
    assert len(keys) == len(set(keys)) >= 10
