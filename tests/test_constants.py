"""What the core decides is typed in the core: Python binds it, once."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from cxl_offload import _C, core
from cxl_offload.memory import Pages, Session
from cxl_offload.topology import load_machine

PACKAGE = Path(__file__).resolve().parents[1] / "cxl_offload"

# Names that say that a number is the core's, and numbers that it has.
WORDS = ("LINE", "PAGE", "GRANULE", "RESERVE", "HUGE")
NUMBERS = {64, 4096, 2 << 20, 1 << 30, 1 / 128}


def value_of(node: ast.expr) -> object:
    text = ast.unparse(node).replace("MIB", str(1 << 20)).replace("GIB", str(1 << 30))
    try:
        return eval(text, {"__builtins__": {}})
    except Exception:
        return None


def test_no_module_types_a_constant_of_the_core_again() -> None:
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign) or path.name == "core.py":
                continue
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            is_of_the_core = any(word in name for name in names for word in WORDS)
            if is_of_the_core and value_of(node.value) in NUMBERS:
                offenders.append(f"{path.relative_to(PACKAGE)}: {names[0]}")
            if isinstance(node.value, ast.Tuple) and value_of(node.value) == get_args(Pages):
                offenders.append(f"{path.relative_to(PACKAGE)}: kinds of pages")
    assert not offenders, "\n".join(offenders)


def test_constants_are_what_a_session_does() -> None:
    """Asked from the core's behaviour, not from the same attribute."""
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    sizes = {kind: session.kernel.page_bytes(kind) for kind in (_C.PageKind.huge_2mib,)}
    assert core.HUGE_PAGE_BYTES == sizes[_C.PageKind.huge_2mib] == 2 << 20
    assert session.kernel.page_bytes(_C.PageKind.huge_1gib) == core.GIGANTIC_PAGE_BYTES
    node = session.machine.node(2)
    free = session.free_bytes(2)
    kept = core.reserve_bytes(node.capacity_bytes)
    session.allocate((free - kept) // core.BASE_PAGE_BYTES * core.BASE_PAGE_BYTES, "bind:2")
    assert session.free_bytes(2) < kept + core.BASE_PAGE_BYTES


def test_what_is_kept_of_a_node_has_a_least_and_a_most() -> None:
    kept = [core.reserve_bytes(total) for total in (1 << 20, 1 << 36, 1 << 45)]
    assert kept == [16 << 20, 1 << 29, 1 << 30]
