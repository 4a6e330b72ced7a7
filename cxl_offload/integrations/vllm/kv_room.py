"""Whether the nodes of a tier are there and have room for it at this moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cxl_offload.integrations.vllm.kv_read import wrong
from cxl_offload.kept import find_device, is_device
from cxl_offload.kept.private_file import open_private
from cxl_offload.memory import (
    Bind,
    Dax,
    FirstTouch,
    Preferred,
    Replicate,
    Session,
    Weighted,
    known_policy,
)
from cxl_offload.memory.shared import shared_free_bytes
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.units import format_bytes

if TYPE_CHECKING:
    from cxl_offload.integrations.vllm.kv_options import KvTier

SHARED_PAGES = ("base", "thp")
"""Of memory in ``/dev/shm``."""


def check_kept(path: Path, nbytes: int, where: str) -> bool:
    """Whether the file of kept chunks is still to be made, and will find room.

    Raises ConfigError, in one line with the option after ``where``, where it cannot be used.
    """
    try:
        if is_device(path):
            device = find_device(path)
            os.close(device.open(os.O_RDWR))
            _check_room(nbytes, device.nbytes, path, "ask for less", where)
            return False
        os.close(open_private(path, os.O_RDWR))
        return False
    except FileNotFoundError:
        pass
    except OSError as error:
        raise wrong(f"{where}persist", f"{path}: {error.strerror or error}") from error
    free, remedy = shared_free_bytes(path.parent), "ask for less, or mount it larger"
    _check_room(nbytes, free, path.parent, remedy, where)
    return True


def _check_room(nbytes: int, free: int, place: Path, remedy: str, where: str) -> None:
    if nbytes > free:
        raise wrong(
            f"{where}bytes",
            f"is {format_bytes(nbytes)} and {place} has {format_bytes(free)} left; {remedy}",
        )


def check_tier(tier: KvTier, session: Session, where: str) -> None:
    """Raises ConfigError, in one line with the option after ``where``, where there is no room."""
    policy = tier.policy
    if policy is None:
        return
    try:
        known_policy(policy, session.machine, "KV on the host")
    except ValueError as error:
        raise wrong(f"{where}policy", f"is {error}") from error
    if isinstance(policy, FirstTouch | Dax | Replicate):  # the last was refused
        return
    free = {node: session.free_bytes(node, tier.pages) for node in policy.nodes}
    if isinstance(policy, Preferred):
        return
    if isinstance(policy, Bind):
        needs = {"/".join(map(str, policy.nodes)): (tier.nbytes, sum(free.values()))}
    else:
        weights = policy.weights if isinstance(policy, Weighted) else dict.fromkeys(policy.nodes, 1)
        shares = stripe_bytes(tier.nbytes, weights, policy.granule_bytes)
        needs = {str(node): (shares.get(node, 0), free[node]) for node in policy.nodes}
    for name, (wanted, there) in needs.items():
        if wanted > there:
            pool = "" if tier.pages in SHARED_PAGES else f" in its pool of {tier.pages} pages"
            remedy = "ask for less, or for more nodes"
            if pool:
                remedy = "reserve more (nr_hugepages of the node), or ask for less"
            raise wrong(
                f"{where}policy",
                f"is {policy}: {format_bytes(wanted)} would go to node {name}, which has "
                f"{format_bytes(there)} free{pool}; {remedy}",
            )
