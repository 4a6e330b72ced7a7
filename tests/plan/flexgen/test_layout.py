"""Cuts of weights: every planned cut is found again in the bytes before it, and in no others."""

from __future__ import annotations

import itertools
import random

import pytest

from cxl_offload.plan.flexgen.choice import Choice, loads_of
from cxl_offload.plan.flexgen.job import flexgen_job
from cxl_offload.plan.flexgen.layout import cuts_at, weight_cuts, weight_homes
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.topology import load_machine


def test_bytes_of_a_choice_say_its_cuts() -> None:
    rng = random.Random(1)
    job = flexgen_job(load_model("opt-125m"), prompt=64, generated=16)
    hardware = hardware_of(load_machine("epyc9354-cxl-a"))
    levels = job.levels()
    for _ in range(400):
        cuts = tuple(sorted(rng.randrange(len(levels)) for _ in range(4)))
        choice = Choice(1, 2, cuts, None, (0, 1, 0, 0, 0), None, True, 0)
        loads = loads_of(job, hardware, choice, levels)
        held = [loads.weights_drive, *loads.weights_host, loads.weights_gpu]

        found = cuts_at(job.groups, tuple(itertools.accumulate(held))[:-1])

        placed = [0] * len(held)
        for group in job.groups:
            for size, home in zip(group.sizes, weight_homes(group.sizes, found), strict=True):
                placed[home] += 2 * size * group.count
        assert placed == held


def test_bytes_inside_a_weight_are_refused_with_the_nearest_cut() -> None:
    groups = flexgen_job(load_model("opt-125m"), prompt=64, generated=16).groups
    cuts = [cut.bytes_below for cut in weight_cuts(groups)]
    inside = (cuts[3] + cuts[4]) // 2 - 1

    with pytest.raises(ValueError, match=f"{inside} bytes .* through a weight.* has {cuts[3]}$"):
        cuts_at(groups, [0, inside])


def test_cuts_ascend_from_nothing_to_everything() -> None:
    job = flexgen_job(load_model("opt-125m"), prompt=64, generated=16)
    cuts = weight_cuts(job.groups)
    assert (cuts[0].bytes_below, cuts[-1].bytes_below) == (0, job.weight_bytes)
    for before, after in itertools.pairwise(cuts):
        assert before.bytes_below < after.bytes_below
        assert before.high_percent == after.low_percent
