"""An optimizer whose states are tuned: the same bits, and pages where the tuner says."""

from __future__ import annotations

import pytest
import torch

from cxl_offload import offload_optimizer, placement_of, use
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.topology import load_machine
from cxl_offload.tune import (
    Bounds,
    Decision,
    Window,
    near_and_far,
    tune_optimizer,
    tune_optimizer_phases,
)

from ..integrations.clock import FarIsSlow

MACHINE = "epyc9354-cxl-a"
WIDTH = 1024


def train(
    steps: int, *, budget: int | None, monkeypatch: pytest.MonkeyPatch | None = None
) -> tuple[torch.Tensor, Session, torch.optim.Optimizer, object]:
    session = Session.simulated(load_machine(MACHINE))
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload_optimizer(optimizer, "bind:0", session=session, pages="base")
    tuned = None
    if budget is not None:
        tuned = tune_optimizer(optimizer, budget_bytes_per_step=budget, session=session)
    data = torch.randn(8, WIDTH)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if monkeypatch is not None and tuned is not None and tuned.tuner is not None:
            monkeypatch.setattr(tuned.tuner, "_tuner", Alternating(), raising=True)
            monkeypatch = None
    return model.weight.detach().clone(), session, optimizer, tuned


def test_phases_of_cpu_adam_are_followed_with_threads_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FarIsSlow()
    monkeypatch.setattr("cxl_offload.tune.optimizer.time", clock)
    session = Session.simulated(load_machine(MACHINE))
    before = torch.get_num_threads()
    weights: list[torch.Tensor] = []
    for tune in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(WIDTH, 64)
        with use(session):
            optimizer = CPUAdam(model.parameters(), policy="interleave:0,2@64KiB", pages="base")
            tuned = None
            if tune:
                tuned = tune_optimizer_phases(
                    optimizer, budget_bytes_per_change=1 << 30, threads=[before], session=session
                )
            data = torch.randn(8, WIDTH)
            for _ in range(40):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
                if tuned is not None and tuned.phases is not None:
                    clock.far_share = tuned.phases.homes.granted
        weights.append(model.weight.detach().clone())
    assert tuned is not None
    assert tuned.phases is not None
    assert set(tuned.phases.tuner.shares) == {"forward and backward", "optimizer"}
    assert tuned.phases.homes.granted() < 0.4  # it began at 0.5
    assert torch.equal(*weights)
    tuned.remove()
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="each once"):
        tune_optimizer_phases(optimizer, threads=[2, 2], session=session)


class Alternating:
    """Moves everything at every decision."""

    def __init__(self) -> None:
        self.share = 0.0

    def decide(self, window: Window, bounds: Bounds = Bounds()) -> Decision:  # noqa: B008 - frozen
        self.share = 0.5 if self.share == 0.0 else 0.0
        return Decision(self.share, "to and fro")

    def hold(self, share: float) -> None:
        self.share = share

    def saved(self) -> dict[str, object]:
        return {}

    def restore(self, saved: dict[str, object]) -> None: ...


def test_training_has_the_same_bits_while_its_states_move(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, *_ = train(60, budget=None)
    moving, session, optimizer, tuned = train(60, budget=1 << 30, monkeypatch=monkeypatch)
    assert torch.equal(plain, moving)
    assert tuned.tuner.decisions >= 2  # type: ignore[attr-defined]
    share = tuned.tuner.homes.granted()  # type: ignore[attr-defined]
    big = [
        value
        for states in optimizer.state.values()
        for value in states.values()
        if value.numel() == WIDTH * WIDTH
    ]
    far = sum(placement_of(value, session=session).granted.get(2, 0) for value in big)
    assert far / sum(value.nbytes for value in big) == pytest.approx(share, abs=0.01)


def test_only_advice_without_a_budget() -> None:
    _, _, _, tuned = train(30, budget=0)
    assert tuned.tuner.homes.granted() == 0.0  # type: ignore[attr-defined]


def test_optimizer_without_placed_states_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    session = Session.simulated(load_machine(MACHINE))
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    tuned = tune_optimizer(optimizer, session=session)
    for _ in range(3):
        weight.grad = torch.ones(4)
        optimizer.step()
    assert tuned.tuner is None
    assert caplog.text.count("nothing to tune") == 1
    tuned.remove()


def test_tiers_are_found_and_missing_ones_named() -> None:
    assert near_and_far(load_machine(MACHINE)) == ((0,), (2,))
    assert near_and_far(load_machine(MACHINE), far="rdram") == ((0,), (1,))
    with pytest.raises(ConfigError, match="tuning needs a near one"):
        near_and_far(load_machine(MACHINE), far="hbm")
