"""Inside a machine with three nodes: the pages of kept blocks, before and after a kill."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from cxl_offload.kept import KeptBlocks, KeptLayout, KeptStore, Placing, kept_path
from cxl_offload.memory import Bind, Policy, Session, Weighted
from tests.kept.ground import block_of, key_of
from tests.placement.kernel_calls import PAGE, page_nodes
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
FAR = SPEC.node_ids[-1]
LAYOUT = KeptLayout(block_bytes=256 << 10, slots=32)


@pytest.fixture
def path() -> Iterator[Path]:
    found = kept_path(f"test-{uuid4().hex}")
    yield found
    found.unlink(missing_ok=True)


def opened(path: Path, policy: Policy) -> KeptBlocks:
    placing = Placing(Session.linux(), policy, "base")
    return KeptBlocks(KeptStore(path, LAYOUT, {"model": "tiny"}, prepare=placing))


def nodes_of(store: KeptBlocks) -> Counter[int]:
    """Pages of all slots, by node."""
    return Counter(page_nodes(store.store.address, LAYOUT.slots * LAYOUT.block_bytes))


def write_and_die(path: Path, policy: Policy) -> None:
    child = os.fork()
    if child == 0:
        try:
            store = opened(path, policy)
            for number in range(20):
                store.put(key_of(number), block_of(key_of(number), LAYOUT))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("again", [FAR, 1])
def test_pages_are_where_the_policy_says_before_and_after_a_kill(again: int, path: Path) -> None:
    write_and_die(path, Bind((FAR,)))
    store = opened(path, Bind((again,)))
    pages = LAYOUT.slots * LAYOUT.block_bytes // PAGE
    assert nodes_of(store) == {again: pages}, "pages that were elsewhere are moved"
    assert len(store) == 20
    for key in store.keys:
        assert store.get(key) == block_of(key, LAYOUT)
    store.close()


def test_pages_of_a_striped_store_stay_striped(path: Path) -> None:
    policy = Weighted({0: 3, FAR: 1})
    write_and_die(path, policy)
    store = opened(path, policy)
    found = nodes_of(store)
    assert set(found) == {0, FAR}
    assert 2.5 < found[0] / found[FAR] < 3.5
    assert all(store.get(key) == block_of(key, LAYOUT) for key in store.keys)
    store.close()
