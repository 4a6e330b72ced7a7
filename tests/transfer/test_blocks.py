"""Lists of blocks by the CUDA kernels, compiled for the CPU where there is no GPU.

What is tested is everything but the GPU: the memory of the lists, their lifetime, checks, and what
the kernels compute. tests/gpu does the same on a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import BlockCopier, BlockPacker, PackedFormat, blocks, pack, unpack

ROOT = Path(__file__).resolve().parents[2]
CXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(CXX is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' library, built from the same sources as by nvcc."""
    path = tmp_path_factory.mktemp("kernels") / "libkernels_on_cpu.so"
    command = [str(CXX), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-x", "c++"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}", "-o", str(path)]
    command += [str(source) for source in sorted((ROOT / "csrc/gpu").glob("*.cu"))]
    subprocess.run(command, check=True, timeout=600)
    return path


@pytest.fixture(autouse=True)
def kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "cuda_kernels_path", lambda: library)


def addresses(base: Any, size: int, places: Any) -> Any:
    return (base.ctypes.data + np.asarray(places) * size).astype(np.uint64)


@pytest.mark.parametrize("size", [1, 48, 4096, 40000])
@pytest.mark.parametrize("as_list", [True, False])
def test_blocks_are_copied_to_their_places(session: Session, size: int, as_list: bool) -> None:
    random = np.random.default_rng(size)
    source = random.integers(0, 256, 20 * size, np.uint8)
    target = np.full(20 * size, 0xEE, np.uint8)
    origin, to = random.permutation(20)[:9], random.permutation(20)[:9]
    expected = target.copy().reshape(20, size)
    expected[to] = source.reshape(20, size)[origin]
    lists = [addresses(source, size, origin), addresses(target, size, to)]
    if as_list:
        lists = [[int(each) for each in one] for one in lists]
    BlockCopier(session, node=0).copy(
        sources=lists[0], targets=lists[1], block_bytes=size, stream=8
    )
    assert (target.reshape(20, size) == expected).all()


def test_lists_wait_for_their_stream_before_they_serve_again(
    session: Session, driver: _C.FakeDriver
) -> None:
    copier = BlockCopier(session, node=0)
    block = np.zeros(64, np.uint8)
    place = [block.ctypes.data]
    driver.launch(8)
    copier.copy(sources=place, targets=place, block_bytes=64, stream=8)
    assert session.stats().asked_bytes.current == 0
    assert driver.events == 1
    driver.finish(8)
    session.trim()
    assert driver.events == 0


def test_blocks_that_mean_nothing_are_refused_or_skipped(session: Session) -> None:
    copier = BlockCopier(session, node=0)
    with pytest.raises(ValueError, match="1 sources to 2"):
        copier.copy(sources=[1], targets=[1, 2], block_bytes=16, stream=8)
    with pytest.raises(ValueError, match="-1"):
        copier.copy(sources=[1], targets=[2], block_bytes=-1, stream=8)
    copier.copy(sources=[], targets=[], block_bytes=16, stream=8)
    copier.copy(sources=[1], targets=[2], block_bytes=0, stream=8)
    assert session.stats().mapped_bytes.current == 0


@pytest.mark.parametrize("code", ["int4", "fp8"])
@pytest.mark.parametrize("elements", [1, 64, 1000])
def test_blocks_packed_by_the_kernel_unpack_on_the_cpu_and_back(
    session: Session, code: Any, elements: int
) -> None:
    layout = PackedFormat(code, "float16", 64)
    room = -(-layout.packed_bytes(elements) // 16) * 16
    numbers = np.random.default_rng(elements).normal(size=(5, elements)).astype(np.float16)
    coded = np.zeros((5 * room + 16), np.uint8)
    coded = coded[-coded.ctypes.data % 16 :][: 5 * room]
    packer = BlockPacker(session, layout, node=0)
    plain = addresses(numbers, elements * 2, range(5))
    packed = addresses(coded, room, [4, 2, 0, 1, 3])
    packer.pack(sources=plain, targets=packed, elements=elements, stream=8)
    back, own = np.zeros_like(numbers), np.zeros(room, np.uint8)
    for row, at in enumerate(packed):
        pack(layout, source=int(plain[row]), elements=elements, target=own.ctypes.data)
        size = layout.packed_bytes(elements)
        theirs = coded[int(at) - coded.ctypes.data :][:size]
        assert (theirs == own[:size]).all()
        unpack(layout, source=int(at), elements=elements, target=back[row].ctypes.data)
    again = np.zeros_like(numbers)
    packer.unpack(
        sources=packed,
        targets=addresses(again, elements * 2, range(5)),
        elements=elements,
        stream=8,
    )
    assert (again.view(np.uint16) == back.view(np.uint16)).all()
    assert np.abs(again.astype(float) - numbers).max() < (0.35 if code == "int4" else 0.25)


def test_packed_block_that_is_misaligned_is_refused(session: Session) -> None:
    packer = BlockPacker(session, PackedFormat("int4"), node=0)
    with pytest.raises(ValueError, match="multiple of 16"):
        packer.pack(sources=[16], targets=[24], elements=64, stream=8)
    with pytest.raises(ValueError, match="multiple of 16"):
        packer.unpack(sources=[24], targets=[16], elements=64, stream=8)
    with pytest.raises(ValueError, match="1 sources to 0"):
        packer.pack(sources=[16], targets=[], elements=64, stream=8)
    with pytest.raises(ValueError, match="-3"):
        packer.pack(sources=[16], targets=[32], elements=-3, stream=8)


def test_large_blocks_go_in_one_batch_of_the_driver(
    session: Session, driver: _C.FakeDriver
) -> None:
    copier = BlockCopier(session, node=0, kernel_below_bytes=4096)
    source, target = np.arange(8192, dtype=np.uint8), np.zeros(8192, np.uint8)
    lists = [addresses(each, 4096, [1, 0]) for each in (source, target)]
    copier.copy(sources=lists[0], targets=lists[1], block_bytes=4095, stream=8)
    assert driver.copies == 0
    assert (copier.uses_kernel(4095), copier.uses_kernel(4096)) == (True, False)
    target[:] = 0
    copier.copy(sources=lists[0], targets=lists[1], block_bytes=4096, stream=8)
    assert driver.copies == 2
    driver.finish(8)
    assert (target == source).all()


def test_measured_limit_is_where_batches_stay_quicker(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that ticks by the way taken: the kernel wins below 64 KiB."""
    now = [0.0]
    real = BlockCopier.copy

    def copy(self: BlockCopier, *, targets: Any, sources: Any, block_bytes: int, stream: int):
        real(self, targets=targets, sources=sources, block_bytes=block_bytes, stream=stream)
        now[0] += 1.0 if self.uses_kernel(block_bytes) == (block_bytes < 65536) else 2.0

    room = np.zeros((2, 256 << 10), np.uint8)
    ends = (room[0].ctypes.data, room[1].ctypes.data)
    monkeypatch.setattr(BlockCopier, "copy", copy)
    monkeypatch.setattr(blocks.time, "perf_counter", lambda: now[0])
    assert blocks.measure_kernel_limit(session, *ends, 256 << 10, node=0, rounds=1) == 65536
    monkeypatch.setattr(blocks, "cuda_kernels_path", lambda: None)
    assert blocks.measure_kernel_limit(session, *ends, 256 << 10, node=0, rounds=1) == 0


def test_installation_without_kernels_batches_and_says_how_to_get_them(
    session: Session, driver: _C.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "cuda_kernels_path", lambda: None)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    lists = [addresses(each, 16, range(4)) for each in (source, target)]
    BlockCopier(session, node=0).copy(sources=lists[0], targets=lists[1], block_bytes=16, stream=8)
    driver.finish(8)
    assert (target == source).all()
    with pytest.raises(ValueError, match="nvcc"):
        BlockPacker(session, PackedFormat("int4"), node=0)
