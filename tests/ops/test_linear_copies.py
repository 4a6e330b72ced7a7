"""Weights with copies on two simulated nodes: each team reads the one near it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cxl_offload import _C
from cxl_offload.errors import MemoryLostError
from cxl_offload.memory import Session, survive_memory_errors, use
from cxl_offload.ops.int4_weight import Int4Weight, int4_quantized
from cxl_offload.ops.linear import PreparedLinear, linear
from cxl_offload.tensor import copies_of, from_tensor
from cxl_offload.topology import load_machine
from tests.memory.failures import lose

SHAPE = (1500, 256)
BOTH = [(0, 1, ()), (1, 1, ())]


@pytest.fixture(autouse=True)
def nodes() -> Iterator[Session]:
    """Two sockets, 0 and 1; the process is on the first."""
    with use(Session.simulated(load_machine("epyc9354-cxl-a"))) as session:
        yield session


def team(*groups: tuple[int, int, tuple[int, ...]]) -> _C.WorkerTeam:
    return _C.WorkerTeam(list(groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [BOTH, [(1, 3, ())], [(-1, 2, ())]])
def test_copies_give_the_same_bits(
    dtype: torch.dtype, groups: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    weight, x = torch.randn(SHAPE).to(dtype), torch.randn(3, SHAPE[1]).to(dtype)
    copied = from_tensor(weight, policy="replicate:0,1")
    assert torch.equal(linear(x, copied, threads=team(*groups)), linear(x, weight, threads=1))


@pytest.mark.parametrize(
    ("group", "read"),
    [(0, 0), (1, 1), (-1, 0), (2, 0)],
    ids=["on the first", "on the second", "on no node", "near the first"],
)
def test_a_team_reads_the_copy_near_its_node(group: int, read: int) -> None:
    copied = from_tensor(torch.ones(SHAPE), policy="replicate:0,1")
    for number, copy in enumerate(copies_of(copied)):
        copy.fill_(number)
    x = torch.ones(1, SHAPE[1])
    for threads in (1, 3):
        out = linear(x, copied, threads=team((group, threads, ())))
        assert out.eq(read * SHAPE[1]).all()


def test_the_order_of_nodes_is_the_policys() -> None:
    copied = from_tensor(torch.ones(SHAPE), policy="replicate:1,0")
    copied.zero_()
    x = torch.ones(1, SHAPE[1])
    assert linear(x, copied, threads=team((0, 1, ()))).eq(SHAPE[1]).all()
    assert linear(x, copied, threads=team((1, 1, ()))).eq(0).all()


def test_a_damaged_copy_changes_only_what_is_computed_near_it() -> None:
    weight, x = torch.randn(SHAPE), torch.randn(2, SHAPE[1])
    copied = from_tensor(weight, policy="replicate:0,1")
    whole = linear(x, copied, threads=1)
    copies_of(copied)[1].fill_(float("nan"))
    out = linear(x, copied, threads=team(*BOTH))
    damaged = out.isnan()
    assert torch.equal(damaged[0], damaged[1])
    assert torch.equal(out[~damaged], whole[~damaged])


def test_views_and_prepared_layers_read_the_near_copy() -> None:
    copied = from_tensor(torch.ones(2, *SHAPE), policy="replicate:0,1")
    copied.zero_()
    x, near = torch.ones(1, SHAPE[1]), team((1, 1, ()))
    assert linear(x, copied[1, 5:9], threads=near).eq(SHAPE[1]).all()
    assert PreparedLinear(copied[1], None)(x, near).eq(SHAPE[1]).all()


def test_codes_and_their_scales_are_read_near() -> None:
    dense = torch.randn(SHAPE)
    plain = int4_quantized(dense)
    x = torch.randn(1, SHAPE[1])
    expected = linear(x, plain, threads=1)
    copied = Int4Weight(
        from_tensor(plain.codes, policy="replicate:0,1"),
        from_tensor(plain.groups, policy="replicate:0,1"),
        plain.form,
    )
    for first in (copied.codes, copied.groups):
        first.zero_()
    assert torch.equal(linear(x, copied, threads=team((1, 1, ()))), expected)
    assert not torch.equal(linear(x, copied, threads=team((0, 1, ()))), expected)


def test_a_lost_page_of_the_copy_that_is_read_is_refused_and_had_again() -> None:
    weight, x = torch.randn(SHAPE), torch.randn(2, SHAPE[1])
    copied = from_tensor(weight, policy="replicate:0,1")
    with survive_memory_errors(interrupt=False):
        lose(copies_of(copied)[1].data_ptr() + 8192)
        with pytest.raises(MemoryLostError) as raised:
            linear(x, copied, threads=team((1, 1, ())))
        assert raised.value.is_whole
        again = linear(x, copied, threads=team((1, 1, ())))
    assert torch.equal(again, linear(x, weight, threads=1))
