"""The planner against every choice there is, its bounds and prices."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

from cxl_offload.plan.flexgen.bound import least_seconds
from cxl_offload.plan.flexgen.choice import granule_bytes, loads_of, phases_of
from cxl_offload.plan.flexgen.mode import Mode
from cxl_offload.plan.flexgen.planner import TIE_LOSS, Optimum, plan_flexgen
from cxl_offload.plan.flexgen.program import PlacementProgram

from .brute_force import best_by_hand, choices, fits, random_instance, single_modes

SMALL = (1, 2)


def mode_of(found: Optimum) -> Mode:
    """The mode of a planner's answer, with its stripes."""
    choice = found.choice
    stripes = choice.weight_stripe, choice.kv_stripe
    return Mode(choice.gpu_batch, *stripes, kv_on_gpu=not choice.cpu_attention)


@functools.cache
def planned(seed: int) -> Optimum | None:
    """The planner's answer to a random instance, for all tests that look at it."""
    job, hardware = random_instance(seed)
    return plan_flexgen(job, hardware, gpu_batches=SMALL, most_batches=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", range(10))
def test_planner_is_optimal_on_random_small_instances(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        job, hardware = random_instance(seed)

        found = planned(seed)
        draw, every = random.Random(seed), list(single_modes(job, hardware, SMALL))
        offered = [mode for mode in every if mode.weight_stripe is None is mode.kv_stripe]
        offered += draw.sample(every, min(len(every), 8))
        if found is not None:
            offered.append(mode_of(found))
        by_hand = best_by_hand(job, hardware, offered, 3)

        assert (found is None) == (by_hand is None), seed
        if found is None or by_hand is None:
            continue
        assert fits(job, hardware, found.choice, found.loads), seed
        assert found.phases.tokens_per_s >= by_hand[0] * (1 - 2 * TIE_LOSS), seed
        assert found.phases.tokens_per_s <= by_hand[0] * (1 + 1e-9), seed


@pytest.mark.slow(reason="prices every stripe")
@pytest.mark.parametrize("seed", [12, 18, 26])
def test_no_stripe_of_any_sixteenths_is_faster(seed: int) -> None:
    """All 15 ratios of two tiers, of weights and of KV, beside each other."""
    job, hardware = random_instance(seed)
    every = list(single_modes(job, hardware, (2,)))
    assert len({mode.kv_stripe for mode in every}) == 16

    found = plan_flexgen(job, hardware, gpu_batches=(2,), most_batches=1)
    by_hand = best_by_hand(job, hardware, every, 1)

    assert found is not None
    assert by_hand is not None
    assert found.phases.tokens_per_s == pytest.approx(by_hand[0], rel=2 * TIE_LOSS)


@pytest.mark.slow(reason="makes every random instance")
def test_random_instances_are_of_every_kind() -> None:
    """What the comparison above is worth: all homes and modes are best somewhere."""
    seen: set[str] = set()
    for seed in range(200):
        found = planned(seed)
        if found is None:
            seen.add("nothing")
            continue
        loads, choice = found.loads, found.choice
        seen |= {
            name
            for name, is_so in {
                "drive": loads.weights_drive + loads.kv_drive > 0,
                "gpu weights": loads.weights_gpu > 0,
                "two tiers": min(loads.host) > 0,
                "kv on gpu": not choice.cpu_attention,
                "cpu attention": choice.cpu_attention,
                "weights striped": choice.weight_stripe is not None,
                "kv striped": choice.kv_stripe is not None,
                "several batches": choice.batches > 1,
            }.items()
            if is_so
        }

    assert len(seen) == 9, seen


def test_bound_is_never_above_any_choice() -> None:
    for seed in range(200, 220):
        job, hardware = random_instance(seed)
        levels = job.levels()
        every = list(single_modes(job, hardware, SMALL))
        for mode in random.Random(seed).sample(every, min(len(every), 9)):
            bounds = least_seconds(job, hardware, mode, levels, np.array([1.0, 2.0]))
            for batches in (1, 2):
                least = min(
                    (
                        phases_of(job, hardware, choice, loads).total_s
                        for choice in choices(job, hardware, mode, batches)
                        if fits(
                            job, hardware, choice, loads := loads_of(job, hardware, choice, levels)
                        )
                    ),
                    default=np.inf,
                )
                assert bounds[batches - 1] <= least * (1 + 1e-9), (seed, mode)


@pytest.mark.slow(reason="prices hundreds of instances")
@pytest.mark.parametrize("first", range(300, 330, 10))
def test_program_and_equations_agree_on_seconds(first: int) -> None:
    for seed in range(first, first + 10):
        job, hardware = random_instance(seed)
        levels = job.levels()
        for mode in single_modes(job, hardware, SMALL):
            program = PlacementProgram(job, hardware, mode, batches=2, levels=levels, unit_s=1e-4)
            solved = program.solve()
            if solved is None:
                continue
            choice, seconds = solved
            loads = loads_of(job, hardware, choice, levels)
            total = phases_of(job, hardware, choice, loads).total_s
            assert seconds == pytest.approx(total, rel=1e-6), (seed, mode)


def test_granule_is_none_for_tensors_smaller_than_a_stripe() -> None:
    assert granule_bytes(16 * 8 * 4096 - 1, (8, 8)) is None
    assert granule_bytes(16 * 8 * 4096, (8, 8)) == 4096
    assert granule_bytes(1 << 40, (8, 8)) == 2 << 20
