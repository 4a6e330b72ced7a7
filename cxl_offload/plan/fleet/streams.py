"""Streams of requests, and what each server of a fleet gets of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.arrivals import Arrival, arrivals_per_s, on_their_own

_SIMULATED = 20_000
"""Requests that one answer is simulated with; of a larger fleet, so many servers are."""
_OF_A_SERVER = 400
_WARM_UP = 0.25
"""Share of the requests of a server that begin on an empty one, and are not counted."""


_RATES = (1e-9, 1e9)
"""Requests/s: one in 30 years, and more than all people send."""


class RequestStream(Protocol):
    """Requests of a fleet, dealt to its servers in turn."""

    @property
    def rate(self) -> float:
        """Requests a second of the whole."""

    def lengths(self) -> tuple[float, float]:
        """Mean tokens of prompts and of answers."""

    def requests(self) -> Sequence[Arrival]:
        """As many as it takes to know the mean work of one."""

    def dealt(self, servers: int) -> list[list[Arrival]]:
        """What some of the servers get, each its own requests."""

    @property
    def warm_up(self) -> float:
        """Share of a server's requests that is not counted."""


@dataclass(frozen=True, slots=True)
class DrawnStream:
    """Requests of one length that come independently of each other, ``rate`` a second."""

    rate: float
    prompt: int
    generated: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not _RATES[0] <= self.rate <= _RATES[1]:
            raise ConfigError(
                f"{self.rate:g} requests/s: a number above 0 is needed, from {_RATES[0]:g} to "
                f"{_RATES[1]:g}"
            )

    @property
    def warm_up(self) -> float:
        """The first quarter."""
        return _WARM_UP

    def lengths(self) -> tuple[float, float]:
        """Those of each."""
        return self.prompt, self.generated

    def requests(self) -> Sequence[Arrival]:
        """One: all are alike."""
        return [Arrival(0.0, self.prompt, self.generated)]

    def dealt(self, servers: int) -> list[list[Arrival]]:
        """Every ``servers``-th of a Poisson stream: the waits between are gamma distributed."""
        draw = random.Random(self.seed)
        made = []
        for _ in range(min(servers, _SIMULATED // _OF_A_SERVER)):
            now, arrivals = 0.0, []
            for _ in range(max(_OF_A_SERVER, _SIMULATED // servers)):
                now += draw.gammavariate(servers, 1 / self.rate)
                arrivals.append(Arrival(now, self.prompt, self.generated))
            made.append(arrivals)
        return made


@dataclass(frozen=True, slots=True)
class TraceStream:
    """Requests of a trace, from its first to its last.

    ``per_s``: requests a second, of a part whose first and last say less of it than the whole does.
    """

    arrivals: Sequence[Arrival]
    per_s: float | None = None

    @property
    def rate(self) -> float:
        """In the mean over the trace."""
        return arrivals_per_s(self.arrivals) if self.per_s is None else self.per_s

    def split(self, longest: int) -> tuple[TraceStream, TraceStream]:
        """Prompts of up to so many tokens, and the longer ones; each for servers of its own."""
        short = [each for each in self.arrivals if each.prompt <= longest]
        long = [each for each in self.arrivals if each.prompt > longest]
        of_each = self.rate / len(self.arrivals)
        return (
            TraceStream(on_their_own(short), of_each * len(short)),
            TraceStream(on_their_own(long), of_each * len(long)),
        )

    @property
    def warm_up(self) -> float:
        """None: every request counts."""
        return 0.0

    def lengths(self) -> tuple[float, float]:
        """Means over the trace."""
        count = len(self.arrivals)
        prompts = sum(each.prompt for each in self.arrivals)
        return prompts / count, sum(each.generated for each in self.arrivals) / count

    def requests(self) -> Sequence[Arrival]:
        """All, since what is found of their prompts differs."""
        return self.arrivals

    def dealt(self, servers: int) -> list[list[Arrival]]:
        """All requests, or those of as many servers as there is time for."""
        of_each = max(1, len(self.arrivals) // servers)
        some = min(servers, max(1, math.ceil(5 * _SIMULATED / of_each)))
        step = servers / some
        return [list(self.arrivals[int(at * step) :: servers]) for at in range(some)]
