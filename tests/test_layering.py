"""Who may import whom: the layers of the house, read off the imports themselves.

Each test names every offender at once.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from .house.sources import PACKAGE, parse

ROOT = PACKAGE.parent

# A module may import from its own room and from the rooms of every layer below its own. A room
# inside of another stands by itself here.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli", "report", "metrics", "integrations", "validation"},
    {"tune", "ranks", "objects", "profile.operators", "kept"},
    {"tensor", "tensor_bytes", "ops", "transfer", "memory"},
    {"plan"},
    {"profile", "profile.operators.model", "sim"},
    {"topology"},
    {"configs", "core", "files"},
    {"arrays", "units", "errors", "events", "lazy"},
    {"renamed"},
    {"former_names"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Inside one layer: who may use whom.
BESIDE = {
    ("cli", "integrations"),
    ("cli", "metrics"),
    ("cli", "report"),
    ("cli", "validation"),
    ("tensor", "memory"),
    ("tensor", "tensor_bytes"),
    ("tensor_bytes", "memory"),
    ("ops", "memory"),
    ("ops", "tensor"),
    ("ops", "tensor_bytes"),
    ("transfer", "memory"),
    ("profile", "profile.operators.model"),
    ("profile.operators.model", "profile"),
    ("units", "errors"),
    ("errors", "units"),
}

CORE_USERS = (
    "core",
    "memory",
    "transfer",
    "ops",
    "plan.equations.stripe",
    "profile.measure",
    "sim.replay",
)
TORCH_USERS = (
    "tensor",
    "tensor_bytes",
    "ops",
    "tune",
    "ranks",
    "objects",
    "profile.operators",
    "integrations",
)
TORCH_FREE = ("integrations.run_options", "profile.operators.model")
FRAMEWORK_USERS = {
    "deepspeed": ("integrations.deepspeed",),
    "flexgen": ("integrations.flexgen",),
    # FlexGen reads its tokens by it, and installs it.
    "transformers": ("integrations.transformers", "integrations.flexgen.tokens"),
    "vllm": ("integrations.vllm",),
}
PLANNED_FRAMEWORKS = tuple(
    f"plan.{name}" for name in ("flexgen", "transformers", "vllm", "training")
)
PLANNED_FRAMEWORK_USERS = {
    "plan.flexgen": ("integrations.flexgen",),
    "plan.transformers": ("integrations.transformers",),
    "plan.vllm": ("plan.fleet",),  # whose servers run vLLM
    "plan.training": (),
}
"""Besides the framework's own room, the command line and the validation, which know all of them,
and the names that ``cxl_offload.plan`` hands on."""


def modules() -> dict[str, Path]:
    """Dotted name inside of the package to file; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Absolute names that a module imports; without ``lazy``, only those at import time."""
    return (name for name, is_late in _imports(path) if lazy or not is_late)


@functools.cache
def _imports(path: Path) -> list[tuple[str, bool]]:
    """Each name, and whether it is imported in a function or for types alone."""
    found: list[tuple[str, bool]] = []

    def look(node: ast.AST, is_late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, is_late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found.extend((f"{node.module}.{alias.name}", is_late) for alias in node.names)
        is_late = is_late or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
        )
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                look(child, is_late)

    look(parse(path), False)
    return found


def is_inside(name: str, homes: Collection[str]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def room_of(name: str) -> str:
    """The longest entry of the layers that a dotted name is in; its first part if none is."""
    homes = [home for home in RANK if is_inside(name, (home,))]
    return max(homes, key=len, default=name.partition(".")[0])


def test_imports_point_downward() -> None:
    offenders = []
    for module, path in modules().items():
        own = room_of(module)
        if not own:  # the package itself hands out names of every layer, lazily
            continue
        for name in imports(path):
            other = room_of(name.removeprefix("cxl_offload."))
            if not name.startswith("cxl_offload.") or other in ("_C", "__version__", own):
                continue
            known = own in RANK and other in RANK
            if not known or not (RANK[other] > RANK[own] or (own, other) in BESIDE):
                offenders.append(f"{module} imports {name}: {own} must not import {other}")
    assert not offenders, "\n".join(offenders)


def test_core_torch_and_frameworks_stay_in_their_rooms() -> None:
    offenders = []
    for module, path in modules().items():
        for name in imports(path):
            top = name.partition(".")[0]
            is_allowed = (
                is_inside(module, CORE_USERS)
                if is_inside(name, ("cxl_offload._C",))
                else is_inside(module, TORCH_USERS) and not is_inside(module, TORCH_FREE)
                if top == "torch"
                else is_inside(module, FRAMEWORK_USERS[top])
                if top in FRAMEWORK_USERS
                else True
            )
            if not is_allowed:
                offenders.append(f"{module} imports {name}")
    assert not offenders, "\n".join(offenders)


def frameworks_imported(module: str, names: Iterable[str]) -> list[str]:
    """Of the imported names those of a framework's planner that the module must not know."""
    if not module or room_of(module) in ("cli", "validation"):
        return []
    found = []
    for name in names:
        home = name.removeprefix("cxl_offload.")
        for room in PLANNED_FRAMEWORKS:
            if is_inside(home, (room,)) and not is_inside(
                module, (room, *PLANNED_FRAMEWORK_USERS[room])
            ):
                found.append(name)
    return found


def test_shared_rooms_know_no_framework() -> None:
    """Planning, simulation, profiles, tuning and what is below them serve every framework alike."""
    offenders = []
    for module, path in modules().items():
        hands_on = module == "plan"  # lazily, which is all that it does
        names = imports(path, lazy=not hands_on)
        offenders += [f"{module} imports {name}" for name in frameworks_imported(module, names)]
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize(
    "module",
    ["plan.pipeline", "plan.decoding.phases", "plan.model.file", "sim.trace", "tune.tiers"],
)
@pytest.mark.parametrize("room", PLANNED_FRAMEWORKS)
def test_framework_that_a_shared_room_imports_is_seen(module: str, room: str) -> None:
    (found,) = frameworks_imported(module, [f"cxl_offload.{room}.plan.Anything"])
    assert found.endswith(f"{room}.plan.Anything")
    assert not frameworks_imported(room, [f"cxl_offload.{room}.plan.Anything"])


def test_package_and_command_line_load_no_torch() -> None:
    offenders = []
    for module, path in modules().items():
        if module and not is_inside(module, ("cli",)):
            continue
        for name in imports(path, lazy=False):
            home = name.removeprefix("cxl_offload.")
            if name.partition(".")[0] == "torch" or (
                is_inside(home, TORCH_USERS) and not is_inside(home, TORCH_FREE)
            ):
                offenders.append(f"{module or 'cxl_offload'} imports {name} at import time")
    assert not offenders, "\n".join(offenders)


def test_each_folder_of_the_core_has_its_own_namespace() -> None:
    offenders = []
    for path in sorted((ROOT / "csrc").glob("*/*.*")):
        folder = path.parent.name
        expected = "cxl_offload" if folder == "core" else f"cxl_offload::{folder}"
        text = path.read_text()
        opened = re.findall(r"^namespace (cxl_offload[\w:]*) \{", text, re.MULTILINE)
        offenders += [
            f"{path.relative_to(ROOT)} opens {name}, not {expected}"
            for name in opened
            if name != expected and not (folder != "core" and name.startswith(f"{expected}::"))
        ]
        if path.suffix == ".h" and "using namespace" in text:
            offenders.append(f"{path.relative_to(ROOT)}: using namespace in a header")
    assert not offenders, "\n".join(offenders)
