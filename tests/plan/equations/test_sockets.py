"""Several sockets that read one memory: the slower one bounds, nodes and links too."""

from __future__ import annotations

import pytest

from cxl_offload.plan.equations.sockets import Crossing, Socket, core_shares, even_rates, link_costs

NEAR = 300e9
ACROSS = 100e9


def two(
    across: float = ACROSS, card: float = 40e9, cores: tuple[int, int] = (32, 32)
) -> list[Socket]:
    """DRAM 0 and 1 and a card, 2, at the second socket."""
    return [
        Socket(0, cores[0], (Crossing({1: across, 2: card}, across),)),
        Socket(1, cores[1], (Crossing({0: across}, across),)),
    ]


def seconds(nbytes: dict[int, float], sockets: list[Socket], gives: dict[int, float]) -> float:
    """One socket and one path after the other, as a reader would work it out."""
    total = sum(socket.cores for socket in sockets)
    slowest = max(nbytes[node] / gives[node] for node in nbytes)
    for socket in sockets:
        part = socket.cores / total
        for crossing in socket.crossings:
            for node, rate in crossing.rates.items():
                slowest = max(slowest, part * nbytes[node] / rate)
            away = sum(part * nbytes[node] for node in crossing.rates)
            slowest = max(slowest, away / crossing.link_bytes_per_s)
    return slowest


@pytest.mark.parametrize("across", [30e9, 100e9, 200e9, 400e9])
@pytest.mark.parametrize(
    "spread", [(1, 0, 0), (0, 1, 0), (0.5, 0.5, 0), (0.4, 0.4, 0.2), (0, 0, 1)]
)
@pytest.mark.parametrize("cores", [(32, 32), (48, 16)])
def test_the_slowest_socket_node_or_link_bounds(
    across: float, spread: tuple[float, ...], cores: tuple[int, int]
) -> None:
    gives = {0: NEAR, 1: NEAR, 2: 40e9}
    sockets = two(across, min(across, 40e9), cores)
    nbytes = {node: 1e12 * share for node, share in enumerate(spread)}
    rates = even_rates(gives, sockets)
    found = max(nbytes[node] / rate for node, rate in enumerate(rates))
    for costs in link_costs(list(gives), sockets):
        found = max(found, sum(nbytes[at] * cost for at, cost in costs.items()))
    assert found == pytest.approx(seconds(nbytes, sockets, gives))


def test_one_socket_reads_what_the_nodes_give() -> None:
    assert even_rates({0: NEAR, 1: ACROSS}, []) == (NEAR, ACROSS)
    assert link_costs([0, 1], []) == []


def test_a_link_that_one_node_is_read_over_is_in_that_nodes_rate() -> None:
    assert len(link_costs([0, 1], two())) == 0
    (costs,) = link_costs([0, 1, 2], two())
    assert costs == {1: 0.5 / ACROSS, 2: 0.5 / ACROSS}


def test_shares_go_by_cores() -> None:
    assert core_shares(two(cores=(48, 16))) == (0.75, 0.25)
