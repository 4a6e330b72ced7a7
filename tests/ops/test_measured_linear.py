"""The way of a linear layer is chosen once for a shape, by time, and computes the product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from cxl_offload.ops import measured_linear
from cxl_offload.ops.measured_linear import (
    ALL_TYPES,
    INTEGERS,
    KERNEL,
    LARGE_PARTS,
    PARTS,
    SINGLE,
    TORCH,
    TRIALS,
    MeasuredLinear,
)

WAYS = [name for name in MeasuredLinear()._ways if name != INTEGERS]  # which is for 4-bit codes


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_every_way_is_the_product_rounded_once(way: str, rows: int) -> None:
    ours = MeasuredLinear()
    x, weight, bias = layer(rows)
    found = ours._ways[way](x, weight, bias)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert found.shape == (rows, 1, 96)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("fast", WAYS)
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
    assert ours.chosen == {(torch.float16, 3, 96, 64, False): fast}
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

    ours._ways = {name: slowed(name, ours._ways[name]) for name in seconds}
    x, weight, bias = layer(8)
    expected = functional.linear(x, weight, bias)
    for _ in range(3 * TRIALS):
        assert not ours.chosen
        torch.testing.assert_close(ours(x, weight, bias), expected, rtol=2**-9, atol=2**-9)
    assert {name: calls[name, 96] for name in seconds} == dict.fromkeys(seconds, TRIALS)
    assert ours.chosen == {(torch.float16, 3, 96, 64, False): SINGLE}
    assert not ours.is_trying
    ours(x[:1], weight, bias)
    assert ours.is_trying


def test_way_whose_calls_are_slow_to_begin_is_tried_on_whole_layers(clock: Clock) -> None:
    """A few rows of a small layer: two threads take 60 us to begin, and then are twice as fast."""

    def way(start: float, second_an_output: float) -> Any:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            clock.now += start + weight.shape[0] * second_an_output
            return functional.linear(x, weight, bias)

        return call

    ours = MeasuredLinear(ways={KERNEL: way(60e-6, 0.08e-6), TORCH: way(2e-6, 0.17e-6)})
    x, weight, bias = layer(4, outputs=768)
    for _ in range(2 * TRIALS):
        ours(x, weight, bias)

    assert list(ours.chosen.values()) == [KERNEL]


@pytest.mark.parametrize("batches", [1, 2, 4])
def test_weights_that_the_batch_before_read_have_a_way_of_their_own(
    batches: int, clock: Clock
) -> None:
    """Each layer is computed for all batches before the next one, so the first finds it cold."""
    cold, warm = {KERNEL: 0.010, TORCH: 0.014}, {KERNEL: 0.009, TORCH: 0.006}
    weights = [torch.randn(96, 64).half() for _ in range(8)]
    cached, cold_calls = [0], Counter[str]()

    def way(name: str) -> Any:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            layer = weight.untyped_storage().data_ptr()
            is_cold = layer != cached[0]
            cached[0] = layer
            clock.now += (cold if is_cold else warm)[name]
            cold_calls[name] += is_cold
            return functional.linear(x, weight, bias)

        return call

    ours = MeasuredLinear(ways={name: way(name) for name in cold})
    prompt, x = torch.randn(128, 64).half(), torch.randn(4, 64).half()

    def forward(x: torch.Tensor) -> None:
        for weight in weights:
            for _ in range(batches):
                ours(x, weight)

    forward(prompt)  # which shows how large the model is
    for _ in range(6):
        forward(x)
    cold_calls.clear()
    forward(x)

    found = {key[-1]: name for key, name in ours.chosen.items() if key[1] == 2}  # of 4 rows
    assert found == ({False: KERNEL} if batches == 1 else {False: KERNEL, True: TORCH})
    assert cold_calls[KERNEL] == len(weights)
    assert cold_calls[TORCH] == 0


def test_weights_made_for_every_call_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_linear, "MOST_WEIGHTS", 8)
    ours, x = MeasuredLinear(), torch.randn(4, 64).half()
    kept = [torch.randn(96, 64).half() for _ in range(40)]
    for weight in kept:
        ours(x, weight)
    assert len(ours._last_read) <= 8


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
    assert list(ours.chosen) == [ours.key(x, weight)] == [(dtype, 2, 96, 64, False)]
    assert all(way.called for way in ways.values())


Calls = list[tuple[int, int]]


def way_of(clock: Clock, start: float, second_a_product: float, calls: Calls) -> Any:
    """Notes rows and outputs of each call; takes as long as its rows and outputs say."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        rows, outputs = x.numel() // x.shape[-1], weight.shape[0]
        calls.append((rows, outputs))
        clock.now += rows * (start + outputs * second_a_product)
        return functional.linear(x, weight, bias)

    return call


PROMPTS = {
    # Of a row's time without outputs, and of its time with all of them, PyTorch's being 1.
    "much faster": (0.0, 0.1, KERNEL, (PARTS,)),
    "faster": (0.0, 0.6, KERNEL, (PARTS, LARGE_PARTS)),
    "no faster than it has to be": (0.0, 0.95, TORCH, (PARTS, LARGE_PARTS)),
    "faster, though its small parts are not": (0.08, 0.7, KERNEL, (PARTS, LARGE_PARTS)),
    "hopeless": (0.0, 1.6, TORCH, (PARTS,)),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_way_of_a_prompt_is_chosen_by_parts_in_its_first_call(case: str, clock: Clock) -> None:
    start, whole, chosen, parts = PROMPTS[case]
    calls: dict[str, Calls] = {KERNEL: [], TORCH: []}
    ours = MeasuredLinear(
        ways={
            KERNEL: way_of(clock, start, (whole - start) / 96, calls[KERNEL]),
            TORCH: way_of(clock, 0.0, 1 / 96, calls[TORCH]),
        }
    )
    x, weight, bias = layer(1000)
    torch.testing.assert_close(
        ours(x, weight, bias), functional.linear(x, weight, bias), rtol=2**-9, atol=2**-9
    )
    assert ours.chosen == {(torch.float16, 8, 96, 64, False): chosen}
    assert not ours.is_trying
    whole_calls = {name: [each for each in calls[name] if each[0] == 1000] for name in calls}
    assert whole_calls == {name: [(1000, 96)] if name == chosen else [] for name in calls}
    tried = {each for name in calls for each in calls[name] if each[0] != 1000}
    assert tried == {(measured_linear.LONGEST_PART, 96 // count) for count in parts}


def test_prompts_of_any_length_go_by_the_way_of_the_first_long_one(clock: Clock) -> None:
    calls: dict[str, Calls] = {KERNEL: [], TORCH: []}
    seconds = {KERNEL: 0.001, TORCH: 0.01}
    ours = MeasuredLinear(
        ways={name: way_of(clock, 0.0, seconds[name], calls[name]) for name in calls}
    )
    for rows in (300, 1000, 5000):
        ours(*layer(rows))
    assert ours.chosen == {(torch.float16, 8, 96, 64, False): KERNEL}
    assert {outputs for _, outputs in calls[TORCH]} == {96 // PARTS}


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


LEFT_TO_TORCH: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
    "no outputs": lambda: (halves(3, 64), halves(0, 64)),
    "no columns": lambda: (halves(3, 0), halves(5, 0)),
    "turned weights": lambda: (halves(100, 64), halves(64, 32).t()),
    "one output without a dimension": lambda: (halves(100, 64), halves(64)),
    "a bias for all": lambda: (halves(100, 64), halves(32, 64), halves(1)),
    "a bias for each row": lambda: (halves(100, 64), halves(32, 64), halves(100, 32)),
    "a derivative": lambda: (halves(100, 64), torch.nn.Parameter(halves(32, 64))),
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_what_no_way_is_meant_for_is_left_to_torch(case: str) -> None:
    given = LEFT_TO_TORCH[case]()
    ours = MeasuredLinear()
    for _ in range(2):
        found = ours(*given)
        torch.testing.assert_close(found, functional.linear(*given))
        assert found.requires_grad == (case == "a derivative")
    assert not ours.chosen
