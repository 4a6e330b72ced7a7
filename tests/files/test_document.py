"""Short documents are composed once, whoever reads them, and a text that differs is another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_document
from cxl_offload.files.text import decode_json
from cxl_offload.plan.model.file import parse_model
from cxl_offload.plan.plan_file import parse_plan
from cxl_offload.topology import load_machine
from cxl_offload.topology.machine_file import parse_machine


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is composed from here on."""
    texts: list[str] = []
    compose = yaml.compose

    def counted(text: str, **options: Any) -> Any:
        texts.append(text)
        return compose(text, **options)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(yaml, "compose", counted)
    return texts


def test_same_text_is_composed_once_and_names_the_file_of_each_call(composed: list[str]) -> None:
    text = "# read twice\na: [1, x]"
    first, second = (read_document(text, file=f"{name}.yaml") for name in "ab")
    assert composed == [text]
    for name, document in (("a", first), ("b", second)):
        with pytest.raises(ConfigError, match=rf"^{name}\.yaml:2: a\[1\]"):
            document.mapping(["a"])["a"].items()[1].integer()


def test_text_that_differs_is_composed_anew(composed: list[str]) -> None:
    values = [read_document(f"# anew\na: {n}", file="a.yaml").entries()["a"].text() for n in "12"]
    assert values == ["1", "2"]
    assert len(composed) == 2


def test_long_text_and_refused_text_are_not_kept(composed: list[str]) -> None:
    long = "# long\n" + "a: 1\n" + "# x\n" * 5000
    for _ in range(2):
        read_document(long, file="a.yaml")
        with pytest.raises(ConfigError, match=r"^a\.yaml:1: not YAML"):
            read_document("[refused", file="a.yaml")
    assert composed == [long, "[refused"] * 2


def test_machine_that_is_loaded_twice_with_other_choices_is_another(composed: list[str]) -> None:
    load_machine("xeon8468")
    before = len(composed)
    one, four = (load_machine(f"xeon8468:snc={count}") for count in (1, 4))
    assert one.nodes != four.nodes or one.accesses != four.accesses
    assert len(composed) == before


@pytest.mark.parametrize(
    "read",
    [
        lambda text: read_document(text, file="f"),
        lambda text: parse_machine(text, file="f"),
        lambda text: parse_model(text, name="m", file="f"),
        lambda text: parse_plan(text, file="f"),
    ],
    ids=["document", "machine", "model", "plan"],
)
@pytest.mark.parametrize(
    "text", ["k: " + "x" * (1 << 20), "- 1\n" * (1 << 19)], ids=["long", "many"]
)
def test_file_of_another_kind_is_refused_before_it_takes_minutes(
    read: Callable[[str], object], text: str, composed: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"^f: [\d,]+ characters are too many; .*another kind\?$"):
        read(text)
    assert composed == []


def test_line_of_a_fault_is_found_in_huge_json_that_is_never_composed(composed: list[str]) -> None:
    text = json.dumps({"version": 1, "unknown": "x" * (1 << 20)}, indent=1)
    with pytest.raises(ConfigError, match=r"^f:3: unknown: unknown key"):
        decode_json(_Versioned, text, file="f")
    assert composed == []


@dataclass
class _Versioned:
    version: int
