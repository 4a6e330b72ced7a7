from __future__ import annotations

import json
from pathlib import Path

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.validation import load_cases, parse_cases

CASE = {
    "id": "one",
    "model": "ratio_change",
    "inputs": {"system": "none", "from_weights": [6, 4], "to_weights": [4, 6]},
    "expected": {"op": "approx", "value": 0.5556},
    "tolerance_suggestion": {"abs": 0.006},
    "use": "semantics",
    "group": "ratio_change",
}


def test_cases_keep_the_line_they_start_on() -> None:
    text = "[\n " + json.dumps(CASE) + ",\n\n " + json.dumps({**CASE, "id": "two"}) + "\n]\n"
    cases = parse_cases(text, file="cases.json")
    assert [(case.id, case.line) for case in cases] == [("one", 2), ("two", 4)]
    assert not cases[0].wrong


def test_empty_array_has_no_cases() -> None:
    assert parse_cases(" [ ] ", file="f") == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("{}", 1, "array of cases"),
        ("", 1, "array of cases"),
        ("[\n{,}]", 2, "property name"),
        ("[\n{}\n{}]", 3, "want , or ]"),
        ("[{}]\nx", 2, "after the array"),
        ("[\n\n7]", 3, "JSON object"),
        ('[\n{"id": NaN}]', 2, "NaN"),
        ('[\n{"id": 1, "id": 2}]', 2, "stands twice"),
    ],
)
def test_wrong_file_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_cases(text, file="cases.json")
    assert (caught.value.file, caught.value.line) == ("cases.json", line)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_cases(tmp_path / "missing.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"[\xff]")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_cases(binary)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model": None}, "'model'"),
        ({"inputs": [1]}, "'inputs'"),
        ({"expected": {"op": "close", "value": 1}}, "'op'"),
        ({"expected": {"op": "approx"}}, "needs a 'value'"),
        ({"expected": {"op": "approx", "value": True}}, "want a number"),
        ({"expected": {"op": "vector_approx", "value": 1}}, "list"),
        ({"expected": {"op": "range", "min": 1}}, "max"),
        ({"tolerance_suggestion": {"within": 1}}, "'within'"),
        ({"tolerance_suggestion": 0.1}, "object or null"),
        ({"printed": "1.2"}, "printed is '1.2'"),
        ({"printed": []}, "the lowest and the highest"),
        ({"printed": [1, 2, 3]}, "the lowest and the highest"),
    ],
)
def test_wrong_case_is_kept_with_its_reason(changes: dict[str, object], wrong: str) -> None:
    (case,) = parse_cases(json.dumps([{**CASE, **changes}]), file="cases.json")
    assert wrong in case.wrong


@pytest.mark.parametrize(("printed", "read"), [(None, ()), (1.2, (1.2,)), ([1, 2], (1, 2))])
def test_printed_number_is_kept_and_nothing_is_scored_by_it(
    printed: object, read: tuple[float, ...]
) -> None:
    entries = [{**CASE, "printed": printed}, CASE]
    with_it, without = parse_cases(json.dumps(entries), file="cases.json")
    assert (with_it.printed, with_it.wrong) == (read, "")
    assert with_it.expected == without.expected
