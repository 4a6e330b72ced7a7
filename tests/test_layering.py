"""Who may import whom: the layers of the house, read off the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cxl_offload"

# A module may import from its own layer's name and from every layer below its own.
LAYERS: list[set[str]] = [
    {"cli", "integrations", "validation"},
    {"executor"},
    {"tensor", "ops", "transfer", "memory"},
    {"plan"},
    {"profile", "sim"},
    {"topology", "configs"},
    {"units", "errors", "lazy"},
    {"renamed"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Inside one layer: who may use whom.
BESIDE = {
    ("cli", "integrations"),
    ("cli", "validation"),
    ("tensor", "memory"),
    ("ops", "memory"),
    ("ops", "tensor"),
    ("transfer", "memory"),
    ("units", "errors"),
    ("errors", "units"),
}

CORE_USERS = ("memory", "transfer", "ops", "profile.measure", "sim.replay", "sim.sharing")
TORCH_USERS = ("tensor", "ops", "executor", "integrations")
FRAMEWORKS = {"flexgen": "flexgen", "deepspeed": "deepspeed", "vllm": "vllm"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Absolute names that a module imports; without ``lazy``, only those at import time."""
    tree = ast.parse(path.read_text(), str(path))
    inside_functions = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for_checkers = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if not lazy and (node in inside_functions or node in for_checkers):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_of_module_point_downward(path: Path) -> None:
    own = dotted(path).partition(".")[0]
    if not own:  # the package itself hands out names of every layer, lazily
        return
    assert own in RANK, f"{path} is in no layer; see the list in this test"
    for name in imports(path):
        if not name.startswith("cxl_offload."):
            continue
        other = name.split(".")[1]
        if other in ("_C", "__version__") or other == own:
            continue
        assert other in RANK, f"{path} imports {name}, which is in no layer"
        allowed = RANK[other] > RANK[own] or (own, other) in BESIDE
        assert allowed, f"{path}: {own} must not import {other} (through {name})"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_core_and_torch_stay_in_their_rooms(path: Path) -> None:
    module = dotted(path)
    for name in imports(path):
        if name.startswith("cxl_offload._C") or name == "cxl_offload._C":
            assert inside(module, CORE_USERS), f"{path} imports the C++ core"
        if name.partition(".")[0] == "torch":
            assert inside(module, TORCH_USERS), f"{path} imports torch"
        framework = name.partition(".")[0]
        if framework in FRAMEWORKS:
            home = f"integrations.{FRAMEWORKS[framework]}"
            assert inside(module, (home,)), f"{path} imports {framework}"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_package_and_cli_need_no_torch_when_imported(path: Path) -> None:
    module = dotted(path)
    if module and not inside(module, ("cli",)):
        return
    for name in imports(path, lazy=False):
        assert name.partition(".")[0] != "torch", f"{path} imports torch at import time"
        if name.startswith("cxl_offload."):
            assert not inside(name.removeprefix("cxl_offload."), TORCH_USERS), (
                f"{path} imports {name} at import time, which needs torch"
            )


def test_equations_know_no_executor() -> None:
    for path in sorted((PACKAGE / "plan" / "equations").glob("*.py")):
        for name in imports(path):
            room = name.removeprefix("cxl_offload.plan.").partition(".")[0]
            assert room not in ("flexgen", "vllm", "training"), f"{path} imports {name}"
