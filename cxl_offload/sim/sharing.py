"""How events that run at the same time share resources: max-min fairness on every bottleneck.

Every event asks for speed 1: the speed at which it runs alone. A resource that cannot serve all its
users at what they ask for gives them equal shares of itself; whoever asks for less, or is held back
elsewhere, leaves the rest to the others. So two copies over one link get half of it each, whatever
their sizes, and a copy that its link slows down takes no more of a node's memory than it can carry.

A congested resource (:class:`cxl_offload.sim.fabric.SwitchLink`) has less to share when it is
offered more than it carries. What an event offers it is what the rest of its way would let through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cxl_offload.sim.resources import Demand

__all__ = ["speeds"]

_EPSILON = 1e-12
_CLOSE = 1e-10
_ROUNDS = 200

_Shares = list[dict[int, float]]


def speeds(demands: Sequence[Demand], losses: Mapping[int, float] | None = None) -> list[float]:
    """Speed of each of several events, 1 where nothing holds it up but its own largest demand.

    Parameters
    ----------
    demands
        Seconds of every event on its resources, each with a largest demand above 0.
    losses
        Resource -> largest share of it that congestion costs.

    Returns
    -------
    list of float
        ``s`` in (0, 1]: the event takes ``1 / s`` times its largest demand. An event below 1 has a
        resource that is fully used and of which nobody has more than it.
    """
    losses = losses or {}
    if len(demands) == 1 and not losses:
        return [1.0]
    shares = [
        {resource: seconds / max(demand.values()) for resource, seconds in demand.items()}
        for demand in demands
    ]
    users: dict[int, list[int]] = {}
    for event, share in enumerate(shares):
        for resource in share:
            users.setdefault(resource, []).append(event)
    room = {
        resource: _room(losses[resource], [shares[event] for event in users[resource]], resource)
        for resource in users
        if resource in losses
    }
    contended = {
        resource: events
        for resource, events in users.items()
        if sum(shares[event][resource] for event in events) > room.get(resource, 1.0) + _EPSILON
    }
    if not contended:
        return [1.0] * len(demands)
    return _agree(shares, contended, room)


def _room(loss: float, shares: _Shares, resource: int) -> float:
    """What a congested resource still carries, as a share of what it carries at best."""
    offered = 0.0
    for share in shares:
        elsewhere = max((part for other, part in share.items() if other != resource), default=0.0)
        if share[resource] > 0.0:
            offered += share[resource] / elsewhere if elsewhere > 0.0 else math.inf
    return 1.0 - loss * (1.0 - 1.0 / offered) if offered > 1.0 else 1.0


def _agree(
    shares: _Shares, contended: dict[int, list[int]], room: Mapping[int, float]
) -> list[float]:
    """Every resource says how fast it lets its users be, given what the others said, until nobody
    changes what he says.
    """
    allowed = [dict.fromkeys(contended.keys() & share, 1.0) for share in shares]
    for _ in range(_ROUNDS):
        change = 0.0
        for resource, events in contended.items():
            asked = [
                shares[event][resource]
                * min((v for r, v in allowed[event].items() if r != resource), default=1.0)
                for event in events
            ]
            level = _water_level(asked, room.get(resource, 1.0))
            for event in events:
                share = shares[event][resource]
                speed = min(1.0, level / share) if share > 0.0 else 1.0
                change = max(change, abs(speed - allowed[event][resource]))
                allowed[event][resource] = speed
        if change < _CLOSE:
            break
    return [min(own.values(), default=1.0) for own in allowed]


def _water_level(asked: Sequence[float], room: float) -> float:
    """The share that bounds those who ask for more, so that all together use what there is."""
    left = len(asked)
    for amount in sorted(asked):
        if amount * left >= room:
            return room / left
        room -= amount
        left -= 1
    return math.inf
