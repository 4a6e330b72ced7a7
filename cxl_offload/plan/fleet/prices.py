"""What servers cost, and their tokens. Prices are asked for: none is assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from cxl_offload.errors import ConfigError
from cxl_offload.units import GIB

CARD_PRICES = ("cxl", "card", "card_watts")
"""Prices that only servers with CXL memory have."""

_HOURS_A_YEAR = 365 * 24
_MOST = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In one currency, whichever.

    Attributes
    ----------
    server
        A server with its GPU, without what is listed below.
    dram, cxl
        A GiB of DRAM, and of memory behind a card.
    card
        A CXL card without its memory.
    watts
        Power of a server; ``card_watts`` is that of a card.
    kwh
        A kilowatt-hour, with cooling.
    years
        Over which what is bought is written off.
    """

    server: float
    dram: float
    cxl: float = 0.0
    card: float = 0.0
    watts: float = 0.0
    card_watts: float = 0.0
    kwh: float = 0.0
    years: float = 4.0

    def __post_init__(self) -> None:
        for name, value in ((each.name, getattr(self, each.name)) for each in fields(self)):
            if not 0 <= value <= _MOST or (name == "years" and value == 0):
                raise ConfigError(f"price {name}={value:g}: from 0 to {_MOST:g}, years above 0")


def prices_of(given: Mapping[str, float]) -> Prices:
    """Prices by name.

    Raises
    ------
    ConfigError
        A name that is unknown, or server or dram is missing.
    """
    known = [each.name for each in fields(Prices)]
    for name in given:
        if name not in known:
            raise ConfigError(f"price {name}: known are {', '.join(known)}")
    missing = [name for name in ("server", "dram") if name not in given]
    if missing:
        raise ConfigError(f"prices: {' and '.join(missing)} not given; nothing is assumed")
    return Prices(**given)


def refuse_unfit(given: Mapping[str, float], *, has_cards: bool) -> None:
    """Refuses prices that would change no cost, and CXL memory that would cost nothing unasked.

    Parameters
    ----------
    has_cards
        Whether a server of those that are compared has CXL memory.

    Raises
    ------
    ConfigError
        Names them, and what they need beside them.
    """
    cards = [name for name in CARD_PRICES if name in given]
    if cards and not has_cards:
        raise ConfigError(
            f"price {', '.join(cards)}: no server has CXL memory; name sizes of it (--cxl), or "
            "leave it out"
        )
    if has_cards and not {"cxl", "card"} & {*given}:
        raise ConfigError(
            "prices: cxl and card not given, and a server has CXL memory; nothing is assumed: give "
            "one of them, be it 0, or compare none (--cxl 0GiB)"
        )
    watts = [name for name in ("watts", "card_watts") if name in given]
    if watts and "kwh" not in given:
        raise ConfigError(
            f"price {', '.join(watts)}: power costs nothing without a price of it; give kwh too, "
            "or leave it out"
        )
    if "kwh" in given and not watts:
        raise ConfigError(
            "price kwh: nothing draws power without watts; give them, or leave it out"
        )


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Host memory of one server, in bytes, and the cards that carry the CXL part."""

    dram_bytes: int
    cxl_bytes: int
    cards: int


def price_of_server(prices: Prices, memory: ServerMemory) -> float:
    """What one server costs to buy."""
    dram, cxl = memory.dram_bytes / GIB, memory.cxl_bytes / GIB
    return prices.server + dram * prices.dram + cxl * prices.cxl + memory.cards * prices.card


def cost_per_hour(prices: Prices, memory: ServerMemory) -> float:
    """Of one server: its price written off evenly, and its power."""
    watts = prices.watts + memory.cards * prices.card_watts
    bought = price_of_server(prices, memory) / (prices.years * _HOURS_A_YEAR)
    return bought + watts / 1e3 * prices.kwh


def break_even_card(
    prices: Prices, without: tuple[int, ServerMemory], having: tuple[int, ServerMemory]
) -> float | None:
    """The price of a card at which both fleets cost the same an hour; each: servers, and memory.

    None where the second has no cards. Below 0: they would not pay if they were given away.
    """
    servers, memory = having
    if not servers * memory.cards:
        return None
    saved = without[0] * cost_per_hour(prices, without[1]) - servers * cost_per_hour(prices, memory)
    return prices.card + saved * prices.years * _HOURS_A_YEAR / (servers * memory.cards)
