"""Which two tiers of a machine a tuner turns between."""

from __future__ import annotations

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine

_FAR = ("cxl", "rdram")
"""Second tiers, the usual one first."""


def near_and_far(
    machine: Machine, *, near: str = "ldram", far: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes of the near tier and of the far one.

    Parameters
    ----------
    near, far
        Names of tiers; ``far`` is CXL memory by default, else DRAM of the other sockets.

    Raises
    ------
    ConfigError
        The machine has no such tier, or only one.
    """
    nodes = {tier.name: tier.nodes for tier in machine.tiers if tier.nodes}
    second = far if far is not None else next((name for name in _FAR if name in nodes), None)
    if near not in nodes or second not in nodes or near == second:
        have = ", ".join(nodes) or "none"
        raise ConfigError(
            f"tune: machine {machine.name} has the tiers {have}; tuning needs a near one "
            f"({near}) and a far one ({second or ' or '.join(_FAR)})"
        )
    return nodes[near], nodes[second]
