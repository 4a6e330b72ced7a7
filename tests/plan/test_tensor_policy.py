"""Which tensors are interleaved, and when none is."""

from __future__ import annotations

import pytest

from cxl_offload.memory import parse_policy
from cxl_offload.plan.tensor_policy import (
    TensorUse,
    TierRate,
    tensor_policies,
    uses_by_kind,
    uses_of_trace,
)
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import load_machine

TIERS = (TierRate("ldram", 3e11), TierRate("cxl", 1e11))
USES = (
    TensorUse("a", 500, 8000),
    TensorUse("b", 400, 1500, 500),
    TensorUse("c", 99, 100),
    TensorUse("d", 1, 50),
)


def striped(**options: object) -> list[str]:
    made = tensor_policies(USES, TIERS, **options)  # type: ignore[arg-type]
    return [each.name for each in made if each.policy.startswith("weighted")]


def test_large_and_accessed_tensors_are_interleaved_last() -> None:
    made = tensor_policies(USES, TIERS)

    assert [each.name for each in made] == ["c", "d", "a", "b"]
    assert made[-1].policy == "weighted:ldram=3,cxl=1"
    for each in made:
        parse_policy(each.policy, load_machine("epyc9354-cxl-a"))


def test_cut_off_is_by_count_or_by_coverage() -> None:
    assert striped(top_k=1) == ["a"]
    assert striped(coverage=0.5) == ["a"]
    assert striped(coverage=0.95) == ["a", "b"]
    assert striped(min_share=0.45) == ["a"]


def test_unsaturated_memory_is_not_interleaved() -> None:
    assert striped(demand_bytes_per_s=2.9e11) == []
    assert striped(demand_bytes_per_s=3e11) == ["a", "b"]


def test_small_tensors_with_most_accesses_stay_local() -> None:
    made = tensor_policies([*USES, TensorUse("busy", 2, 10**6)], TIERS)

    assert {each.policy for each in made} == {"preferred:ldram,cxl"}
    assert "most accesses go to small tensors" in made[0].reason


def test_one_tier_or_unknown_rates_interleave_nothing() -> None:
    for tiers in (TIERS[:1], (TIERS[0], TierRate("cxl", float("inf")))):
        made = tensor_policies(USES, tiers)
        assert all(each.policy.startswith("preferred:ldram") for each in made)


def test_kinds_alone_keep_optimizer_states_local() -> None:
    uses = uses_by_kind({"kv": 600, "exp_avg": 300, "act": 100})
    made = {each.name: each.policy for each in tensor_policies(uses, TIERS)}

    assert made["kv"] == "weighted:ldram=3,cxl=1"
    assert made["exp_avg"] == made["act"] == "preferred:ldram,cxl"


def test_trace_of_a_run_gives_uses_by_kind() -> None:
    trace = Trace(
        [
            Event("decode", 0, "load_weight", "h2d", "weights", {0: 100, 2: 50}, {}),
            Event("decode", 0, "compute", "cpu", "kv", {2: 70}, {2: 7}),
            Event("decode", 0, "hidden", "d2h", "act", {}, {0: 9}),
        ]
    )

    weights, kv = uses_of_trace(trace, {"weights": 1000, "kv": 400})

    assert (weights.read_bytes, weights.written_bytes) == (150, 0)
    assert (kv.read_bytes, kv.written_bytes, kv.accesses) == (70, 7, 77 / 64)


@pytest.mark.parametrize(
    ("uses", "tiers", "options", "message"),
    [
        (USES, (), {}, "at least the local one"),
        ((USES[0], USES[0]), TIERS, {}, "'a' is named twice"),
        (USES, TIERS, {"coverage": 0}, "coverage 0"),
    ],
)
def test_impossible_requests_are_refused(
    uses: tuple[TensorUse, ...], tiers: tuple[TierRate, ...], options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_policies(uses, tiers, **options)


def test_reason_of_a_tensor_that_stays_local_is_what_was_compared() -> None:
    made = {each.name: each.reason for each in tensor_policies(USES, TIERS, top_k=1)}
    assert made["b"] == "large, but less accessed (31.2 lines) than what is interleaved"
    assert made["c"] == "small: 0.099 of all bytes, and from 0.1 a tensor is large"
    idle = tensor_policies([*USES, TensorUse("idle", 5000)], TIERS, min_share=0.01)
    assert {e.name: e.reason for e in idle}["idle"] == "large, but never accessed"


def test_kind_that_is_always_kept_local_is_not_called_small() -> None:
    """30 GiB of exp_avg were "small, or seldom accessed"."""
    uses = uses_by_kind({"exp_avg": 30 << 30, "weights": 30 << 30, "act": 30 << 30})
    made = {each.name: each.reason for each in tensor_policies(uses, TIERS)}
    assert "optimizer states ran 2-18 % slower interleaved" in made["exp_avg"]
    assert "written all the time" in made["act"]
