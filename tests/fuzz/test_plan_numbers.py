"""Every number of a plan file: one that no planner writes is refused with its line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import parse_plan

from . import sound

Path = tuple[str | int, ...]

MAY_BE_NEGATIVE = {"gain", "gain_tokens_per_s"}
COUNTS = {"size", "count", "tokens", "cases", "threads"}
"""Of these, none is no plan: 0 rows, batches, tokens, cases, threads of a node."""
SHARES = {"percent": 100.0}


def numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, int | float]]:
    """Every number of a document with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from numbers(item, (*path, at))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def field_of(path: Path) -> str:
    """The field that a number belongs to: a mapping's are those of the mapping."""
    return str(path[0] if path[0] in ("threads", "node_bytes") else path[-1])


def nonsense(path: Path, sound_value: float) -> list[Any]:
    """What no planner writes there."""
    name = field_of(path)
    made: list[Any] = [float("nan"), float("-inf"), True, "x", 1 << 64]
    if name not in MAY_BE_NEGATIVE:
        made.append(-1)
    if isinstance(sound_value, int):
        made.append(0.5)
    if name in COUNTS or path == ("batch", "prompt"):
        made.append(0)
    if name in SHARES:
        made.append(SHARES[name] + 1)
    return made


def line_of(text: str, path: Path) -> int:
    """Where the value of a key stands, by the parser and not by the reader."""
    node: Any = yaml.compose(text)
    line = 0
    for part in path:
        if isinstance(node, yaml.MappingNode):
            key, node = next(each for each in node.value if each[0].value == str(part))
            line = key.start_mark.line
        else:
            assert isinstance(part, int)
            node = node.value[part]
            line = node.start_mark.line
    return line + 1


def changed(document: Any, path: Path, value: Any) -> Any:
    made = copy.deepcopy(document)
    below = made
    for part in path[:-1]:
        below = below[part]
    below[path[-1]] = value
    return made


def distinct(document: Any) -> list[tuple[Path, int | float]]:
    """The first of every field: other entries of a list or a mapping are read by the same code."""
    found: dict[tuple[str, ...], tuple[Path, int | float]] = {}
    for path, value in numbers(document):
        parts = [str(part) for part in path if isinstance(part, str)]
        if "terms" in parts or parts[0] in ("threads", "node_bytes"):
            parts.pop()
        found.setdefault(tuple(parts), (path, value))
    del found["version",]
    return list(found.values())


def short(text: str) -> Any:
    """A plan without the rest of its lists, which would only take time."""
    document = yaml.safe_load(text)
    rest = {"notes": [], "why": [], "settings": {}}
    rest |= {name: document[name][:1] for name in ("prices", "phases")}
    return {**document, **rest}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", range(len(sound.PLANNERS)), ids=list(sound.PLANNERS))
def test_numbers_that_no_planner_writes_are_refused_with_their_line(at: int) -> None:
    document = short(sound.plans()[at])
    tried = 0
    for path, value in distinct(document):
        if path == ("batch", "prompt") and document["kind"] == "training":
            continue  # 0 there
        for wrong in nonsense(path, value):
            text = yaml.safe_dump(changed(document, path, wrong), sort_keys=False)
            with pytest.raises(ConfigError) as caught:
                parse_plan(text, file="p.yaml")
            message = str(caught.value)
            assert message.startswith(f"p.yaml:{line_of(text, path)}: "), (path, wrong, message)
            assert message.isprintable(), (path, wrong, message)
            tried += 1
    assert tried > 80


def test_plans_of_all_executors_are_among_the_sound_ones() -> None:
    documents = [yaml.safe_load(text) for text in sound.plans()]
    assert {each["executor"] for each in documents} == {
        "flexgen", "transformers", "vllm", "deepspeed",
    }  # fmt: skip
    fields = {field_of(path) for each in documents for path, _ in numbers(each)}
    assert {"size", "prompt", "bytes", "percent", "seconds", "gain", "first_token_s"} <= fields
    assert {"threads", "node_bytes", "cases", "median", "gain_tokens_per_s"} <= fields


@pytest.mark.parametrize("path", [("cxl", "gain"), ("prices", 0, "gain_tokens_per_s")])
def test_gains_may_be_losses(path: Path) -> None:
    document = yaml.safe_load(sound.plans()[0])
    assert document["cxl"]["gain"] is not None
    parse_plan(yaml.safe_dump(changed(document, path, -0.5)), file="p.yaml")
