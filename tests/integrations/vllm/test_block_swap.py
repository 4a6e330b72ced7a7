"""Which function swaps KV blocks, on a stand-in for the GPU; vLLM itself only for the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cxl_offload import _C
from cxl_offload.integrations.vllm import block_swap
from cxl_offload.integrations.vllm.block_swap import STOCK, CopierSwap, choose_swap, tune_worker
from cxl_offload.memory import Session
from cxl_offload.transfer import BlockCopier, blocks
from tests.transfer.conftest import driver, session  # noqa: F401
from tests.transfer.test_blocks import CXX, library  # noqa: F401

STREAM = 8
PAGE = 4096


class Clock:
    """Seconds that pass only when somebody copies."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def contender(self, seconds: float) -> Callable[[], None]:
        def copy() -> None:
            self.now += seconds

        return copy


def choice_of(seconds: dict[str, float]) -> str:
    clock = Clock()
    contenders = {name: clock.contender(took) for name, took in seconds.items()}
    return choose_swap(contenders, lambda swap: swap(), clock=clock).name


def test_quickest_is_chosen_only_when_it_beats_vllm_by_the_margin() -> None:
    assert choice_of({STOCK: 1.0, "batched": 1.1, "kernel": 0.5}) == "kernel"
    assert choice_of({STOCK: 1.0, "batched": 0.9, "kernel": 1.5}) == "batched"
    assert choice_of({STOCK: 1.0, "batched": 0.99, "kernel": 0.985}) == STOCK
    assert choice_of({STOCK: 1.0}) == STOCK


def test_contender_that_fails_is_left_out_and_vllm_s_failure_is_not_hidden() -> None:
    clock = Clock()

    def failing() -> None:
        raise OSError("launch refused")

    contenders: dict[str, Any] = {STOCK: clock.contender(1.0), "kernel": failing}
    found = choose_swap(contenders, lambda swap: swap(), clock=clock)
    assert (found.name, set(found.seconds)) == (STOCK, {STOCK})
    with pytest.raises(OSError, match="refused"):
        choose_swap({STOCK: failing}, lambda swap: swap(), clock=clock)


def lists(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int, int]]) -> Any:
    """Addresses and bytes, as vLLM makes them, of ``(source row, target row, bytes)``."""
    return (
        torch.tensor([source[row].data_ptr() for row, _, _ in pairs]),
        torch.tensor([target[row].data_ptr() for _, row, _ in pairs]),
        torch.tensor([nbytes for _, _, nbytes in pairs]),
    )


@pytest.mark.skipif(CXX is None, reason="needs g++")
@pytest.mark.parametrize("kernel_below_bytes", [0, None])
def test_swap_copies_blocks_of_every_size_to_their_places(
    session: Session,  # noqa: F811
    driver: _C.FakeDriver,  # noqa: F811
    library: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kernel_below_bytes: int | None,
) -> None:
    monkeypatch.setattr(blocks, "cuda_kernels_path", lambda: library)
    source = torch.randint(-128, 128, (6, PAGE), dtype=torch.int8)
    target = torch.zeros(6, PAGE, dtype=torch.int8)
    pairs = [(0, 5, PAGE), (3, 1, 256), (2, 2, PAGE), (4, 0, 256)]
    copier = BlockCopier(session, node=0, kernel_below_bytes=kernel_below_bytes)
    CopierSwap(copier, lambda: STREAM)(*lists(source, target, pairs), is_src_access_order_any=True)
    driver.finish(STREAM)
    expected = torch.zeros_like(target)
    for row, to, nbytes in pairs:
        expected[to, :nbytes] = source[row, :nbytes]
    assert torch.equal(target, expected)
    assert driver.copies == (len(pairs) if kernel_below_bytes == 0 else 0)


@dataclass
class Handler:
    """What is used of vLLM's handler of one direction."""

    src_tensors: list[torch.Tensor]
    dst_tensors: list[torch.Tensor]
    _swap_blocks_batch: Any


class Region:
    is_pinned = True


class Worker:
    """Two layers of 8 blocks, and a pool of 5 chunks of 2 blocks."""

    def __init__(self, swap: Any) -> None:
        self.cache = [torch.randint(-128, 128, (8, PAGE), dtype=torch.int8) for _ in range(2)]
        room = torch.zeros(5, 2 * 2 * PAGE, dtype=torch.int8)  # as a region: rows with all layers
        self.pool = [room[:, : 2 * PAGE], room[:, 2 * PAGE :]]
        self._mmap_region = Region()
        self._store_handler = Handler(self.cache, self.pool, swap)
        self._load_handler = Handler(self.pool, self.cache, swap)


@pytest.fixture
def tune(
    session: Session,  # noqa: F811
    driver: _C.FakeDriver,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Worker, float], dict[str, Any]]:
    """Tunes a worker whose own function takes so many seconds; ours take one."""
    clock, real = Clock(), choose_swap
    monkeypatch.setattr(
        block_swap, "choose_swap", lambda contenders, copy: real(contenders, copy, clock=clock)
    )

    def made(worker: Worker, stock_seconds: float) -> dict[str, Any]:
        stock = worker._store_handler._swap_blocks_batch

        def timed(*given: Any, **extra: Any) -> None:
            clock.now += stock_seconds - 1.0
            stock(*given, **extra)

        worker._store_handler._swap_blocks_batch = timed
        worker._load_handler._swap_blocks_batch = timed

        def run(queue: Callable[[], None]) -> None:
            clock.now += 1.0
            queue()
            driver.finish(STREAM)

        found = tune_worker(worker, session, node=0, run=run, stream=lambda: STREAM)
        if any(worker.__dict__[name]._swap_blocks_batch is timed for name in HANDLERS):
            assert all(each.name == STOCK for each in found.values())
        return found

    return made


HANDLERS = ("_store_handler", "_load_handler")


def test_worker_gets_the_quicker_function_and_its_cache_is_unchanged(
    tune: Callable[[Worker, float], dict[str, Any]],
    session: Session,  # noqa: F811
) -> None:
    copier = BlockCopier(session, node=0, kernel_below_bytes=0)
    worker = Worker(CopierSwap(copier, lambda: STREAM))
    before = [each.clone() for each in worker.cache]
    found = tune(worker, 2.0)
    assert set(found) == {"store", "load"}
    assert all(choice.name != STOCK for choice in found.values())
    for own, was, pool in zip(worker.cache, before, worker.pool, strict=True):
        assert torch.equal(own, was)
        assert torch.equal(pool[:5, :PAGE], was[:5])
    for name in HANDLERS:
        assert isinstance(getattr(worker, name)._swap_blocks_batch, CopierSwap)


def test_worker_keeps_vllm_s_function_where_nothing_is_quicker(
    tune: Callable[[Worker, float], dict[str, Any]],
    session: Session,  # noqa: F811
) -> None:
    copier = BlockCopier(session, node=0, kernel_below_bytes=0)
    worker = Worker(CopierSwap(copier, lambda: STREAM))
    found = tune(worker, 1.0)
    assert [choice.name for choice in found.values()] == [STOCK, STOCK]
    assert all(
        not isinstance(getattr(worker, name)._swap_blocks_batch, CopierSwap) for name in HANDLERS
    )


def test_worker_whose_pool_is_not_pinned_is_left_alone(session: Session) -> None:  # noqa: F811
    worker = Worker(print)
    worker._mmap_region.is_pinned = False
    assert tune_worker(worker, session, node=0, run=lambda _: None) == {}
    assert worker._store_handler._swap_blocks_batch is print


def test_worker_that_is_not_as_tested_is_left_alone(session: Session) -> None:  # noqa: F811
    assert tune_worker(object(), session, node=0, run=lambda _: None) == {}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
def test_vllm_s_worker_calls_the_function_that_is_replaced() -> None:
    import inspect

    from vllm import _custom_ops as ops
    from vllm.v1.kv_offload.cpu.gpu_worker import (
        CPUOffloadingWorker,
        SingleDirectionOffloadingHandler,
    )

    made = inspect.getsource(CPUOffloadingWorker.__init__)
    assert "self._store_handler = SingleDirectionOffloadingHandler(" in made
    assert "self._load_handler = SingleDirectionOffloadingHandler(" in made
    handler = inspect.getsource(SingleDirectionOffloadingHandler)
    assert "self._swap_blocks_batch(" in handler
    assert "self.src_tensors: list[torch.Tensor]" in handler
    given = list(inspect.signature(ops.swap_blocks_batch).parameters)
    assert given == ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"]
    ours = list(inspect.signature(CopierSwap.__call__).parameters)[1:]
    assert ours == ["sources", "targets", "sizes", "is_src_access_order_any"]
