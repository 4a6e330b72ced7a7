"""Inside a machine of several nodes: pages that the kernel takes for broken while they are used."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.errors import MemoryLostError
from cxl_offload.kept import KeptBlocks, KeptLayout, KeptStore, kept_path
from cxl_offload.memory import Bind, Interleave, Session, survive_memory_errors
from cxl_offload.memory.session import Allocation
from tests.kept.ground import block_of, key_of
from tests.placement.child import MIB, run_in_child
from tests.placement.kernel_calls import PAGE, page_nodes
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
FAR = SPEC.node_ids[-1]
HUGE = 2 * MIB
_FAILURES = Path("/sys/devices/system/memory")
_SWEEP_SEED = 19
_SWEEPS = 30


def offline(address: int, how: str) -> None:
    """The kernel takes the page under an address out of use: ``hard`` loses it, ``soft`` not."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // PAGE * 8)
        (entry,) = struct.unpack("<Q", pages.read(8))
    frame = entry & ((1 << 55) - 1)
    assert frame, "only root may ask for page frames"
    (_FAILURES / f"{how}_offline_page").write_text(hex(frame * PAGE))


def lose(address: int) -> None:
    offline(address, "hard")


def filled(policy: object, nbytes: int = MIB, *, pages: str = "base") -> Allocation:
    block = Session.linux().allocate(nbytes, policy, pages=pages)  # type: ignore[arg-type]
    ctypes.memset(block.address, 7, nbytes)
    return block


def read(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


def ended_by(work: Callable[[], None]) -> int:
    """The signal that ends a forked child, or 0."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_without_protection_a_lost_page_ends_the_process() -> None:
    def use() -> None:
        block = filled(Bind((FAR,)))
        lose(block.address + PAGE)
        read(block.address + PAGE)

    assert ended_by(use) == signal.SIGBUS


def test_lost_page_is_known_before_anybody_uses_it() -> None:
    block = filled(Bind((FAR,)))

    def wait() -> None:
        lose(block.address + 3 * PAGE)
        for _ in range(1000):  # the thread that the kernel tells may need a moment
            time.sleep(0.02)

    with survive_memory_errors(), pytest.raises(MemoryLostError, match=f"on node {FAR}"):
        wait()
    assert read(block.address + 3 * PAGE) == 0xFF
    assert read(block.address + 4 * PAGE) == 7


def test_lost_page_that_is_used_is_replaced_on_its_node() -> None:
    def use() -> None:  # a child has nobody who is told early
        block = filled(Bind((FAR,)))
        lose(block.address + PAGE)
        assert page_nodes(block.address + PAGE, PAGE) == [-2]
        assert read(block.address + PAGE + 5) == 0xFF
        assert page_nodes(block.address, 3 * PAGE) == [FAR] * 3
        (row,) = _C.losses_in(block.address, block.nbytes)
        assert row[1:] == (block.address + PAGE, PAGE, _C.LossKind.used)

    with survive_memory_errors(interrupt=False):
        run_in_child(use)


def test_madvise_of_poison_is_survived() -> None:
    def use() -> None:
        block = filled(Bind((0,)))
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(block.address), ctypes.c_size_t(PAGE), 100
        )  # MADV_HWPOISON
        assert read(block.address) == 0xFF
        assert len(_C.losses_in(block.address, PAGE)) == 1

    with survive_memory_errors(interrupt=False):
        run_in_child(use)


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    pool = Path(f"/sys/devices/system/node/node{FAR}/hugepages/hugepages-2048kB/nr_hugepages")
    before = pool.read_text()
    pool.write_text(str(int(before) + count))
    try:
        yield
    finally:
        pool.write_text(before)


def test_huge_page_is_lost_as_a_whole() -> None:
    def use() -> None:
        block = filled(Bind((FAR,)), 3 * HUGE, pages="2MiB")
        lose(block.address + HUGE + 17 * PAGE)
        assert read(block.address + HUGE) == 0xFF
        assert read(block.address + 2 * HUGE - 1) == 0xFF
        assert read(block.address + HUGE - 1) == read(block.address + 2 * HUGE) == 7
        assert [row[1:3] for row in _C.losses_in(block.address, 3 * HUGE)] == [
            (block.address + HUGE, HUGE)
        ]

    with huge_pages(6), survive_memory_errors(interrupt=False):
        run_in_child(use)


def test_of_a_transparent_huge_page_one_page_is_lost() -> None:
    def use() -> None:
        block = filled(Bind((FAR,)), 2 * HUGE, pages="thp")
        lose(block.address + 5 * PAGE)
        assert read(block.address + 5 * PAGE) == 0xFF
        assert read(block.address + 4 * PAGE) == read(block.address + 6 * PAGE) == 7

    with survive_memory_errors(interrupt=False):
        run_in_child(use)


def test_pages_that_nobody_used_are_found_by_asking() -> None:
    def use() -> None:
        session = Session.linux()
        block = session.allocate(MIB, Interleave((0, FAR), granule_bytes=16 * PAGE))
        ctypes.memset(block.address, 7, MIB)
        for page in (3, 20):
            lose(block.address + page * PAGE)
        assert session.lost() == ()
        found = session.check().lost
        assert [(each.offset, each.nbytes, each.node) for each in found] == [
            (3 * PAGE, PAGE, 0),
            (20 * PAGE, PAGE, FAR),
        ]
        assert read(block.address + 3 * PAGE) == 0xFF

    run_in_child(use)  # without survive_memory_errors


def test_pages_that_the_kernel_moved_are_brought_back() -> None:
    session = Session.linux()
    block = session.allocate(MIB, Bind((FAR,)))
    ctypes.memset(block.address, 7, MIB)
    move_away(block.address + 2 * PAGE, 4)
    (stray,) = session.check(bring_back=False).strays
    assert (stray.offset, stray.nbytes) == (2 * PAGE, 4 * PAGE)
    assert (stray.placed_on, stray.found_on, stray.is_back) == (FAR, 0, False)
    (stray,) = session.check().strays
    assert stray.is_back
    assert session.check().strays == ()
    assert page_nodes(block.address, MIB) == [FAR] * (MIB // PAGE)
    assert ctypes.string_at(block.address, MIB) == b"\7" * MIB


def move_away(address: int, count: int) -> None:
    """To node 0, as soft-offlining may."""
    pages = (ctypes.c_void_p * count)(*range(address, address + count * PAGE, PAGE))
    nodes, status = (ctypes.c_int * count)(), (ctypes.c_int * count)()
    moved = ctypes.CDLL(None).syscall(279, 0, ctypes.c_ulong(count), pages, nodes, status, 2)
    assert moved == 0
    assert page_nodes(address, count * PAGE) == [0] * count


def test_soft_offlined_page_stays_whole_and_in_its_place() -> None:
    session = Session.linux()
    block = session.allocate(MIB, Bind((FAR,)))
    ctypes.memset(block.address, 7, MIB)
    offline(block.address + PAGE, "soft")
    assert all(each.is_back for each in session.check().strays)
    assert page_nodes(block.address, MIB) == [FAR] * (MIB // PAGE)
    assert ctypes.string_at(block.address, MIB) == b"\7" * MIB
    assert session.lost() == ()


def test_kept_block_on_a_lost_page_is_dropped_and_the_others_are_found() -> None:
    layout = KeptLayout(block_bytes=64 << 10, slots=16)
    path = kept_path(f"test-{uuid4().hex}")

    def use() -> None:
        store = KeptBlocks(KeptStore(path, layout, {"model": "tiny"}))
        for number in range(8):
            store.put(key_of(number), block_of(key_of(number), layout))
        slot = store.find(key_of(3))
        assert slot is not None
        lose(store.store.address + slot * layout.block_bytes + PAGE)
        found = {number: store.get(key_of(number)) for number in range(8)}
        assert found.pop(3) is None
        for number, block in found.items():
            assert block == block_of(key_of(number), layout)
        store.put(key_of(3), block_of(key_of(3), layout))
        assert store.get(key_of(3)) == block_of(key_of(3), layout)
        store.close()

    try:
        with survive_memory_errors(interrupt=False):
            run_in_child(use)
        path.unlink(missing_ok=True)
        assert ended_by(use) == signal.SIGBUS, "without protection"
    finally:
        path.unlink(missing_ok=True)


class Sweep:
    """Weights, KV and optimizer states on a node, used by the core's own kernels."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.session = Session.linux()
        self.team = _C.WorkerTeam([(-1, 2, [])])
        self.random = np.random.default_rng(generator.randrange(1 << 30))

    def array(self, *shape: int) -> NDArray[np.float32]:
        nbytes = int(np.prod(shape)) * 4
        policy = self.generator.choice([Bind((FAR,)), Bind((0,)), Interleave((0, FAR))])
        block = self.session.allocate(nbytes, policy)
        self.blocks.append(block)
        raw = (ctypes.c_float * (nbytes // 4)).from_address(block.address)
        made = np.ctypeslib.as_array(raw).reshape(shape)
        made[:] = self.random.standard_normal(shape, dtype=np.float32)
        return made

    def linear(self) -> Callable[[], bytes]:
        x, weight = self.array(4, 256), self.array(512, 256)

        def run() -> bytes:
            y = np.empty((4, 512), np.float32)
            _C.run_linear(view(x), view(weight), view(y), self.team)
            return y.tobytes()

        return run

    def attention(self) -> Callable[[], bytes]:
        q, k, v = self.array(2, 4, 64), self.array(2, 4, 128, 64), self.array(2, 4, 128, 64)

        def run() -> bytes:
            out = np.empty_like(q)
            _C.run_attention(
                view(q), view(k), view(v), view(out), self.team, scale=0.125, lengths=[128, 128]
            )
            return out.tobytes()

        return run

    def adam(self) -> Callable[[], bytes]:
        param, grad, first, second = (self.array(256, 256) for _ in range(4))
        second[:] = np.abs(second)

        def run() -> bytes:
            settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
            settings |= {"decoupled_weight_decay": False, "bias_correction": True}
            rule = _C.AdamRule(settings, step=3)
            update = _C.Update(rule, view(param), view(grad), [view(first), view(second)])
            _C.run_updates([update], self.team)
            return param.tobytes()

        return run

    def round(self, number: int) -> str:
        """One page of one of them fails: the same result, or one error; says which."""
        self.blocks: list[Allocation] = []
        kind = self.generator.choice(["linear", "attention", "adam"])
        run: Callable[[], bytes] = getattr(self, kind)()
        contents = [ctypes.string_at(block.address, block.nbytes) for block in self.blocks]

        def restore() -> None:
            for block, content in zip(self.blocks, contents, strict=True):
                ctypes.memmove(block.address, content, len(content))
                _C.settle(block.address, block.nbytes)

        right = run()
        restore()
        victim = self.generator.choice([each for each in self.blocks if each.nbytes >= PAGE])
        at = self.generator.randrange(victim.nbytes // PAGE) * PAGE
        lose(victim.address + at)
        wanted = f"bytes {at} to {at + PAGE - 1} of "
        outcome = "same"
        said = ""
        try:
            found = run()
        except MemoryLostError as error:
            said, outcome = str(error), "error"
        else:
            assert found == right, f"seed {_SWEEP_SEED}, round {number}: {kind} gave wrong numbers"
        if said:
            assert wanted in said, (number, kind, at, said)
            assert f"on node {victim.runs(at, PAGE)[0][2]}" in said
        restore()
        assert run() == right, f"seed {_SWEEP_SEED}, round {number}: {kind} after restoring"
        return outcome


def view(array: NDArray[np.float32]) -> _C.TensorView:
    strides = [stride // 4 for stride in array.strides]
    return _C.TensorView(array.ctypes.data, "float32", array.shape, strides)


def test_seeded_sweep_gives_the_same_or_one_error() -> None:
    sweep = Sweep(random.Random(_SWEEP_SEED))
    with survive_memory_errors(interrupt=False):
        outcomes = [sweep.round(number) for number in range(_SWEEPS)]
    assert outcomes == ["error"] * _SWEEPS


def test_seeded_sweep_where_nobody_is_told_early() -> None:
    def use() -> None:
        sweep = Sweep(random.Random(_SWEEP_SEED + 1))
        outcomes = [sweep.round(number) for number in range(_SWEEPS // 2)]
        assert outcomes == ["error"] * (_SWEEPS // 2)

    with survive_memory_errors(interrupt=False):
        run_in_child(use)


def test_seeded_sweep_ends_the_process_without_protection() -> None:
    def use() -> None:
        Sweep(random.Random(_SWEEP_SEED + 2)).round(0)

    assert ended_by(use) == signal.SIGBUS
