"""Parts finer than percents: where memory is full, a stripe of them fits where percents do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.plan.decoding.sizes import CYCLES
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.plan.transformers.homes import finer_parts, largest_tensor, policy_of, whole_parts
from cxl_offload.plan.transformers.plan import Transformers
from cxl_offload.plan.transformers.shares import KV
from cxl_offload.topology.model import MAX_WEIGHT

from .requests import request

GIB = 1 << 30


@given(
    weights=st.lists(st.integers(0, 10_000), min_size=2, max_size=12).filter(any),
    room=st.lists(st.integers(0, GIB), min_size=12, max_size=12),
    tensor_pages=st.integers(1, 100_000),
)
def test_parts_make_up_their_total_and_an_interleave_takes_them(
    weights: list[int], room: list[int], tensor_pages: int
) -> None:
    shares = [each / sum(weights) for each in weights]
    nbytes = 300 * GIB
    parts = finer_parts(shares, nbytes, room[: len(shares)], tensor_pages * BASE_PAGE_BYTES)
    total = sum(parts)
    assert total == 100 or 100 < total <= tensor_pages // CYCLES
    assert 0 <= min(parts) <= max(parts) <= MAX_WEIGHT
    beyond = [
        (part / total - share) * nbytes - free
        for part, share, free in zip(parts, shares, room, strict=False)
    ]
    percents = [
        (part / 100 - share) * nbytes - free
        for part, share, free in zip(whole_parts(shares), shares, room, strict=False)
    ]
    if max(percents) <= 0:
        assert max(beyond) <= 1e-6 * nbytes, "where percents have room, finer parts have it too"


def test_block_fills_all_memory() -> None:
    """Percents of OPT-175B's weights are 3 GiB, more than is left of all nodes: with them a block
    had one sequence of every batch less.

    The bytes that the policy of the cache puts on every node are asked of the core.
    """
    executor = Transformers(request("opt-175b", prompt=64, generated=128))
    found = executor.search(executor.hardware())
    assert found is not None
    homes, job, hardware = found.choice.homes, executor.job, found.hardware
    free = [node.usable_bytes - have for have, node in zip(homes.host, hardware.nodes, strict=True)]
    assert min(free) >= 0
    assert sum(free) < 0.004 * sum(node.usable_bytes for node in hardware.nodes)
    assert any(sum(parts) not in (0, 100) for parts in homes.parts.values()), "finer ones"

    for kind, placed in homes.kinds.items():
        nbytes, parts = largest_tensor(job, homes, kind), homes.parts[homes.class_of(kind)]
        used = {at: part for at, part in enumerate(parts) if part}
        text = policy_of(hardware, parts, nbytes)
        if len(used) > 1 and kind == KV:
            granule = int(text.rpartition("@")[2].removesuffix("KiB")) * 1024
            one = stripe_bytes(nbytes, used, granule)
            assert placed == tuple(2 * job.layers * one.get(at, 0) for at in range(len(parts)))
        if len(used) > 1:
            by_name = dict(
                part.split("=") for part in text[len("weighted:") : -1].split("@")[0].split(",")
            )
            assert {*by_name} == {hardware.names[at] for at in used}
            assert max(map(int, by_name.values())) <= MAX_WEIGHT
