"""The whole plans that are timed."""

from __future__ import annotations

import pytest

from benchmarks import bench_planner, planner_requests
from benchmarks.planner_requests import AUTO, of_nodes, timed_plans


def test_grown_machine_has_unequal_nodes() -> None:
    machine = of_nodes("epyc9354-cxl-a", 12)
    assert len(machine.nodes) == 12
    added = [each.id for each in machine.nodes[-9:]]
    rates = [each.read_bandwidth_bytes_per_s for each in machine.accesses if each.target in added]
    assert len(set(rates)) == 9


@pytest.mark.slow(reason="plans for twelve nodes with every executor")
def test_every_executor_is_timed_and_auto_is_their_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner_requests, "GROWN", ("spr3-h100",))
    monkeypatch.setattr(planner_requests, "NODES", (8,))
    monkeypatch.setattr(planner_requests, "names", lambda _: ["opt-125m"])
    timed = list(timed_plans(shipped=False))
    first = {each.executor: each.cpu_s for each in timed if each.lengths == (512, 32)}
    assert first.keys() > {"auto", *AUTO}
    assert first["auto"] == pytest.approx(sum(first[name] for name in AUTO))
    bench_planner.whole_plans(shipped=False, as_json=False)
    assert f"{len(timed)} plans: median" in capsys.readouterr().out
