"""Every kind is where its policy says, by asking the pages of the tensors that DeepSpeed holds."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Train

PLACES = {
    "fp32_master": ("bind:2", [2]),
    "fp32_grad": ("rdram", [1]),
    "exp_avg": ("cxl", [2]),
    "exp_avg_sq": ("weighted:ldram=3,cxl=1@64KiB", [0, 2]),
    "staging": ("rdram", [1]),
    "temp_grad": ("bind:2", [2]),
    "grad_accumulation": ("interleave:1,2@4KiB", [1, 2]),
    "params": ("interleave:0,1@16KiB", [0, 1]),
}
POLICY = {kind: policy for kind, (policy, _) in PLACES.items()}
IN_STAGE_2 = {*PLACES} - {"params"}
IN_STAGE_3 = {*PLACES} - {"temp_grad", "grad_accumulation"}


@pytest.fixture(scope="module")
def runs(train: Train) -> list[Any]:
    stage2 = {"stage": 2, "accumulation": 2}
    stage3 = {"stage": 3, "offload_param": True}
    return train(
        [
            stage2 | {"policy": POLICY},
            stage3 | {"policy": POLICY},
            stage2,
            stage3 | {"pin": False},
            stage2 | {"policy": "cxl"},
            stage2 | {"gpu_nodes": [1]},
        ]
    )


@pytest.mark.parametrize(("at", "kinds"), [(0, IN_STAGE_2), (1, IN_STAGE_3)], ids=["2", "3"])
def test_pages_of_every_kind_are_on_its_nodes_after_training(
    runs: list[Any], at: int, kinds: set[str]
) -> None:
    pages = runs[at]["pages"]
    assert set(pages) == kinds
    for kind in kinds:
        assert pages[kind]["placed"], kind
        assert pages[kind]["nodes"] == PLACES[kind][1], kind


@pytest.mark.parametrize(("at", "kinds"), [(0, IN_STAGE_2), (1, IN_STAGE_3)], ids=["2", "3"])
def test_pages_of_every_kind_are_on_its_nodes_before_the_first_step(
    runs: list[Any], at: int, kinds: set[str]
) -> None:
    pages = runs[at]["at_start"]
    # Accumulators are made in the first backward pass.
    assert set(pages) == kinds - {"grad_accumulation"}
    for kind, found in pages.items():
        assert found["placed"], kind
        assert found["nodes"] == PLACES[kind][1], kind


@pytest.mark.parametrize("at", [0, 1])
def test_rows_count_what_the_pages_say(runs: list[Any], at: int) -> None:
    run = runs[at]
    rows = {row[0]: row for row in run["rows"]}
    assert set(rows) == set(run["pages"])
    for kind, nbytes, requested, granted, pinned, _ in run["rows"]:
        assert sum(granted.values()) == nbytes
        assert sorted(int(node) for node in granted) == PLACES[kind][1]
        assert requested is not None
        assert not pinned  # there is no GPU
    assert rows["exp_avg"][1] == rows["fp32_master"][1] == 2 * rows["staging"][1]
    shares = rows["exp_avg_sq"][3]
    if at == 0:  # one tensor of 8 granules and a rest; stage 3 has a smaller one for each group
        assert 0.7 < shares["0"] / (shares["0"] + shares["2"]) < 0.8
    assert run["missed"] == []


def test_defaults_prefer_the_local_node(runs: list[Any]) -> None:
    for kind in runs[2]["pages"].values():
        assert kind["placed"]
        assert kind["nodes"] == [0]


def test_defaults_put_what_the_gpu_copies_on_its_node(runs: list[Any]) -> None:
    copied = {"staging", "temp_grad", "grad_accumulation"}
    for kind, found in runs[5]["pages"].items():
        assert found["nodes"] == ([1] if kind in copied else [0]), kind


def test_one_policy_places_every_kind(runs: list[Any]) -> None:
    assert {node for kind in runs[4]["pages"].values() for node in kind["nodes"]} == {2}


def test_a_kind_that_cannot_be_caught_is_named(runs: list[Any]) -> None:
    run = runs[3]
    assert not run["pages"]["staging"]["placed"]
    assert any("staging" in missed for missed in run["missed"])
    row = next(row for row in run["rows"] if row[0] == "staging")
    assert row[2] is None
    assert any("pin_memory is false" in note for note in row[5])
    assert "NOT PLACED" in run["table"]
    others = {kind for kind, found in run["pages"].items() if found["placed"]}
    assert others == {"fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq", "params"}
