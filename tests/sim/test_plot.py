"""The picture shows the window asked for, and rates that add up to the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.sim import Timeline, Trace, replay
from cxl_offload.sim.plot import node_rates, plot_timeline

from .machines import GB, event, machine


@pytest.fixture
def timeline() -> Timeline:
    trace = Trace(
        one
        for step in (2, 3, 5)
        for one in (
            event("h2d", {0: GB, 2: GB}, step=step, queue="load"),
            event("cpu", {0: 3 * GB, 2: GB}, {0: GB}, step=step, queue="compute"),
        )
    )
    return replay(trace, machine())


def test_rates_over_time_add_up_to_the_bytes(timeline: Timeline) -> None:
    edges, rates = node_rates(timeline, np.arange(6))
    assert sorted(rates) == [0, 2]
    for node, rate in rates.items():
        moved = float((rate * np.diff(edges)).sum())
        assert moved == pytest.approx(timeline.node_bytes[node])
        assert (rate >= 0).all()


def test_picture_is_written_and_says_that_it_is_simulated(
    timeline: Timeline, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot_timeline(timeline, tmp_path / "whole.png")
    assert (tmp_path / "whole.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        plot_timeline(timeline, tmp_path / "part.svg", first_step=3, steps=1)
    text = (tmp_path / "part.svg").read_text()
    assert "simulated: round-numbers, steps 3 to 3, 2 events" in text
    assert "load" in text
    assert "compute" in text
    assert "Bytes are spread evenly over the time" in text


def test_no_colour_is_that_of_a_kind_and_of_a_node(
    timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.colors import to_hex

    drawn: dict[str, set[str]] = {"broken_barh": set(), "stairs": set()}
    for method, keyword in (("broken_barh", "facecolors"), ("stairs", "color")):
        plain = getattr(Axes, method)

        def noted(
            *given: Any, _plain: Any = plain, _of: str = method, _key: str = keyword, **named: Any
        ) -> Any:
            drawn[_of].add(to_hex(named[_key]))
            return _plain(*given, **named)

        monkeypatch.setattr(Axes, method, noted)
    plot_timeline(timeline, tmp_path / "a.png")
    assert len(drawn["stairs"]) == 2
    assert drawn["broken_barh"]
    assert not drawn["broken_barh"] & drawn["stairs"]


def test_window_without_steps_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="no step 4; its steps are 2 to 5"):
        plot_timeline(timeline, tmp_path / "a.png", first_step=4)
    with pytest.raises(ConfigError, match="at least 1"):
        plot_timeline(timeline, tmp_path / "a.png", steps=0)
    assert not (tmp_path / "a.png").exists()
