"""Old names: each still works and warns, and every name of the version before is accounted for."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

import cxl_offload
from cxl_offload import renamed
from cxl_offload.renamed import GONE, RENAMED, new_name, renamed_attribute, renamed_keywords

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
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [each for target in targets for each in ast.walk(target)]
            found |= {each.id for each in named if isinstance(each, ast.Name)}
            if "__all__" in {getattr(target, "id", "") for target in targets} and node.value:
                found |= set(ast.literal_eval(node.value))
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
            new = new_name(dotted)
            if is_there(dotted) or is_gone:
                continue
            is_found = dotted == module or hands_out_old_names(dotted)
            if new is None or not is_there(new) or not is_found:
                lost.append(f"{dotted} -> {new}")
    assert not lost, "list them in cxl_offload/renamed.py:\n" + "\n".join(lost)


def test_importer_finds_every_module_of_the_version_before() -> None:
    modules = [line.split()[0] for line in PUBLIC_NAMES.read_text().splitlines()]
    moved = [name for name in modules if file_of(name) is None and name not in GONE]
    lost = [name for name in moved if importlib.util.find_spec(name) is None]
    assert lost == []


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
    tree = ast.parse(Path(renamed.__file__).read_text())
    tables = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    keys = [
        ast.literal_eval(key)
        for table in tables
        if isinstance(table, ast.Dict)
        for key in table.keys
        if key is not None
    ]
    assert len(keys) == len(set(keys)) >= 10
