"""Hardware that is a little better than other hardware, and what both have in common.

A price plans again with one GiB or one GB/s more on one node. What is proved once for hardware that
has as much more on every node holds for each of these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cxl_offload.plan.hardware import Hardware

_NODE_RATES = ("read_bytes_per_s", "copy_bytes_per_s")
_RATES = ("link_bytes_per_s", "drive_read_bytes_per_s", "drive_write_bytes_per_s")
_ROOMS = ("gpu_usable_bytes", "drive_usable_bytes")
_OF_NODES = ("usable_bytes", *_NODE_RATES)


def gains_of(known: Hardware, better: Hardware) -> tuple[float, float] | None:
    """By which factor any rate is better at most, and by how many bytes any room.

    None where something is worse, or is not alike otherwise.
    """
    if len(known.nodes) != len(better.nodes) or _alike(known) != _alike(better):
        return None
    rates = _values(known, _RATES, _NODE_RATES)
    faster = _values(better, _RATES, _NODE_RATES)
    rooms = _values(known, _ROOMS, ("usable_bytes",))
    larger = _values(better, _ROOMS, ("usable_bytes",))
    pairs = [*zip(rates, faster, strict=True), *zip(rooms, larger, strict=True)]
    if any(new < old or (old == 0 and new > 0) for old, new in pairs):
        return None
    factor = max(new / old if new != old else 1.0 for old, new in zip(rates, faster, strict=True))
    return factor, max(new - old for old, new in zip(rooms, larger, strict=True))


@dataclass(frozen=True, slots=True)
class Everywhere:
    """Hardware on which every node has as much more as any node of the better one has.

    ``more`` is what was added to its nodes and to the rest: equal for equal hardware.
    """

    hardware: Hardware
    more: tuple[float, ...]


def better_everywhere(known: Hardware, better: Hardware) -> Everywhere | None:
    """Hardware that is no worse than ``better``, and the same for many of them.

    None where something of ``better`` is worse, where it is not alike otherwise, or where it would
    be ``better`` itself.
    """
    if gains_of(known, better) is None:
        return None
    pairs = list(zip(known.nodes, better.nodes, strict=True))
    more = {
        name: max(_difference(getattr(old, name), getattr(new, name)) for old, new in pairs)
        for name in _OF_NODES
    }
    nodes = tuple(
        replace(
            old,
            **{name: max(getattr(old, name) + more[name], getattr(new, name)) for name in more},
        )
        for old, new in pairs
    )
    rest = [_difference(getattr(known, name), getattr(better, name)) for name in (*_RATES, *_ROOMS)]
    made = replace(better, nodes=nodes)
    return None if made == better else Everywhere(made, (*more.values(), *rest))


def _difference(old: float, new: float) -> float:
    return 0.0 if new == old else new - old


def _values(
    hardware: Hardware, fields: tuple[str, ...], node_fields: tuple[str, ...]
) -> list[float]:
    values = [getattr(hardware, name) for name in fields]
    return values + [getattr(node, name) for node in hardware.nodes for name in node_fields]


def _alike(hardware: Hardware) -> Hardware:
    """The same with rooms and rates that are not looked at."""
    nodes = tuple(
        replace(node, usable_bytes=0.0, read_bytes_per_s=0.0, copy_bytes_per_s=0.0)
        for node in hardware.nodes
    )
    none: dict[str, Any] = dict.fromkeys((*_RATES, *_ROOMS), 0.0)
    return replace(hardware, nodes=nodes, gpu_memory_bytes=0.0, notes=(), **none)
