"""Latency under load and the concurrency that causes it, by Little's law."""

from __future__ import annotations

from cxl_offload.core import LINE_BYTES


def lines_in_flight(bandwidth_bytes_per_s: float, latency_ns: float) -> float:
    """Cache lines in flight at a measured point: ``bandwidth * latency / 64`` (Little's law).

    Of all threads together; holds at any load, saturated or not.
    """
    return bandwidth_bytes_per_s * latency_ns * 1e-9 / LINE_BYTES


def closed_loop_latency_ns(
    *, idle_latency_ns: float, peak_bytes_per_s: float, lines: float
) -> float:
    """Latency of a closed loop with ``lines`` cache lines in flight on a tier.

    ``max(idle, lines * 64 / peak)``: below saturation the idle latency, at saturation what
    Little's law leaves, whatever the medium. The two asymptotes of the loaded-latency curve; at
    the knee, and with prefetchers on CXL well before it (Lebedev et al., 8.3), the measured curve
    lies above them.

    Source: Little's law; Wang et al., Hitchhiker's Guide, 3.3 (local to remote socket within 1 %).
    """
    return max(idle_latency_ns, lines * LINE_BYTES * 1e9 / peak_bytes_per_s)
