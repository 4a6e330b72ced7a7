"""Batches come in the order of their exact bounds, though few of these are worked out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cxl_offload.plan.flexgen import turns as turns_module
from cxl_offload.plan.flexgen.bound import least_seconds, rough_seconds
from cxl_offload.plan.flexgen.job import FlexGenJob, flexgen_job
from cxl_offload.plan.flexgen.mode import Mode
from cxl_offload.plan.flexgen.planner import modes
from cxl_offload.plan.flexgen.turns import Turns
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.topology import load_machine

from .brute_force import random_instance


def mixtral() -> tuple[FlexGenJob, Hardware]:
    """28 cuts of the weights, four host nodes' worth of room, and a drive."""
    job = flexgen_job(load_model("mixtral-8x7b"), prompt=512, generated=32)
    return job, hardware_of(load_machine("epyc9354-cxl-a"))


def in_order(
    job: FlexGenJob, hardware: Hardware, offered: list[Mode], batches: Any
) -> list[tuple[float, int, Mode]]:
    """Every batch of every mode that fits, sorted by the exact bound."""
    found = []
    for at, mode in enumerate(offered):
        seconds = least_seconds(job, hardware, mode, job.levels(), batches)
        each = seconds / batches / mode.gpu_batch
        found += [(float(each[n]), at, n, mode) for n in np.flatnonzero(each < np.inf)]
    return [
        (bound, int(batches[n]), mode) for bound, _, n, mode in sorted(found, key=lambda t: t[:3])
    ]


@pytest.mark.parametrize("seed", range(400, 412))
def test_batches_come_in_the_order_of_all_exact_bounds(seed: int) -> None:
    job, hardware = random_instance(seed)
    offered, batches = modes(job, hardware, gpu_batches=(1, 2)), np.arange(1.0, 6.0)
    turns = Turns(job, hardware, job.levels())
    for mode in offered:
        turns.offer(mode, batches)

    assert list(iter(turns.next, None)) == in_order(job, hardware, offered, batches)


@pytest.mark.parametrize("seed", range(420, 450))
def test_rough_bound_is_never_above_the_exact_one(seed: int) -> None:
    job, hardware = random_instance(seed)
    batches = np.arange(1.0, 9.0)
    for mode in modes(job, hardware, gpu_batches=(1, 2, 8)):
        rough = rough_seconds(job, hardware, mode, job.levels(), batches)
        assert np.all(rough <= least_seconds(job, hardware, mode, job.levels(), batches)), mode


def test_rough_bound_is_below_the_exact_one_where_a_drive_helps_and_costs() -> None:
    """What the exact one is for: else the order above would be that of the rough ones."""
    lower = 0
    for seed in range(420, 450):
        job, hardware = random_instance(seed)
        for mode in modes(job, hardware, gpu_batches=(1, 2)):
            rough, exact = (
                bound(job, hardware, mode, job.levels(), np.arange(1.0, 9.0))
                for bound in (rough_seconds, least_seconds)
            )
            lower += np.count_nonzero((exact < np.inf) & (rough < 0.99 * exact))
    assert lower > 10


def test_few_exact_bounds_are_worked_out_for_the_first_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, hardware = mixtral()
    offered, batches = modes(job, hardware), np.arange(1.0, 300.0)
    asked: list[int] = []

    def counted(*arguments: Any) -> Any:
        asked.append(len(arguments[-1]))
        return least_seconds(*arguments)

    monkeypatch.setattr(turns_module, "least_seconds", counted)
    turns = Turns(job, hardware, job.levels())
    for mode in offered:
        turns.offer(mode, batches)
    assert not asked
    first = list(itertools.islice(iter(turns.next, None), 20))
    assert 0 < sum(asked) < len(offered) * len(batches) / 4
    assert first == in_order(job, hardware, offered, batches)[:20]


def test_what_is_put_first_comes_first_and_hides_nothing() -> None:
    job, hardware = random_instance(400)
    offered, batches = modes(job, hardware, gpu_batches=(1, 2)), np.arange(1.0, 4.0)
    turns = Turns(job, hardware, job.levels())
    for mode in offered:
        turns.offer(mode, batches)
    turns.put_first(offered[-1], 7)

    assert turns.next() == (-1.0, 7, offered[-1])
    assert list(iter(turns.next, None)) == in_order(job, hardware, offered, batches)
