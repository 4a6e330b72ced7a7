"""Nodes of one machine divided among processes: exact, near, and as asked."""

from __future__ import annotations

import itertools
import random

import pytest

from cxl_offload import load_machine
from cxl_offload.plan.rank_shares import Member, NodeRequest, assign_homes, divide_nodes
from cxl_offload.topology import Gpu, Machine, Node, NodeKind

PAGE = 4096
GIB = 1 << 30


def machine(gpus: tuple[Gpu, ...] = ()) -> Machine:
    """Two sockets, a CXL node on each, and the memory of a GPU as a node."""
    near = {0: 10, 1: 20, 2: 30, 3: 40, 4: 50}
    far = {0: 20, 1: 10, 2: 40, 3: 30, 4: 60}
    return Machine(
        name="two",
        nodes=(
            Node(id=0, kind=NodeKind.DRAM, cpus=(0, 1), capacity_bytes=8 * GIB),
            Node(id=1, kind=NodeKind.DRAM, cpus=(2, 3), capacity_bytes=8 * GIB),
            Node(id=2, kind=NodeKind.CXL, cpus=(), capacity_bytes=4 * GIB),
            Node(id=3, kind=NodeKind.CXL, cpus=(), capacity_bytes=4 * GIB),
            Node(id=4, kind=NodeKind.GPU, cpus=(), capacity_bytes=2 * GIB),
        ),
        distances={0: near, 1: far},
        gpus=gpus,
        simulated=True,
    )


def at(*homes: int, **named: object) -> list[Member]:
    return [Member(rank, home=home, **named) for rank, home in enumerate(homes)]  # type: ignore[arg-type]


def total(shares: list[dict[int, int]]) -> dict[int, int]:
    return {node: sum(share[node] for share in shares) for node in shares[0]}


def test_each_of_two_ranks_gets_the_nodes_of_its_socket() -> None:
    room = {0: 8 * GIB, 1: 8 * GIB, 2: 4 * GIB, 3: 4 * GIB}
    first, second = divide_nodes(machine(), room, at(0, 1))
    assert first == {0: 8 * GIB, 1: 0, 2: 4 * GIB, 3: 0}
    assert second == {0: 0, 1: 8 * GIB, 2: 0, 3: 4 * GIB}


def test_one_cxl_node_is_shared_equally_by_both_sockets() -> None:
    first, second = divide_nodes(machine(), {0: GIB, 1: GIB, 2: GIB}, at(0, 1))
    assert first == {0: GIB, 1: 0, 2: GIB // 2}
    assert second == {0: 0, 1: GIB, 2: GIB // 2}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("odd", [0, 1, PAGE, 3 * PAGE + 17])
def test_shares_sum_to_the_capacity_and_differ_by_a_page(count: int, odd: int) -> None:
    room = {2: GIB + odd, 3: 5 * PAGE}
    shares = divide_nodes(machine(), room, at(*[0, 1] * 4)[:count])
    assert total(shares) == room
    sums = [sum(share.values()) for share in shares]
    assert max(sums) - min(sums) < 2 * PAGE


def test_requests_come_first_and_the_rest_is_divided_equally() -> None:
    members = [
        Member(0, home=0, requests=(NodeRequest("tier cxl", (2, 3), 3 * GIB),)),
        Member(1, home=1),
    ]
    first, second = divide_nodes(machine(), {2: 2 * GIB, 3: 2 * GIB}, members)
    assert sum(first.values()) == 3 * GIB + GIB // 2
    assert first[2] == 2 * GIB  # the nearer one whole
    assert second == {2: 0, 3: GIB // 2}


def test_rank_that_can_go_elsewhere_makes_room() -> None:
    """Each takes the nearest by itself; only together do they fit."""
    members = [
        Member(0, home=0, requests=(NodeRequest("either", (2, 3), GIB),)),
        Member(1, home=0, requests=(NodeRequest("node 2", (2,), GIB),)),
    ]
    first, second = divide_nodes(machine(), {2: GIB, 3: GIB}, members)
    assert (first, second) == ({2: 0, 3: GIB}, {2: GIB, 3: 0})


def test_requests_that_do_not_fit_name_ranks_and_nodes() -> None:
    members = at(0, 1, requests=(NodeRequest("tier cxl", (2,), 3 * GIB),))
    with pytest.raises(ValueError, match=r"rank 0 3 GiB of tier cxl, rank 1 3 GiB.*2: 4 GiB"):
        divide_nodes(machine(), {2: 4 * GIB}, members)
    with pytest.raises(ValueError, match="do not fit"):
        divide_nodes(machine(), {2: GIB}, at(0, requests=(NodeRequest("node 9", (9,), 1),)))


def test_memory_of_a_gpu_goes_to_the_ranks_on_it() -> None:
    gpus = (Gpu("gpu0", node=0, memory_node=4), Gpu("gpu1", node=1))
    members = assign_homes(machine(gpus), [Member(0), Member(1), Member(2, gpu="gpu0")])
    assert [(member.gpu, member.home) for member in members] == [
        ("gpu1", 1),
        ("gpu1", 1),
        ("gpu0", 0),
    ]
    shares = divide_nodes(machine(gpus), {4: 2 * GIB}, members)
    assert [share[4] for share in shares] == [0, 0, 2 * GIB]


def test_ranks_bound_to_their_nodes_share_only_those() -> None:
    members = [
        Member(0, home=0, nodes=frozenset({0, 2})),
        Member(1, home=1, nodes=frozenset({1, 2})),
    ]
    first, second = divide_nodes(machine(), {0: GIB, 1: 2 * GIB, 2: GIB}, members)
    assert first == {0: GIB, 1: 0, 2: GIB // 2}
    assert second == {0: 0, 1: 2 * GIB, 2: GIB // 2}


def test_without_gpus_ranks_are_spread_over_the_sockets() -> None:
    assert [m.home for m in assign_homes(machine(), [Member(rank) for rank in range(4)])] == [
        *(0, 0, 1, 1)
    ]
    kept = assign_homes(machine(), [Member(0, home=1), Member(1)])
    assert [member.home for member in kept] == [1, 1]


def test_gpus_of_a_published_machine_are_given_out_in_order() -> None:
    found = load_machine("spr3-h100")
    members = assign_homes(found, [Member(0), Member(1)])
    assert [(member.gpu, member.home) for member in members] == [("H100", 0), ("H100", 0)]


def cheapest_by_trying(
    costs: list[dict[int, int]], wants: list[int], room: dict[int, int]
) -> int | None:
    """The least distance of all ways to hand out a few pages, one at a time; None: no way."""
    pages = [index for index, want in enumerate(wants) for _ in range(want)]
    best = None
    for chosen in itertools.product(*(costs[index] for index in pages)):
        if any(chosen.count(node) > free for node, free in room.items()):
            continue
        price = sum(costs[index][node] for index, node in zip(pages, chosen, strict=True))
        best = price if best is None else min(best, price)
    return best


def test_requests_are_served_at_the_least_distance_of_all_ways() -> None:
    """Against trying all ways, on 300 random small cases."""
    random.seed(7)
    feasible = 0
    for _ in range(300):
        nodes = [0, 1, 2]
        rows = {home: {node: random.randint(10, 60) for node in nodes} for home in nodes}
        small = Machine(
            name="random",
            nodes=tuple(
                Node(id=node, kind=NodeKind.DRAM, cpus=(node,), capacity_bytes=GIB)
                for node in nodes
            ),
            distances=rows,
            simulated=True,
        )
        room = {node: random.randint(0, 3) for node in nodes}
        homes = [random.choice(nodes) for _ in range(3)]
        allowed = [tuple(random.sample(nodes, random.randint(1, 3))) for _ in homes]
        wants = [random.randint(0, 2) for _ in homes]
        members = [
            Member(rank, home=home, requests=(NodeRequest("x", allowed[rank], wants[rank] * PAGE),))
            for rank, home in enumerate(homes)
        ]
        costs = [
            {node: rows[home][node] for node in allowed[rank]} for rank, home in enumerate(homes)
        ]
        expected = cheapest_by_trying(costs, wants, room)
        # Nothing is left for the second round where all that is not asked for is away.
        full = sum(room.values()) == sum(wants)
        capacities = {node: pages * PAGE for node, pages in room.items()}
        try:
            shares = divide_nodes(small, capacities, members)
        except ValueError:
            assert expected is None
            continue
        assert expected is not None
        feasible += 1
        assert total(shares) == capacities
        if full:
            price = sum(
                share[node] // PAGE * rows[home][node]
                for share, home in zip(shares, homes, strict=True)
                for node in nodes
            )
            assert price == expected
    assert feasible > 30
