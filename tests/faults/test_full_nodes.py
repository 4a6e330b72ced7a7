"""Nodes and huge-page pools that are full, short, or fill up while we allocate."""

from __future__ import annotations

import threading

import pytest

from cxl_offload.memory import Bind, Interleave, Policy, Preferred, Session, Weighted

from .ground import (
    MIB,
    NODES,
    Account,
    check_against_kernel,
    check_all_returned,
    kernel_of,
    machine,
    simulated,
)

HUGE = 2 * MIB


def test_an_empty_pool_is_named_before_anything_is_mapped() -> None:
    session = simulated(64 * MIB)
    maps = kernel_of(session).calls["map"]
    with pytest.raises(MemoryError, match=r"2 MiB huge-page pool of node 2 has 0 "):
        session.allocate(HUGE, Bind((2,)), pages="2MiB")
    assert kernel_of(session).calls["map"] == maps
    check_all_returned(session)


def test_a_pool_that_is_short_gives_what_it_has_to_who_may_spill() -> None:
    session = simulated(64 * MIB, huge_2mib=4)
    with pytest.raises(MemoryError, match="node 1"):
        session.allocate(5 * HUGE, Bind((1,)), pages="2MiB")
    block = session.allocate(5 * HUGE, Preferred((1,)), pages="2MiB")
    assert block.bytes_per_node() == {1: 4 * HUGE, 0: HUGE}
    assert any("spilled to node 0" in note for note in block.notes)
    check_against_kernel(session, [block])


def test_a_pool_that_shrinks_under_us_keeps_what_is_live_and_refuses_more() -> None:
    session = simulated(64 * MIB, huge_2mib=4)
    kernel = kernel_of(session)
    block = session.allocate(2 * HUGE, Bind((1,)), pages="2MiB")
    with pytest.raises(ValueError, match="in use"):
        kernel.set_pool(1, HUGE, 1)
    kernel.set_pool(1, HUGE, 2)
    with pytest.raises(MemoryError, match="node 1"):
        session.allocate(HUGE, Bind((1,)), pages="2MiB")
    assert block.bytes_per_node() == {1: 2 * HUGE}
    del block
    again = session.allocate(2 * HUGE, Bind((1,)), pages="2MiB")
    assert again.bytes_per_node() == {1: 2 * HUGE}


@pytest.mark.parametrize(
    "policy", [Bind((0, 1)), Preferred((0,)), Interleave(NODES), Weighted({0: 1, 2: 1})], ids=str
)
def test_a_full_machine_is_seen_before_anything_is_mapped(policy: Policy) -> None:
    session = simulated(64 * MIB)
    kernel = kernel_of(session)
    for node in NODES:
        kernel.set_used_by_others(node, 64 * MIB)
    calls = kernel.calls
    with pytest.raises(MemoryError, match="free"):
        session.allocate(32 * MIB, policy)
    assert kernel.calls == calls
    for node in NODES:
        kernel.set_used_by_others(node, 0)
    block = session.allocate(32 * MIB, policy)
    check_against_kernel(session, [block])


@pytest.mark.parametrize("limit_mib", [32, 100])
def test_the_limit_of_the_process_is_named_and_kept(limit_mib: int) -> None:
    session = Session.simulated(machine(256 * MIB), process_limit_bytes=limit_mib * MIB)
    with pytest.raises(MemoryError, match=r"memory\.max"):
        session.allocate(limit_mib * MIB, Bind((1,)))
    block = session.allocate((limit_mib - 16) * MIB, Interleave((0, 1)))
    check_against_kernel(session, [block])


def test_a_node_that_fills_up_while_we_allocate_costs_no_page_and_no_wrong_answer() -> None:
    session = simulated(128 * MIB)
    kernel = kernel_of(session)
    stop = threading.Event()

    def others() -> None:
        amount = 0
        while not stop.is_set():
            amount = 100 * MIB - amount
            try:
                kernel.set_used_by_others(2, amount)
            except ValueError:  # we hold too much of it
                amount = 100 * MIB - amount

    thread = threading.Thread(target=others)
    thread.start()
    served = refused = 0
    try:
        while (served < 20 or refused < 20) and served + refused < 20_000:
            try:
                block = session.allocate(80 * MIB, Bind((2,)))
            except MemoryError as error:
                refused += "node 2" in str(error)
                assert Account.of(session) == Account(0, 0, 0)
                continue
            served += block.bytes_per_node() == {2: 80 * MIB}
            del block
            session.trim()
    finally:
        stop.set()
        thread.join()
    assert served >= 20
    assert refused >= 20
    check_all_returned(session)
