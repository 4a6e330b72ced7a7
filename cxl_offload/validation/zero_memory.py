"""What papers print of ZeRO-Offload beside its times: the host's bytes, and a slowdown by parts."""

from __future__ import annotations

from cxl_offload.plan.equations.adam_bytes import HOST_BYTES_PER_PARAM
from cxl_offload.plan.exact import exact


def host_state_bytes(params: float) -> float:
    """Bytes of optimizer state, parameters and gradients on the host."""
    return HOST_BYTES_PER_PARAM * params


def fits(params: float, host_capacity_gib: float) -> bool:
    """Whether the host state fits, compared exactly; a tie fits."""
    return HOST_BYTES_PER_PARAM * exact(params) <= exact(host_capacity_gib) * 2**30


def largest_params(host_capacity_bytes: float) -> float:
    """The (real) number of parameters whose state fills the host."""
    return host_capacity_bytes / HOST_BYTES_PER_PARAM


def step_slowdown(
    *,
    optimizer_share: float,
    optimizer_slowdown: float,
    transfer_share: float = 0.0,
    transfer_slowdown: float = 0.0,
) -> float:
    """Fraction by which a step grows when parts of it slow down: ``sum(share * slowdown)``."""
    return optimizer_share * optimizer_slowdown + transfer_share * transfer_slowdown
