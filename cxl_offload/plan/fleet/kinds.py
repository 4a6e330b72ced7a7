"""Servers of several kinds: the cheapest that meets the target, and two kinds side by side.

A fleet is of one kind, or of two that share the requests by the length of their prompts: a router
knows it when a request comes, and long prompts and short ones want different servers. Each of the
two is then a fleet of its own, with its own requests, its own caches and the whole target, so what
is said of the mixture is what the simulation of each says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cxl_offload.plan.fleet.prices import Prices
from cxl_offload.plan.fleet.search import FleetOption, FleetPlanner, as_document, options
from cxl_offload.plan.fleet.streams import RequestStream, TraceStream
from cxl_offload.plan.vllm.plan import VllmRequest
from cxl_offload.plan.vllm.serving import TokenTargets

_SHARES = (10, 25, 50, 75, 90, 97)
"""Per cent of the requests that a tried threshold leaves to the servers of short prompts."""
_FEWEST = 20
"""Requests of a part: of fewer, nobody knows what 95 of 100 see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """A machine to buy, with the (DRAM, CXL) bytes to compare and its prices.

    ``request`` is for that machine, with the mean lengths of all requests.
    """

    request: VllmRequest
    sizes: Sequence[tuple[int, int]]
    prices: Prices

    @property
    def name(self) -> str:
        """That of the machine."""
        return self.request.machine.name


@dataclass(frozen=True, slots=True, kw_only=True)
class KindAnswer:
    """What a fleet of one kind takes.

    Attributes
    ----------
    options
        One for each size of memory, the cheapest first.
    refused
        Why none can be planned; None: they are.
    """

    kind: ServerKind
    options: Sequence[FleetOption] = ()
    refused: ValueError | None = None

    @property
    def cheapest(self) -> FleetOption | None:
        """The option that costs least; None: none meets the target."""
        return self.options[0] if self.options and self.options[0].servers else None

    @property
    def reason(self) -> str:
        """Why no option meets the target, in the words of the first; empty: one does."""
        if self.refused is not None:
            return str(self.refused)
        return "" if self.cheapest else self.options[0].reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPart:
    """Servers of one kind that get a part of the requests, and this share of all."""

    machine: str
    option: FleetOption
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Two kinds of servers: ``short`` get prompts of up to ``longest`` tokens, ``long`` the others.

    ``one_kind_per_million`` is what the same division costs with the cheapest kind for both parts;
    None where no kind can do both.
    """

    longest: int
    short: FleetPart
    long: FleetPart
    cost_per_hour: float
    cost_per_million: float
    one_kind_per_million: float | None


class KindPlanner:
    """Answers for several kinds of servers, one stream of requests and one target."""

    def __init__(
        self,
        kinds: Sequence[ServerKind],
        stream: RequestStream,
        target: TokenTargets,
        *,
        block_tokens: int = 512,
        progress: Callable[[str, int, int], None] = lambda label, done, total: None,
    ) -> None:
        self._kinds = kinds
        self._stream = stream
        self._target = target
        self._block_tokens = block_tokens
        self._progress = progress

    def answers(self, servers: int | None = None) -> list[KindAnswer]:
        """One for each kind, the cheapest first; those that cannot be planned for last.

        Parameters
        ----------
        servers
            So many of each, whether they meet the target or not.

        Raises
        ------
        ConfigError, ValueError
            What was wrong with the first, where none can be planned for.
        """
        found = [self._answer(kind, self._stream, servers) for kind in self._kinds]
        if all(each.refused for each in found):
            raise next(each.refused for each in found if each.refused)
        return sorted(found, key=_cost)

    def mixture(self) -> Mixture | None:
        """The cheapest pair of kinds; None where prompts do not differ or no pair meets the target.

        Tried are six thresholds, shares of the requests; both parts meet the whole target.
        """
        stream = self._stream
        if len(self._kinds) < 2 or not isinstance(stream, TraceStream):
            return None
        found = []
        for at, longest in enumerate(thresholds := _thresholds(stream)):
            self._progress("mixtures of two kinds", at, len(thresholds))
            made = self._divided(stream, longest)
            if made is not None:
                found.append(made)
        return min(found, key=lambda each: each.cost_per_hour, default=None)

    def _answer(
        self, kind: ServerKind, stream: RequestStream, servers: int | None = None
    ) -> KindAnswer:
        block, label = self._block_tokens, "sizes of memory planned"
        planner = FleetPlanner(kind.request, stream, self._target, block_tokens=block)
        try:
            made = options(
                planner,
                kind.sizes,
                kind.prices,
                servers=servers,
                progress=lambda done: self._progress(label, done, len(kind.sizes)),
            )
        except ValueError as error:  # a ConfigError is one
            return KindAnswer(kind=kind, refused=error)
        return KindAnswer(kind=kind, options=made)

    def _divided(self, stream: TraceStream, longest: int) -> Mixture | None:
        """The cheapest pair for one threshold."""
        parts = [self._cheapest(part) for part in stream.split(longest)]
        pairs = [(short, long) for short in parts[0].items() for long in parts[1].items()]
        mixed = [pair for pair in pairs if pair[0][0] != pair[1][0]]
        if not mixed:
            return None
        short, long = min(mixed, key=_pair_cost)
        same = [_pair_cost(pair) for pair in pairs if pair[0][0] == pair[1][0]]
        tokens = stream.rate * stream.lengths()[1] * 3600 / 1e6  # millions an hour
        share = sum(each.prompt <= longest for each in stream.arrivals) / len(stream.arrivals)
        cost = _pair_cost((short, long))
        return Mixture(
            longest=longest,
            short=FleetPart(machine=short[0], option=short[1], share=share),
            long=FleetPart(machine=long[0], option=long[1], share=1 - share),
            cost_per_hour=cost,
            cost_per_million=cost / tokens,
            one_kind_per_million=min(same) / tokens if same else None,
        )

    def _cheapest(self, part: TraceStream) -> dict[str, FleetOption]:
        """The cheapest option of every kind that meets the target for these requests."""
        prompt, generated = (math.ceil(each) for each in part.lengths())
        found = {}
        for kind in self._kinds:
            request = replace(kind.request, prompt=prompt, generated=generated)
            answer = self._answer(replace(kind, request=request), part)
            if answer.cheapest is not None:
                found[kind.name] = answer.cheapest
        return found


def _cost(answer: KindAnswer) -> tuple[bool, bool, float]:
    cheapest = answer.cheapest
    return (
        answer.refused is not None,
        cheapest is None,
        math.inf if cheapest is None else cheapest.cost_per_hour,
    )


def _pair_cost(pair: tuple[tuple[str, FleetOption], tuple[str, FleetOption]]) -> float:
    return pair[0][1].cost_per_hour + pair[1][1].cost_per_hour


def _thresholds(stream: TraceStream) -> list[int]:
    """Lengths of prompts that leave enough requests on both sides."""
    prompts = sorted(each.prompt for each in stream.arrivals)
    tried = np.percentile(prompts, _SHARES, method="inverted_cdf")
    return [
        int(longest)
        for longest in dict.fromkeys(tried)
        if _FEWEST <= np.searchsorted(prompts, longest, side="right") <= len(prompts) - _FEWEST
    ]


def answer_document(answer: KindAnswer) -> Mapping[str, object]:
    """For JSON: a kind and its cheapest option."""
    cheapest = answer.cheapest
    return {
        "machine": answer.kind.name,
        "reason": answer.reason,
        "cheapest": None if cheapest is None else as_document(cheapest),
    }


def mixture_document(mixture: Mixture | None) -> Mapping[str, object] | None:
    """For JSON: tokens of a prompt, and costs as those of options."""
    if mixture is None:
        return None
    parts = {
        name: {"machine": part.machine, "share": part.share, **as_document(part.option)}
        for name, part in (("short", mixture.short), ("long", mixture.long))
    }
    return {
        "longest_short_prompt": mixture.longest,
        **parts,
        "cost_per_hour": mixture.cost_per_hour,
        "cost_per_million_tokens": mixture.cost_per_million,
        "one_kind_cost_per_million_tokens": mixture.one_kind_per_million,
    }
