"""How benchmarks/bench_vllm_kv.py takes turns, with servers that only note what they are asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from benchmarks import bench_vllm_kv
from benchmarks.conditions import Conditions
from benchmarks.neighbour import Neighbour
from benchmarks.vllm_cases import LOADS, NEVER, NONE, ONE
from benchmarks.vllm_load import Answered, Load, LoadRun

SECONDS = {(NONE, False): 2.0, (NONE, True): 4.0, (ONE, False): 1.0, (ONE, True): 3.0}
"""Of a run, by server and by whether a neighbour works."""


class Asked(NamedTuple):
    name: str
    seed: int
    beside: bool  # whether a neighbour worked meanwhile


class Servers:
    """What was asked, in its order; prompts before it, which are not timed, stand apart."""

    def __init__(self, neighbour: Neighbour | None) -> None:
        self.asked: list[Asked] = []
        self.before: list[Asked] = []
        self._works = False
        if neighbour is not None:
            neighbour._ask = self._ask  # type: ignore[method-assign]

    def _ask(self, what: bytes) -> dict[str, Any]:
        self._works = what == b"w"
        return {"seconds": 1.0, "cpu_seconds": 1.0, "bytes": 1}

    def run_load(self, port: int, load: Load, seed: int) -> LoadRun:
        asked = Asked((NONE, ONE)[port], seed, self._works)
        (self.asked if load == LOADS[NEVER] else self.before).append(asked)
        return LoadRun(SECONDS[asked.name, asked.beside], (Answered(0.1, 0.2, (1,)),))


class Silent:
    """A server that counts nothing."""

    def __init__(self, port: int) -> None:
        self.port = port

    def metrics(self) -> str:
        return ""


def measured(
    monkeypatch: pytest.MonkeyPatch, neighbour: Neighbour | None
) -> tuple[Servers, dict[str, Any]]:
    servers = Servers(neighbour)
    monkeypatch.setattr(bench_vllm_kv, "run_load", servers.run_load)
    monkeypatch.setattr(bench_vllm_kv, "SETTLE_S", 0)
    up: Any = {NONE: Silent(0), ONE: Silent(1)}
    return servers, bench_vllm_kv.measure(up, LOADS[NEVER], 2, 1000, Conditions(neighbour))


def test_both_servers_get_the_prompts_of_a_round_and_a_neighbour_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Neighbour(1 << 20) as neighbour:
        servers, found = measured(monkeypatch, neighbour)
    pairs = [servers.asked[at : at + 2] for at in range(0, 8, 2)]
    assert [each.beside for each in servers.asked] == [False] * 2 + [True] * 4 + [False] * 2
    for pair in pairs:
        assert {each.name for each in pair} == {NONE, ONE}
        assert len({each.seed for each in pair}) == 1
    assert len({pair[0].seed for pair in pairs}) == 4  # nothing is found that an earlier run stored
    lost = bench_vllm_kv.falls({NEVER: found})[f"{NEVER}: {ONE}"]
    assert found[ONE]["throughput_ratio"]["median"] == 2
    assert lost.beside.median == pytest.approx(4 / 3)
    assert lost.falls.median == pytest.approx(2 / 3)


def test_each_run_follows_a_prompt_of_its_own_server_that_no_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Neighbour(1 << 20) as neighbour:
        servers, _ = measured(monkeypatch, neighbour)
    assert [(each.name, each.beside) for each in servers.before] == [
        (each.name, each.beside) for each in servers.asked
    ]
    assert not {each.seed for each in servers.before} & {each.seed for each in servers.asked}


def test_without_a_neighbour_there_are_quiet_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, found = measured(monkeypatch, None)
    assert len(servers.asked) == 4
    assert "seconds_beside" not in found[ONE]
