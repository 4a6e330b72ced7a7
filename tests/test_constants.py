"""What the core decides is typed in the core: Python binds it, once."""

from __future__ import annotations

import ast
import re
from typing import get_args

from cxl_offload import _C, core
from cxl_offload.memory import Pages, Session
from cxl_offload.memory.rules import PAGE_KINDS
from cxl_offload.topology import load_machine

from .house.sources import PACKAGE, parse

CSRC = PACKAGE.parent / "csrc"

# Names that say that a number is the core's, and numbers that it has.
WORDS = ("LINE", "PAGE", "GRANULE", "RESERVE", "HUGE")
NAMES = ("MOST_BYTES", "MAX_BYTES", "STATE_BLOCK")
NUMBERS = {64, 128, 4096, 2 << 20, 1 << 30, 1 << 62, 1 / 128}

# Where 4096 is not a page, or the core is not there to ask.
OTHER_4096 = {
    "integrations/autostart/sitecustomize.py": "how much of a file is read; it imports no package",
    "kept/model_files.py": "how much is read at each of some places of a file",
    "plan/training/drive.py": "elements to which DeepSpeed rounds its buffers",
    "topology/sysfs.py": "sizes that Linux knows; machines are discovered without the core",
}

# Kernels in which a bare 64 is a value or a format, and not bytes of a line.
BARE_64 = {
    "kernels/attention_check.cc": "the multiple of codes that groups of a cache have",
    "kernels/attention_integer_keys.inc.h": "the middle of a digit of seven bits",
    "kernels/linear_bf16_avx512.cc": "weights that share a scale",
    "kernels/linear_bf16_read.inc.h": "places in a permutation of 64 bytes",
    "kernels/linear_tiles.inc.h": "the bytes of the operand of ldtilecfg",
    "kernels/linear_tiles_amx.cc": "weights that share a scale",
}

# Of memory; each has its name in csrc/core/sizes.h or csrc/os/kernel.h.
NAMED_SIZES = ("kLineBytes", "kBasePageBytes", "kHugePageBytes", "kGiganticPageBytes")


def value_of(node: ast.expr) -> object:
    text = ast.unparse(node).replace("MIB", str(1 << 20)).replace("GIB", str(1 << 30))
    try:
        return eval(text, {"__builtins__": {}})
    except Exception:
        return None


def test_no_module_types_a_constant_of_the_core_again() -> None:
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in parse(path).body:
            if not isinstance(node, ast.Assign) or path.name == "core.py":
                continue
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            is_of_the_core = any(
                name in NAMES or any(word in name for word in WORDS) for name in names
            )
            if is_of_the_core and value_of(node.value) in NUMBERS:
                offenders.append(f"{path.relative_to(PACKAGE)}: {names[0]}")
            if isinstance(node.value, ast.Tuple) and value_of(node.value) == get_args(Pages):
                offenders.append(f"{path.relative_to(PACKAGE)}: kinds of pages")
    assert not offenders, "\n".join(offenders)


def test_no_module_types_the_bytes_of_a_page() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and node.value == 4096
    }
    assert found == set(OTHER_4096)


def test_kinds_of_pages_are_the_cores() -> None:
    assert set(PAGE_KINDS) == set(get_args(Pages))
    assert set(PAGE_KINDS.values()) == set(_C.PageKind.__members__.values())
    typed = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value) == "Literal"
        and value_of(node.slice) == get_args(Pages)
    ]
    assert typed == ["topology/node.py"]


def code_of_the_core() -> dict[str, str]:
    """Path to text, without comments and strings."""
    skipped = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"')
    return {
        path.relative_to(CSRC).as_posix(): skipped.sub("", path.read_text())
        for path in sorted(CSRC.rglob("*.*"))
    }


def test_sizes_of_memory_are_defined_once_in_the_core() -> None:
    found = {
        name: [
            path
            for path, code in code_of_the_core().items()
            if re.search(rf"\bconstexpr\b[^;\n]*\b{name}\s*=", code)
        ]
        for name in NAMED_SIZES
    }
    assert found == {
        "kLineBytes": ["core/sizes.h"],
        "kBasePageBytes": ["core/sizes.h"],
        "kHugePageBytes": ["os/kernel.h"],
        "kGiganticPageBytes": ["os/kernel.h"],
    }


def test_kernels_give_every_64_a_name() -> None:
    """Lines, groups and rows of tiles have 64 of something: a bare number does not say of what."""
    found = {
        path
        for path, code in code_of_the_core().items()
        for line in code.splitlines()
        if path.startswith("kernels/")
        and re.search(r"\b64\b", line)
        and not re.search(r"\bconstexpr\b[^;]*\bk\w+ = ", line)
    }
    assert found == set(BARE_64)


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
