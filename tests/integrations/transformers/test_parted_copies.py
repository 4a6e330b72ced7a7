"""Weights come in parts beside the hidden states of a layer that computes its rows in parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload import _C
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.parted_copies import PartedCopies
from cxl_offload.memory import Session
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.transfer import CopyHandle

from .calls_of_torch import AllCallsOfTorch
from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import generate, make, prompts
from .test_planned_gpu import llama

ONE_NODE = {"weights": "bind:2", "kv": "bind:0", "activations": "bind:2"}
ROWS, AT_ONCE, PROMPT = 8, 2, 40
PARTS = ROWS // AT_ONCE


class Watched(FakeCopies):
    """Keeps kind and bytes of every copy to the accelerator, in the order of the queue."""

    seen: ClassVar[list[tuple[str, int]]] = []
    gone: ClassVar[int] = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        is_states = source.dim() == 3 and source.shape[0] == AT_ONCE
        kind = "states" if is_states else "weights"
        self.seen.append((kind, source.nbytes))
        return super().copy(target, source, after)

    def copy_back(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]
    ) -> CopyHandle:
        Watched.gone += 1
        return super().copy_back(target, source, after)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, driver: _C.FakeDriver) -> Iterator[Session]:
    monkeypatch.setattr(Watched, "seen", [])
    fake_accelerator(monkeypatch, lambda session: Watched(session, driver))
    with pinning_session(machine(), driver) as session:
        yield session


def weights_between_states(model: PreTrainedModel, session: Session) -> list[int]:
    """Bytes of weights that are queued between two copies of hidden states, in the prefill.

    Of layers but the first, which comes before any; the head has to be there before its rows.
    """
    given = prompts(ROWS, PROMPT)
    with offload(model, ONE_NODE, rows_at_once=AT_ONCE, accelerator="cuda", session=session):
        model.generate(**given, max_new_tokens=1, do_sample=False)
    found = [
        sum(nbytes for _, nbytes in group)
        for kind, group in itertools.groupby(Watched.seen, key=lambda copy: copy[0])
        if kind == "weights"
    ]
    return found[1 : (PARTS - 1) * (len(model.model.layers) - 1)]


def layer_bytes(model: PreTrainedModel) -> int:
    return sum(each.nbytes for each in model.model.layers[0].parameters())


def mixtral() -> PreTrainedModel:
    return make("mixtral")


@pytest.mark.parametrize("made", [llama, mixtral])
def test_no_part_of_the_rows_waits_behind_all_weights_of_the_next_layer(
    made: Callable[[], PreTrainedModel], seen: Session
) -> None:
    """Each part waits for a quarter of them; where a layer ends its own last quarter comes before.

    And all of them come.
    """
    model = made()
    layer, layers = layer_bytes(model), len(model.model.layers)
    found = weights_between_states(model, seen)
    quarter = layer / PARTS
    assert max(found) <= 2 * quarter + 64
    assert sum(each > quarter + 64 for each in found) <= layers - 2
    assert sum(found) == pytest.approx((layers - 1) * layer - 2 * quarter, 0.01)


def test_queue_of_whole_layers_is_found_out(seen: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: all parts at once."""
    begin = PartedCopies.begin
    monkeypatch.setattr(PartedCopies, "begin", lambda self, parts: begin(self, 1))
    model = llama()
    assert max(weights_between_states(model, seen)) >= layer_bytes(model)


def test_tokens_are_those_of_stock_when_experts_are_asked_for_one_by_one(seen: Session) -> None:
    """In decode steps of few rows a router says which experts are copied, between the parts."""
    model = make("mixtral")
    stock = generate(model, "sdpa")
    with offload(model, ONE_NODE, rows_at_once=1, accelerator="cuda", session=seen) as done:
        assert torch.equal(generate(model), stock)
        assert done.streamed is not None


class Counted:
    """Copies that only keep what they are asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.copied: list[tuple[int, int]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> Any:
        target.copy_(source)
        self.copied.append((source.nbytes, after[0]))
        return object()


def test_parts_are_even_and_the_last_one_has_the_rest() -> None:
    copies: Any = Counted()
    parted, now, coming = PartedCopies(copies), [0], []
    sources = [torch.arange(count, dtype=torch.float32) for count in (10, 1, 22)]
    targets = [torch.zeros_like(each) for each in sources]
    parted.begin(4)
    for target, source in zip(targets, sources, strict=True):
        parted.put(target, source, lambda: now, coming)
    assert not copies.copied
    for at in range(4):
        now[0] = at
        parted.more()
        parted.put(torch.zeros(1), torch.ones(1), lambda: (9,), [])  # others are not held back
    by_part = [sum(n for n, stream in copies.copied if stream == at) for at in range(4)]
    assert by_part == [36, 32, 32, 32]
    assert sum(stream == 9 for _, stream in copies.copied) == 4
    assert len(coming) == len(copies.copied) - 4
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


@pytest.mark.parametrize("way", ["rest", "drop"])
def test_what_is_left_is_queued_or_forgotten(way: str) -> None:
    copies: Any = Counted()
    parted, target = PartedCopies(copies), torch.zeros(8)
    parted.begin(4)
    parted.put(target, torch.ones(8), lambda: (0,), [])
    parted.more()
    getattr(parted, way)()
    parted.rest()
    assert target.sum() == (8 if way == "rest" else 2)


def calls_of_a_step(policies: dict[str, str], session: Session) -> float:
    """Calls of torch, and copies, of one layer and part in a decode step."""
    model, given, counts = llama(), prompts(ROWS, PROMPT), []
    for new in (2, 4):
        with offload(model, policies, rows_at_once=AT_ONCE, accelerator="cuda", session=session):
            Watched.seen.clear()
            Watched.gone = 0
            with AllCallsOfTorch() as calls:
                model.generate(**given, max_new_tokens=new, do_sample=False)
        counts.append(calls.count + len(Watched.seen) + Watched.gone)
    return (counts[1] - counts[0]) / 2 / PARTS / len(model.model.layers)


def test_a_part_takes_as_many_calls_more_as_the_planner_counts(seen: Session) -> None:
    """Than one whose hidden states are on the accelerator."""
    kept = {kind: policy for kind, policy in ONE_NODE.items() if kind != "activations"}
    more = calls_of_a_step(ONE_NODE, seen) - calls_of_a_step(kept, seen)
    assert more == pytest.approx(TRANSFORMERS.states_calls, rel=0.1)
