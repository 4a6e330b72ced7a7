"""Tiers and limits that a request names: what is not there, or would change nothing, is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine
from cxl_offload.topology.model import TIER_NAMES

NVME = "nvme"
"""What plans call the drive."""


def host_names(
    machine: Machine, usable: Collection[int], wanted: Sequence[str] | None
) -> tuple[str, ...]:
    """Names of the tiers that may be used, in their order, without the drive.

    Parameters
    ----------
    usable
        Nodes that memory is planned on.
    wanted
        Tiers to keep to; None: all.

    Raises
    ------
    ConfigError
        A wanted tier that the machine does not have, a drive included.
    """
    have = [
        name
        for name in TIER_NAMES
        for tier in machine.tiers
        if tier.name == name and set(usable) & set(tier.nodes)
    ]
    if wanted is None:
        return tuple(have)
    for name in wanted:
        if name != NVME and name not in have:
            raise ConfigError(
                f"tier {name}: {machine.name} has no such tier with memory that may be used; its "
                f"tiers are {', '.join(have)}"
            )
    if NVME in wanted:
        need_drive(machine, f"tier {NVME}")
    return tuple(name for name in have if name in wanted)


def check_limits(
    machine: Machine,
    names: Sequence[str],
    wanted: Sequence[str] | None,
    limits: Mapping[str, int],
) -> None:
    """Refuses limits of what is not planned with.

    Parameters
    ----------
    names
        As :func:`host_names` gives them.

    Raises
    ------
    ConfigError
        Names the tier, and what to do.
    """
    for name in limits:
        if name in names:
            continue
        if name != NVME:
            raise ConfigError(
                f"limit of {name}: {machine.name} offers {', '.join(names)}; name one of them"
            )
        need_drive(machine, f"limit of {NVME}")
        if wanted is not None and NVME not in wanted:
            raise ConfigError(
                f"limit of {NVME}: the tiers leave the drive out; name it among them (--tiers), or "
                "leave the limit out"
            )


def refuse_drive(tiers: Sequence[str] | None, limits: Mapping[str, int], why: str) -> None:
    """Refuses the drive as a tier, and a limit of it, for an executor that has no use for one.

    Raises
    ------
    ConfigError
        Says why.
    """
    if NVME in (tiers or ()):
        raise ConfigError(f"tier {NVME}: {why}; leave it out")
    if NVME in limits:
        raise ConfigError(f"limit of {NVME}: {why}; leave it out")


def has_drive(machine: Machine) -> bool:
    """Whether the machine's first drive can be planned with."""
    return bool(machine.drives and machine.drives[0].read_bandwidth_bytes_per_s)


def need_drive(machine: Machine, what: str) -> None:
    """Refuses what is asked of a drive where the machine has none.

    Parameters
    ----------
    what
        As it begins the message, such as ``tier nvme``.

    Raises
    ------
    ConfigError
        Says what is missing.
    """
    if not has_drive(machine):
        raise ConfigError(
            f"{what}: {machine.name} has no drive whose read rate is known; leave it out, or add "
            "it under drives of its file"
        )
