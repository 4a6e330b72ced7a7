"""Layers in tiers against the layers of transformers, in any order of what a cache is asked for."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import first_rooms
from cxl_offload.integrations.transformers.cache import kept_tensors, put_in_tiers, reserve
from cxl_offload.integrations.transformers.growing_layers import TierLayer, TierSlidingLayer
from cxl_offload.integrations.transformers.room import KvMemory, slack_of
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, FirstTouch, Interleave, Policy, Session

from .conftest import machine

HEADS, DIM = 2, 4
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 5, 20, 70, 150])),
        st.tuples(st.just("reorder"), st.integers(0, 1000)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("choose"), st.integers(0, 1000)),
        st.tuples(st.just("crop"), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


def kv_memory(policy: Policy, session: Session) -> KvMemory:
    return KvMemory(store_for({"kv": policy}, session))


def states(batch: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, count, DIM, generator=generator)


def perform(layer: Any, step: str, size: int, batch: int, seed: int) -> Any:
    """One thing that generate() does to a layer; what it returns is compared."""
    if step == "update":
        keys = states(batch, size, seed)
        made = layer.update(keys, -keys)
        return [each.clone() for each in made]
    if step == "reorder":
        rows = torch.randint(0, batch, (batch,), generator=torch.Generator().manual_seed(size))
        return layer.reorder_cache(rows)
    if step == "repeat":
        return layer.batch_repeat_interleave(size)
    if step == "choose":
        return layer.batch_select_indices(torch.tensor([size % batch, 0]))
    if step == "crop":
        return layer.crop(-size)
    return layer.reset()


def same(ours: Any, stock: Any) -> None:
    assert ours.get_seq_length() == stock.get_seq_length()
    assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
    assert ours.is_initialized == stock.is_initialized
    if stock.get_seq_length() > 0 and stock.keys.numel():
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)


def compare(ours: Any, stock: Any, steps: list[tuple[str, int]]) -> None:
    batch, empty = 2, True
    for seed, (step, size) in enumerate(steps):
        if step == "copy":
            ours = copy.deepcopy(ours)
            continue
        if (batch > 4 and step == "repeat") or (empty and step in ("repeat", "choose", "crop")):
            continue
        size = min(size, max(0, stock.get_seq_length() - 1)) if step == "crop" else size
        expected = perform(stock, step, size, batch, seed)
        made = perform(ours, step, size, batch, seed)
        if step == "update":
            assert all(torch.equal(one, two) for one, two in zip(made, expected, strict=True))
        same(ours, stock)
        empty = step == "reset" or (empty and step != "update")
        batch = {"repeat": 2 * batch, "choose": 2, "reset": 2}.get(step, batch)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, expected=st.sampled_from([0, 30, 300]))
def test_growing_layer_does_as_that_of_transformers(
    steps: list[tuple[str, int]], expected: int
) -> None:
    session = Session.simulated(machine())
    compare(TierLayer(kv_memory(Bind((2,)), session), expected), DynamicLayer(), steps)
    assert session.stats().asked_bytes.current == 0


@settings(deadline=None, max_examples=120)
@given(
    steps=STEPS,
    window=st.sampled_from([2, 5, 16, 100, 700]),
    expected=st.sampled_from([0, 30, 300]),
    recorded=st.booleans(),
)
def test_sliding_layer_does_as_that_of_transformers(
    steps: list[tuple[str, int]], window: int, expected: int, recorded: bool
) -> None:
    """Also with candidates taken back, which transformers asks to be told of before."""
    session = Session.simulated(machine())
    ours = TierSlidingLayer(window, kv_memory(Bind((2,)), session), expected)
    stock = DynamicSlidingWindowLayer(window)
    if recorded:
        ours.activate_past_recording()
        stock.activate_past_recording()
    else:
        steps = [(step, size) for step, size in steps if step != "crop"]
    compare(ours, stock, steps)
    del ours
    assert session.stats().asked_bytes.current == 0


def test_crop_of_a_full_window_that_kept_nothing_is_refused(session: Session) -> None:
    layer = TierSlidingLayer(4, kv_memory(Bind((2,)), session))
    layer.update(states(1, 9, 0), states(1, 9, 1))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)


def test_window_moves_within_its_own_room(session: Session) -> None:
    """A thousand positions in the room of a window and its slack; one allocation each."""
    window = 40
    layer = TierSlidingLayer(window, kv_memory(Bind((2,)), session))
    layer.update(states(1, 300, 0), states(1, 300, 1))
    for seed in range(1000):
        layer.update(states(1, 1, seed), states(1, 1, seed))
    room = (window - 1 + slack_of(window - 1)) * HEADS * DIM * 4
    assert session.stats().asked_bytes.peak <= 2 * room
    assert session.stats().asked_bytes.total <= 2 * room


def test_expected_room_is_taken_once(session: Session) -> None:
    layer = TierLayer(kv_memory(Bind((2,)), session), expected=500)
    layer.update(states(1, 20, 0), states(1, 20, 1))
    for seed in range(480):
        layer.update(states(1, 1, seed), states(1, 1, seed))
    assert session.stats().asked_bytes.total == 2 * 500 * HEADS * DIM * 4


def test_states_lie_where_the_policy_says(session: Session) -> None:
    cache = DynamicCache(config=CONFIG)
    put_in_tiers(cache, kv_memory(Bind((2,)), session))
    cache.update(states(2, 30, 0), states(2, 30, 1), 0)
    for part in (cache.layers[0].keys, cache.layers[0].values):
        span = part.storage_offset() * 4 + part.untyped_storage().nbytes()
        assert set(session.placement(part.data_ptr(), span).granted) == {2}


def test_cache_that_learns_its_layers_makes_them_in_the_tier(session: Session) -> None:
    cache = DynamicCache()
    put_in_tiers(cache, kv_memory(Bind((2,)), session))
    reserve(cache, 100)
    cache.update(states(2, 30, 0), states(2, 30, 1), 1)
    assert [type(layer) for layer in cache.layers] == [TierLayer, TierLayer]
    assert session.stats().nodes[2].current_bytes >= 2 * 2 * 100 * HEADS * DIM * 4


def test_fixed_cache_has_all_its_room_in_the_tier_and_can_be_copied(session: Session) -> None:
    cache = StaticCache(config=CONFIG, max_cache_len=50)
    put_in_tiers(cache, kv_memory(Bind((2,)), session))
    keys = states(2, 30, 0)
    seen, _ = cache.update(keys, keys, 0)
    assert torch.equal(seen, keys)
    kept = copy.deepcopy(cache)
    kept.layers[0].keys.zero_()
    assert torch.equal(cache.layers[0].keys[:, :, :30], keys)
    assert session.stats().asked_bytes.current == 4 * 2 * 50 * HEADS * DIM * 4
    kept.layers[0].reorder_cache(torch.tensor([1, 1]))
    cache.layers[0].reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(cache.layers[0].keys[0], cache.layers[0].keys[1])


def test_gradients_are_refused(session: Session) -> None:
    layer = TierLayer(kv_memory(Bind((2,)), session))
    with pytest.raises(RuntimeError, match="no_grad"):
        layer.update(states(1, 2, 0).requires_grad_(), states(1, 2, 1))


def test_cache_made_while_inferring_goes_on_outside(session: Session) -> None:
    layer = TierLayer(kv_memory(FirstTouch(), session))
    with torch.inference_mode():
        layer.update(states(1, 2, 0), states(1, 2, 1))
    layer.update(states(1, 2, 2), states(1, 2, 3))
    assert torch.equal(layer.keys[:, :, 2:], states(1, 2, 2))


def test_cache_of_another_kind_is_refused(session: Session) -> None:
    cache = DynamicCache(config=CONFIG)
    cache.layers[0] = object()
    with pytest.raises(ConfigError, match="object cannot lie in tiers"):
        put_in_tiers(cache, kv_memory(Bind((2,)), session))


def held(cache: DynamicCache, session: Session) -> set[int]:
    """Addresses of the allocations that a cache's keys and values are in."""
    owners = [session.find(tensor.data_ptr()) for tensor in kept_tensors(cache)]
    return {owner.address for owner in owners if owner is not None}


def of_layers(count: int, window: int = 0) -> DynamicCache:
    """Every second layer has the window, if there is one."""
    config = LlamaConfig(num_hidden_layers=count, hidden_size=8, num_attention_heads=2)
    if window:
        config = Gemma3TextConfig(
            num_hidden_layers=count,
            hidden_size=8,
            num_attention_heads=2,
            sliding_window=window,
            sliding_window_pattern=2,
        )
    return DynamicCache(config=config)


def fill(cache: DynamicCache, count: int, seed: int = 0) -> list[torch.Tensor]:
    made = [states(2, count, seed + at) for at in range(len(cache.layers))]
    for at, keys in enumerate(made):
        cache.update(keys, -keys, at)
    return made


@pytest.mark.parametrize(("window", "allocations"), [(0, 1), (8, 2)])
def test_small_layers_of_a_cache_share_one_allocation_by_kind(
    window: int, allocations: int
) -> None:
    session = Session.simulated(machine())
    memory, cache = kv_memory(Bind((2,)), session), of_layers(6, window)
    put_in_tiers(cache, memory, 30)
    made = fill(cache, 5)
    assert len(held(cache, session)) == allocations
    tensors = kept_tensors(cache)
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for layer, keys in zip(cache.layers, made, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, -keys)
    counted = memory.store.use()["kv", "host"]
    assert sum(each.nbytes for each in tensors) == counted.live_bytes
    assert counted.live_bytes == session.stats().asked_bytes.current
    del tensors, layer, cache
    assert counted.live_bytes == session.stats().asked_bytes.current == 0


def test_striped_layers_begin_a_stripe_each() -> None:
    session = Session.simulated(machine())
    cache = of_layers(3)
    put_in_tiers(cache, kv_memory(Interleave((0, 2)), session), 30)
    fill(cache, 5)
    assert len(held(cache, session)) == 6
    del cache


def test_large_layers_have_allocations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rooms, "_MOST_SHARED", 1000)
    session = Session.simulated(machine())
    cache = of_layers(6)
    put_in_tiers(cache, kv_memory(Bind((2,)), session), 30)
    fill(cache, 5)
    assert len(held(cache, session)) == 12
    del cache


def test_layers_that_grow_leave_the_shared_allocation_and_copies_have_their_own() -> None:
    session = Session.simulated(machine())
    memory, cache = kv_memory(Bind((2,)), session), of_layers(3)
    put_in_tiers(cache, memory, 8)
    first = fill(cache, 5)
    copied = copy.deepcopy(cache)
    assert len(held(cache, session)) == 1
    assert held(cache, session).isdisjoint(held(copied, session))
    shared = memory.store.use()["kv", "host"].live_bytes - sum(
        each.nbytes for each in kept_tensors(copied)
    )
    more = fill(cache, 300, seed=10)
    after = memory.store.use()["kv", "host"].live_bytes
    mine = sum(each.nbytes for each in (*kept_tensors(cache), *kept_tensors(copied)))
    assert shared > 0
    assert after == mine  # what was shared is gone
    for at, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys, torch.cat([first[at], more[at]], dim=2))
        assert torch.equal(copied.layers[at].keys, first[at])
    del cache, copied, layer
    assert session.stats().asked_bytes.current == 0


def test_layers_of_other_heads_than_the_first_have_their_own() -> None:
    session = Session.simulated(machine())
    cache = of_layers(3)
    put_in_tiers(cache, kv_memory(Bind((2,)), session), 8)
    for at, heads in enumerate((1, 2, 1)):
        keys = torch.full((2, heads, 5, DIM), float(at))
        cache.update(keys, -keys, at)
    for at, layer in enumerate(cache.layers):
        assert float(layer.keys.min()) == float(layer.keys.max()) == at
    del cache, layer
    assert session.stats().asked_bytes.current == 0
