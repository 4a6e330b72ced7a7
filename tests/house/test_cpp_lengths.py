"""How long functions of the C++ core are, and how many parameters they take.

Read off clang-format's layout: a function begins at the edge of its class or namespace, and ends
with the next brace there. Each test names every offender at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .sources import PACKAGE
from .test_lengths import MOST_FUNCTION_LINES, MOST_PARAMETERS

CORE = PACKAGE.parent / "csrc"
BINDINGS = "bindings/"
"""Functions there have a line for each name that Python is given."""

IN_REGISTERS = "one loop, whose sums stay in registers"
LONG_FUNCTIONS = {
    "gpu/cuda_api.cc CudaApi::load": "a line for each symbol of the driver",
    "kernels/attention_codes.inc.h score_codes": IN_REGISTERS,
    "kernels/attention_integer_values.inc.h add_chunk": IN_REGISTERS,
    "memory/block_heap_check.cc BlockHeap::check_extents": "one walk, which sums up as it checks",
    "transfer/copy_engine.cc CopyEngine::Queue::submit": "one order of steps, each undone if late",
}

_NO_FUNCTION = re.compile(
    r"\s*((namespace|class|struct|enum|union|extern|if|for|while|switch|else|do|return)\b|#|//|\})"
)
_BEGIN = re.compile(r"((?:  )?)\S.*\(")
_NAME = re.compile(r"(operator\W+|[~\w:]+)\(")


def functions_of(text: str) -> Iterator[tuple[str, str, int]]:
    """Name, parameters and lines of each function that has a body."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        found = _BEGIN.match(line)
        name = _NAME.search(line)
        if not found or not name or _NO_FUNCTION.match(line):
            continue
        opens = next(
            (to for to in range(at, len(lines)) if lines[to].endswith(("{", ";", "}"))), len(lines)
        )
        if opens == len(lines) or not lines[opens].endswith("{"):
            continue
        edge = found[1] + "}"
        end = next((to for to in range(opens, len(lines)) if lines[to].startswith(edge)), None)
        if end is not None:
            head = " ".join(lines[at : opens + 1])
            yield name[1], _within(head[head.index(name[0]) + len(name[0]) :]), end - at + 1


def _within(text: str) -> str:
    """Up to the bracket that closes the one before the text."""
    depth = 1
    for at, sign in enumerate(text):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if not depth:
            return text[:at]
    return text


def parameters(text: str) -> int:
    depth = commas = 0
    for sign in text:
        depth += sign in "(<{["
        depth -= sign in ")>}]"
        commas += sign == "," and not depth
    return commas + 1 if text.strip() else 0


def core() -> Iterator[tuple[str, str, str, int]]:
    for path in sorted(CORE.rglob("*")):
        name = path.relative_to(CORE).as_posix()
        if path.suffix in (".cc", ".h", ".cu") and not name.startswith(BINDINGS):
            for function, given, count in functions_of(Path(path).read_text()):
                yield name, function, given, count


def test_functions_of_the_core_are_short_or_have_a_reason() -> None:
    long = {
        f"{name} {function}": count
        for name, function, _, count in core()
        if count > MOST_FUNCTION_LINES
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_parameters_of_the_core_are_few() -> None:
    many = [
        f"{name} {function}: {parameters(given)} parameters"
        for name, function, given, _ in core()
        if parameters(given) > MOST_PARAMETERS
    ]
    assert not many, "\n".join(many)


def test_functions_are_found_with_their_parameters_and_lines() -> None:
    text = (
        "namespace a {\n\nint sum(const std::map<int, int>& of, int (*f)(int, int),\n"
        "        int c) {\n  if (c) {\n    return 1;\n  }\n  return 2;\n}\n\n"
        "class B {\n public:\n  bool has() const {\n    return true;\n  }\n  void later(int);\n};\n"
        "}  // namespace a\n"
    )
    found = [(name, parameters(given), lines) for name, given, lines in functions_of(text)]
    assert found == [("sum", 3, 7), ("has", 0, 3)]
    assert sum(1 for _ in core()) > 500, "hardly any function was found"
