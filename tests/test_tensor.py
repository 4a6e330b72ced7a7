"""Tensors whose memory is the pool's: dtypes, lifetime, views, what leaves the pool."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cxl_offload
from cxl_offload import Bind, Session

from .memory.machines import GIB, MIB, simulated_memory
from .memory.pages import nodes_of

QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@pytest.fixture(autouse=True)
def session() -> Iterator[Session]:
    session = Session.linux()
    with cxl_offload.use(session):
        yield session
    if session.stats().asked_bytes.current:
        gc.collect()  # what a failed test's traceback holds is no leak; it takes long, so only then
    assert session.stats().asked_bytes.current == 0
    session.trim()
    assert session.stats().mapped_bytes.current == 0


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
def test_every_dtype_has_torch_s_own_size_and_address(dtype: torch.dtype, session: Session) -> None:
    tensor = cxl_offload.empty(3, 5, dtype=dtype, policy="bind:0")
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (3, 5))
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == torch.empty(3, 5, dtype=dtype).nbytes
    assert session.stats().asked_bytes.current == 15 * dtype.itemsize
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.arange(raw.numel(), dtype=torch.uint8).view(raw.shape))
    assert session.find(tensor.data_ptr()) is not None


@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_quantized_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="integer type"):
        cxl_offload.empty(4, dtype=dtype)


def test_four_bit_values_keep_their_bits() -> None:
    packed = cxl_offload.empty(1 << 16, dtype=torch.float4_e2m1fn_x2, policy="bind:0")
    source = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    packed.view(torch.uint8).copy_(source)
    assert torch.equal(packed.view(torch.uint8), source)


def test_zeros_full_and_copies_have_their_values() -> None:
    assert torch.equal(cxl_offload.zeros(2, 3), torch.zeros(2, 3))
    assert torch.equal(
        cxl_offload.full((4,), 1.5, dtype=torch.bfloat16).float(), torch.full((4,), 1.5)
    )
    source = torch.randn(7, 9).t()
    copied = cxl_offload.from_tensor(source, policy="bind:0")
    assert torch.equal(copied, source)
    assert copied.is_contiguous()
    like = cxl_offload.empty_like(source, dtype=torch.float16)
    assert (tuple(like.shape), like.dtype) == ((9, 7), torch.float16)


def test_tensor_without_elements_owns_nothing(session: Session) -> None:
    empty = cxl_offload.empty(0, 4, dtype=torch.float16)
    assert tuple(empty.shape) == (0, 4)
    assert session.stats().asked_bytes.current == 0
    assert cxl_offload.placement_of(empty).granted == {}


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        cxl_offload.empty(3, -1)


def test_storage_cannot_be_resized(session: Session) -> None:
    tensor = cxl_offload.zeros(1024)
    with pytest.raises(RuntimeError, match=r"resizable|resize"):
        tensor.untyped_storage().resize_(1 << 20)
    assert torch.equal(tensor, torch.zeros(1024))


def test_views_keep_the_memory_alive(session: Session) -> None:
    tensor = cxl_offload.full((1024, 1024), 3.0)
    view = tensor[10:20].t()
    del tensor
    gc.collect()
    assert session.stats().allocations.current == 1
    assert (view == 3.0).all()
    del view
    assert session.stats().allocations.current == 0


def test_dlpack_consumers_keep_the_memory_alive(session: Session) -> None:
    tensor = cxl_offload.full((100,), 2.0)
    array = np.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert session.stats().allocations.current == 1
    assert (array == 2.0).all()
    del array
    assert session.stats().allocations.current == 0


def test_allocation_itself_is_writable_for_numpy(session: Session) -> None:
    block = session.allocate(4096, Bind((0,)))
    array = np.from_dlpack(block)
    array[:] = 9
    assert array.flags.writeable
    assert array.ctypes.data == block.address
    del block
    assert session.stats().allocations.current == 1
    capsule = session.allocate(64, Bind((0,))).__dlpack__()
    assert session.stats().allocations.current == 2
    del capsule, array
    assert session.stats().allocations.current == 0


@pytest.mark.parametrize(
    "leave",
    [
        lambda t: t.clone(),
        lambda t: t.half(),
        lambda t: t.to(torch.float64),
        lambda t: copy.deepcopy(t),
        lambda t: t.t().contiguous(),
        lambda t: t + 1,
    ],
    ids=["clone", "half", "to", "deepcopy", "contiguous", "operator"],
)
def test_what_torch_allocates_is_outside_the_pool(leave: Any, session: Session) -> None:
    tensor = cxl_offload.zeros(64, 65)
    assert session.find(leave(tensor).data_ptr()) is None
    assert session.stats().allocations.current == 1


def test_shared_memory_is_outside_the_pool(session: Session) -> None:
    tensor = cxl_offload.full((1000,), 4.0)
    tensor.share_memory_()
    assert session.find(tensor.data_ptr()) is None
    assert (tensor == 4.0).all()
    assert session.stats().allocations.current == 0


def test_autograd_and_in_place_work_as_on_any_tensor() -> None:
    weight = cxl_offload.from_tensor(torch.randn(8, 8), policy="bind:0").requires_grad_()
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((8, 8), 2.0))
    with torch.no_grad():
        weight.add_(1)
    parameter = torch.nn.Parameter(cxl_offload.zeros(4))
    assert parameter.is_leaf


def test_placement_of_view_counts_its_own_range_only() -> None:
    tensor = cxl_offload.zeros(1 << 20, policy="bind:0")
    assert cxl_offload.placement_of(tensor).granted == {0: 4 * MIB}
    assert cxl_offload.placement_of(tensor[: 1 << 18]).granted == {0: MIB}
    assert nodes_of(tensor.data_ptr(), tensor.nbytes) == {0: 1024}


def test_placement_of_foreign_tensor_asks_its_pages() -> None:
    placement = cxl_offload.placement_of(torch.ones(1 << 20))
    assert placement.requested is None
    assert placement.granted == {0: 4 * MIB}


def test_placement_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        cxl_offload.placement_of(torch.empty(4, device="meta"))


def test_move_takes_all_views_along() -> None:
    with cxl_offload.use(simulated_memory()) as simulated:
        tensor = cxl_offload.full((MIB,), 6.0, policy="ldram")
        view = tensor[100:]
        cxl_offload.move(view, "weighted:ldram=1,cxl=3@64KiB")
        assert cxl_offload.placement_of(tensor).granted == {0: MIB, 2: 3 * MIB}
        assert (tensor == 6.0).all()
        assert view.data_ptr() == tensor[100:].data_ptr()
        assert simulated.stats().tiers["cxl"].current_bytes == 3 * MIB


def test_move_of_foreign_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="from_tensor"):
        cxl_offload.move(torch.zeros(4096), "bind:0")


def test_simulated_placement_is_real_in_the_page_map_and_data_is_real() -> None:
    with cxl_offload.use(simulated_memory((8 * GIB, 8 * GIB, 4 * GIB))):
        tensor = cxl_offload.from_tensor(torch.arange(1 << 20), policy={0: 4, 1: 2, 2: 1})
        assert torch.equal(tensor, torch.arange(1 << 20))
        placement = cxl_offload.placement_of(tensor)
        assert placement.simulated
        assert placement.granted[0] == 8 * MIB, "less than one cycle of 2 MiB granules: one node"
        assert "less than one cycle" in placement.notes[0]


def test_tensors_are_used_by_another_session_s_thread(session: Session) -> None:
    import threading

    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(cxl_offload.zeros(5000)))
    thread.start()
    thread.join()
    assert session.stats().allocations.current == 1
    made.clear()
    assert session.stats().allocations.current == 0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.timeout(600)
def test_data_loader_workers_read_tensors(session: Session) -> None:
    rows = cxl_offload.from_tensor(torch.arange(64.0).view(32, 2), policy="bind:0")
    loader = torch.utils.data.DataLoader(
        Rows(rows), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    assert torch.equal(torch.cat(list(loader)), rows)
    assert not multiprocessing.active_children()
    assert session.stats().allocations.current == 1


def test_forked_child_has_a_session_of_its_own() -> None:
    kept = cxl_offload.full((2048,), 1.0)
    child = os.fork()
    if child == 0:
        try:
            own = cxl_offload.full((2048,), 2.0)
            ok = bool((own == 2.0).all()) and bool((kept == 1.0).all())
        except BaseException:
            os._exit(3)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (kept == 1.0).all()
