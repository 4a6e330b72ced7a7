"""Short documents are composed once, whoever reads them, and a text that differs is another one."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_document
from cxl_offload.topology import load_machine


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
