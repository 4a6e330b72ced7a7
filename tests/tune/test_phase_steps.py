"""Pages that move for a phase before it begins, where that pays; threads of each phase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cxl_offload import zeros
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import (
    PhaseSteps,
    PhaseThreads,
    PhaseTuner,
    ThreadChoice,
    TierRatios,
    TunedHomes,
    decisions,
)
from cxl_offload.units import MIB
from tests.tune.test_phases import CHASES, READS

NEAR, FAR = 0, 2
PHASES = ("read", "chase")
COUNTS = {"read": 30, "chase": 30}


class Program:
    """Two phases on a clock of its own; moves take time on it too."""

    def __init__(self, *, move_s_per_byte: float, budget: int | None = None, **options: object):
        self.now = 0.0
        self.session = Session.simulated(load_machine("epyc9354-cxl-a"))
        self.tensors = {
            str(at): zeros(8 * MIB, dtype=torch.uint8, policy="bind:0", session=self.session)
            for at in range(2)
        }
        self.homes = TunedHomes(self.tensors, near=[NEAR], far=[FAR], session=self.session)
        self.at_work: list[tuple[str, float]] = []
        advance = self.homes.advance

        def timed(most_bytes: int):  # type: ignore[no-untyped-def]
            moved = advance(most_bytes)
            self.now += moved.nbytes * move_s_per_byte
            return moved

        self.homes.advance = timed  # type: ignore[method-assign]
        self.tuner = PhaseTuner(TierRatios(0.6, 2.1), PHASES, whole_move_s=0.0)
        self.steps = PhaseSteps(
            self.homes,
            self.tuner,
            budget_bytes_per_change=self.homes.nbytes if budget is None else budget,
            clock=lambda: self.now,
            samples=4,
            **options,  # type: ignore[arg-type]
        )

    def cycles(self, count: int) -> float:
        """So many cycles; seconds of the last, moves included."""
        for _ in range(count):
            began = self.now
            for name, step in zip(PHASES, (READS, CHASES), strict=True):
                with self.steps.phase(name):
                    self.at_work.append((name, self.homes.granted()))
                    self.now += COUNTS[name] * step.seconds(self.homes.granted())
        return self.now - began


def test_pages_are_where_a_phase_wants_them_before_it_begins() -> None:
    program = Program(move_s_per_byte=1e-10)
    first = program.cycles(1)
    last = program.cycles(100)
    shares = program.tuner.shares
    assert shares["read"] > shares["chase"] == 0.0
    assert dict(program.at_work[-2:]) == pytest.approx(shares, abs=0.05)
    assert last < 0.9 * first


def test_phases_share_one_placement_where_moves_do_not_pay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(move_s_per_byte=1e-5)  # minutes for all of it
    with caplog.at_level("INFO", "cxl_offload.tune"):
        program.cycles(100)
    assert len(set(program.tuner.shares.values())) == 1
    assert len({share for _, share in program.at_work[-40:]}) == 1
    assert "moves between them would cost what they gain" in caplog.text


def test_moves_are_weighed_against_one_cycle_however_many_a_decision_has_seen() -> None:
    free, never = Program(move_s_per_byte=0.0), Program(move_s_per_byte=1e-5)
    gained_s = never.cycles(80) - free.cycles(80)
    assert gained_s > 0
    moved_bytes = 2 * free.homes.nbytes  # there and back, each cycle
    dear = Program(move_s_per_byte=4 * gained_s / moved_bytes)
    dear.cycles(100)
    assert len(set(dear.tuner.shares.values())) == 1


def test_phases_of_many_steps_are_told_by_callbacks() -> None:
    program = Program(move_s_per_byte=1e-10)
    steps, tuner = program.steps, program.tuner
    for _ in range(60):
        for name, step in zip(PHASES, (READS, CHASES), strict=True):
            steps.begin(name)
            for _ in range(3):
                steps.step(name, COUNTS[name] * step.seconds(program.homes.granted()))
    assert tuner.shares["read"] > tuner.shares["chase"] == 0.0
    assert program.homes.granted() == 0.0


def test_small_budget_keeps_one_placement_for_all_phases() -> None:
    program = Program(move_s_per_byte=1e-10, budget=4 * MIB)
    program.cycles(100)
    assert len(set(program.tuner.shares.values())) == 1
    assert len({share for _, share in program.at_work[-20:]}) == 1


def test_nothing_moves_without_a_budget_and_the_advice_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(move_s_per_byte=1e-10, budget=0)
    before = {one.outcome: one.count for one in decisions() if one.tuner == "phase"}
    with caplog.at_level("INFO", "cxl_offload.tune"):
        program.cycles(60)
    assert {share for _, share in program.at_work} == {0.0}
    assert "tune, advice only: " in caplog.text
    after = {one.outcome: one.count for one in decisions() if one.tuner == "phase"}
    assert after["advised"] > before.get("advised", 0)


def test_full_node_stops_the_moves_and_the_tuner_knows(caplog: pytest.LogCaptureFixture) -> None:
    program = Program(move_s_per_byte=1e-10)
    program.session.kernel.set_used_by_others(
        FAR, program.session.free_bytes(FAR) - (1 << 30) - 10 * MIB
    )
    program.cycles(60)
    for name, share in program.at_work[-2:]:
        assert share <= 10 / 16 + 0.01
        assert program.tuner.shares[name] == pytest.approx(share, abs=0.1)


def test_state_of_phases_survives_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "phases.json"
    first = Program(move_s_per_byte=1e-10, state=state)
    first.cycles(60)
    second = Program(move_s_per_byte=1e-10, state=state)
    assert second.tuner.saved() == first.tuner.saved()
    assert second.homes.granted() == pytest.approx(second.tuner.shares["read"], abs=0.05)
    for text in ("{}", '{"phases": {}, "threads": {}}', '{"phases": 3, "threads": 4}'):
        state.write_text(text)
        with pytest.raises(ConfigError, match="saved state"):
            Program(move_s_per_byte=1e-10, state=state)


def test_each_phase_gets_the_fewest_threads_that_are_as_fast() -> None:
    saturates = {"read": 8, "chase": 2}
    now = 0.0
    counts: list[int] = []
    threads = {name: ThreadChoice([1, 2, 4, 8, 16], steps=3) for name in PHASES}
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    one = zeros(MIB, dtype=torch.uint8, policy="bind:0", session=session)
    homes = TunedHomes({"one": one}, near=[NEAR], far=[FAR], session=session)
    tuner = PhaseTuner(TierRatios(0.6, 2.1), PHASES, whole_move_s=1.0)
    chosen = PhaseThreads(threads, counts.append)
    steps = PhaseSteps(homes, tuner, threads=chosen, clock=lambda: now, samples=4)
    for _ in range(30):
        for name in PHASES:
            with steps.phase(name):
                now += 1.0 / min(counts[-1], saturates[name]) + 0.001 * counts[-1]
    assert {name: choice.count for name, choice in threads.items()} == saturates
    with pytest.raises(ValueError, match="each once"):
        ThreadChoice([2, 2])
    again = ThreadChoice([1, 2])
    again.restore(threads["read"].saved())
    assert (again.count, again.is_settled) == (8, True)
    with pytest.raises(ConfigError, match="number of threads"):
        again.restore({"count": "many"})
