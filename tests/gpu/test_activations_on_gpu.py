"""Activations of a GPU in pinned host memory: the same gradients, and GPU memory that is free."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cxl_offload.memory import Session
from cxl_offload.ops.activations import offload_activations

from .slow_work import keep_busy

pytestmark = pytest.mark.gpu


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
def test_gradients_are_the_same_bits(session: Session, prefetch: int) -> None:
    net = model()
    x = torch.randn(2048, 1024, device="cuda")
    net(x).square().mean().backward()
    expected = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    offload = offload_activations(
        {session.kernel.local_node: 1}, prefetch=prefetch, session=session
    )
    for _ in range(3):
        net.zero_grad()
        keep_busy(torch.cuda.current_stream(), 100_000_000)
        with offload:
            loss = net(x).square().mean()
        loss.backward()
        for param, grad in zip(net.parameters(), expected, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, grad)
    assert offload.use.copies >= 3 * 8
    del loss


def test_gpu_holds_less_between_forward_and_backward(session: Session) -> None:
    net = model()
    x = torch.randn(32768, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    loss = net(x).square().mean()
    stock = torch.cuda.memory_allocated() - before
    del loss
    with offload_activations({session.kernel.local_node: 1}, session=session):
        loss = net(x).square().mean()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < stock / 4
    loss.backward()
    del loss
