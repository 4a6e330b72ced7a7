"""The most used items near: against the oracle that knows the counts, and against thrashing."""

from __future__ import annotations

import numpy as np
import pytest

from cxl_offload.tune import MostUsedItems, MostUsedRule


def zipf(items: int, exponent: float, draw: np.random.Generator) -> np.ndarray:
    weights = 1.0 / np.arange(1, items + 1) ** exponent
    return draw.permutation(weights / weights.sum())


@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.2])
def test_near_hits_come_close_to_those_of_the_oracle(exponent: float) -> None:
    draw = np.random.default_rng(1)
    popularity = zipf(64, exponent, draw)
    items = MostUsedItems(64, 16)
    hits = total = moved = 0
    for round_ in range(3000):
        uses = draw.multinomial(16, popularity)
        if round_ >= 1000:
            hits += int(uses[list(items.near)].sum())
            total += 16
        items.note(uses)
        swaps = items.swaps(most=1)
        moved += sum(1 + (swap.far >= 0) for swap in swaps) if round_ >= 1000 else 0
    oracle = float(np.sort(popularity)[::-1][:16].sum())
    assert hits / total >= 0.9 * oracle
    assert moved <= 0.01 * total  # bytes moved against bytes read, items being of equal size


def test_most_used_items_follows_a_change_of_what_is_asked_for() -> None:
    draw = np.random.default_rng(2)
    items = MostUsedItems(32, 4, rule=MostUsedRule(half_life=50))
    for wanted in (range(4), range(20, 24)):
        for _ in range(400):
            uses = np.zeros(32)
            uses[draw.choice(list(wanted), 4)] += 1
            items.note(uses)
            items.swaps(most=1)
        assert set(items.near) == set(wanted)


def test_items_of_like_use_do_not_trade_places() -> None:
    draw = np.random.default_rng(3)
    items = MostUsedItems(16, 8)
    late = 0
    for round_ in range(4000):
        items.note(draw.multinomial(32, np.full(16, 1 / 16)))
        late += len(items.swaps(most=4)) if round_ > 1000 else 0
    assert late <= 15


def test_free_room_is_filled_first_and_never_overfilled() -> None:
    items = MostUsedItems(6, 3, near=[0])
    items.note([0, 0, 5, 4, 3, 0])
    assert [(swap.near, swap.far) for swap in items.swaps(most=2)] == [(2, -1), (3, -1)]
    assert items.near == (0, 2, 3)
    assert [(swap.near, swap.far) for swap in items.swaps(most=9)] == [(4, 0)]
    assert len(items.near) == 3


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="room for 3 of 2"):
        MostUsedItems(2, 3)
    with pytest.raises(ValueError, match="items are near"):
        MostUsedItems(4, 1, near=[0, 1])
    with pytest.raises(ValueError, match="none endless or below 0"):
        MostUsedItems(2, 1).note([1, -1])
    with pytest.raises(ValueError, match="half_life"):
        MostUsedRule(half_life=0)
    assert MostUsedItems(2, 1).swaps(most=5) == ()
