"""How long functions of the C++ core are, and how many parameters they take.

Read off clang-format's layout: a function begins at the edge of its class or namespace, and ends
with the next brace there. Each test names every offender at once; exceptions say why as those of
Python do (test_lengths.py), above the function or its template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .sources import PACKAGE
from .test_lengths import reason_needed, without_reason

CORE = PACKAGE.parent / "csrc"
BINDINGS = "bindings/"
"""Functions there have a line for each name that Python is given."""

_NO_FUNCTION = re.compile(
    r"\s*((namespace|class|struct|enum|union|extern|if|for|while|switch|else|do|return)\b|#|//|\})"
)
_BEGIN = re.compile(r"((?:  )?)\S.*\(")
_NAME = re.compile(r"(operator\W+|[~\w:]+)\(")


def functions_of(text: str) -> Iterator[tuple[str, int, str, int]]:
    """Name, first line, parameters and count of lines of each function that has a body."""
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
            given = _within(head[head.index(name[0]) + len(name[0]) :])
            is_template = lines[at - 1].lstrip().startswith("template")
            yield name[1], at if is_template else at + 1, given, end - at + 1


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


def core() -> Iterator[tuple[str, str]]:
    """Name and text of every source that has functions."""
    for path in sorted(CORE.rglob("*")):
        name = path.relative_to(CORE).as_posix()
        if path.suffix in (".cc", ".h", ".cu") and not name.startswith(BINDINGS):
            yield name, path.read_text()


def test_functions_of_the_core_are_short_and_of_few_parameters_or_say_why_not() -> None:
    offenders = []
    for name, text in core():
        needed = {
            first: reason_needed(count, parameters(given))
            for _, first, given, count in functions_of(text)
        }
        offenders += without_reason(name, text, needed)
    assert not offenders, "\n".join(offenders)


def test_functions_are_found_with_their_parameters_and_lines() -> None:
    text = (
        "namespace a {\n\nint sum(const std::map<int, int>& of, int (*f)(int, int),\n"
        "        int c) {\n  if (c) {\n    return 1;\n  }\n  return 2;\n}\n\n"
        "class B {\n public:\n  template <int N>\n  bool has() const {\n    return true;\n  }\n"
        "  void later(int);\n};\n}  // namespace a\n"
    )
    found = [(name, at, parameters(given), lines) for name, at, given, lines in functions_of(text)]
    assert found == [("sum", 3, 3, 7), ("has", 13, 0, 3)]
    assert sum(1 for _, text in core() for _ in functions_of(text)) > 500, "hardly any was found"
