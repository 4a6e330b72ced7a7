"""How long files and functions are, and how many parameters they take.

Each test names every offender at once. An exception says why in the line above the function, as
``# Long: why``, ``# Many parameters: why`` or ``# Long, with many parameters: why``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from .sources import PACKAGE, functions, modules, parameters_of, parse

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 40
"""Without its docstring."""
MOST_PARAMETERS = 8

_REASON = re.compile(r" *(?:#|//) (Long|Many parameters|Long, with many parameters): \S")


def reasons_given(text: str) -> dict[int, str]:
    """What each comment of the form ``# Long: why`` excuses, by the line below it."""
    found = {at: _REASON.match(line) for at, line in enumerate(text.splitlines(), 2)}
    return {at: reason[1] for at, reason in found.items() if reason}


def reason_needed(lines: int, parameters: int) -> str:
    """What the comment above such a function has to excuse; empty: there is nothing."""
    is_long, has_many = lines > MOST_FUNCTION_LINES, parameters > MOST_PARAMETERS
    if is_long and has_many:
        return "Long, with many parameters"
    return "Long" if is_long else "Many parameters" if has_many else ""


def without_reason(name: str, text: str, needed: Mapping[int, str]) -> list[str]:
    """Functions, by the line they begin at, whose comment does not say what it has to."""
    given = reasons_given(text)
    return [
        f"{name}:{at}: the line above says {given.get(at)!r}, and has to say {needed.get(at)!r}"
        for at in sorted(needed.keys() | given.keys())
        if needed.get(at, "") != given.get(at, "")
    ]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_files_are_short() -> None:
    lengths = {name: len((PACKAGE / name).read_text().splitlines()) for name, _ in modules()}
    long = {name: count for name, count in lengths.items() if count > MOST_FILE_LINES}
    assert not long, "\n".join(f"{name}: {count}" for name, count in long.items())


def test_functions_are_short_and_of_few_parameters_or_say_why_not() -> None:
    offenders = []
    for name, tree in modules():
        needed = {
            min(part.lineno for part in (function, *function.decorator_list)): reason_needed(
                lines_of(function), len(parameters_of(function))
            )
            for _, function in functions(tree)
        }
        offenders += without_reason(name, (PACKAGE / name).read_text(), needed)
    assert not offenders, "\n".join(offenders)


def test_functions_of_benchmarks_are_short() -> None:
    offenders = [
        f"benchmarks/{path.name} {name}: {lines_of(function)} lines"
        for path in sorted((PACKAGE.parent / "benchmarks").glob("*.py"))
        for name, function in functions(parse(path))
        if lines_of(function) > MOST_FUNCTION_LINES
    ]
    assert not offenders, "\n".join(offenders)


def test_reason_stands_right_above_what_needs_it_and_nowhere_else() -> None:
    text = "# Long: a loop.\ndef long(): ...\n\n    // Many parameters: the core's.\n    void f();"
    assert without_reason("a", text, {2: "Long", 5: "Many parameters"}) == []
    assert without_reason("a", text, {2: "Long, with many parameters", 5: "", 9: "Long"}) == [
        "a:2: the line above says 'Long', and has to say 'Long, with many parameters'",
        "a:5: the line above says 'Many parameters', and has to say ''",
        "a:9: the line above says None, and has to say 'Long'",
    ]
    assert without_reason("a", text, {2: "Long"}), "a reason that nothing below it needs"
    assert without_reason("a", "# Long:\ndef long(): ...", {2: "Long"}), "nothing is said"
    assert reason_needed(41, 9) == "Long, with many parameters"
    assert (reason_needed(40, 9), reason_needed(41, 8)) == ("Many parameters", "Long")
