"""``--price`` of ``cxl-offload plan fleet``: of all machines, or ``MACHINE:NAME=AMOUNT`` of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs
from cxl_offload.plan.fleet.prices import CARD_PRICES, Prices, prices_of, refuse_unfit

_FORM = "NAME=AMOUNT, such as server=40000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A machine that prices are asked for: its names, and whether a size has CXL memory."""

    names: tuple[str, ...]
    has_cards: bool


def prices_by_machine(texts: Sequence[str], machines: Sequence[Priced]) -> list[Prices]:
    """The prices of each machine: its own, and for the rest those of all.

    Raises
    ------
    ConfigError
        No price, an unknown machine or name, one that is missing, or one that changes no cost.
    """
    common: list[str] = []
    own: list[list[str]] = [[] for _ in machines]
    for text in texts:
        head, equals, amount = text.rpartition("=")
        machine, colon, name = head.rpartition(":")
        if not colon:
            common.append(text)
            continue
        own[_named(text, machine, machines)].append(f"{name}{equals}{amount}")
    for_all = pairs("--price", common, float, form=_FORM)
    some_have_cards = any(each.has_cards for each in machines)
    found = []
    for each, mine in zip(machines, own, strict=True):
        given = pairs(f"--price {each.names[0]}:", mine, float, form=_FORM)
        shared = for_all
        if some_have_cards and not each.has_cards:
            shared = {name: value for name, value in for_all.items() if name not in CARD_PRICES}
        found.append(_checked({**shared, **given}, each, several=len(machines) > 1))
    return found


def _named(text: str, machine: str, machines: Sequence[Priced]) -> int:
    for at, each in enumerate(machines):
        if machine in each.names:
            return at
    known = ", ".join(each.names[0] for each in machines)
    raise ConfigError(f"--price {text}: no machine {machine} is compared; there is {known}")


def _checked(given: Mapping[str, float], machine: Priced, *, several: bool) -> Prices:
    try:
        made = prices_of(given)
        refuse_unfit(given, has_cards=machine.has_cards)
    except ConfigError as error:
        if several:
            raise ConfigError(f"{machine.names[0]}: {error}") from None
        raise
    return made
