"""Views of plain tensors that the core makes by itself, and what it leaves to view.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cxl_offload import _C, CPUAdam
from cxl_offload.ops.view import PLAIN, READ_FLOATS, tensor_view

TYPES = (*READ_FLOATS, torch.int8, torch.uint8)

BY_ATTRIBUTES = _C.PlainTensors(
    (torch.Tensor, torch.nn.Parameter),
    {each: str(each).removeprefix("torch.") for each in TYPES},
    strided=torch.strided,
)
"""As torch is read that has no table of functions in C."""

both_ways = pytest.mark.parametrize("plain", [PLAIN, BY_ATTRIBUTES], ids=["table", "attributes"])


def _resized(count: int) -> torch.Tensor:
    tensor = torch.randn(3, 4)
    tensor.untyped_storage().resize_(count)
    return tensor


def _unaligned() -> torch.Tensor:
    return torch.frombuffer(bytearray(41), dtype=torch.float32, count=10, offset=1)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(3)


PLAIN_ONES: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(3, 5),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(4)),
    "a number": lambda: torch.tensor(2.0),
    "nothing": lambda: torch.empty(3, 0, 2),
    "nothing without memory": lambda: torch.empty(0),
    "lengths of one": lambda: torch.randn(7, 1, 3).transpose(0, 1),
    "a part": lambda: torch.randn(9, 4)[3:5],
    "the last element": lambda: torch.randn(9)[8:],
    "for inference": lambda: torch.inference_mode()(torch.randn)(3),
}
STRANGE_ONES: dict[str, Callable[[], object]] = {
    "no tensor": lambda: [1.0, 2.0],
    "nothing at all": lambda: None,
    "columns": lambda: torch.randn(3, 5).t(),
    "a broadcast": lambda: torch.randn(1, 5).expand(3, 5),
    "sparse": lambda: torch.randn(3, 5).to_sparse(),
    "of another device": lambda: torch.empty(3, device="meta"),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "double": lambda: torch.randn(3, dtype=torch.float64),
    "without its memory": lambda: _resized(0),
    "beyond its storage": lambda: _resized(47),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "fake": _fake,
    "functional": lambda: torch._to_functional_tensor(torch.randn(3)),
}


@both_ways
@pytest.mark.parametrize("made", PLAIN_ONES.values(), ids=PLAIN_ONES.keys())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_plain_tensor_has_the_view_that_torch_says(
    made: Callable[[], torch.Tensor], dtype: torch.dtype, plain: _C.PlainTensors
) -> None:
    tensor = made().detach().to(dtype) if dtype is not torch.float32 else made()
    found = plain.view(tensor)
    assert found is not None
    assert (found.address, found.shape) == (tensor.data_ptr(), list(tensor.shape))
    assert (f"torch.{found.dtype}", found.nbytes) == (str(dtype), tensor.nbytes)
    assert found.is_contiguous


def test_types_that_a_kernel_does_not_take_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x is torch\.int8; this kernel takes torch\.float32"):
        tensor_view(torch.zeros(3, dtype=torch.int8), "x")


@both_ways
def test_a_tensor_is_read_while_torch_records_operators(plain: _C.PlainTensors) -> None:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        view = plain.view(x)
        assert view is not None
        found.append(view.shape)
        return x + 1

    torch.jit.trace(function, (torch.randn(3, 5),), check_trace=False)
    assert found == [[3, 5]]


@both_ways
@pytest.mark.parametrize("made", STRANGE_ONES.values(), ids=STRANGE_ONES.keys())
def test_of_any_other_object_there_is_none_and_python_says_why(
    made: Callable[[], object], plain: _C.PlainTensors
) -> None:
    strange = made()
    assert plain.view(strange) is None
    with pytest.raises((TypeError, ValueError)):
        tensor_view(strange, "x", dtypes=TYPES)  # type: ignore[arg-type]


@both_ways
def test_an_address_between_elements_is_left_to_python(plain: _C.PlainTensors) -> None:
    tensor = _unaligned()
    assert plain.view(tensor) is None
    with pytest.raises(ValueError, match="not a multiple of 4 bytes"):
        tensor_view(tensor, "x")


def test_groups_of_one_optimizer_keep_their_own_settings() -> None:
    """Parameters of a group share one rule, those of another and of another step do not."""
    begin = [torch.randn(5) for _ in range(6)]

    def stepped(kind: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(each.clone()) for each in begin]
        groups: list[dict[str, Any]] = [
            {"params": params[:3]},
            {"params": params[3:5], "lr": 0.5, "maximize": True},
            {"params": params[5:], "weight_decay": 0.3},
        ]
        optimizer = kind(groups, lr=0.1, weight_decay=0.0)
        for step in range(4):
            for at, param in enumerate(params):
                # Some begin later, so steps within a group differ.
                param.grad = torch.full((5,), 0.1 * (at + 1)) if step >= at % 3 else None
            optimizer.step()
        return [param.detach() for param in params]

    for found, expected in zip(stepped(CPUAdam), stepped(torch.optim.AdamW), strict=True):
        # A parameter of size 1 that ends near zero has lost as many digits.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
