"""Experts that are asked for one by one: the stream alone, without a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cxl_offload import _C
from cxl_offload.integrations.transformers import streamed_weights
from cxl_offload.integrations.transformers.asked_experts import StackedExperts
from cxl_offload.integrations.transformers.streamed_weights import WeightStage, WeightStream
from cxl_offload.memory import Session
from cxl_offload.tensor import empty
from cxl_offload.transfer import CopyHandle

from .conftest import machine
from .fake_accelerator import (
    COMPUTE,
    FakeCopies,
    LateCopies,
    UnfencedCopies,
    pinning_session,
)


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


def expert_stages(session: Session, count: int) -> list[WeightStage]:
    """Layers of eight experts; all numbers of expert ``e`` of stage ``s`` are ``10 s + e``."""
    config = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=8)
    config._experts_implementation = "eager"
    made = []
    for at in range(count):
        caller = nn.Sequential(MixtralExperts(config))
        module: Any = caller[0]
        for weight in module.parameters():
            numbers = torch.arange(8.0).view(8, 1, 1) + 10 * at
            home = empty(tuple(weight.shape), policy="bind:2", pin=True, session=session)
            weight.data = home.copy_(numbers.expand(weight.shape))
        stacks = tuple(module.parameters())
        experts = StackedExperts(module, caller, stacks, 1)
        made.append(WeightStage(f"stage {at}", caller, stacks, (experts,)))
    return made


@pytest.mark.parametrize("kind", [LateCopies, UnfencedCopies])
def test_slice_is_never_overwritten_while_work_that_reads_it_waits(
    kind: type[LateCopies], session: Session, driver: _C.FakeDriver
) -> None:
    """The control copies without waiting for readers, and is found out."""
    made, copies = expert_stages(session, 3), kind(session, driver)
    stream = WeightStream(made, copies)
    seen: list[tuple[int, torch.Tensor]] = []
    for step in range(4):
        for at in range(3):
            stream.begin(at, 1)
            for expert in {step, 5}:
                stream.ask(at, 0, functools.partial(frozenset, {expert}))
                view = made[at].weights[0].data[expert]
                found = torch.zeros(view.shape)
                driver.copy(
                    target=found.data_ptr(),
                    source=view.data_ptr(),
                    nbytes=view.nbytes,
                    stream=COMPUTE,
                )
                seen.append((10 * at + expert, found))
            stream.end(at)
    assert copies.engine._core is not None
    for each in copies.engine._core.streams:  # copies run as early as they may
        driver.finish(each)
    driver.finish(COMPUTE)
    right = [bool((found == number).all()) for number, found in seen]
    assert all(right) is (kind is LateCopies), right
    one = sum(weight[0].nbytes for weight in made[0].weights)
    assert stream.expert_copied_bytes == len(seen) * one
    stream.close()
    copies.close()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (torch.tensor([[3, 1], [1, 3]]), {1, 3}),
        (torch.tensor([[3, 1]], dtype=torch.int32), {1, 3}),
        (torch.empty(0, 2, dtype=torch.int64), set()),
        (torch.tensor([[True, False]]), set(range(8))),
        (torch.tensor([[0.5, 0.5]]), set(range(8))),
        (torch.tensor([[1, 8]]), set(range(8))),
        (torch.tensor([[1, -1]]), set(range(8))),
        (None, set(range(8))),
    ],
)
def test_numbers_are_those_of_the_call_or_all(
    asked: torch.Tensor | None, expected: set[int], session: Session
) -> None:
    """Masks, shares, and numbers of no expert, which some implementations read another for."""
    experts = expert_stages(session, 1)[0].experts[0]
    assert experts.numbers((torch.empty(1), asked), {}) == expected
    assert experts.numbers((), {"top_k_index": asked}) == expected


def test_unknown_number_of_tokens_copies_all(session: Session, driver: _C.FakeDriver) -> None:
    """What computes the experts is not asked then whether it reads only some."""
    made, copies = expert_stages(session, 2), FakeCopies(session, driver)
    stream = WeightStream(made, copies)
    stream.begin(0, None)
    stream.ask(0, 0, lambda: frozenset({1}))
    assert stream.expert_copied_bytes == made[0].nbytes
    stream.end(0)
    stream.close()
    copies.close()


def test_stage_that_an_interrupt_left_open_begins_anew(
    session: Session, driver: _C.FakeDriver
) -> None:
    """Its weights come from their tiers then, and go back there."""
    made, copies = expert_stages(session, 2), FakeCopies(session, driver)
    homes = [weight.data_ptr() for weight in made[0].weights]
    stream = WeightStream(made, copies)
    stream.begin(0, 1)
    stream.begin(0, 1)
    assert [weight.data_ptr() for weight in made[0].weights] != homes
    stream.end(0)
    assert [weight.data_ptr() for weight in made[0].weights] == homes
    stream.close()
    copies.close()


def test_interrupt_while_weights_go_home_loses_none(
    monkeypatch: pytest.MonkeyPatch, session: Session, driver: _C.FakeDriver
) -> None:
    made, copies = expert_stages(session, 2), FakeCopies(session, driver)
    homes = [weight.data_ptr() for weight in made[0].weights]
    stream = WeightStream(made, copies)
    stream.begin(0, 1)

    def interrupted(weight: torch.Tensor, data: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streamed_weights, "show", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.end(0)
    stream.close()
    assert [weight.data_ptr() for weight in made[0].weights] == homes
    copies.close()


def test_refused_copy_leaves_word_of_the_stream_that_read_the_buffer(
    session: Session, driver: _C.FakeDriver
) -> None:
    """What the stage has queued before its experts were refused reads the buffer still."""

    class TwoStreams(FakeCopies):
        now = COMPUTE

        def stream(self) -> int:
            return self.now

    made, copies = expert_stages(session, 2), TwoStreams(session, driver)
    stream = WeightStream(made, copies)
    for at in (0, 1):
        stream.begin(at, 1)
        stream.end(at)
    copies.now = other = COMPUTE + 1
    stream.begin(0, 1)
    driver.fail_copy(1)
    with pytest.raises(OSError, match="refused"):
        stream.ask(0, 0, lambda: frozenset({1}))
    stream.end(0)
    assert [buffer.reader for buffer in stream._buffers].count(other) == 1
    stream.close()
    copies.close()


def test_interrupt_while_old_copies_end_forgets_none(
    monkeypatch: pytest.MonkeyPatch, session: Session, driver: _C.FakeDriver
) -> None:
    """Whoever fills the buffer next waits for them again."""
    made, copies = expert_stages(session, 2), FakeCopies(session, driver)
    stream = WeightStream(made, copies)
    stream.begin(0, None)
    (buffer,) = (each for each in stream._buffers if each.experts_coming)
    under_way = list(buffer.experts_coming)

    def interrupted(handle: CopyHandle) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CopyHandle, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.forget()
    assert buffer.holds is None
    assert buffer.experts_coming == under_way
    stream.close()
    copies.close()
