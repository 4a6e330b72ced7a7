"""Layers with their first positions on an accelerator against the layers of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv, accelerator_kv
from cxl_offload.integrations.transformers.cache import kept_tensors, put_in_tiers
from cxl_offload.integrations.transformers.current_rows import RowPart
from cxl_offload.integrations.transformers.growing_layers import TierLayer, TierSlidingLayer
from cxl_offload.integrations.transformers.parted_room import PartedRoom
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.integrations.transformers.room import KvMemory, slack_of
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session

from .conftest import machine
from .test_cache import CONFIG, DIM, HEADS, STEPS, compare, states

CPU = torch.device("cpu")
SHARES = st.sampled_from([0.02, 0.25, 0.5, 0.97, 1.0])


def parted(session: Session, share: float, device: torch.device = CPU) -> KvMemory:
    store = store_for({"kv": Bind((2,))}, session)
    return KvMemory(store, accelerator=AcceleratorKv(device, share))


def held(memory: KvMemory) -> int:
    assert memory.accelerator is not None
    return memory.accelerator.use.live_bytes


def room_of(layer: Any) -> PartedRoom:
    assert isinstance(layer._room, PartedRoom)
    return layer._room


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, expected=st.sampled_from([0, 30, 300]), share=SHARES)
def test_growing_layer_does_as_that_of_transformers(
    steps: list[tuple[str, int]], expected: int, share: float
) -> None:
    session = Session.simulated(machine())
    memory = parted(session, share)
    compare(TierLayer(memory, expected), DynamicLayer(), steps)
    assert held(memory) == session.stats().asked_bytes.current == 0


@settings(deadline=None, max_examples=120)
@given(
    steps=STEPS,
    window=st.sampled_from([2, 5, 16, 100, 700]),
    expected=st.sampled_from([0, 30, 300]),
    recorded=st.booleans(),
    share=SHARES,
)
def test_sliding_layer_does_as_that_of_transformers(
    steps: list[tuple[str, int]], window: int, expected: int, recorded: bool, share: float
) -> None:
    session = Session.simulated(machine())
    memory = parted(session, share)
    ours, stock = TierSlidingLayer(window, memory, expected), DynamicSlidingWindowLayer(window)
    if recorded:
        ours.activate_past_recording()
        stock.activate_past_recording()
    else:
        steps = [(step, size) for step, size in steps if step != "crop"]
    compare(ours, stock, steps)
    del ours
    assert held(memory) == session.stats().asked_bytes.current == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_accelerator_has_its_share_of_the_room_and_the_tier_the_rest(
    share: float, session: Session
) -> None:
    memory = parted(session, share)
    layer = TierLayer(memory, expected=200)
    layer.update(states(3, 150, 0), states(3, 150, 1))
    row = 3 * HEADS * DIM * 4
    assert held(memory) == 2 * int(200 * share) * row
    assert session.stats().asked_bytes.current == 2 * (200 - int(200 * share)) * row
    layer.update(states(3, 60, 2), states(3, 60, 3))  # more than was expected: both grow
    room = 210 + slack_of(210)
    assert held(memory) == 2 * int(room * share) * row
    assert room_of(layer)._head.positions == min(210, int(room * share))
    layer.reset()
    assert held(memory) == session.stats().asked_bytes.current == 0


def test_window_that_slides_keeps_its_beginning_on_the_accelerator_without_new_memory(
    session: Session,
) -> None:
    window, memory = 100, parted(session, 0.5)
    layer, stock = TierSlidingLayer(window, memory), DynamicSlidingWindowLayer(window)
    for each in (layer, stock):
        each.update(states(1, 300, 0), states(1, 300, 1))
    taken, on_head = held(memory), []
    for seed in range(500):
        new = states(1, 1, seed)
        made, expected = layer.update(new, -new), stock.update(new, -new)
        assert all(torch.equal(one, two) for one, two in zip(made, expected, strict=True))
        on_head.append(room_of(layer)._head.positions)
    assert held(memory) == taken
    assert max(on_head[100:]) > 70
    assert sum(on_head) / len(on_head) > 0.3 * window


def test_failure_between_parts_of_a_batch_leaves_both_as_they_were(session: Session) -> None:
    memory = parted(session, 0.5)
    layer = TierLayer(memory, expected=20)
    keys = states(4, 8, 0)
    layer.update(keys, -keys)
    more = states(4, 6, 1)  # two positions for the accelerator, four for the tier
    memory.current.part = RowPart(0, 2, 4)
    layer.update(more[:2], -more[:2])
    memory.current.part = None
    assert layer.get_seq_length() == 8
    assert torch.equal(layer.keys, keys)
    for begin in (0, 2):
        memory.current.part = RowPart(begin, begin + 2, 4)
        layer.update(more[begin : begin + 2], -more[begin : begin + 2])
    memory.current.part = None
    assert torch.equal(layer.keys, torch.cat([keys, more], dim=2))
    assert torch.equal(layer.values, -layer.keys)
    del layer


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_refused_growth_leaves_what_is_kept(
    nth: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new memory is keys and values on the accelerator, then keys and values in the tier."""
    memory = parted(session, 0.5)
    layer = TierLayer(memory, expected=40)
    keys = states(2, 40, 0)
    layer.update(keys, -keys)
    left = iter(range(nth - 1))

    def failing(real: Any) -> Any:
        def empty(self: Any, shape: Any, dtype: Any) -> torch.Tensor:
            if next(left, None) is None:
                raise MemoryError("full")
            return real(self, shape, dtype)  # type: ignore[no-any-return]

        return empty

    with monkeypatch.context() as patched:
        for kind in (KvMemory, AcceleratorKv):
            patched.setattr(kind, "empty", failing(kind.empty))
        with pytest.raises(MemoryError, match="full"):
            layer.update(states(2, 1, 1), states(2, 1, 1))
    layer._show()
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, -keys)
    new = states(2, 3, 2)
    made = layer.update(new, -new)
    assert torch.equal(made[0], torch.cat([keys, new], dim=2))
    assert torch.equal(made[1], -made[0])
    del layer, made
    assert held(memory) == 0


def test_accelerator_without_room_says_so_in_one_line(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = parted(session, 0.5)
    layer = TierLayer(memory, expected=40)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(MemoryError, match=r"accelerator_kv 0.5: cpu has no room for") as error:
            layer.update(states(2, 1, 1), states(2, 1, 1))
    assert "\n" not in str(error.value)
    assert not layer.is_initialized


def test_cache_that_is_kept_is_copied_and_goes_on_apart(session: Session) -> None:
    memory = parted(session, 0.5)
    cache = DynamicCache(config=CONFIG)
    put_in_tiers(cache, memory, 40)
    keys = states(2, 30, 0)
    cache.update(keys, -keys, 0)
    once = held(memory)
    twin = copy.deepcopy(cache)
    assert held(memory) == 2 * once
    assert all(session.find(each.data_ptr()) for each in kept_tensors(twin))
    new = states(2, 5, 1)
    twin.update(new, -new, 0)
    assert torch.equal(cache.layers[0].keys, keys)
    assert torch.equal(twin.layers[0].keys, torch.cat([keys, new], dim=2))
    del cache, twin
    assert held(memory) == 0


# States in two places ----------------------------------------------------------------------------


@pytest.fixture
def both() -> PartedStates:
    return PartedStates(states(2, 3, 0), states(2, 5, 1), CPU)


def test_operators_see_all_positions(both: PartedStates) -> None:
    whole = torch.cat([both.head, both.tail], dim=2)
    assert both.shape == whole.shape
    assert torch.equal(both, whole)
    assert torch.equal(both.repeat_interleave(2, 1), whole.repeat_interleave(2, 1))
    q = states(2, 1, 2)
    by_both = torch.nn.functional.scaled_dot_product_attention(q, both, both)
    assert torch.equal(by_both, torch.nn.functional.scaled_dot_product_attention(q, whole, whole))
    assert "3 positions on cpu" in repr(both)


def test_writing_to_them_is_refused_rather_than_lost(both: PartedStates) -> None:
    with pytest.raises(TypeError, match="read only; write to their head and their tail"):
        both.mul_(2)


def test_part_that_is_all_is_not_copied() -> None:
    head, none = states(2, 3, 0), states(2, 0, 0)
    assert PartedStates(head, none, CPU).joined().data_ptr() == head.data_ptr()


# Refusals ----------------------------------------------------------------------------------------


def test_fixed_cache_is_refused(session: Session) -> None:
    cache = StaticCache(config=CONFIG, max_cache_len=10)
    with pytest.raises(ConfigError, match="accelerator_kv is for caches that grow"):
        put_in_tiers(cache, parted(session, 0.5))


@pytest.mark.parametrize(
    ("share", "device", "kinds", "said"),
    [
        (-0.1, CPU, {"kv"}, "accelerator_kv -0.1: a share of the KV cache, from 0"),
        (1.5, CPU, {"kv"}, "accelerator_kv 1.5: a share"),
        (float("nan"), CPU, {"kv"}, "accelerator_kv nan: a share"),
        (True, CPU, {"kv"}, "accelerator_kv True: a share"),
        ("half", CPU, {"kv"}, "accelerator_kv half: a share"),
        (0.5, None, {"kv"}, "no accelerator computes; name one with accelerator"),
        (0.5, CPU, {"mlp"}, "give a policy of kv for the rest"),
    ],
)
def test_share_that_cannot_be_is_refused_in_one_line(
    share: Any, device: Any, kinds: set[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        accelerator_kv(share, device, kinds)
    assert "\n" not in str(error.value)


def test_share_of_nothing_is_none() -> None:
    assert accelerator_kv(0, None, ()) is None
