"""benchmarks/bench_states.py: peers have the pages that this package has."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from benchmarks.bench_states import CONTENDERS, PEERS, into_huge_pages
from cxl_offload.tensor_bytes import held_tensors

NUMEL = 1 << 20


def test_every_peer_has_both_kinds_of_pages() -> None:
    for name in PEERS:
        assert {name, f"{name}, huge pages"} <= CONTENDERS.keys()


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the mapping of a tensor's bytes was advised so."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head, _, rest = line.partition(" ")
        begin, dash, end = head.partition("-")
        if dash and ":" not in head:
            found = int(begin, 16) <= tensor.data_ptr() < int(end, 16)
        elif found and head == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping has the tensor")


def test_large_states_move_to_huge_pages_with_their_values() -> None:
    # A mapping of its own: numpy advises the heap so, where a tensor of torch's may lie later.
    large = torch.frombuffer(mmap.mmap(-1, 4 * NUMEL), dtype=torch.float32).normal_()
    small = torch.randn(10)
    was, address, addresses = large.clone(), large.data_ptr(), small.data_ptr()
    assert not asks_for_huge_pages(large)
    into_huge_pages([large, small, 3])
    assert torch.equal(large, was)
    assert large.data_ptr() != address
    assert asks_for_huge_pages(large)
    assert small.data_ptr() == addresses


@pytest.mark.slow(reason="imports torchao, which takes long")
def test_states_inside_of_a_tensor_of_torchao_move_too() -> None:
    kept = pytest.importorskip("torchao.optim.subclass_8bit")
    state = kept.OptimState8bit.zeros((4 * NUMEL,), signed=True)
    state.codes.random_(0, 256)
    state.scale.uniform_(0.5, 1.5)
    values = state.dequantize()
    addresses = {held.data_ptr() for held in held_tensors(state)}
    into_huge_pages([state])
    assert torch.equal(state.dequantize(), values)
    moved = [held for held in held_tensors(state) if held.data_ptr() not in addresses]
    assert [held.nbytes for held in moved] == [4 * NUMEL]
    assert asks_for_huge_pages(moved[0])
