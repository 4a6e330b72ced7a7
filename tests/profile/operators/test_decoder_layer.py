"""A decoder layer that times its operators: what it computes, and what it counts."""

from __future__ import annotations

import collections
import gc
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.profile.operators import decoder_layer
from cxl_offload.profile.operators.cache_operators import (
    CacheLoader,
    attention_in_place,
    copied_attention,
)
from cxl_offload.profile.operators.decoder_layer import (
    CALLS,
    DecoderLayer,
    Decoding,
    LayerCache,
    Stopwatch,
)
from cxl_offload.profile.operators.framework_code import FrameworkCode, copies_of_the_code

CPU = torch.device("cpu")
ROWS, HIDDEN, POSITIONS = 2, 128, 33


def cache(seed: int = 0) -> LayerCache:
    generator = torch.Generator().manual_seed(seed)
    shape = (POSITIONS + 1, ROWS * HIDDEN // 64, 64)
    k, v = (torch.rand(shape, generator=generator).half() for _ in "kv")
    return LayerCache((k, v), (k, v))


def decoding(watch: Stopwatch, *, in_place: bool) -> Decoding:
    mask = torch.ones(ROWS, POSITIONS, dtype=torch.bool)
    return Decoding(watch, functional.linear, mask, CacheLoader(CPU), in_place=in_place)


def layer() -> DecoderLayer:
    torch.manual_seed(0)
    return DecoderLayer(HIDDEN, CPU, copies_of_the_code(4))


def test_copied_attention_and_attention_in_place_compute_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(24, 1, 64, generator=generator).half()
    k, v = (torch.rand(32, 24, 64, generator=generator).half() for _ in range(2))
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[1, :5] = False
    copied = copied_attention(q, k, v, mask)
    in_place = attention_in_place(q, k, v, mask)
    torch.testing.assert_close(copied, in_place, atol=2e-3, rtol=2e-3)


def test_loaded_caches_are_copies_in_memory_that_the_last_did_not_have() -> None:
    load = CacheLoader(CPU)
    home = torch.rand(1 << 18)
    first = load(home, home + 1)
    second = load(home, home + 1)
    assert torch.equal(first[0], home)
    assert torch.equal(second[1], home + 1)
    places = {each.data_ptr() for each in (*first, *second)}
    assert len(places) == 4
    assert home.data_ptr() not in places


@pytest.mark.parametrize("in_place", [False, True])
def test_every_operator_of_a_layer_is_timed_under_its_name(in_place: bool) -> None:
    ticks = itertools.count()
    watch = Stopwatch(CPU, lambda: float(next(ticks)))
    watch._own = 0.0
    layer().decode(
        torch.rand(ROWS, 1, HIDDEN).half(), cache(), cache(1), decoding(watch, in_place=in_place)
    )
    attention = {"attention in place": 1.0} if in_place else {"copied attention": 1.0, "load": 1.0}
    assert watch.seconds == {"square": 4.0, "inner": 2.0, "calls": 8.0, "python": 4.0} | attention


def test_a_layer_gives_the_same_with_both_attentions_and_stores_the_new_row() -> None:
    made, x = layer(), torch.rand(ROWS, 1, HIDDEN).half()
    watch = Stopwatch(CPU)
    results, caches = [], []
    for in_place in (False, True):
        caches.append(cache())
        results.append(made.decode(x, caches[-1], cache(1), decoding(watch, in_place=in_place)))
    torch.testing.assert_close(*results, atol=0.5, rtol=2e-2)
    for k_or_v, before in zip(caches[0].home, cache().home, strict=True):
        assert torch.equal(k_or_v[: POSITIONS - 1], before[: POSITIONS - 1])
        assert torch.equal(k_or_v[POSITIONS - 1], k_or_v[POSITIONS])
        assert not torch.equal(k_or_v[POSITIONS], before[POSITIONS])


class _Counted(TorchDispatchMode):
    """Calls that reach torch's dispatcher while the clock runs for small calls."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += self.on
        return func(*args, **(kwargs or {}))


def test_as_many_calls_are_timed_as_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, labels = _Counted(), []
    begin, end = Stopwatch.begin, Stopwatch.end
    before: collections.Counter[str] = collections.Counter()
    small = 0

    def begun(watch: Stopwatch) -> None:
        nonlocal before
        before, counted.on = counted.calls.copy(), True
        begin(watch)

    def ended(watch: Stopwatch, label: Any) -> None:
        nonlocal small
        end(watch, label)
        labels.append(label)
        small += (counted.calls - before).total() if label == "calls" else 0

    watch = Stopwatch(CPU)
    monkeypatch.setattr(decoder_layer.Stopwatch, "begin", begun)
    monkeypatch.setattr(decoder_layer.Stopwatch, "end", ended)
    with counted, torch.no_grad():
        x = torch.rand(ROWS, 1, HIDDEN).half()
        layer().decode(x, cache(), cache(1), decoding(watch, in_place=True))
    assert labels.count("calls") == 8
    assert small == CALLS


def test_what_reading_the_clock_takes_is_taken_off() -> None:
    ticks = itertools.count()
    watch = Stopwatch(CPU, lambda: 0.25 * next(ticks))
    watch.begin()
    watch.end("square")
    assert watch.seconds["square"] == 0.0
    watch.begin()
    for _ in range(3):
        next(ticks)
    watch.end("square")
    assert watch.seconds["square"] == 0.75


def test_copies_of_the_code_do_the_same_from_memory_of_their_own() -> None:
    first, second = copies_of_the_code(2)
    assert first().instructions() == second().instructions() == FrameworkCode().instructions() > 100
    codes = {id(each._move.__code__) for each in (first, second, FrameworkCode)}
    assert len(codes) == 3
    one = first()
    one.work()
    assert one.count == 15


def test_what_others_run_when_garbage_is_collected_is_not_counted() -> None:
    def collected(phase: str, info: dict[str, int]) -> None:
        seen.append((phase, info["generation"]))

    seen: list[tuple[str, int]] = []
    code, thresholds = FrameworkCode(), gc.get_threshold()
    alone = code.instructions()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        counted = code.instructions()
        made = [[] for _ in range(100)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert (len(made), counted) == (100, alone)
    assert seen, "the collector ran once it was allowed to"
    assert gc.isenabled()
