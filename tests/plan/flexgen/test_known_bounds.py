"""Bounds of known hardware spare those of better hardware, and hide none that matter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from cxl_offload.arrays import Floats
from cxl_offload.plan.decoding.engine import OWN, STOCK, EngineRates
from cxl_offload.plan.flexgen.bound import least_seconds
from cxl_offload.plan.flexgen.job import flexgen_job
from cxl_offload.plan.flexgen.known_bounds import KnownBounds, gains_of
from cxl_offload.plan.flexgen.mode import Mode
from cxl_offload.plan.flexgen.planner import modes
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.prices import resources
from cxl_offload.topology import load_machine

BATCHES = np.arange(1.0, 41.0)


def better_at_random(draw: random.Random, hardware: Hardware) -> Hardware:
    nodes = tuple(
        replace(
            node,
            usable_bytes=node.usable_bytes + draw.choice((0, 1, 40)) * 2**30,
            read_bytes_per_s=node.read_bytes_per_s * draw.choice((1.0, 1.3)),
            copy_bytes_per_s=node.copy_bytes_per_s * draw.choice((1.0, 1.2)),
        )
        for node in hardware.nodes
    )
    return replace(
        hardware,
        nodes=nodes,
        link_bytes_per_s=hardware.link_bytes_per_s * draw.choice((1.0, 1.5)),
        gpu_usable_bytes=hardware.gpu_usable_bytes + draw.choice((0, 3)) * 2**30,
        drive_read_bytes_per_s=hardware.drive_read_bytes_per_s * draw.choice((1.0, 1.1)),
    )


@pytest.mark.parametrize("engine", [OWN, STOCK])
def test_no_batch_of_better_hardware_is_hidden_that_may_be_fast(engine: EngineRates) -> None:
    job = flexgen_job(load_model("opt-13b"), prompt=512, generated=32, engine=engine)
    hardware, levels = hardware_of(load_machine("epyc9354-cxl-a")), job.levels()

    def bound_of(offered: Hardware, mode: Mode) -> Floats:
        return least_seconds(job, offered, mode, levels, BATCHES)

    draw, known, spared = random.Random(3), KnownBounds(hardware, bound_of), 0
    for _ in range(6):
        better = better_at_random(draw, hardware)
        told = known.on(better)
        for mode in draw.sample(modes(job, better), 8):
            bounds = bound_of(better, mode)
            most = np.median(bounds / BATCHES) * BATCHES * draw.choice((0.6, 1.0))
            asked = told.may_be_below(mode, most)
            assert set(np.flatnonzero(bounds < most)) <= set(asked)
            spared += len(BATCHES) - len(asked)
    assert spared > 0


def test_worse_and_other_hardware_is_told_nothing() -> None:
    hardware = hardware_of(load_machine("epyc9354-cxl-a"))
    assert gains_of(hardware, hardware) == (1.0, 0.0)
    less = replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s / 2)
    assert gains_of(hardware, less) is None
    assert gains_of(hardware, hardware.without("cxl")) is None
    assert gains_of(hardware, replace(hardware, cores=99)) is None


def test_every_price_is_asked_of_hardware_that_bounds_are_known_for() -> None:
    hardware = hardware_of(load_machine("epyc9354-cxl-a"))
    for resource in resources(hardware):
        gains = gains_of(hardware, resource.more)
        assert gains is not None
        assert gains > (1.0, 0.0)
