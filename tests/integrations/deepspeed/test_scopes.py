"""What is placed and what is not: blocks, engines that were there, other optimizers, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cxl_offload.integrations.deepspeed.objects import unplaced

from .conftest import Train
from .test_placement import PLACES, POLICY

AT_PLACE = {"fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq"}


@pytest.fixture(scope="module")
def runs(train: Train) -> dict[str, Any]:
    stage2 = {"stage": 2, "accumulation": 2, "set": True}
    jobs = {
        "stock": stage2 | {"stock": True},
        "attached": stage2 | {"attach": True, "policy": POLICY},
        "stock torch": {"stage": 2, "optimizer": "AdamW", "stock": True},
        "torch": {"stage": 2, "optimizer": "AdamW", "policy": POLICY},
        "two": {"stage": 2, "what": "two engines"},
        "twice": {"stage": 2, "what": "placed twice"},
        "refused": {"stage": 2, "what": "refused", "room": 1 << 20},
        "no offload": {"stage": 2, "what": "no offload"},
        # Last, because stage 3 changes torch's linear.
        "attached in stage 3": {
            "stage": 3,
            "offload_param": True,
            "attach": True,
            "policy": POLICY,
        },
    }
    jobs["inference"] = {"stage": 3, "offload_param": True, "what": "inference"}
    born = {"stage": 3, "offload_param": True, "zero_init": True}
    jobs |= {"stock zero.Init": born | {"stock": True}, "zero.Init": born | {"policy": POLICY}}
    return dict(zip(jobs, train(list(jobs.values())), strict=True))


def test_model_made_under_zero_init_is_placed_in_the_same_block(runs: dict[str, Any]) -> None:
    run = runs["zero.Init"]
    assert run["losses"] == runs["stock zero.Init"]["losses"]
    assert run["digest"] == runs["stock zero.Init"]["digest"]
    assert run["missed"] == []
    for kind, found in run["pages"].items():
        assert found["placed"], kind
        assert found["nodes"] == PLACES[kind][1], kind
    assert run["held_after_destroy"] == 0


def test_engine_that_was_there_is_moved_and_trains_the_same(runs: dict[str, Any]) -> None:
    stock, attached = runs["stock"], runs["attached"]
    assert attached["losses"] == stock["losses"]
    assert attached["digest"] == stock["digest"]
    assert attached["set_right"]
    for kind, found in attached["pages"].items():
        assert found["placed"], kind
        assert found["nodes"] == PLACES[kind][1], kind


def test_engine_of_stage_3_that_was_there_names_what_stays(runs: dict[str, Any]) -> None:
    run = runs["attached in stage 3"]
    placed = {kind for kind, found in run["pages"].items() if found["placed"]}
    assert placed == AT_PLACE
    assert {missed.partition(":")[0] for missed in run["missed"]} == {"staging", "params"}


def test_states_of_other_optimizers_are_moved_after_their_first_step(runs: dict[str, Any]) -> None:
    run = runs["torch"]
    assert run["losses"] == runs["stock torch"]["losses"]
    assert run["digest"] == runs["stock torch"]["digest"]
    for kind in AT_PLACE:
        assert run["pages"][kind]["placed"], kind
        assert run["pages"][kind]["nodes"] == PLACES[kind][1], kind


def test_two_engines_keep_policies_of_their_own(runs: dict[str, Any]) -> None:
    run = runs["two"]
    assert {node for kind in run["first"].values() for node in kind["nodes"]} == {2}
    assert {node for kind in run["second"].values() for node in kind["nodes"]} == {1}
    assert run["second_after_first_is_destroyed"] == run["second"]
    assert run["losses"][0] == run["losses"][1]  # same model, same data
    assert run["losses"][2] == run["losses"][3]
    assert run["watched"] == [True, True, False]


def test_engine_is_placed_by_one_only(runs: dict[str, Any]) -> None:
    """Two would move its tensors to and fro in every step."""
    run = runs["twice"]
    assert "this engine is placed already" in run["said"]
    assert run["outer"] == 0
    for when in ("before", "after"):
        assert {node for kind in run[when].values() for node in kind["nodes"]} == {2}
    moved = run["again"]["exp_avg"]
    assert moved["placed"]
    assert set(moved["nodes"]) == {1}


def test_pinned_memory_of_nobody_is_placed_in_a_block_and_named_after_it(
    runs: dict[str, Any],
) -> None:
    run = runs["two"]
    assert run["inside"] == [[1], [1], [1]]
    assert run["kept"]
    assert run["outside"] is None
    assert run["no_engine"] == []
    assert any("two_engines: 16 KiB" in missed for missed in run["missed"])
    assert run["unpinned"] == 0


def test_node_without_room_is_an_error_that_leaves_nothing_behind(runs: dict[str, Any]) -> None:
    run = runs["refused"]
    assert "node 2" in run["error"]
    assert run["pages"]["exp_avg"]["nodes"] == [1]
    assert run["pages"]["exp_avg_sq"]["nodes"] == [0]  # not the policy of the block that failed
    assert run["missed"] == []


def test_parameters_of_an_engine_without_an_optimizer_are_placed(runs: dict[str, Any]) -> None:
    run = runs["inference"]
    assert run["outputs"][0] == run["outputs"][1] == run["outputs"][2]
    for rows, missed in zip(run["rows"], run["missed"], strict=True):
        assert [row[0] for row in rows] == ["params"]
        assert list(rows[0][2]) == ["2"]
        assert missed == [
            "optimizer: not offloaded (zero_optimization.offload_optimizer is not set)"
        ]


def test_engine_without_offload_says_so_and_holds_nothing(runs: dict[str, Any]) -> None:
    run = runs["no offload"]
    for missed, rows in run["told"]:
        assert "not offloaded" in missed[0]
        assert rows == 0
    assert run["held"] == 0


def engine(optimizer: Any, params: Any = None, **zero: Any) -> Any:
    """Answers as an engine of a kind that this machine cannot run."""
    return SimpleNamespace(
        zero_offload_optimizer=lambda: optimizer,
        zero_offload_param=lambda: params,
        optimizer=SimpleNamespace(**zero),
    )


def test_what_no_policy_reaches_is_named() -> None:
    stage3: dict[str, Any] = {"fp32_partitioned_groups_flat": []}
    nvme = SimpleNamespace(device="nvme", super_offload=False, pin_memory=True)
    cpu = SimpleNamespace(device="cpu", super_offload=False, pin_memory=True)
    superchip = SimpleNamespace(device="cpu", super_offload=True, pin_memory=True)
    assert unplaced(engine(cpu)) == ()
    assert "not offloaded" in unplaced(engine(None))[0]
    both = unplaced(engine(nvme, nvme, **stage3))
    assert [each.partition(":")[0] for each in both] == [
        "optimizer states and fp32 parameters",
        "params",
    ]
    assert "SuperOffload" in unplaced(engine(superchip, **stage3))[0]
    assert "ZenFlow" in unplaced(engine(cpu, zenflow=True))[0]
