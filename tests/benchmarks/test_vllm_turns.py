"""Turns of vLLM's servers: who is asked what and when, and what is told of several processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from benchmarks import vllm_turns
from benchmarks.conditions import Conditions
from benchmarks.neighbour import QUIET, Neighbour
from benchmarks.vllm_cases import LOADS, NEVER, NONE, ONE, REUSE
from benchmarks.vllm_load import Answered, Load, LoadRun
from benchmarks.vllm_turns import LEARNING_ROUNDS, Taken, falls, results_of, take_turns
from cxl_offload.integrations.vllm.serving_report import Samples, parse_metrics


def reading(prompt: float, hits: float, stored: float) -> Samples:
    source = 'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"}'
    return parse_metrics(
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f"{source} {hits}\n"
        f'vllm:kv_offload_store_bytes_total{{engine="0"}} {stored}\n'
    )


def taken(seconds: list[float], stored: float) -> Taken:
    runs = [LoadRun(each, (Answered(0.1, 0.2, (1,)),)) for each in seconds]
    begins = [reading(100, 50, 7), reading(10, 5, 0)]
    ends = [reading(200, 90, 7 + stored), reading(310, 65, stored)]
    return Taken({QUIET: runs}, begins, ends)


def test_processes_of_a_server_are_told_as_one() -> None:
    turns = {NONE: taken([1.0, 2.0], 0), ONE: taken([2.0, 4.0], 30)}
    found = results_of(turns, LOADS[NEVER])
    assert found[ONE]["throughput_ratio"]["median"] == 0.5
    assert found[ONE]["stored_bytes"] == 60, "not what was stored before the turns"
    assert found[NONE]["stored_bytes"] == 0
    assert found[ONE]["hit_rate"] == pytest.approx((40 + 60) / (100 + 300))


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
        (self.asked if load in LOADS.values() else self.before).append(asked)
        return LoadRun(SECONDS[asked.name, asked.beside], (Answered(0.1, 0.2, (1,)),))


class Silent:
    """A server that counts nothing."""

    def __init__(self, port: int) -> None:
        self.port = port

    def metrics(self) -> str:
        return ""


def turns_of(
    monkeypatch: pytest.MonkeyPatch,
    neighbour: Neighbour | None,
    *,
    load: str = NEVER,
    seed: int = 1000,
) -> tuple[Servers, list[Asked], dict[str, Any]]:
    """Of two rounds: what servers were asked, what of it to learn, and the results."""
    servers = Servers(neighbour)
    monkeypatch.setattr(vllm_turns, "run_load", servers.run_load)
    monkeypatch.setattr(vllm_turns, "SETTLE_S", 0)
    up: Any = {NONE: Silent(0), ONE: Silent(1)}
    taken: dict[str, Taken] = {}
    conditions = Conditions(neighbour)
    take_turns(up, LOADS[load], taken, turns=range(2), seed=seed, conditions=conditions)
    learnt = servers.asked[: 2 * LEARNING_ROUNDS]
    del servers.asked[: 2 * LEARNING_ROUNDS]
    return servers, learnt, results_of(taken, LOADS[load])


def test_both_servers_get_the_prompts_of_a_round_and_a_neighbour_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Neighbour(1 << 20) as neighbour:
        servers, _, found = turns_of(monkeypatch, neighbour)
    pairs = [servers.asked[at : at + 2] for at in range(0, 8, 2)]
    assert [each.beside for each in servers.asked] == [False] * 2 + [True] * 4 + [False] * 2
    for pair in pairs:
        assert {each.name for each in pair} == {NONE, ONE}
        assert len({each.seed for each in pair}) == 1
    assert len({pair[0].seed for pair in pairs}) == 4  # nothing is found that an earlier run stored
    lost = falls({NEVER: found})[f"{NEVER}: {ONE}"]
    assert found[ONE]["throughput_ratio"]["median"] == 2
    assert lost.beside.median == pytest.approx(4 / 3)
    assert lost.falls.median == pytest.approx(2 / 3)


def test_each_run_follows_a_prompt_of_its_own_server_that_no_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Neighbour(1 << 20) as neighbour:
        servers, _, _ = turns_of(monkeypatch, neighbour)
    assert [(each.name, each.beside) for each in servers.before] == [
        (each.name, each.beside) for each in servers.asked
    ]
    assert not {each.seed for each in servers.before} & {each.seed for each in servers.asked}


def test_without_a_neighbour_there_are_quiet_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, _, found = turns_of(monkeypatch, None)
    assert len(servers.asked) == 4
    assert "seconds_beside" not in found[ONE]


def test_what_servers_learn_from_comes_back_in_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    for at, load in enumerate((REUSE, NEVER)):
        servers, learnt, _ = turns_of(monkeypatch, None, load=load, seed=1000 * at)
        assert sorted(each.name for each in learnt) == sorted([NONE, ONE] * LEARNING_ROUNDS)
        seeds += {each.seed for each in (*servers.asked, *servers.before)}
        seeds += {each.seed for each in learnt}
    assert len(seeds) == len(set(seeds))
