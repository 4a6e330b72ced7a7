"""A wrong machine file is refused with its file and the line to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.topology import load_machine, parse_machine

GOOD = """\
name: small
description: two nodes and a card
paper: "Somebody et al., A Machine"
initiator: 0
nodes:
  - {id: 0, kind: dram, cpus: {value: 0-3, source: T1}, capacity: {value: 8 GiB, source: T1}}
  - {id: 1, kind: dram, cpus: {value: 4-7, source: T1}, capacity: {value: 8 GiB, source: T1}}
  - {id: 2, kind: cxl, capacity: {value: 4 GiB, source: T1}}
distances:
  source: T2
  rows:
    0: {0: 10, 1: 20, 2: 30}
    1: {0: 20, 1: 10, 2: 40}
    2: {0: 30, 1: 40, 2: 10}
accesses:
  - {from: 0, to: 2, read_latency: {value: 292 ns, source: T3}}
  - {from: 0, to: 2, read_bandwidth: {value: 38.4 GB/s, source: T3, bound: upper}}
gpus:
  - name: A10
    node: 0
    memory: {value: 24 GiB, source: T1}
    link: {peak: {value: 32 GB/s, assumed: true, reason: data sheet}}
dma_paths:
  - {gpu: A10, node: 2, h2d: {value: 30 GB/s, source: T4}}
drives:
  - {name: NVMe, capacity: {value: 1 TB, source: T1}}
tiers: {ldram: [0], rdram: [1], cxl: [2], nvme: []}
facts:
  - {name: cxl_over_ldram_latency_ratio, value: 2.1 x, source: T5}
notes: [made up]
"""


def test_the_good_file_is_good() -> None:
    machine = parse_machine(GOOD, file="small.yaml")
    access = machine.access(0, 2)
    assert access is not None
    assert (access.read_latency_ns, access.read_bandwidth_bytes_per_s) == (292, 38.4e9)
    assert machine.fact("cxl_over_ldram_latency_ratio") == 2.1
    assert machine.fact("nothing_ns") is None


# what to replace, with what, the line that must be named, words that must be there
WRONG = {
    "unknown top key": ("notes:", "nodes_extra:", 30, "unknown key 'nodes_extra'"),
    "misspelt key": ("initiator: 0", "initator: 0", 4, "did you mean 'initiator'"),
    "missing key": ('paper: "Somebody et al., A Machine"\n', "", 1, "key 'paper' is missing"),
    "key twice": ("notes: [made up]", "name: again", 30, "appears twice"),
    "unit missing": (
        "8 GiB, source: T1}}\n  - {id: 1",
        "8, source: T1}}\n  - {id: 1",
        6,
        "known units",
    ),
    "bandwidth without per second": ("38.4 GB/s", "38.4 GB", 17, "GB/s"),
    "latency with a size": ("292 ns", "292 GB", 16, "known units: ns"),
    "size with a rate": ("value: 4 GiB", "value: 4 GiB/s", 8, "GiB"),
    "number without a source": (
        "{value: 4 GiB, source: T1}",
        "{value: 4 GiB}",
        8,
        "needs a source",
    ),
    "bare number": (
        "capacity: {value: 4 GiB, source: T1}",
        "capacity: 4 GiB",
        8,
        "must be a mapping",
    ),
    "negative capacity": ("value: 4 GiB", "value: -4 GiB", 8, "-4 GiB"),
    "capacity 0": ("value: 4 GiB", "value: 0 GiB", 8, "more than 0"),
    "bandwidth 0": ("38.4 GB/s", "0 GB/s", 17, "more than 0"),
    "assumed without a reason": (
        "assumed: true, reason: data sheet",
        "assumed: true",
        22,
        "needs a reason",
    ),
    "assumed with a source": ("reason: data sheet", "reason: x, source: y", 22, "not a source"),
    "reason without assumed": ("bound: upper", "reason: because", 17, "goes with assumed"),
    "unknown bound": ("bound: upper", "bound: about", 17, "upper or lower"),
    "unknown kind": ("kind: cxl", "kind: cxll", 8, "no kind of node"),
    "node twice": ("- {id: 1,", "- {id: 0,", 7, "node 0 appears twice"),
    "node id below 0": ("- {id: 1,", "- {id: -1,", 7, "at least 0"),
    "CPU list": ("value: 4-7", "value: 7-4", 7, "backwards"),
    "CPUs of no kernel": ("value: 4-7", "value: 4-8192", 7, "CPU 8192 of 4-8192: 8191 is the last"),
    "initiator without CPUs": ("initiator: 0", "initiator: 2", 4, "not a node with CPUs"),
    "unknown tier": ("nvme: []", "l4: []", 27, "tier 'l4' is unknown"),
    "tier of another kind": ("cxl: [2]", "cxl: [1]", 27, "node 1 is dram"),
    "node in two tiers": ("rdram: [1]", "rdram: [0]", 27, "already in a tier"),
    "tier with an absent node": ("cxl: [2]", "cxl: [3]", 27, "node 3 is not one of 0, 1, 2"),
    "access to an absent node": (
        "- {from: 0, to: 2, read_b",
        "- {from: 0, to: 5, read_b",
        17,
        "node 5",
    ),
    "access given twice": (
        "read_bandwidth: {value: 38.4 GB/s",
        "read_latency: {value: 3 ns",
        17,
        "twice",
    ),
    "distance row missing": ("    2: {0: 30, 1: 40, 2: 10}\n", "", 11, "node 2 has no row"),
    "distance column missing": ("1: {0: 20, 1: 10, 2: 40}", "1: {0: 20, 1: 10}", 13, "node 2"),
    "distance of an absent node": ("    2: {0: 30", "    7: {0: 30", 14, "'7' is no node"),
    "distance below 10": ("1: 20, 2: 30", "1: 5, 2: 30", 12, "at least 10"),
    "own distance not 10": ("0: {0: 10, 1: 20", "0: {0: 11, 1: 20", 12, "itself"),
    "copy to an unknown GPU": ("gpu: A10", "gpu: A100", 24, "'A100' is no GPU"),
    "GPU on an absent node": ("    node: 0", "    node: 9", 20, "node 9"),
    "fact without a unit": (
        "cxl_over_ldram_latency_ratio",
        "cxl_latency",
        29,
        "must end in its unit",
    ),
    "fact of another unit": ("2.1 x", "2.1 ns", 29, "ratio"),
    "unknown variant": (
        "- {from: 0, to: 2, read_b",
        "- {when: {snc: 4}, from: 0, to: 2, read_b",
        17,
        "no variant",
    ),
    "not YAML": ("notes: [made up]", "notes: [made", 31, "not YAML"),
    "tab": ("notes: [made up]", "\tnotes: x", 30, "not YAML"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused_at_its_line(tmp_path: Path, name: str) -> None:
    old, new, line, words = WRONG[name]
    assert GOOD.count(old) == 1, "the replacement must hit one place"
    path = tmp_path / "wrong.yaml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    assert (caught.value.file, caught.value.line) == (str(path), line), str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a list\n", "only text", "\x00", "{: : }"])
def test_what_is_no_machine_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_machine(text, file="x.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_machine(path)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 40))
def test_a_damaged_file_loads_or_is_refused_but_never_crashes(start: int, length: int) -> None:
    damaged = GOOD[:start] + GOOD[start + length :]
    refused = None
    try:
        parse_machine(damaged, file="x.yaml")
    except ConfigError as error:
        refused = str(error)
    assert refused is None or refused.startswith("x.yaml")
