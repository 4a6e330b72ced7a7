"""Pieces of a layer are timed in its sequence; as many calls of torch as the profile divides by."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.profile.operators import gated_layer
from cxl_offload.profile.operators.decoder_layer import Label, Stopwatch
from cxl_offload.profile.operators.model import PIECE_CALLS


class Counting(Stopwatch):
    """Counts calls of torch's dispatcher by label instead of seconds."""

    def __init__(self, calls: CallsOfTorch) -> None:
        self._calls = calls
        super().__init__(torch.device("cpu"), lambda: float(calls.count))

    def begin(self) -> None:
        self._begun = self._calls.count

    def end(self, label: Label) -> None:
        self.seconds[label] += self._calls.count - self._begun


class CallsOfTorch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_layer, "WIDTHS", (128, 256))
    monkeypatch.setattr(gated_layer, "VOCABULARY", 64)
    monkeypatch.setattr(gated_layer, "_DECODED", (1, 4))
    monkeypatch.setattr(gated_layer, "_PROMPTS", (1, 2))
    monkeypatch.setattr(gated_layer, "_TOKENS", 8)


@pytest.mark.usefixtures("small")
def test_calls_between_products_are_as_many_as_the_profile_divides_by() -> None:
    with torch.no_grad(), CallsOfTorch() as calls:
        watch = Counting(calls)
        layer = gated_layer.GatedLayer(watch, 128)
        caches = [torch.ones(2, 2, 258, 64, dtype=torch.bfloat16) for _ in "kv"]
        watch.reset()
        layer.run(torch.ones(2, 1, 128, dtype=torch.bfloat16), caches, 33)
    assert sum(watch.seconds[name] for name in ("norm", "rotary", "gate")) == PIECE_CALLS


@pytest.mark.usefixtures("small")
def test_every_piece_is_timed_at_every_number_of_rows() -> None:
    ticks = itertools.count()
    found = gated_layer.measure_gated(lambda: float(next(ticks)), 1 << 20)
    decoded = ("norm", "rotary", "gate", "logits", "store", "short attention", "long attention")
    assert {(point.piece, point.rows) for point in found.pieces} == {
        *((name, rows) for name in decoded for rows in (1, 4)),
        *((name, 16) for name in ("norm", "rotary", "gate", "prompt store", "prompt attention")),
    }
    assert {point.elements for point in found.pieces if point.piece == "long attention"} == {
        2 * 257 * 128
    }
    assert [(point.rows, point.weight_bytes) for point in found.products] == [
        (rows, 2 * width * outputs)
        for width, inner in ((128, 352), (256, 704))
        for rows in (1, 4, 8, 16)
        for outputs in (width, inner)
    ]
