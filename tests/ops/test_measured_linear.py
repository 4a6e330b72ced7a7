"""The way of a linear layer is chosen once for a shape, by time, and computes the product."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from cxl_offload.ops import measured_linear
from cxl_offload.ops.measured_linear import (
    ALL_TYPES,
    KERNEL,
    SINGLE,
    TORCH,
    TRIALS,
    MeasuredLinear,
)


@dataclass
class Clock:
    """Time that only a slowed way takes: a busy machine adds nothing to it."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measured_linear, "time", made)
    return made


def layer(rows: int, outputs: int = 96, width: int = 64) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    shapes = ((rows, 1, width), (outputs, width), (outputs,))
    return tuple(torch.randn(shape, generator=source).half() for shape in shapes)


@pytest.mark.parametrize("way", [KERNEL, SINGLE, TORCH])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_every_way_is_the_product_rounded_once(way: str, rows: int) -> None:
    ours = MeasuredLinear()
    x, weight, bias = layer(rows)
    found = ours._ways[way](x, weight, bias)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert found.shape == (rows, 1, 96)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("fast", [KERNEL, SINGLE, TORCH])
def test_way_that_is_much_faster_is_found_in_the_first_call_and_kept(
    fast: str, clock: Clock
) -> None:
    ours, calls = MeasuredLinear(), Counter[str]()

    def slowed(name: str, way: Any) -> Any:
        def call(*arguments: Any) -> torch.Tensor:
            calls[name] += 1
            clock.now += 0.001 if name == fast else 0.05
            made: torch.Tensor = way(*arguments)
            return made

        return call

    ours._ways = {name: slowed(name, way) for name, way in ours._ways.items()}
    x, weight, bias = layer(8)
    found = ours(x, weight, bias)
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=2**-9, atol=2**-9)
    assert ours.chosen == {(torch.float16, 3, 96, 64): fast}
    calls.clear()
    ours(x, weight, bias)
    ours(x[:5], weight, bias)  # as many rows, to the next power of two
    assert calls == {fast: 2}


def test_ways_that_are_nearly_as_fast_are_tried_in_turns_by_calls_of_whole_layers(
    clock: Clock,
) -> None:
    ours, calls = MeasuredLinear(), Counter[tuple[str, int]]()
    seconds = {KERNEL: 0.011, SINGLE: 0.008, TORCH: 0.01}

    def slowed(name: str, way: Any) -> Any:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            calls[name, weight.shape[0]] += 1
            clock.now += seconds[name]
            made: torch.Tensor = way(x, weight, bias)
            return made

        return call

    ours._ways = {name: slowed(name, way) for name, way in ours._ways.items()}
    x, weight, bias = layer(8)
    expected = functional.linear(x, weight, bias)
    for _ in range(3 * TRIALS):
        assert not ours.chosen
        torch.testing.assert_close(ours(x, weight, bias), expected, rtol=2**-9, atol=2**-9)
    assert {name: calls[name, 96] for name in seconds} == dict.fromkeys(seconds, TRIALS)
    assert ours.chosen == {(torch.float16, 3, 96, 64): SINGLE}
    assert not ours.is_trying
    ours(x[:1], weight, bias)
    assert ours.is_trying


def test_other_types_are_left_to_torch() -> None:
    ours = MeasuredLinear()
    x, weight, bias = (each.float() for each in layer(2))
    assert torch.equal(ours(x, weight, bias), functional.linear(x, weight, bias))
    assert not ours.chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_types_and_ways_are_those_that_were_asked_for(dtype: torch.dtype) -> None:
    ways = {name: Mock(wraps=functional.linear) for name in (KERNEL, TORCH)}
    ours = MeasuredLinear(ALL_TYPES, ways)
    x, weight, bias = (each.to(dtype) for each in layer(4))
    for _ in range(2 * TRIALS):
        assert torch.equal(ours(x, weight, bias), functional.linear(x, weight, bias))
    assert list(ours.chosen) == [ours.key(x, weight)] == [(dtype, 2, 96, 64)]
    assert all(way.called for way in ways.values())
