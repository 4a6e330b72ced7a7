"""offload_activations wherever autograd packs: on its threads, in graphs of graphs, compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.ops.activations import OffloadedActivations, offload_activations

from ..memory.machines import simulated_memory, wait_until_all_is_back

BEYOND_ONE_THREAD = 70
"""Nested backward passes; from 60 on, autograd continues on a thread of its own."""


@pytest.fixture
def _session() -> Iterator[Session]:
    """Two DRAM nodes and a CXL node, simulated; what is left at the end is a leak."""
    session = simulated_memory()
    torch.compiler.reset()
    with cxl_offload.use(session):
        yield session
    torch.compiler.reset()
    wait_until_all_is_back(session)


pytestmark = pytest.mark.usefixtures("_session")

Pass = Callable[[nn.Linear, torch.Tensor], None]


def nested(layer: nn.Linear, x: torch.Tensor) -> None:
    def again(value: torch.Tensor, left: int) -> torch.Tensor:
        value = torch.tanh(layer(value))
        return checkpoint(again, value, left - 1, use_reentrant=True) if left else value

    again(x, BEYOND_ONE_THREAD).sum().backward()


def twice(layer: nn.Linear, x: torch.Tensor) -> None:
    (slope,) = torch.autograd.grad(torch.tanh(layer(x)).sum(), x, create_graph=True)
    slope.square().sum().backward()


def on_another_thread(layer: nn.Linear, x: torch.Tensor) -> None:
    loss = torch.tanh(layer(x)).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def gradients(run: Pass, handle: OffloadedActivations | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)
    if handle is None:
        run(layer, x)
    else:
        with handle:
            run(layer, x)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [x.grad, layer.weight.grad]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("run", [nested, twice, on_another_thread], ids=lambda run: run.__name__)
def test_gradients_are_the_same_where_autograd_packs_or_unpacks_elsewhere(
    run: Pass, prefetch: int
) -> None:
    handle = offload_activations("bind:2", min_bytes=1, prefetch=prefetch)
    for mine, plain in zip(gradients(run, handle), gradients(run, None), strict=True):
        assert torch.equal(mine, plain)
    assert handle.use.saved > 0


def test_leaving_on_another_thread_is_refused_and_the_context_stays() -> None:
    handle = offload_activations("bind:2", min_bytes=1)
    seen: list[BaseException] = []

    def leave() -> None:
        try:
            handle.__exit__(None, None, None)
        except RuntimeError as error:
            seen.append(error)

    with handle:
        thread = threading.Thread(target=leave, name="other")
        thread.start()
        thread.join()
        assert "'other' leaves a context that it did not enter" in str(seen[0])
        torch.tanh(torch.randn(8, requires_grad=True)).sum().backward()
    assert handle.use.saved > 0


def inside(handle: OffloadedActivations) -> Pass:
    def run(layer: nn.Linear, x: torch.Tensor) -> None:
        @torch.compile(backend="aot_eager")
        def forward(value: torch.Tensor) -> torch.Tensor:
            with handle:
                hidden = torch.tanh(layer(value))
            return (hidden * hidden).sum()

        forward(x).backward()  # type: ignore[no-untyped-call]

    return run


def around(handle: OffloadedActivations) -> Pass:
    def run(layer: nn.Linear, x: torch.Tensor) -> None:
        @torch.compile(backend="aot_eager")
        def forward(value: torch.Tensor) -> torch.Tensor:
            return torch.tanh(layer(value)).square().sum()

        with handle:
            loss = forward(x)
        loss.backward()  # type: ignore[no-untyped-call]

    return run


@pytest.mark.parametrize("where", [inside, around], ids=lambda where: where.__name__)
def test_compiled_function_is_offloaded_without_a_word(
    where: Callable[[OffloadedActivations], Pass],
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handle = offload_activations("bind:2", min_bytes=1)
    mine = gradients(where(handle), None)

    def plain(layer: nn.Linear, x: torch.Tensor) -> None:
        torch.tanh(layer(x)).square().sum().backward()

    for one, other in zip(mine, gradients(plain, None), strict=True):
        torch.testing.assert_close(one, other)
    assert handle.use.saved > 0
    said: list[Any] = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "Dynamo does not know" in text]
    assert capfd.readouterr() == ("", "")
