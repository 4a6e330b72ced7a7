"""How events that run at the same time share resources: max-min fairness on every bottleneck.

Every event asks for speed 1: the speed at which it runs alone. A resource that cannot serve all its
users at what they ask for gives them equal shares of itself; whoever asks for less, or is held back
elsewhere, leaves the rest to the others. So two copies over one link get half of it each, whatever
their sizes, and a copy that its link slows down takes no more of a node's memory than it can carry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cxl_offload.sim.resources import Demand

__all__ = ["speeds"]

_EPSILON = 1e-12
_CLOSE = 1e-10
_ROUNDS = 200


def speeds(demands: Sequence[Demand]) -> list[float]:
    """Speed of each of several events, 1 where it runs as if it were alone.

    Parameters
    ----------
    demands
        Seconds of every event on its resources, each with a largest demand above 0.

    Returns
    -------
    list of float
        ``s`` in (0, 1]: the event takes ``1 / s`` times as long as alone. An event below 1 has a
        resource that is fully used and of which nobody has more than it.
    """
    if len(demands) == 1:
        return [1.0]
    shares = [
        {resource: seconds / max(demand.values()) for resource, seconds in demand.items()}
        for demand in demands
    ]
    users: dict[int, list[int]] = {}
    for event, share in enumerate(shares):
        for resource in share:
            users.setdefault(resource, []).append(event)
    contended = {
        resource: events
        for resource, events in users.items()
        if sum(shares[event][resource] for event in events) > 1.0 + _EPSILON
    }
    if not contended:
        return [1.0] * len(demands)
    return _agree(shares, contended)


def _agree(shares: list[dict[int, float]], contended: dict[int, list[int]]) -> list[float]:
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
            level = _water_level(asked)
            for event in events:
                speed = min(1.0, level / shares[event][resource])
                change = max(change, abs(speed - allowed[event][resource]))
                allowed[event][resource] = speed
        if change < _CLOSE:
            break
    return [min(own.values(), default=1.0) for own in allowed]


def _water_level(asked: Sequence[float]) -> float:
    """The share that bounds those who ask for more, so that all together use what there is."""
    room = 1.0
    left = len(asked)
    for amount in sorted(asked):
        if amount * left >= room:
            return room / left
        room -= amount
        left -= 1
    return math.inf
