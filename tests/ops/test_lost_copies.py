"""Copies that the package makes over memory that fails: an error, never NaN without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import cxl_offload
from cxl_offload.errors import MemoryLostError
from cxl_offload.memory import Session, lost_memory, survive_memory_errors, written_anew
from cxl_offload.ops.checkpoint_stager import TierStager
from cxl_offload.tensor import copy_whole
from tests.memory.failures import lose

PAGE = 4096


@pytest.fixture(autouse=True)
def surviving() -> Iterator[None]:
    with cxl_offload.use(Session.linux()), survive_memory_errors(interrupt=False):
        yield


def placed(elements: int = 1 << 16) -> torch.Tensor:
    return cxl_offload.zeros(elements, policy="bind:0")


COPIES: dict[str, Callable[[torch.Tensor], object]] = {
    "from_tensor": lambda lost: cxl_offload.from_tensor(lost, policy="bind:0"),
    "from_tensor as another type": lambda lost: cxl_offload.from_tensor(
        lost, dtype=torch.bfloat16, policy="bind:0"
    ),
    "stage": lambda lost: TierStager("bind:0").stage({"lost": [lost]}),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copy_of_lost_memory_is_refused_and_of_the_rest_is_made(kind: str) -> None:
    tensor = placed()
    lose(tensor.data_ptr())
    with pytest.raises(MemoryLostError, match="bytes 0 to 4095 of an allocation"):
        COPIES[kind](tensor)
    COPIES[kind](tensor[PAGE:])
    tensor.zero_()
    written_anew(tensor.data_ptr(), tensor.nbytes)
    COPIES[kind](tensor)


def test_memory_that_fails_while_it_is_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = placed(), placed()
    copy = torch.Tensor.copy_

    def fails(self: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        lose(self.data_ptr() + PAGE)
        return copy(self, given)

    monkeypatch.setattr(torch.Tensor, "copy_", fails)
    with pytest.raises(MemoryLostError, match="bytes 4096 to 8191"):
        copy_whole(target, source)


def test_what_is_copied_over_is_whole_again() -> None:
    source, target = placed(), placed()
    lose(target.data_ptr())
    copy_whole(target[1:], source[1:])
    (lost,) = lost_memory()
    assert lost.nbytes == 4
    copy_whole(target, source)
    assert lost_memory() == ()


OPTIMIZERS = {
    "adam": (cxl_offload.CPUAdam, torch.float32),
    "adagrad": (cxl_offload.CPUAdagrad, torch.float32),
    "lion in bfloat16": (cxl_offload.CPULion, torch.bfloat16),
    "adam in 8 bits": (cxl_offload.CPUAdam, torch.uint8),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_checkpoint_of_lost_states_is_not_loaded(kind: str, into: torch.dtype) -> None:
    make, dtype = OPTIMIZERS[kind]
    param = torch.nn.Parameter(torch.ones(1 << 16))
    param.grad = torch.ones_like(param)
    optimizer = make([param], policy="bind:0", pages="base", state_dtype=dtype)
    other = make([param], policy="bind:0", state_dtype=into)
    optimizer.step()
    name = next(iter(optimizer.kept_names))
    lose(optimizer.state[param][name].data_ptr() + PAGE)
    for each in (optimizer, other):
        with pytest.raises(
            MemoryLostError, match=f"bytes 4096 to 8191 of {name} of parameter 0 of the checkpoint"
        ):
            each.load_state_dict(optimizer.state_dict())
    with pytest.raises(MemoryLostError):
        optimizer.step()


class _Loses(torch.autograd.Function):
    """The page of an address fails in the backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, address: int) -> torch.Tensor:
        ctx.address = address  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        lose(ctx.address)  # type: ignore[attr-defined]
        return grad, None


@pytest.mark.parametrize("when", ["before the update", "after it"])
def test_step_after_an_overlapped_backward_raises_until_what_is_lost_is_written(when: str) -> None:
    weight = torch.nn.Parameter(placed(1 << 16).view(64, 1024))
    bias = torch.nn.Parameter(torch.zeros(64))
    optimizer = cxl_offload.CPUAdam(
        {"weight": weight, "bias": bias}.items(), policy="bind:0", overlap=True
    )

    def passed(loses: bool) -> None:
        x = torch.ones(4, 1024)
        out = torch.nn.functional.linear(x, weight, bias)
        if loses:
            out = _Loses.apply(out, weight.data_ptr())  # type: ignore[no-untyped-call]
        out.sum().backward()  # type: ignore[no-untyped-call]

    if when == "before the update":
        with pytest.raises(MemoryLostError):
            passed(loses=True)
    else:
        passed(loses=False)
        lose(weight.data_ptr())
    for _ in range(2):
        with pytest.raises(MemoryLostError, match=r"bytes 0 to 4095 of parameter 0 \(weight\)"):
            optimizer.step()
    weight.data.zero_()
    written_anew(weight.data_ptr(), weight.nbytes)
    optimizer.step()
    assert [int(optimizer.state[each]["step"]) for each in (weight, bias)] == [1, 1]
    optimizer.zero_grad()
    passed(loses=False)
    optimizer.step()
    assert [int(optimizer.state[each]["step"]) for each in (weight, bias)] == [2, 2]
