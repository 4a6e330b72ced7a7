"""Lower bounds of the seconds of a layout, so that few of them need a program."""

from __future__ import annotations

from cxl_offload.plan.decoding.copied_states import store_costs
from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import (
    between_products_seconds,
    decode_gpu_seconds,
    decode_rows_seconds,
    first_copy_rate,
    joined_calls_seconds,
    prefill_between_seconds,
    prefill_cpu_seconds,
    prefill_flops,
    states_calls_seconds,
)
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout
from cxl_offload.plan.transformers.program import gpu_part_seconds
from cxl_offload.plan.transformers.states import copied_states


def least_seconds(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """Seconds of a sequence that nothing of this layout undercuts.

    Every term by itself, over all nodes together, with the most batches.
    """
    streamed = least_streamed_bytes(job, hardware, layout, most) / _copies_rate(hardware)
    return _least(job, hardware, layout, most, streamed=streamed)


def least_of_states(job: DecoderJob, hardware: Hardware, layout: Layout) -> float:
    """The same of hidden states on the host if weights took no time, whatever the batches."""
    return _least(job, hardware, layout, 1, streamed=0.0)


def _least(
    job: DecoderJob, hardware: Hardware, layout: Layout, most: int, *, streamed: float
) -> float:
    """``streamed`` seconds of weights on their way to the GPU a batch."""
    token, prefill = _least_work(job, hardware, layout, most), 0.0
    if layout.states == "host":
        come, go = _least_copies(job, hardware, layout, 1)
        token = max(token + states_calls_seconds(job), streamed + come, go)
        come, go = _least_copies(job, hardware, layout, job.prompt)
        prefill = max(streamed + come, _least_stored(job, hardware, layout) + go)
    prefill = max(prefill, _least_prefill(job, hardware, layout, most, streamed=streamed))
    return (prefill + (job.generated - 1) * max(streamed, token)) / layout.rows


def _copies_rate(hardware: Hardware) -> float:
    """Bytes/s to the GPU, of all nodes together."""
    return min(hardware.link_bytes_per_s, hardware.copy_bytes_per_s)


def _least_copies(
    job: DecoderJob, hardware: Hardware, layout: Layout, tokens: int
) -> tuple[float, float]:
    """Hidden states of a batch on their way to the GPU, and back."""
    states = copied_states(job, layout, layout.rows)
    back = states.bytes_out(tokens) * min(store_costs(hardware))
    return states.bytes_in(tokens) / _copies_rate(hardware), back


def closer_seconds(
    job: DecoderJob, hardware: Hardware, layout: Layout, batches: tuple[int, int]
) -> float:
    """The same, closer where CPUs attend to a cache that fills nodes of different rates.

    The more batches, the fewer bytes of weights for each, and the less of each on the fast nodes.

    Parameters
    ----------
    batches
        Fewest and most.
    """
    if layout.kv != "host" or not hardware.has_gpu:
        return 0.0
    fewest, most = batches
    rate, come = _copies_rate(hardware), 0.0
    work = _least_beside_attention(job, hardware, layout, fewest)
    if layout.states == "host":
        work += states_calls_seconds(job)
        come, _ = _least_copies(job, hardware, layout, 1)

    def token(count: int) -> tuple[float, float]:
        streamed = least_streamed_bytes(job, hardware, layout, count) / rate
        return streamed + come, work + _attention_of_full_nodes(job, hardware, layout, count)

    low, high = fewest, most
    while low < high:
        middle = (low + high) // 2
        loads, works = token(middle)
        low, high = (low, middle) if works >= loads else (middle + 1, high)
    least = min(max(token(count)) for count in (low, max(fewest, low - 1)))
    prefill = _least_prefill(job, hardware, layout, most, streamed=0.0)
    return (prefill + (job.generated - 1) * least) / layout.rows


def _attention_of_full_nodes(
    job: DecoderJob, hardware: Hardware, layout: Layout, count: int
) -> float:
    """CPUs read the cache of one of so many batches, which have all room of every node."""
    left, rate = layout.rows * job.kv_sequence_bytes, 0.0
    nodes = [(node.usable_bytes / count, node.read_bytes_per_s) for node in hardware.nodes]
    nodes.sort(key=lambda node: -node[0] / node[1])
    for at, (_, read) in enumerate(nodes):
        rate += read  # this node and those before it have room for what they read in the same time
        full = sum(each for each, _ in nodes[at + 1 :])
        seconds = (left - full) / rate
        if at + 1 == len(nodes) or seconds * nodes[at + 1][1] >= nodes[at + 1][0]:
            share = job.mean_kv_tokens * job.kv_bytes_per_token / job.kv_sequence_bytes
            return max(0.0, seconds) * share / job.engine.attention_share
    return 0.0


def _least_work(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """Of the GPU and of CPUs, for a token of every sequence of a batch."""
    work = _least_beside_attention(job, hardware, layout, most)
    mean = layout.rows * job.mean_kv_tokens * job.kv_bytes_per_token
    if layout.kv == "gpu":
        return work + mean / hardware.gpu.memory_bytes_per_s
    reads = hardware.read_bytes_per_s
    flops = 4 * layout.rows * job.mean_kv_tokens * job.query_width * job.layers
    arithmetic = flops / (hardware.cores * job.engine.attention_flops_per_core)
    on_host, there = max(mean / reads / job.engine.attention_share, arithmetic), 0.0
    if layout.kv == "both":
        work += joined_calls_seconds(job)
        there = most_kv_there(job, hardware, layout)
    on_gpu = gpu_part_seconds(job, hardware, layout.rows)
    return work + on_host + min(0.0, on_gpu - on_host) * there


def _least_beside_attention(
    job: DecoderJob, hardware: Hardware, layout: Layout, most: int
) -> float:
    """The same without attention, or what joins two parts of a cache."""
    engine, rows = job.engine, layout.rows
    reads = hardware.read_bytes_per_s
    on_cpu = layout.bytes_of(job, layout.on_cpu)
    params = sum(job.kinds[kind].met for kind in layout.multiplied)
    batch = rows if hardware.has_gpu else most  # the more rows, the fewer bytes for each
    work = decode_gpu_seconds(
        job,
        hardware,
        rows,
        params_cpu=params,
        cpu_bytes=float(on_cpu),
        unread=layout.unread_bytes(job, batch),
    )
    work += between_products_seconds(job, hardware) / most
    work += decode_rows_seconds(job, hardware, rows)
    if layout.multiplied:
        passes = 1.0 if hardware.has_gpu else 1.0 / most
        arithmetic = 2 * rows * params / (hardware.cores * engine.products_flops_per_core)
        seconds = on_cpu * layout.cpu_read_share(job, batch) / reads
        if layout.copied:
            seconds += layout.bytes_of(job, layout.copied) / hardware.near_bytes_per_s
        work += passes * seconds / engine.products_share + arithmetic
    return work


def least_streamed_bytes(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """What is streamed for a batch when as many layers as there is room for stay on the GPU.

    Every batch takes a part of that room, so that with fewer batches more layers stay, but each
    batch has more of what is streamed.
    """
    total, room = layout.bytes_of(job, layout.streamed), layout.gpu_room(job, hardware)
    top = layout.most_resident_bytes(job)
    if total <= room:
        return (total - top) / most
    held: float = layout.held_bytes(job, layout.rows)
    if layout.kv == "gpu":
        held += layout.rows * job.kv_sequence_bytes
    one = max(1.0, layout.layered_bytes(job) / job.layers)
    layers = int(max(0.0, min(top, room - most * held)) / one + 1e-6)
    with_most = (total - layers * one) / most
    if most == 1:
        return with_most
    return min(with_most, max(total - top, total - room + (most - 1) * held) / (most - 1))


def most_kv_there(job: DecoderJob, hardware: Hardware, layout: Layout) -> float:
    """The largest share of the cache that the GPU has room for, with the fewest batches."""
    rows = layout.fewest_batches * layout.rows
    room = layout.gpu_room(job, hardware) - layout.held_bytes(job, rows)
    return float(min(1.0, max(0.0, room) / (rows * job.kv_sequence_bytes)))


def _least_prefill(
    job: DecoderJob,
    hardware: Hardware,
    layout: Layout,
    most: int,
    *,
    streamed: float,
) -> float:
    """Of one batch; ``streamed`` seconds of copies a batch."""
    engine, rows = job.engine, layout.rows
    on_cpu = layout.bytes_of(job, layout.on_cpu)
    stored = _least_stored(job, hardware, layout)
    if hardware.has_gpu:
        arithmetic = prefill_flops(job, rows) / hardware.gpu.products_flops_per_s
        return max(arithmetic, stored, streamed)
    reads = hardware.read_bytes_per_s
    arithmetic = prefill_cpu_seconds(job, hardware, rows)
    read = on_cpu / reads
    if layout.copied:
        read += layout.bytes_of(job, layout.copied) / first_copy_rate(hardware)
    once = read / engine.products_share + prefill_between_seconds(job, hardware)
    return max(arithmetic + once / most, stored)


def _least_stored(job: DecoderJob, hardware: Hardware, layout: Layout) -> float:
    """Keys and values of a batch's prompts on their way to the host."""
    if layout.kv == "gpu":
        return 0.0
    costs = kv_store_costs(job.engine, hardware)
    stored = layout.rows * job.prompt * job.kv_bytes_per_token * min(costs)
    return stored * (1 - most_kv_there(job, hardware, layout)) if layout.kv == "both" else stored
