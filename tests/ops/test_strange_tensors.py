"""Tensors whose bytes are not their values, or not there: refused by every way into a kernel.

Each call is made with each kind of strange tensor, in a process of its own where the old code
crashed: torch itself reads memory that is gone without a look.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import cxl_offload.ops.attention_op
import cxl_offload.ops.linear_op  # noqa: F401  (both register an operator)
from cxl_offload import CPUAdam, CPULion, from_tensor, placement_of
from cxl_offload.memory import use
from cxl_offload.ops.attention import decode_attention, decode_attention_partial
from cxl_offload.ops.linear import PreparedLinear, linear
from cxl_offload.transfer import HostCopier

from ..memory.machines import simulated_memory

Call = Callable[[torch.Tensor], object]

WEIGHT = torch.randn(5, 64)
KEYS = torch.randn(3, 2, 10, 8)
QUERY = torch.randn(3, 8, 8)


def _as_query(x: torch.Tensor) -> torch.Tensor:
    return x.view(3, 8, 8)


def _step(
    kind: type[torch.optim.Optimizer], x: torch.Tensor, *, grad: bool, **options: object
) -> None:
    other = torch.ones(3, 64)
    param = torch.nn.Parameter(other if grad else x)
    param.grad = x if grad else other
    kind([param], **options).step()


COMPUTING: dict[str, Call] = {
    "linear": lambda x: linear(x, WEIGHT),
    "linear's weight": lambda x: linear(WEIGHT, x),
    "prepared linear": lambda x: PreparedLinear(WEIGHT, None)(x),
    "attention": lambda x: decode_attention(_as_query(x), KEYS, KEYS),
    "attention's keys": lambda x: decode_attention(
        torch.randn(1, 3, 8), x.view(1, 3, 8, 8), torch.randn(1, 3, 8, 8)
    ),
    "partial attention": lambda x: decode_attention_partial(_as_query(x), KEYS, KEYS),
}
UPDATING: dict[str, Call] = {
    "Adam's parameter": lambda x: _step(CPUAdam, x, grad=False),
    "Adam's gradient": lambda x: _step(CPUAdam, x, grad=True),
    "Lion's gradient": lambda x: _step(CPULion, x, grad=True),
    "8-bit Adam's parameter": lambda x: _step(CPUAdam, x, grad=False, state_dtype=torch.uint8),
    "8-bit Adam's gradient": lambda x: _step(CPUAdam, x, grad=True, state_dtype=torch.uint8),
    "8-bit Lion's gradient": lambda x: _step(CPULion, x, grad=True, state_dtype=torch.uint8),
}
COPYING: dict[str, Call] = {
    "a copy's source": lambda x: HostCopier().copy_strided(target=torch.empty(3, 64), source=x),
    "a copy's target": lambda x: HostCopier().copy_strided(target=x, source=torch.ones(3, 64)),
    "from_tensor": from_tensor,
    "placement_of": placement_of,
}


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("call", (COMPUTING | UPDATING | COPYING).items(), ids=lambda call: call[0])
def test_storage_that_was_resized_is_refused(call: tuple[str, Call], left: int) -> None:
    x = torch.randn(3, 64)
    x.untyped_storage().resize_(left)
    with use(simulated_memory()), pytest.raises(ValueError, match="bytes of its storage"):
        call[1](x)


@pytest.mark.parametrize("call", (COMPUTING | UPDATING | COPYING).items(), ids=lambda call: call[0])
def test_zeros_that_have_no_memory_are_refused(call: tuple[str, Call]) -> None:
    x = torch._efficientzerotensor(3, 64)
    with use(simulated_memory()), pytest.raises(ValueError, match="without memory"):
        call[1](x)


def test_part_of_a_resized_storage_that_is_there_is_used() -> None:
    x = torch.randn(4, 64)
    row, whole = x[0], linear(x[0], WEIGHT)
    x.untyped_storage().resize_(64 * 4)
    assert torch.equal(linear(row, WEIGHT), whole)


@pytest.mark.parametrize("call", (COMPUTING | UPDATING).items(), ids=lambda call: call[0])
def test_functional_tensors_are_refused(call: tuple[str, Call]) -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"functional|storage"):
        torch.func.functionalize(lambda x: (call[1](x), x)[1])(torch.randn(3, 64))


@pytest.mark.parametrize("call", COMPUTING.items(), ids=lambda call: call[0])
def test_recordings_that_would_miss_the_call_are_refused(call: tuple[str, Call]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        call[1](x)
        return x + 1

    for record in (
        lambda: torch.jit.trace(function, (torch.randn(3, 64),)),
        lambda: make_fx(function)(torch.randn(3, 64)),
    ):
        with pytest.raises(RuntimeError, match=r"call torch\.ops\.cxl_offload\."):
            record()


def test_operators_are_recorded() -> None:
    x, other = torch.randn(3, 64), torch.randn(3, 64)

    def both(x: torch.Tensor) -> torch.Tensor:
        attended = torch.ops.cxl_offload.decode_attention(x.view(3, 8, 8), KEYS, KEYS)
        return torch.ops.cxl_offload.linear(attended.reshape(3, 64), WEIGHT)

    for recorded in (torch.jit.trace(both, (x,)), make_fx(both)(x)):
        assert torch.equal(recorded(other), both(other))


@pytest.mark.parametrize("call", COMPUTING.items(), ids=lambda call: call[0])
def test_forward_derivatives_are_refused(call: tuple[str, Call]) -> None:
    x = torch.randn(3, 64)
    if call[0] == "prepared linear":
        pytest.skip("it asks nothing about gradients, as it says")
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward derivative"):
        call[1](forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("call", COMPUTING.items(), ids=lambda call: call[0])
def test_derivatives_are_refused(call: tuple[str, Call]) -> None:
    if call[0] == "prepared linear":
        pytest.skip("it asks nothing about gradients, as it says")
    with pytest.raises(ValueError, match="has no derivative"):
        call[1](torch.randn(3, 64, requires_grad=True))
    with torch.no_grad():
        call[1](torch.randn(3, 64, requires_grad=True))


def test_operators_refuse_arguments_of_several_devices() -> None:
    x, meta = torch.randn(3, 64), torch.device("meta")
    linear_of, attend = torch.ops.cxl_offload.linear, torch.ops.cxl_offload.decode_attention
    with pytest.raises(ValueError, match="on cpu and on meta"):
        linear_of(x, WEIGHT.to(meta))
    with pytest.raises(ValueError, match="on cpu and on meta"):
        attend(QUERY, KEYS.to(meta), KEYS)
    with pytest.raises(ValueError, match="on cpu and on meta"):
        attend(QUERY, KEYS, KEYS, torch.tensor([1, 1, 1]).to(meta))
    assert linear_of(x.to(meta), WEIGHT.to(meta)).device == meta


def test_copies_of_bytes_that_are_no_values_are_refused() -> None:
    target, copier = torch.zeros(4, 4), HostCopier()
    made = torch.full((4, 4), 1 + 2j)
    strange = {
        "is on meta": torch.ones(4, 4, device="meta"),
        "is_neg": torch._neg_view(torch.ones(4, 4)),
        "int32 to torch": torch.ones(4, 4, dtype=torch.int32),
    }
    for message, source in strange.items():
        with pytest.raises(ValueError, match=message):
            copier.copy_strided(target=target, source=source)
    with pytest.raises(ValueError, match="is_conj"):
        copier.copy_strided(target=torch.zeros_like(made), source=made.conj())
    assert not target.any()
