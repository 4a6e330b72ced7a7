"""Latency under load: a closed queueing network of cache lines in flight.

The CPUs keep a fixed number of lines under way. A line spends the idle latency of the node it is
for (a pure delay) and waits there behind the lines that came before it (a queue that serves one
line every ``64 B / bandwidth``). Mean-value analysis gives throughput and latency without a fitted
constant: flat at first, steep near the peak, and beyond it what Little's law leaves.

Source: Reiser and Lavenberg, Mean-Value Analysis of Closed Multichain Queuing Networks (J. ACM
1980). Service times are taken as exponential, which rounds the knee off; between real memory, which
is more regular, and this lie at most the two asymptotes ``min(B_i / f_i)`` and ``lines * 64 / L``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cxl_offload.arrays import Floats
from cxl_offload.core import LINE_BYTES


def loaded_latency_ns(
    shares: ArrayLike,
    *,
    idle_latency_ns: ArrayLike,
    bandwidth_bytes_per_s: ArrayLike,
    lines_in_flight: float,
) -> Floats:
    """Latency of every node with ``lines_in_flight`` lines under way.

    Throughput follows by Little's law: ``lines_in_flight * 64 B / sum(shares * latency)``.

    Parameters
    ----------
    shares
        float ``(..., nodes)``: part of the lines that go to each node; rows sum to 1.
    idle_latency_ns, bandwidth_bytes_per_s
        float ``(nodes,)``, of the initiator on each node.
    lines_in_flight
        Of all threads together, at least 1; fractions lie between the whole numbers around them.

    Returns
    -------
    numpy.ndarray
        float64 ``(..., nodes)`` ns; idle latency where a share is 0.

    Raises
    ------
    ValueError
        Fewer than one line in flight.
    """
    if not 1 <= lines_in_flight < float("inf"):
        raise ValueError(f"{lines_in_flight} lines in flight; at least 1 has to be under way")
    visits = np.asarray(shares, dtype=np.float64)
    idle = np.asarray(idle_latency_ns, dtype=np.float64)
    service = LINE_BYTES * 1e9 / np.asarray(bandwidth_bytes_per_s, dtype=np.float64)
    whole = int(lines_in_flight)
    queued = np.zeros_like(visits)
    latency = np.zeros_like(visits)
    before = latency
    for lines in range(1, whole + 2):
        before = latency
        # An arriving line sees the queues of a network with one line less; of the idle latency one
        # service is spent in the queue's server, the rest on the way.
        latency = idle + service * queued
        round_trip = (visits * latency).sum(axis=-1, keepdims=True)
        queued = lines / round_trip * visits * service * (1.0 + queued)
    part = lines_in_flight - whole
    return np.where(visits > 0, before + part * (latency - before), idle)
