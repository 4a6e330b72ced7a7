"""What one planned decode step of vLLM would move, as a trace that a machine can replay.

A step a layer: the layer's weights cross the link when they are off the GPU, then the GPU reads
them and the running sequences' KV of that layer, and takes its part of what a step costs beside.
Nothing overlaps, as in vLLM's weight offload
without prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.vllm.offload import WeightOffload, running_sequences
from cxl_offload.sim import Event, Trace


def planned_step(
    case: WeightOffload, layers: int, layer_bytes: int, offloaded: Sequence[int]
) -> Trace:
    """One decode step of all running sequences, in phase ``decode``.

    Parameters
    ----------
    offloaded
        Node of every layer that is off the GPU; no more of them than ``layers``.
    """
    offload = float(len(offloaded) * layer_bytes)
    sequences = running_sequences(case, offload)
    kv = round(sequences * case.mean_tokens_per_sequence * case.kv_bytes_per_token / layers)
    rest = round(case.weight_bytes) - layers * layer_bytes
    read = layer_bytes - round(case.unasked_bytes(sequences) / layers)
    parameters = case.params / case.weight_bytes  # that a token meets, a byte of weights
    beside = case.beside_s(sequences) / layers * case.gpu.flops_per_s  # as operations at the peak
    trace = Trace()
    for step in range(layers):
        if step < len(offloaded):
            there = {offloaded[step]: layer_bytes}
            trace.append(Event("decode", step, "compute", "h2d", "weights", there, {}, layer_bytes))
        flops = 2 * parameters * layer_bytes * sequences / case.gpu.arithmetic_share
        trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, read + kv, flops))
        if beside:
            trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, 0, beside))
    if rest:
        flops = 2 * parameters * rest * sequences / case.gpu.arithmetic_share
        read = rest - round(case.table_bytes)
        trace.append(Event("decode", layers, "compute", "gpu", "act", {}, {}, read, flops))
    trace.count_tokens("decode", max(1, round(sequences)))
    return trace
