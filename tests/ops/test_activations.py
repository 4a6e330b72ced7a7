"""offload_activations: the same gradients, the saved bytes in a tier, nothing left afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.ops.activations import OffloadedActivations, offload_activations

from ..memory.machines import MIB, simulated_memory, wait_until_all_is_back

CXL = 2


@pytest.fixture
def session() -> Iterator[Session]:
    """Two DRAM nodes and a CXL node, simulated; what is left at the end is a leak."""
    session = simulated_memory()
    with cxl_offload.use(session):
        yield session
    wait_until_all_is_back(session)


class Block(nn.Module):
    """A layer of OPT: one projection to q, k and v, whose parts are views of one storage."""

    def __init__(self, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = x.shape
        parts = self.qkv(self.first(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = (parts[:, :, index].transpose(1, 2) for index in range(3))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        x = x + self.down(torch.relu(self.up(self.second(x))))
        return nn.functional.dropout(x, 0.1)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.recompute: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return nn.functional.cross_entropy(
            (x @ self.embed.weight.t()).flatten(0, 1), tokens.view(-1)
        )


def made(recompute: bool | None = None, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.recompute = recompute
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))


def gradients(model: Model) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def plain_gradients(model: Model) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model(tokens()).backward()
    found = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    return found


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("prefetch", [0, 1, 3, 1000])
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bits(
    session: Session, prefetch: int, recompute: bool | None, dtype: torch.dtype
) -> None:
    model = made(recompute, dtype)
    expected = plain_gradients(model)
    offload = offload_activations("cxl", min_bytes=1, prefetch=prefetch)
    for _ in range(2):
        torch.manual_seed(2)
        with offload:
            loss = model(tokens())
        assert session.stats().nodes[CXL].current_bytes > 0
        loss.backward()
        assert_same_bits(gradients(model), expected)
        model.zero_grad()
        del loss
        wait_until_all_is_back(session)
    assert offload.use.copies > 0
    assert offload.use.kept["parameter"] > 0


def test_backward_inside_of_the_context_is_the_same(session: Session) -> None:
    model = made(recompute=True)
    expected = plain_gradients(model)
    torch.manual_seed(2)
    with offload_activations("cxl", min_bytes=1, prefetch=2):
        model(tokens()).backward()
    assert_same_bits(gradients(model), expected)


def test_saved_bytes_are_on_the_node_and_ordinary_memory_is_free(session: Session) -> None:
    x = torch.randn(1 << 20, requires_grad=True)
    with offload_activations("cxl") as offload:
        middle = x * 2
        where = middle.untyped_storage()
        mark = torch.multiprocessing.reductions.StorageWeakRef(where)
        y = middle.exp().sum()
        del middle, where
    assert mark.expired()
    held = session.stats()
    assert held.nodes[CXL].current_bytes >= 4 * MIB
    assert set(held.nodes) == {CXL}
    assert offload.use.copied_bytes == held.asked_bytes.current
    y.backward()
    assert torch.equal(x.grad, 2 * (2 * x.detach()).exp())  # type: ignore[arg-type]


def test_views_of_one_storage_are_copied_once(session: Session) -> None:
    x = torch.randn(6, 64, 64, requires_grad=True)
    with offload_activations("cxl", min_bytes=1) as offload:
        whole = x * 1.5
        y = sum(((part @ part.t()) * part).sum() for part in whole)
        y = y + whole.transpose(0, 1).pow(2).sum()
    assert offload.use.saved > 12
    # The products are storages of their own; of the whole there is one copy.
    products = 6 * 64 * 64 * 4
    assert offload.use.copied_bytes == whole.nbytes + products
    y.backward()
    again = x.detach().requires_grad_()
    whole = again * 1.5
    y = sum(((part @ part.t()) * part).sum() for part in whole)
    (y + whole.transpose(0, 1).pow(2).sum()).backward()
    assert torch.equal(x.grad, again.grad)  # type: ignore[arg-type]


def test_tensor_changed_between_two_saves_is_copied_again(session: Session) -> None:
    x = torch.ones(1000, requires_grad=True)
    held = torch.full((1000,), 2.0)
    with offload_activations("cxl", min_bytes=1) as offload:
        first = (x * held).sum()
        held.mul_(5)
        second = (x * held).sum()
    assert offload.use.copies == 2
    (first + second).backward()
    assert torch.equal(x.grad, torch.full((1000,), 12.0))  # type: ignore[arg-type]


def test_new_tensor_at_the_address_of_a_dropped_one_is_copied(session: Session) -> None:
    x = torch.ones(1000, requires_grad=True)
    memory, parts = bytearray(4000), []
    with offload_activations("cxl", min_bytes=1) as offload:
        for factor in range(1, 9):
            memory[:] = torch.full((1000,), float(factor)).numpy().tobytes()
            held = torch.frombuffer(memory, dtype=torch.float32)
            parts.append((x * held).sum())
            del held
    assert offload.use.copies == 8
    torch.stack(parts).sum().backward()
    assert torch.equal(x.grad, torch.full((1000,), 36.0))  # type: ignore[arg-type]


def test_what_is_small_thin_or_placed_stays(session: Session) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    placed = cxl_offload.full((64, 64), 3.0, policy="bind:1")
    column = torch.ones(64, 4096)[:, 7]
    with offload_activations("cxl", min_bytes=1000) as offload:
        y = (x * placed).sum() + (x * torch.ones(64)).sum() + (x * column).sum()
    assert offload.use.copies == 0
    assert offload.use.kept == {"placed": 1, "small": 2}
    with offload_activations("cxl", min_bytes=1) as offload:
        z = (x * column).sum()
    assert offload.use.kept == {"thin": 1}
    (y + z).backward()
    assert torch.equal(x.grad, torch.full((64, 64), 6.0))  # type: ignore[arg-type]
    del y, z, placed


def test_tensors_from_256_kib_on_leave(session: Session) -> None:
    x = torch.ones(65_536, requires_grad=True)
    with offload_activations("cxl") as offload:
        least = (x * torch.ones(65_536)).sum()
        less = (x[1:] * torch.ones(65_535)).sum()
    assert (offload.use.copied_bytes, offload.use.kept) == (262_144, {"small": 1})
    (least + less).backward()


def test_small_view_of_a_large_tensor_brings_only_itself(session: Session) -> None:
    data = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    x = torch.ones(8, 1024, requires_grad=True)
    with offload_activations("cxl", min_bytes=1) as offload:
        y = (x * data[100:108]).sum()
    assert 8 * 4096 <= offload.use.copied_bytes <= 8 * 4096 + 64
    y.backward()
    assert torch.equal(x.grad, data[100:108])  # type: ignore[arg-type]


def test_parameter_changed_before_backward_is_an_error_as_in_torch(session: Session) -> None:
    model = nn.Linear(8, 8)
    x = torch.ones(2, 8, requires_grad=True)
    with offload_activations("cxl", min_bytes=1):
        y = model(x).sum()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_swapped_data_of_a_parameter_is_followed_as_in_torch(session: Session) -> None:
    """ZeRO-3 gathers a parameter again for the backward, in other memory."""
    weight = nn.Parameter(torch.ones(100))
    x = torch.ones(100, requires_grad=True)
    with offload_activations("cxl", min_bytes=1):
        y = (x * weight).sum()
    weight.data = torch.full((100,), 7.0)
    y.backward()
    assert torch.equal(x.grad, torch.full((100,), 7.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_retained_graph_gives_the_same_twice_and_double_backward_works(
    session: Session, prefetch: int
) -> None:
    x = torch.randn(5000, dtype=torch.float64, requires_grad=True)
    with offload_activations("cxl", min_bytes=1, prefetch=prefetch):
        y = (x.exp() * x.sin()).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(first, second)
    (twice,) = torch.autograd.grad(second.sum(), x)
    exact = 2 * x.exp() * x.cos()
    assert torch.allclose(twice, exact, rtol=1e-12)


def test_inner_context_takes_what_is_saved_in_it(session: Session) -> None:
    x = torch.randn(100_000, requires_grad=True)
    with offload_activations("bind:1", min_bytes=1) as outer:
        a = x.exp()
        with offload_activations("cxl", min_bytes=1) as inner, outer:
            b = a.sin()
        with inner:
            c = b.cos()
    assert (outer.use.saved, outer.use.copies) == (2, 1)  # both are the result of the first exp
    assert (inner.use.saved, inner.use.copies) == (1, 1)
    held = session.stats().nodes
    assert (held[1].current_bytes > 0, held[CXL].current_bytes > 0) == (True, True)
    c.sum().backward()
    other = x.detach().requires_grad_()
    other.exp().sin().cos().sum().backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    del a, b, c


def test_error_in_forward_leaves_nothing_and_hooks_are_off(session: Session) -> None:
    x = torch.randn(100_000, requires_grad=True)

    def failing() -> None:
        with offload_activations("cxl", min_bytes=1):
            y = x.exp().sin()
            assert session.stats().asked_bytes.current > 0
            raise KeyError(y.shape)

    with pytest.raises(KeyError):
        failing()
    gc.collect()
    assert session.stats().asked_bytes.current == 0
    x.exp()
    assert session.stats().asked_bytes.current == 0


def test_full_tier_is_an_error_and_the_forward_can_be_repeated(session: Session) -> None:
    small = simulated_memory((1 << 30, 1 << 30, 24 * MIB))
    x = torch.randn(1 << 20, requires_grad=True)
    offload = offload_activations("cxl", session=small, pages="base")
    with pytest.raises(MemoryError), offload:
        y = x.exp().exp().exp()
    gc.collect()
    with offload:
        y = x.exp().sum()
    y.backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_share_a_context(session: Session, prefetch: int) -> None:
    offload = offload_activations("cxl", min_bytes=1, prefetch=prefetch)
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        try:
            x = torch.randn(20_000, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            other = x.detach().requires_grad_()
            other.exp().sin().pow(2).sum().backward()
            barrier.wait(60)
            for _ in range(20):
                x.grad = None
                with offload:
                    y = x.exp().sin().pow(2).sum()
                y.backward()
                assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert offload.use.copies > 0


class _Spy:
    """Which copies are begun, by their size, in order."""

    def __init__(self, offload: OffloadedActivations) -> None:
        self.begun: list[int] = []
        way = offload._way(torch.device("cpu"))
        start: Callable[..., None] = way.start

        def begin(saved: object) -> None:
            if saved.back is None:  # type: ignore[attr-defined]
                self.begun.append(saved.home.nbytes // 4000)  # type: ignore[attr-defined]
            start(saved)

        way.start = begin  # type: ignore[method-assign]


def test_copies_come_back_in_reverse_order_and_ahead(session: Session) -> None:
    offload = offload_activations("cxl", min_bytes=1, prefetch=2)
    spy = _Spy(offload)
    seen: list[tuple[int, list[int]]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, size):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(torch.zeros(size * 1000))
            ctx.size = size
            return x * 1

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            assert ctx.saved_tensors[0].numel() == ctx.size * 1000
            seen.append((ctx.size, list(spy.begun)))
            return grad, None

    x = torch.ones(1, requires_grad=True)
    with offload:
        y = x
        for size in range(1, 7):
            y = Watched.apply(y, size)
    y.sum().backward()
    assert [size for size, _ in seen] == [6, 5, 4, 3, 2, 1]
    for size, begun in seen:
        assert begun == list(range(6, max(size - 2, 1) - 1, -1))
