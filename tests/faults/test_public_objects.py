"""Every public object in many threads at once, and in a forked child of a process that uses it.

A child may do what works without the locks and threads of its parent; all else is refused with one
line. What may never happen is that it hangs, or that it reaches what is its parent's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

import cxl_offload
from cxl_offload import _C
from cxl_offload.memory import Bind, Interleave, Session, SharedRegion
from cxl_offload.ops.adam import adam_step
from cxl_offload.ops.attention import decode_attention
from cxl_offload.transfer import BlockCopier, CopyEngine, HostCopier, PackedFormat, pack, unpack

from .ground import GIB, KIB, MIB, simulated

CHUNK = 64 * KIB


@dataclass
class Ground:
    """A session on simulated nodes with a GPU that is not there, one on this machine."""

    driver: _C.FakeDriver = field(default_factory=_C.FakeDriver)
    session: Session = field(init=False)
    linux: Session = field(init=False)
    block: _C.Allocation = field(init=False)
    held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = simulated(GIB, driver=self.driver)
        self.linux = Session.linux()
        self.block = self.session.allocate(MIB, Bind((0,)), pin=True)
        np.from_dlpack(self.block)[:] = 7  # type: ignore[arg-type]

    def engine(self) -> CopyEngine:
        return CopyEngine(self.session, chunk_bytes=CHUNK, staging_bytes=8 * CHUNK)


Use = Callable[[], object]
REFUSED = "in a forked child: it belongs to the parent process"


def allocate(ground: Ground) -> Use:
    return lambda: ground.session.allocate(3 * MIB, Interleave((0, 1), granule_bytes=64 * KIB))


def allocate_here(ground: Ground) -> Use:
    return lambda: ground.linux.allocate(3 * MIB, Bind((ground.linux.kernel.local_node,)))


def allocate_pinned(ground: Ground) -> Use:
    return lambda: ground.session.allocate(MIB, Bind((1,)), pin=True)


def move(ground: Ground) -> Use:
    return lambda: ground.session.move(ground.block, Bind((1,)))


def ask_an_allocation(ground: Ground) -> Use:
    return lambda: (ground.block.requested, ground.block.notes, ground.block.runs(0, MIB))


def record_stream(ground: Ground) -> Use:
    return lambda: ground.block.record_stream(7)


def read(ground: Ground) -> Use:
    view = np.from_dlpack(ground.block)  # type: ignore[arg-type]

    def check() -> None:
        assert (view == 7).all()
        assert torch.utils.dlpack.from_dlpack(ground.block)[-1] == 7  # type: ignore[arg-type]

    return check


def sum_up(ground: Ground) -> Use:
    return lambda: (ground.session.stats(), ground.session.trim(), ground.session.find(1))


def ask_this_machine(ground: Ground) -> Use:
    tensor = cxl_offload.zeros(MIB, dtype=torch.uint8, session=ground.linux)

    def ask() -> None:
        placed = cxl_offload.placement_of(tensor, session=ground.linux)
        assert sum(placed.granted.values()) == MIB

    return ask


def ask_simulated_nodes(ground: Ground) -> Use:
    return lambda: ground.session.bytes_per_node(ground.block.address, MIB)


def free_room(ground: Ground) -> Use:
    return lambda: ground.session.free_bytes(0)


def gpu_driver(ground: Ground) -> Use:
    return ground.driver.synchronize


def engine_copies(ground: Ground) -> Use:
    engine = ground.engine()
    ground.held.append(engine)
    source = ground.session.allocate(4 * CHUNK, Bind((0,)))

    def copy() -> None:
        target = np.zeros(4 * CHUNK, np.uint8)
        handle = engine.to_device(
            target=target.ctypes.data, source=source.address, nbytes=4 * CHUNK
        )
        assert handle is not None
        handle.wait()

    return copy


def engine_drains(ground: Ground) -> Use:
    engine = ground.engine()
    ground.held.append(engine)
    return lambda: (engine.drain(), engine.links(), engine.unfinished_bytes("to_host"))


def engine_closes(ground: Ground) -> Use:
    engine = ground.engine()
    return engine.close


def engine_goes(ground: Ground) -> Use:
    engines = [ground.engine()]
    return engines.clear


def handle_waits(ground: Ground) -> Use:
    engine = ground.engine()
    target = np.zeros(CHUNK, np.uint8)
    handle = engine.to_device(target=target.ctypes.data, source=ground.block.address, nbytes=CHUNK)
    assert handle is not None
    ground.held += [engine, target]
    return handle.wait


def host_copies(ground: Ground) -> Use:
    copier = HostCopier(cpus=[_C.allowed_cpus()[0]] * 3)
    source = np.arange(8 * MIB, dtype=np.uint8)

    def copy() -> None:
        target = np.zeros_like(source)
        copier.copy(target=target.ctypes.data, source=source.ctypes.data, nbytes=source.nbytes)
        assert (target == source).all()

    return copy


def host_copier_goes(ground: Ground) -> Use:
    copiers = [HostCopier(cpus=[_C.allowed_cpus()[0]] * 3)]
    return copiers.clear


def blocks(ground: Ground) -> Use:
    copier = BlockCopier(ground.session, node=0, kernel_below_bytes=0)
    stream = ground.driver.create_stream()

    def copy() -> None:
        target = np.zeros(4096, np.uint8)
        copier.copy(
            targets=[target.ctypes.data],
            sources=[ground.block.address],
            block_bytes=4096,
            stream=stream,
        )
        ground.driver.wait_stream(stream)
        assert (target == 7).all()

    return copy


def packing(ground: Ground) -> Use:
    layout = PackedFormat("int4", "float32")
    numbers = np.linspace(-1, 1, 256, dtype=np.float32)

    def there_and_back() -> None:
        packed = np.zeros(layout.packed_bytes(256), np.uint8)
        back = np.zeros_like(numbers)
        pack(layout, source=numbers.ctypes.data, elements=256, target=packed.ctypes.data)
        unpack(layout, source=packed.ctypes.data, elements=256, target=back.ctypes.data)
        assert np.abs(back - numbers).max() < 0.05

    return there_and_back


def shared_region(ground: Ground) -> Use:
    region = SharedRegion(f"public-{uuid4().hex}", MIB, session=ground.linux)
    ground.held.append(region)
    return lambda: (region.placement(), region.notes)


def shared_region_places(ground: Ground) -> Use:
    region = SharedRegion(f"public-{uuid4().hex}", MIB, session=ground.linux)
    ground.held.append(region)
    return lambda: region.place(Bind((ground.linux.kernel.local_node,)))


def optimizer_step(ground: Ground) -> Use:
    made = threading.local()  # torch's own threads are not there in a child: no work for them

    def step() -> None:
        if not hasattr(made, "tensors"):
            made.tensors = [torch.ones(30_003) for _ in range(4)]
        adam_step(*made.tensors, step=1, lr=0.5)

    return step


def attention_of_a_cache(ground: Ground) -> Use:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 300, 64)
    query = torch.randn(1, 2, 64)
    wanted = decode_attention(query, keys, values)

    def attend() -> None:
        assert torch.equal(decode_attention(query, keys, values), wanted)

    return attend


def in_use(ground: Ground) -> Use:
    def make() -> None:
        with cxl_offload.use(Session.linux()):
            assert cxl_offload.zeros(10).sum() == 0

    return make


WORKS = (
    read,
    sum_up,
    ask_this_machine,
    engine_closes,
    engine_goes,
    host_copies,
    host_copier_goes,
    packing,
    shared_region,
    optimizer_step,
    attention_of_a_cache,
    in_use,
)
IS_REFUSED = (
    allocate,
    allocate_here,
    allocate_pinned,
    move,
    ask_an_allocation,
    record_stream,
    ask_simulated_nodes,
    free_room,
    gpu_driver,
    engine_copies,
    engine_drains,
    handle_waits,
    blocks,
    shared_region_places,
)


@contextmanager
def busy(use: Use, threads: int) -> Iterator[list[BaseException]]:
    """Threads that use the object all the while; what they raised."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                use()
        except Exception as error:
            raised.append(error)

    team = [threading.Thread(target=work) for _ in range(threads)]
    for thread in team:
        thread.start()
    try:
        yield raised
    finally:
        stop.set()
        for thread in team:
            thread.join()


def report_of_child(use: Use) -> str:
    """What a forked child says of a use: "" if it worked, else the error; it must not hang."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            use()
        except BaseException as error:  # to the parent, which judges
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 300
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it hangs"
        time.sleep(0.005)
    with os.fdopen(reader) as text_of_child:
        return text_of_child.read()


@pytest.fixture
def ground() -> Iterator[Ground]:
    ground = Ground()
    yield ground
    for each in ground.held:
        if hasattr(each, "close"):
            each.close()


@pytest.mark.sampled(26)
@pytest.mark.parametrize("make", [*WORKS, *IS_REFUSED], ids=lambda make: make.__name__)
def test_many_threads_share_one_object(ground: Ground, make: Callable[[Ground], Use]) -> None:
    use = make(ground)
    with busy(use, threads=4) as raised:
        time.sleep(0.1)
    assert raised == []


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("make", [*WORKS, *IS_REFUSED], ids=lambda make: make.__name__)
def test_forked_child_is_served_or_refused_with_one_line(
    ground: Ground, make: Callable[[Ground], Use]
) -> None:
    use = make(ground)
    reports = []
    with busy(use, threads=2) as raised:
        for _ in range(4):
            reports.append(report_of_child(use))
    assert raised == []
    if make in WORKS:
        assert set(reports) == {""}
        return
    for report in reports:
        assert report.startswith("ValueError: ")
        assert REFUSED in report
        assert "\n" not in report


def test_forked_child_ends_with_everything_it_inherited(ground: Ground) -> None:
    """Python's own exit drops all objects, which must not wait for threads of the parent."""
    kept = [make(ground) for make in (*WORKS, *IS_REFUSED)]
    child = os.fork()
    if child == 0:
        ground.held.clear()
        kept.clear()
        os._exit(0)
    deadline = time.monotonic() + 300
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("it hangs")
        time.sleep(0.005)
    assert len(kept) == len(WORKS) + len(IS_REFUSED)
    kept.clear()
