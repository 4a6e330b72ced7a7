"""Memory for weights: exact in size, on the nodes that were asked for. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from cxl_offload import Session, load_machine
from cxl_offload.integrations.vllm.weight_memory import WeightMemory
from cxl_offload.integrations.vllm.weight_options import WeightOptions
from cxl_offload.memory import Pages
from cxl_offload.tensor import placement_of

MIB = 1 << 20


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


def room(session: Session, asked: int, pages: Pages = "base") -> WeightMemory:
    options = WeightOptions(policy="bind:0", kinds={}, pages=pages)
    return WeightMemory(session, options, asked_bytes=asked, pin=False)


def test_weight_is_on_the_nodes_of_its_placement(session: Session) -> None:
    made = room(session, 64 * MIB)
    near = made.place("a", torch.empty(1024, 1024), "bind:0")
    far = made.place("b", torch.empty(2048, 1024), "bind:2")
    assert near is not None
    assert far is not None
    assert placement_of(near, session=session).granted == {0: 4 * MIB}
    assert placement_of(far, session=session).granted == {2: 8 * MIB}
    assert made.bytes_per_node() == {"bind:0": {0: 4 * MIB}, "bind:2": {2: 8 * MIB}}


def test_weight_beyond_what_was_asked_is_not_taken(session: Session) -> None:
    made = room(session, 8 * MIB)
    assert made.place("a", torch.empty(6 * MIB, dtype=torch.uint8), "bind:0") is not None
    assert made.place("b", torch.empty(3 * MIB, dtype=torch.uint8), "bind:0") is None
    assert made.place("c", torch.empty(2 * MIB, dtype=torch.uint8), "bind:2") is not None
    assert made.held_bytes == 8 * MIB
    assert session.stats().mapped_bytes.current == 8 * MIB


def test_rest_of_a_page_holds_the_next_weights(session: Session) -> None:
    made = room(session, 64 * MIB)
    first = made.place("a", torch.empty(100, dtype=torch.uint8), "bind:0")
    second = made.place("b", torch.empty(100, dtype=torch.uint8), "bind:0")
    assert first is not None
    assert second is not None
    assert second.data_ptr() - first.data_ptr() == 512
    assert made.held_bytes == 4096


def test_huge_pages_count_whole_against_what_was_asked(session: Session) -> None:
    session.kernel.set_pool(0, 2 * MIB, 8)  # type: ignore[attr-defined]
    made = room(session, 5 * MIB, "2MiB")
    weight = made.place("a", torch.empty(3 * MIB, dtype=torch.uint8), "bind:0")
    assert weight is not None
    assert made.held_bytes == 4 * MIB
    assert placement_of(weight, session=session).page_bytes == 2 * MIB
    assert made.place("b", torch.empty(2 * MIB, dtype=torch.uint8), "bind:0") is None
    assert made.place("c", torch.empty(MIB, dtype=torch.uint8), "bind:0") is not None
    assert made.held_bytes == 4 * MIB


def test_dropped_weight_gives_its_memory_back(session: Session) -> None:
    made = room(session, 8 * MIB)
    weight = made.place("a", torch.empty(8 * MIB, dtype=torch.uint8), "bind:0")
    assert weight is not None
    made.drop("a")
    del weight
    session.trim()
    assert made.held_bytes == 0
    assert session.stats().mapped_bytes.current == 0
    assert made.place("b", torch.empty(8 * MIB, dtype=torch.uint8), "bind:2") is not None


def test_strides_and_type_of_a_weight_are_kept(session: Session) -> None:
    made = room(session, 8 * MIB)
    like = torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t()
    weight = made.place("a", like, "bind:0")
    assert weight is not None
    weight.copy_(like)
    assert (weight.dtype, weight.shape, weight.stride()) == (like.dtype, like.shape, like.stride())
    assert torch.equal(weight, like)


def test_empty_weight_takes_no_memory(session: Session) -> None:
    made = room(session, 8 * MIB)
    assert made.place("a", torch.empty(0), "bind:0") is None
    assert made.held_bytes == 0
