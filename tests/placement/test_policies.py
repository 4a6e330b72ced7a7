"""Every policy with every page size on every node set: the pages themselves say where they are."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from cxl_offload.memory import Bind, FirstTouch, Interleave, Policy, Preferred, Weighted
from tests.placement.child import MIB
from tests.placement.kernel_calls import PAGE
from tests.placement.rig import Rig, node_sets, rig_names

KIB = 1 << 10
HUGE = 2 * MIB
WEIGHTS = (4, 2, 1, 1, 1)
GRANULES = {"base": (4 * KIB, 64 * KIB, HUGE), "thp": (HUGE,), "2MiB": (HUGE,)}


def _policies(nodes: tuple[int, ...], pages: str) -> list[Policy]:
    found: list[Policy] = [Bind(nodes), Preferred(nodes)]
    for granule in GRANULES[pages] if len(nodes) > 1 else ():
        weights = dict(zip(nodes, WEIGHTS, strict=False))
        found.append(Interleave(nodes, granule_bytes=granule))
        found.append(Weighted(weights, granule_bytes=granule))
    return found


CASES = [
    pytest.param(name, policy, pages, id=f"{name}-{policy}-{pages}")
    for name in rig_names()
    for pages in GRANULES
    if (name, pages) != ("host", "2MiB")  # the host's pools are not ours to fill
    for nodes in node_sets(name)
    for policy in _policies(nodes, pages)
]


def expected_nodes(policy: Policy, nbytes: int) -> list[int]:
    """The node of every base page: whole cycles, then what is left by largest remainder."""
    if isinstance(policy, Bind | Preferred):
        return [policy.nodes[0]] * (nbytes // PAGE)
    assert isinstance(policy, Interleave | Weighted)
    weights = policy.weights if isinstance(policy, Weighted) else dict.fromkeys(policy.nodes, 1)
    divisor = math.gcd(*weights.values())
    cycle = [node for node, weight in weights.items() for _ in range(weight // divisor)]
    granules = -(-nbytes // policy.granule_bytes)
    left = granules % len(cycle)
    share = {node: Fraction(left * cycle.count(node), len(cycle)) for node in weights}
    counts = {node: int(share[node]) for node in weights}
    by_remainder = sorted(weights, key=lambda node: counts[node] - share[node])
    for node in by_remainder[: left - sum(counts.values())]:
        counts[node] += 1
    tail = [node for node, count in counts.items() for _ in range(count)]
    places = cycle * (granules // len(cycle)) + tail
    return [places[i * PAGE // policy.granule_bytes] for i in range(nbytes // PAGE)]


def _nbytes(policy: Policy, page_bytes: int) -> int:
    """A cycle and a part of the next, which ends inside a page."""
    if isinstance(policy, Bind | Preferred):
        return 2 * HUGE - 5
    assert isinstance(policy, Interleave | Weighted)
    weights = policy.weights if isinstance(policy, Weighted) else dict.fromkeys(policy.nodes, 1)
    granules = sum(weights.values()) + 1
    cycles = 1 if policy.granule_bytes == HUGE else 3
    return cycles * granules * policy.granule_bytes - (page_bytes // 2 + 7)


@contextlib.contextmanager
def _pools(rig: Rig, nodes: tuple[int, ...], pages: str, need: int) -> Iterator[None]:
    if pages != "2MiB":
        yield
        return
    for node in nodes:
        rig.set_pool(node, need)
    try:
        yield
    finally:
        rig.session.trim()
        for node in nodes:
            rig.set_pool(node, 0)


@pytest.mark.parametrize(("rig", "policy", "pages"), CASES, indirect=["rig"])
def test_pages_are_where_the_policy_says(rig: Rig, policy: Policy, pages: str) -> None:
    assert not isinstance(policy, FirstTouch)
    nodes = policy.nodes
    page_bytes = HUGE if pages == "2MiB" else PAGE
    nbytes = _nbytes(policy, page_bytes)
    with _pools(rig, nodes, pages, need=-(-nbytes // HUGE)):
        block = rig.session.allocate(nbytes, policy, pages=pages)
        held = block.held_bytes
        assert nbytes <= held < nbytes + page_bytes

        actual = rig.page_nodes(block.address, held)
        assert actual == expected_nodes(policy, held)
        assert rig.mappings_over(block.address, held) == 1

        placement = rig.session.placement(block.address, held)
        assert placement.granted == {n: pages * PAGE for n, pages in Counter(actual).items()}
        assert placement.page_bytes == page_bytes
        assert not placement.notes
        assert sum(block.bytes_per_node().values()) == nbytes
        for node, use in rig.session.stats().nodes.items():
            assert use.current_bytes == actual.count(node) * PAGE
        del block


@pytest.mark.parametrize("pages", ["base", "thp"])
def test_first_touch_follows_the_thread_that_writes(rig: Rig, pages: str) -> None:
    cpus = {node.id: node.cpus for node in rig.session.machine.nodes}
    allowed = os.sched_getaffinity(0)
    for node in rig.nodes_with_cpus:
        block = rig.session.allocate(2 * HUGE, FirstTouch(), pages=pages)
        assert block.bytes_per_node() == {-1: 2 * HUGE}
        if not rig.session.is_simulated:
            os.sched_setaffinity(0, set(cpus[node]) & allowed)
        try:
            ctypes.memset(block.address, 1, HUGE)
        finally:
            os.sched_setaffinity(0, allowed)
        assert rig.page_nodes(block.address, HUGE) == [node] * (HUGE // PAGE)
        assert rig.session.bytes_per_node(block.address + HUGE, HUGE) == {-1: HUGE}
        del block
        rig.session.trim()
