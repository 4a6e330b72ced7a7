"""The page of machine files has every key that a machine file may have, and no other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.files import Field, MappedFields
from cxl_offload.topology import NodeKind, parse_machine
from cxl_offload.topology.model import TIER_NAMES
from cxl_offload.topology.quantity import SOURCE_KEYS

from .blocks import ROOT, read_blocks

PAGE = ROOT / "docs/machines.md"
TEXT = PAGE.read_text(encoding="utf-8")
(EXAMPLE,) = (block.text for block in read_blocks(PAGE) if block.language == "yaml")

HEADINGS = {"A quantity": "a quantity", "The file": ""}
QUANTITIES = ("size", "rate", "time", "count", "operations", "CPUs")
"""What the tables of the page call the values that are quantities."""

Keys = dict[tuple[str, str], bool]
"""Section and key, and whether it is needed."""


class Read:
    """What is asked of a machine file while it is read."""

    def __init__(self) -> None:
        self.keys: Keys = {}
        self.used: set[tuple[str, str]] = set()
        self.quantities: set[str] = set()

    def mapping(
        self, field: Field, required: Iterable[str] = (), optional: Iterable[str] = ()
    ) -> MappedFields:
        section = re.sub(r"\[\d+\]", "", field.path)
        section = "variants" if section.startswith("variants.") else section
        needed = tuple(required)
        if needed == ("value",) and section != "facts":
            self.quantities.add(section)
            section = "a quantity"
        for key in (*needed, *optional):
            at = section, key
            self.keys[at] = key in needed or self.keys.get(at, False)
        found = STOCK(field, needed, optional)
        self.used |= {(section, key) for key in found}
        return found


STOCK = Field.mapping


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The example of the page, with all that was asked of it."""
    found = Read()
    monkeypatch.setattr(Field, "mapping", lambda *given, **named: found.mapping(*given, **named))
    parse_machine(EXAMPLE, file=PAGE.name)
    found.keys |= {("tiers", name): False for name in TIER_NAMES}
    return found


def documented() -> tuple[Keys, dict[str, set[str]]]:
    """The keys of the page's tables, and those of each kind of value by their path."""
    keys: Keys = {}
    values = defaultdict(set)
    section = ""
    for line in TEXT.splitlines():
        if heading := re.fullmatch(r"##+ `?([^`]+)`?", line):
            section = HEADINGS.get(heading[1], heading[1])
        elif line.startswith("| `"):
            names, needed, value = (cell.strip() for cell in line.split("|")[1:4])
            for name in re.findall(r"`(\w+)`", names):
                keys[section, name] = needed == "yes"
                values[value].add(f"{section}.{name}".lstrip("."))
    return keys, values


def test_page_has_every_key_and_says_which_are_needed(read: Read) -> None:
    assert documented()[0] == read.keys


def test_page_says_which_values_are_quantities(read: Read) -> None:
    values = documented()[1]
    assert set().union(*(values[kind] for kind in QUANTITIES)) == read.quantities


def test_example_has_every_key(read: Read) -> None:
    """So no key of a list that it lacks could be missing in the tables."""
    of_facts = {(section, key) for section in ("distances", "facts") for key in SOURCE_KEYS}
    of_when = {(section, key) for section, key in read.keys if key == "when"}
    tiers = {(section, key) for section, key in read.keys if section == "tiers"}
    assert read.used >= read.keys.keys() - of_facts - of_when - tiers
    assert read.used & of_when


def test_key_that_is_added_and_not_documented_is_found(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxl_offload.topology.machine_file._OPTIONAL", ("initiator", "rack"))
    document = "name: a\ndescription: b\npaper: c\ntiers: {}\nrack: 7\nnodes: []\n"
    with pytest.raises(ConfigError, match="at least one node"):
        parse_machine(document, file=PAGE.name)
    assert read.keys.keys() - documented()[0].keys() == {("", "rack")}


def test_kinds_of_nodes_are_in_the_page() -> None:
    assert all(f"`{kind.value}`" in TEXT for kind in NodeKind)


@pytest.mark.parametrize("choice", ["asic", "fpga"])
def test_example_is_read_for_every_choice(choice: str) -> None:
    machine = parse_machine(EXAMPLE, file=PAGE.name, variant={"device": choice})
    access = machine.access(0, 1)
    assert access is not None
    assert access.read_latency_ns == 270
    assert access.read_bandwidth_bytes_per_s is not None
