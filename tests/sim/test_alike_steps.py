"""A step takes what it takes alone, wherever it stands; the core refuses bad input."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload import _C
from cxl_offload.sim import Event, Trace, replay

from .machines import GB, event, machine

MIB = 1 << 20
STEPS = 12

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


@settings(max_examples=40, deadline=None)
@given(LAYOUT, st.integers(0, 10**6))
def test_a_step_takes_what_it_takes_as_a_trace_of_its_own(
    layout: list[tuple[Any, str, set[int]]], seed: int
) -> None:
    draw = random.Random(seed)
    together = Trace(
        draw_event(draw, engine, queue, nodes, step)
        for step in range(STEPS)
        for engine, queue, nodes in layout
    )
    timeline = replay(together, machine())
    begin = 0.0
    for step in range(STEPS):
        chosen = [at for at, one in enumerate(together) if one.step == step]
        alone = replay(Trace([together.events[at] for at in chosen]), machine())
        near = {"rtol": 1e-9, "atol": 1e-9}
        np.testing.assert_allclose(timeline.starts_s[chosen] - begin, alone.starts_s, **near)
        np.testing.assert_allclose(timeline.ends_s[chosen] - begin, alone.ends_s, **near)
        begin = float(timeline.ends_s[chosen].max())
    assert timeline.seconds == pytest.approx(begin)


GOOD: dict[str, Any] = {
    "setup_s": np.array([0.0, 0.5]),
    "alone_s": np.array([1.0, 2.0]),
    "demand_begins": np.array([0, 1, 2]),
    "resources": np.array([0, 0], dtype=np.int32),
    "shares": np.array([1.0, 1.0]),
    "queue_begins": np.array([0, 1, 2]),
    "step_begins": np.array([0, 2]),
    "losses": [0.0],
}


def test_two_jobs_on_one_resource() -> None:
    """The first runs alone for half a second, then both at half speed, then the second alone."""
    starts, ends, steps = _C.run_steps(**GOOD)
    assert starts.tolist() == [0.0, 0.0]
    assert ends.tolist() == pytest.approx([1.5, 3.0])
    assert steps.tolist() == pytest.approx([3.0])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("setup_s", np.array([0.0]), "length"),
        ("setup_s", np.array([0.0, np.nan]), "job 1"),
        ("alone_s", np.array([-1.0, 2.0]), "job 0"),
        ("alone_s", np.array([1.0, np.inf]), "job 1"),
        ("demand_begins", np.array([0, 1, 3]), "demand_begins"),
        ("demand_begins", np.array([0, 3, 2]), "demand_begins"),
        ("demand_begins", np.array([0, 2]), "length"),
        ("resources", np.array([0, 1], dtype=np.int32), "resource 1 of 1"),
        ("resources", np.array([0, -1], dtype=np.int32), "resource -1"),
        ("resources", np.array([0], dtype=np.int32), "length"),
        ("shares", np.array([1.0, 0.0]), "share"),
        ("shares", np.array([1.0, 1.5]), "share"),
        ("queue_begins", np.array([1, 2]), "queue_begins"),
        ("queue_begins", np.array([], dtype=np.int64), "queue_begins"),
        ("step_begins", np.array([0, 1]), "step_begins"),
        ("losses", [1.0], "loss"),
    ],
)
def test_the_core_refuses_what_does_not_fit(name: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        _C.run_steps(**{**GOOD, name: value})


def test_the_core_takes_no_other_type_of_number() -> None:
    with pytest.raises(TypeError):
        _C.run_steps(**{**GOOD, "resources": np.array([0, 0], dtype=np.int64)})
