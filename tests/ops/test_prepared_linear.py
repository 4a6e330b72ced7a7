"""Weights that get other memory, shapes or types, between two calls and during one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from cxl_offload import _C
from cxl_offload.memory import Session, use
from cxl_offload.ops.int4_weight import Int4Weight, int4_quantized
from cxl_offload.ops.linear import PreparedLinear, linear
from cxl_offload.ops.view import has_plain_rows
from cxl_offload.tensor import from_tensor
from cxl_offload.topology import load_machine

WIDTH = 64
MADE = torch.randn(WIDTH, WIDTH)


@pytest.fixture
def session() -> Iterator[Session]:
    with use(Session.simulated(load_machine("epyc9354-cxl-a"))) as session:
        yield session


def live_bytes(session: Session) -> int:
    gc.collect()
    session.trim()
    return sum(use.current_bytes for use in session.stats().nodes.values())


CHANGES: dict[str, Callable[[Parameter], torch.Tensor]] = {
    "fewer rows": lambda weight: weight.data[:50],
    "every second row": lambda weight: weight.data[::2],
    "fewer columns": lambda weight: weight.data[:, :32],
    "transposed": lambda weight: weight.data.t(),
    "another type": lambda weight: weight.data.view(torch.float16)[:, :WIDTH],
    "other memory": lambda weight: weight.data.clone(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_prepared_is_not_of_a_weight_that_changed(change: str) -> None:
    weight = Parameter(MADE.clone())
    prepared = PreparedLinear(weight, None)
    assert prepared.is_of(weight, None)
    assert prepared.is_of(Parameter(weight.data), None)
    weight.data = CHANGES[change](weight)
    assert not prepared.is_of(weight, None)


@pytest.mark.parametrize("changed", [None, MADE[0, :-1], MADE[0].view(torch.int32), MADE[:, 0]])
def test_what_was_prepared_is_not_of_another_bias(changed: torch.Tensor | None) -> None:
    weight, bias = MADE.clone(), MADE[0]
    prepared = PreparedLinear(weight, bias)
    assert prepared.is_of(weight, bias)
    assert not prepared.is_of(weight, changed)
    assert not PreparedLinear(weight, None).is_of(weight, bias)


def test_what_was_prepared_keeps_what_it_reads(session: Session) -> None:
    weight, bias = Parameter(from_tensor(MADE)), Parameter(from_tensor(MADE[0]))
    prepared = PreparedLinear(weight, bias)
    held = live_bytes(session)
    weight.data, bias.data = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH)
    assert live_bytes(session) == held
    x = torch.randn(3, WIDTH)
    assert torch.equal(prepared(x), linear(x, MADE, MADE[0]))
    del prepared
    assert live_bytes(session) == 0


@pytest.mark.parametrize("codes", [False, True])
def test_weights_stay_while_the_kernel_reads_them(
    codes: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread gives the tensors other memory while Python's lock is released."""
    x, bias, coded = torch.randn(3, WIDTH), from_tensor(MADE[0]), int4_quantized(MADE)
    expected = linear(x, coded if codes else MADE, MADE[0])
    if codes:
        weight: Any = Int4Weight(from_tensor(coded.codes), from_tensor(coded.groups), coded.form)
        tensors, options = [weight.codes, weight.groups, bias], {}
    else:
        weight, scale = from_tensor(MADE), from_tensor(torch.ones(WIDTH))
        tensors, options = [weight, bias, scale], {"scale": scale}
    run, held = _C.run_linear, live_bytes(session)

    def run_later(*given: Any, **more: Any) -> None:
        for tensor in tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        assert live_bytes(session) == held
        run(*given, **more)

    monkeypatch.setattr(_C, "run_linear", run_later)
    assert torch.equal(linear(x, weight, bias, **options), expected)
    assert live_bytes(session) == 0


GIVEN: dict[str, Callable[[], Any]] = {
    "rows": lambda: MADE[:3],
    "a row": lambda: MADE[0],
    "three dimensions": lambda: MADE[:6].view(2, 3, WIDTH),
    "half precision": lambda: MADE[:3].to(torch.bfloat16),
    "a part of a storage": lambda: MADE[5:8],
    "columns of wider rows": lambda: torch.cat([MADE, MADE], 1)[:, 3 : 3 + WIDTH],
    "transposed": MADE.t,
    "imaginary parts, negated": lambda: MADE.to(torch.complex64).conj().imag,
    "no rows": lambda: MADE[:0],
    "no dimension": lambda: MADE[0, 0],
    "another width": lambda: MADE[:, :32].contiguous(),
    "another type": lambda: MADE.double(),
    "no tensor": lambda: [1.0] * WIDTH,
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("bias", [None, MADE[0]], ids=["", "bias"])
def test_a_prepared_layer_is_the_layer(given: Callable[[], Any], bias: Any) -> None:
    """Whatever it is given: the same bits and shape, or the same words of refusal."""

    def outcome(call: Callable[[Any], torch.Tensor]) -> Any:
        try:
            made = call(given())
        except (ValueError, TypeError) as error:
            return type(error), str(error)
        return tuple(made.shape), made.dtype, made.float().flatten().tolist()

    prepared = PreparedLinear(MADE, bias)
    assert outcome(prepared) == outcome(lambda x: linear(x, MADE, bias))


def test_a_storage_that_ends_too_early_is_not_read() -> None:
    """The layer takes rows by their address alone, so nothing behind would notice."""
    x = torch.randn(3, WIDTH)
    x.untyped_storage().resize_(x.nbytes - 1)
    assert not has_plain_rows(x, WIDTH)
    whole = torch.randn(3, WIDTH)
    assert has_plain_rows(whole, WIDTH)
    assert has_plain_rows(whole[1:], WIDTH)
