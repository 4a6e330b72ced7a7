"""Steps that advance together must take what each takes alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.sim import Event, Trace, replay
from cxl_offload.sim.columns import Columns
from cxl_offload.sim.lockstep import speeds_together
from cxl_offload.sim.resources import Engines, Resources
from cxl_offload.sim.sharing import speeds
from cxl_offload.sim.work import Work

from .machines import GB, event, machine

MIB = 1 << 20
STEPS = 40

LAYOUT = st.lists(
    st.tuples(
        st.sampled_from(["h2d", "d2h", "cpu", "gpu", "nvme"]),
        st.sampled_from("abcd"),
        st.sets(st.sampled_from([0, 1, 2]), min_size=1),
    ),
    min_size=1,
    max_size=7,
)


def draw_event(draw: random.Random, engine: Any, queue: str, nodes: set[int], step: int) -> Event:
    """Random sizes, a tenth of them nothing."""

    def sizes(wanted: bool) -> dict[int, int]:
        if not wanted:
            return {}
        return {node: draw.randrange(64 * MIB) * (draw.random() > 0.1) for node in sorted(nodes)}

    return event(
        engine,
        sizes(engine in ("h2d", "cpu")),
        sizes(engine in ("d2h", "cpu", "nvme")),
        step=step,
        queue=queue,
        accelerator_bytes=draw.randrange(GB) if engine == "gpu" else 0,
        flops=draw.random() * 1e9 if engine == "gpu" else 0.0,
    )


def alike_steps(layout: list[tuple[Any, str, set[int]]], seed: int) -> Trace:
    draw = random.Random(seed)
    return Trace(
        draw_event(draw, engine, queue, nodes, step)
        for step in range(STEPS)
        for engine, queue, nodes in layout
    )


@settings(max_examples=40, deadline=None)
@given(LAYOUT, st.integers(0, 10**6))
def test_alike_steps_take_what_each_takes_as_a_trace_of_its_own(
    layout: list[tuple[Any, str, set[int]]], seed: int
) -> None:
    together = alike_steps(layout, seed)
    timeline = replay(together, machine())
    begin = 0.0
    for step in range(STEPS):
        chosen = [at for at, one in enumerate(together) if one.step == step]
        alone = replay(Trace([together.events[at] for at in chosen]), machine())
        # One at a time takes proportions to a millionth.
        near = {"rtol": 1e-5, "atol": 1e-9}
        np.testing.assert_allclose(timeline.starts_s[chosen] - begin, alone.starts_s, **near)
        np.testing.assert_allclose(timeline.ends_s[chosen] - begin, alone.ends_s, **near)
        begin = float(timeline.ends_s[chosen].max())
    assert timeline.seconds == pytest.approx(begin)


@settings(max_examples=40, deadline=None)
@given(LAYOUT, st.integers(0, 10**6))
def test_speeds_of_many_steps_are_those_of_each(
    layout: list[tuple[Any, str, set[int]]], seed: int
) -> None:
    trace = alike_steps(layout, seed)
    resources = Resources(
        machine(), initiator=0, gpu=None, engines=Engines(), fabric=None, cache=None
    )
    columns = Columns.of(trace.events)
    demands = [resources.of(group) for group in columns.groups]
    work = Work.of(columns, demands, {})
    heads = np.arange(len(trace)).reshape(STEPS, len(layout))
    found = speeds_together(work, heads)
    for step in range(STEPS):
        each: list[dict[int, float]] = []
        for number in heads[step].tolist():
            kind, row = work.kind_of[number], work.row_of[number]
            seconds = zip(demands[kind].resources, demands[kind].seconds[row], strict=True)
            each.append({resource: value for resource, value in seconds if value > 0})
        moving = [at for at, demand in enumerate(each) if demand]
        if moving:
            expected = speeds([each[at] for at in moving])
            np.testing.assert_allclose(found[step, moving], expected, rtol=1e-6)
