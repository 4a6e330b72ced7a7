"""A kind that is striped in part and whole in part is never faster than stripes of its bytes.

The reason why no plan has such a mixture: nodes that give a kind's bytes at the same time need
``max(bytes / bandwidth)``, and stripes with as many bytes on every node reach that. The product's
equations are asked first, then the simulator, which knows none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.plan.decoding import phases
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.equations.sockets import Crossing, Socket
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.sim import Event, Trace, replay
from cxl_offload.topology import Link

from ...sim.machines import event, machine

GB = 1e9
ROUNDING = 1e-9


@dataclass(frozen=True)
class Mixture:
    """Bytes on every node that are striped together, and that are whole tensors or sequences."""

    striped: tuple[float, ...]
    whole: tuple[float, ...]

    @property
    def bytes(self) -> tuple[float, ...]:
        """All of every node."""
        return tuple(sum(each) for each in zip(self.striped, self.whole, strict=True))


def shares(nbytes: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(each / sum(nbytes) for each in nbytes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Hardware, Mixture]:
    """One to four nodes of any rates, of one socket or two, and some bytes of both forms."""
    count = draw(st.integers(1, 4))
    rate = st.floats(1.0, 500.0)
    nodes = tuple(
        HostNode(
            name=str(at),
            tier=("ldram", "cxl")[at > 0],
            node=at,
            usable_bytes=1e15,
            read_bytes_per_s=draw(rate) * GB,
            latency_ns=100.0,
            copy_bytes_per_s=draw(rate) * GB,
        )
        for at in range(count)
    )
    sockets: tuple[Socket, ...] = ()
    if draw(st.booleans()):
        near, far = (frozenset(range(0, count, 2)), frozenset(range(1, count, 2)))
        sockets = tuple(
            Socket(at, 8, (Crossing({n: draw(rate) * GB for n in away}, draw(rate) * GB),))
            for at, away in enumerate((far, near))
            if away
        )
    hardware = Hardware(
        machine="random",
        nodes=nodes,
        link_bytes_per_s=draw(rate) * GB,
        local_latency_ns=100.0,
        gpu=GpuRates(1e14, 1e12),
        gpu_memory_bytes=1e12,
        gpu_usable_bytes=1e12,
        cores=16,
        sockets=sockets,
    )
    size = st.one_of(st.just(0.0), st.floats(0.01, 1000.0).map(lambda each: each * GB))
    sizes = st.lists(size, min_size=count, max_size=count).map(tuple)
    found = Mixture(draw(sizes), draw(sizes))
    return hardware, found


def read_s(hardware: Hardware, mixture: Mixture) -> float:
    """CPUs read the striped part, and the whole one: what they do for KV, and for weights."""
    return _read_s(hardware, mixture.striped, striped=True) + _read_s(
        hardware, mixture.whole, striped=False
    )


def _read_s(hardware: Hardware, nbytes: tuple[float, ...], *, striped: bool) -> float:
    if not sum(nbytes):
        return 0.0
    return phases._cpu_seconds(hardware, nbytes, shares(nbytes) if striped else None)


def copied_s(hardware: Hardware, mixture: Mixture) -> float:
    """Weights cross the link, both parts of them."""
    parts = ((mixture.striped, True), (mixture.whole, False))
    return sum(_copied_s(hardware, nbytes, striped=striped) for nbytes, striped in parts)


def _copied_s(hardware: Hardware, nbytes: tuple[float, ...], *, striped: bool) -> float:
    if not sum(nbytes):
        return 0.0
    block = Block(
        sequences=1, batches=1, gpu_batch=1, weights_drive=0.0, weights_host=nbytes,
        weight_shares=shares(nbytes) if striped else None, kv_drive=0.0,
        kv_host=(0.0,) * len(nbytes), kv_gpu=1.0, kv_shares=None, activations_gpu=1.0,
    )  # fmt: skip
    return phases._link_seconds(hardware, block)


def as_stripes(mixture: Mixture) -> Mixture:
    """The same bytes on every node, all of them striped."""
    return Mixture(mixture.bytes, (0.0,) * len(mixture.whole))


@pytest.mark.slow(reason="prices hundreds of mixtures")
@settings(deadline=None, max_examples=300)
@given(cases())
def test_no_mixture_is_faster_than_stripes_with_its_bytes(case: tuple[Hardware, Mixture]) -> None:
    hardware, mixture = case
    for seconds in (read_s, copied_s):
        stripes = seconds(hardware, as_stripes(mixture))
        assert seconds(hardware, mixture) >= stripes * (1 - ROUNDING), seconds


@settings(deadline=None, max_examples=300)
@given(cases())
def test_stripes_are_what_no_node_and_no_link_undercuts(case: tuple[Hardware, Mixture]) -> None:
    """The bound that they reach, from rates alone: so nothing else could be faster either."""
    hardware, mixture = case
    alone = replace(hardware, sockets=())
    nbytes, nodes = mixture.bytes, hardware.nodes
    rates = [(node.read_bytes_per_s, node.copy_bytes_per_s) for node in nodes]
    read = max(each / rate for each, (rate, _) in zip(nbytes, rates, strict=True))
    copied = max(each / rate for each, (_, rate) in zip(nbytes, rates, strict=True))
    copied = max(copied, sum(nbytes) / hardware.link_bytes_per_s)
    stripes = as_stripes(mixture)
    assert read_s(alone, stripes) == pytest.approx(read, rel=1e-9)
    assert copied_s(alone, stripes) == pytest.approx(copied, rel=1e-9)


def test_stripes_with_other_bytes_can_be_slower_than_a_mixture() -> None:
    """The control: of equal stripes over unequal nodes the claim is false, so tests can see it."""
    node = HostNode(
        name="0", tier="ldram", node=0, usable_bytes=1e15, read_bytes_per_s=300 * GB,
        latency_ns=100.0, copy_bytes_per_s=300 * GB,
    )  # fmt: skip
    slow = replace(node, name="1", tier="cxl", node=1, read_bytes_per_s=30 * GB)
    hardware = Hardware(
        machine="two", nodes=(node, slow), link_bytes_per_s=25 * GB, local_latency_ns=100.0,
        gpu=GpuRates(1e14, 1e12), gpu_memory_bytes=1e12, gpu_usable_bytes=1e12, cores=16,
    )  # fmt: skip
    mixture = Mixture((90 * GB, 8 * GB), (0.0, 1 * GB))
    equal = Mixture((49.5 * GB, 49.5 * GB), (0.0, 0.0))
    assert read_s(hardware, equal) > 4 * read_s(hardware, mixture)
    assert read_s(hardware, mixture) > read_s(hardware, as_stripes(mixture))


SIZES = st.lists(st.integers(0, 50), min_size=3, max_size=3).map(tuple)


@settings(deadline=None, max_examples=60)
@given(
    striped=st.lists(SIZES, min_size=1, max_size=4),
    whole=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), max_size=4),
    queues=st.integers(1, 3),
    engine=st.sampled_from(["cpu", "h2d"]),
)
def test_no_replay_of_a_mixture_is_faster_either(
    striped: list[tuple[int, ...]], whole: list[tuple[int, int]], queues: int, engine: str
) -> None:
    """Tensors of a mixture in one queue or in several side by side; stripes one after the other."""
    unit = 10**9
    tensors = [dict(enumerate(size)) for size in striped] + [{at: size} for at, size in whole]
    tensors = [{at: unit * size for at, size in each.items() if size} for each in tensors]
    tensors = [each for each in tensors if each]
    if not tensors:
        return
    total = {at: sum(each.get(at, 0) for each in tensors) for at in range(3)}
    plain = machine()
    gpu = replace(plain.gpus[0], link=Link(10 * unit, 10 * unit))
    there = replace(
        plain,
        gpus=(gpu,),
        dma_paths=tuple(replace(path, extra_latency_ns=None) for path in plain.dma_paths),
    )

    def seconds(events: list[Event]) -> float:
        return replay(Trace(events), there).seconds

    mixture = [event(engine, each, queue=f"queue {at % queues}") for at, each in enumerate(tensors)]
    sizes = [sum(each.values()) / sum(total.values()) for each in tensors]
    parts = [{at: round(nbytes * size) for at, nbytes in total.items()} for size in sizes]
    stripes = [event(engine, {at: n for at, n in each.items() if n}) for each in parts]
    assert seconds(mixture) >= seconds(stripes) * (1 - 1e-6)
