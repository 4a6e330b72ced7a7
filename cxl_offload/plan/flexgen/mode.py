"""What a search decides outside its programs: batch, and stripes of any ratio, narrowed down.

A tier's nodes share its sixteenths by their rates. With free ratios the time of a stripe is linear
in the bytes of every node, so one program bounds all stripes between two limits; a search halves
the limits until one stripe is left.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cxl_offload.plan.equations.interleave import best_weights
from cxl_offload.plan.flexgen.choice import Stripe, kv_granule, weight_granule
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.hardware import Hardware

STRIPE_TOTAL = 16
"""Sum of interleave weights: steps of 6 % are finer than bandwidths are known."""

_WHOLE = 1e-6
"""A number of sixteenths this close to a whole one is that."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Stripes that give each tier some sixteenths between two limits.

    Attributes
    ----------
    weights
        Of every tier, in the order of the hardware, the weights of its nodes by the sixteenths that
        the tier has: those that leave none of its nodes out, and 0 of all.
    low, high
        Sixteenths of a tier, at least and at most.
    """

    weights: tuple[tuple[tuple[int, Stripe], ...], ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def tiers(self) -> tuple[range, ...]:
        """Indices of every tier's nodes."""
        ends = list(itertools.accumulate((len(each[0][1]) for each in self.weights), initial=0))
        return tuple(range(*pair) for pair in itertools.pairwise(ends))

    @property
    def limits(self) -> tuple[tuple[int, int], ...]:
        """Least and most sixteenths of every node."""
        made: list[tuple[int, int]] = []
        for offered, low, high in zip(self.weights, self.low, self.high, strict=True):
            left = [weights for total, weights in offered if low <= total <= high]
            made += [(min(each), max(each)) for each in zip(*left, strict=True)]
        return tuple(made)

    @property
    def is_one(self) -> bool:
        """Whether one ratio is left."""
        return self.low == self.high

    def narrowed(self) -> Ratios | None:
        """The limits that the others leave; None where no stripe over two nodes keeps them all."""
        found: Ratios | None = self
        while found is not None and (tighter := found._tighter()) != found:
            found = tighter
        return found

    def _tighter(self) -> Ratios | None:
        low, high = list(self.low), list(self.high)
        for at, offered in enumerate(self.weights):
            least = max(low[at], STRIPE_TOTAL - sum(self.high) + self.high[at])
            most = min(high[at], STRIPE_TOTAL - sum(self.low) + self.low[at])
            left = [total for total, _ in offered if least <= total <= most]
            if not left:
                return None
            low[at], high[at] = min(left), max(left)
        tiers = zip(self.tiers, high, strict=True)
        if sum(len(tier) for tier, most in tiers if most) < 2:
            return None
        return replace(self, low=tuple(low), high=tuple(high))

    def split(self, sixteenths: Sequence[float]) -> list[Ratios]:
        """Parts that have every stripe of these once, cut where a tier's share is broken most.

        Parameters
        ----------
        sixteenths
            Of every tier, where the least time was found; within the limits.
        """
        free = [at for at, low in enumerate(self.low) if low < self.high[at]]
        at = max(free, key=lambda tier: (broken(sixteenths[tier]), self.high[tier]))
        below = math.floor(sixteenths[at] + _WHOLE)
        below = min(max(below, self.low[at]), self.high[at])
        pieces = [(self.low[at], below), (below + 1, self.high[at])]
        if broken(sixteenths[at]) <= _WHOLE:
            pieces = [(below, below), (self.low[at], below - 1), (below + 1, self.high[at])]
        return self.split_at(at, pieces)

    def split_at(self, at: int, pieces: Sequence[tuple[int, int]]) -> list[Ratios]:
        """What is left where a tier has between so many sixteenths and so many."""
        made = []
        for least, most in pieces:
            low, high = list(self.low), list(self.high)
            low[at], high[at] = max(least, low[at]), min(most, high[at])
            made.append(replace(self, low=tuple(low), high=tuple(high)).narrowed())
        return [each for each in made if each is not None]

    @property
    def stripe(self) -> Stripe:
        """The one that is left."""
        return tuple(low for low, _ in self.limits)

    def stripes(self) -> Iterator[Stripe]:
        """All of them."""
        if self.is_one:
            yield self.stripe
            return
        for part in self.split([float(low) for low in self.low]):
            yield from part.stripes()


def broken(sixteenths: float) -> float:
    """How far from a whole number."""
    return abs(sixteenths - round(sixteenths))


@dataclass(frozen=True, slots=True)
class Mode:
    """What is decided outside the program: the GPU batch, stripes, KV all on the GPU or not.

    With ``Ratios`` it is many modes at once, whose program finds seconds that none undercuts.
    """

    gpu_batch: int
    weight_stripe: Stripe | Ratios | None
    kv_stripe: Stripe | Ratios | None
    kv_on_gpu: bool

    @property
    def is_one(self) -> bool:
        """Whether all stripes are decided."""
        return not isinstance(self.weight_stripe, Ratios) and not isinstance(self.kv_stripe, Ratios)


def rates_of(hardware: Hardware, kind: str) -> list[float]:
    """Bytes/s of every node for a kind: what it gives copies of ``weights``, or CPUs for ``kv``."""
    if kind == "weights":
        return [min(node.copy_bytes_per_s, hardware.link_bytes_per_s) for node in hardware.nodes]
    return [node.read_bytes_per_s for node in hardware.nodes]


def ratios_of(job: FlexGenJob, hardware: Hardware, kind: str) -> list[Ratios | Stripe]:
    """All stripes over two nodes and more whose rates are known; none where there are not two.

    Host tensors of the kind have them: ``weights`` or ``kv``.
    """
    granule_of = weight_granule if kind == "weights" else kv_granule
    if granule_of(job, (STRIPE_TOTAL,)) is None:
        return []
    nodes = zip(hardware.nodes, rates_of(hardware, kind), strict=True)
    weights = tuple(
        _weights(tuple(rate for _, rate in group))
        for _, group in itertools.groupby(nodes, key=lambda each: each[0].tier)
    )
    none, most = (0,) * len(weights), tuple(each[-1][0] for each in weights)
    found = Ratios(weights, none, most).narrowed()
    if found is None:
        return []
    return [found.stripe if found.is_one else found]


def stripes_like(
    job: FlexGenJob, hardware: Hardware, kind: str, known: Stripe | None
) -> list[Ratios | Stripe]:
    """A stripe that is known, and that of the bandwidths over the same nodes; else over all."""
    if not ratios_of(job, hardware, kind):
        return []
    rates = rates_of(hardware, kind)
    over = [at for at, rate in enumerate(rates) if 0 < rate < math.inf]
    if known is not None:
        over = [at for at, weight in enumerate(known) if weight]
    weights = best_weights([rates[at] for at in over], total=STRIPE_TOTAL)
    made = [0] * len(rates)
    for at, weight in zip(over, weights, strict=True):
        made[at] = weight
    offered = [tuple(made)] if min(weights) > 0 else []
    return list(dict.fromkeys([*([] if known is None else [known]), *offered]))


@functools.lru_cache(maxsize=256)
def _weights(rates: tuple[float, ...]) -> tuple[tuple[int, Stripe], ...]:
    """Weights of a tier's nodes by their sum; an unknown rate has none above 0.

    Kept, as a price changes the rate of one node.
    """
    none = (0, (0,) * len(rates))
    if not all(0 < rate < math.inf for rate in rates):
        return (none,)
    totals = range(len(rates), STRIPE_TOTAL + 1)
    made = ((total, best_weights(rates, total=total)) for total in totals)
    return (none, *(each for each in made if min(each[1]) > 0))


def apart(mode: Mode) -> list[Mode]:
    """Modes that have every stripe of a mode once, and either all nodes of a tier or none.

    Between none and one sixteenth for each node of a tier is nothing: a program with both would
    find its least time there again and again. It is itself where it has no such tier.
    """
    return [
        replace(mode, weight_stripe=weights, kv_stripe=kv)
        for weights in _without_gaps(mode.weight_stripe)
        for kv in _without_gaps(mode.kv_stripe)
    ]


def _without_gaps(stripe: Stripe | Ratios | None) -> list[Stripe | Ratios | None]:
    if not isinstance(stripe, Ratios):
        return [stripe]
    made = [stripe]
    for at, tier in enumerate(stripe.tiers):
        if len(tier) > 1 and stripe.high[at]:
            pieces = [(0, 0), (1, STRIPE_TOTAL)]
            made = [part for each in made for part in each.split_at(at, pieces)]
    found = (each.narrowed() for each in made)
    return [each.stripe if each.is_one else each for each in found if each is not None]


def narrower(mode: Mode, found: Sequence[Sequence[float] | None]) -> list[Mode]:
    """Modes that have every stripe of a mode once.

    Parameters
    ----------
    found
        Sixteenths of every tier where the least time is, of weights and of KV; None: no ratios.
    """
    kinds = (("weights", mode.weight_stripe), ("kv", mode.kv_stripe))
    kind, stripe, at = max(
        (
            (kind, stripe, at)
            for (kind, stripe), at in zip(kinds, found, strict=True)
            if isinstance(stripe, Ratios) and at is not None
        ),
        key=lambda each: max(broken(share) for share in each[2]),
    )
    parts = [part.stripe if part.is_one else part for part in stripe.split(at)]
    if kind == "weights":
        return [replace(mode, weight_stripe=part) for part in parts]
    return [replace(mode, kv_stripe=part) for part in parts]
