"""What the power cuts ask for, held against a life without a cut: no guest, no medium."""

from __future__ import annotations

import random

import pytest

from tests.kept.ground import LAYOUT, after, key_of, keys_of
from tests.vm.test_power_cuts import what_must_be_there


def a_life(seed: int) -> list[tuple[str, list[bytes]]]:
    """Lines that a guest says, each with what its store holds then."""
    numbers = random.Random(seed)
    there = [key_of(number) for number in numbers.sample(range(24), LAYOUT.slots)]
    words = " ".join(str(int.from_bytes(key[-4:], "big")) for key in there)
    life = [(f"found dax {words}", there)]
    for key in keys_of(seed):
        there = after(there, [key], LAYOUT.slots)
        life.append((f"written dax {int.from_bytes(key[-4:], 'big')}", there))
        if numbers.random() < 0.2:
            life.append(("flushed dax", there))
    return life


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_there_must_be_there_where_every_write_is_on_the_medium(seed: int) -> None:
    life = a_life(seed)
    for end, (_, there) in enumerate(life, 1):
        said = [line for line, _ in life[:end]]
        assert what_must_be_there(said, "dax", all_writes=True) == set(there)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_flushed_must_be_there_unless_its_slot_was_used_again(seed: int) -> None:
    life = a_life(seed)
    for end, (line, there) in enumerate(life, 1):
        said = [said for said, _ in life[:end]]
        must = what_must_be_there(said, "dax", all_writes=False)
        assert must <= set(there)
        if line == "flushed dax":
            assert must == set(there)
