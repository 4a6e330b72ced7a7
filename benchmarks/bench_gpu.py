"""Memory of this package on a GPU, against what torch and the CUDA driver do alone.

    python -m benchmarks.bench_gpu [--json FILE] [--only SECTION]...

Every figure is measured. Correctness first: each way of copying is checked before it is timed.
Peers run in the same process, interleaved, and their medians are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cxl_offload
from benchmarks.gpu_clock import (
    GIB,
    KIB,
    MIB,
    Spread,
    Work,
    describe_machine,
    interleaved,
    size_text,
    spread_row,
    wall_seconds,
)
from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import (
    BlockCopier,
    BlockPacker,
    CopyEngine,
    PackedFormat,
    cuda_kernels_path,
)

Row = dict[str, Any]

COPY_SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
SWAP_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
SWAP_BYTES = 128 * MIB
PIN_BYTES = 8 * GIB
PACKED_ELEMENTS, PACKED_BLOCKS = 32768, 1024
ENGINE_SIZES = (64 * KIB, 4 * MIB, 256 * MIB)


def random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fills a tensor of bytes with a block of random bytes, repeated; zeros would copy too fast."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 256, (min(4 * MIB, tensor.numel()),), dtype=torch.uint8)
    block.random_(generator=generator)
    for at in range(0, tensor.numel(), block.numel()):
        part = tensor[at : at + block.numel()]
        part.copy_(block[: part.numel()])
    return tensor


def copy_work(target: torch.Tensor, source: torch.Tensor) -> Work:
    def work(stream: torch.cuda.Stream) -> None:
        target.copy_(source, non_blocking=True)

    return work


def check_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.zero_()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    if not torch.equal(target.cpu(), source.cpu()):
        raise SystemExit("bench_gpu: a copy arrived wrong")


def bench_copy(session: Session) -> list[Row]:
    """One large copy at a time, each way, from this package's pinned memory and from torch's."""
    rows: list[Row] = []
    largest = COPY_SIZES[-1]
    hosts = {
        "cxl_offload": cxl_offload.empty(largest, dtype=torch.uint8, pin=True),
        "cxl_offload thp": cxl_offload.empty(largest, dtype=torch.uint8, pin=True, pages="thp"),
        "torch pin_memory": torch.empty(largest, dtype=torch.uint8, pin_memory=True),
    }
    on_gpu = torch.empty(largest, dtype=torch.uint8, device="cuda")
    for seed, host in enumerate(hosts.values()):
        random_like(host, seed)
    for direction in ("h2d", "d2h"):
        for size in COPY_SIZES:
            works = {}
            for name, host in hosts.items():
                ends = (on_gpu[:size], host[:size])
                target, source = ends if direction == "h2d" else ends[::-1]
                if size == COPY_SIZES[0]:
                    check_copy(target, source)
                works[name] = copy_work(target, source)
            repeats = max(2, min(64, 256 * MIB // size))
            rows += rated(interleaved(works, repeats=repeats), size, direction=direction)
    rows += bench_both_ways(hosts, on_gpu)
    return rows


def bench_both_ways(hosts: dict[str, torch.Tensor], on_gpu: torch.Tensor) -> list[Row]:
    half = on_gpu.numel() // 2
    other = torch.cuda.Stream()

    def both(host: torch.Tensor, stream: torch.cuda.Stream) -> None:
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            host[half:].copy_(on_gpu[half:], non_blocking=True)
        on_gpu[:half].copy_(host[:half], non_blocking=True)
        stream.wait_stream(other)

    works: dict[str, Work] = {name: partial(both, host) for name, host in hosts.items()}
    return rated(interleaved(works, repeats=2), 2 * half, direction="both")


def rated(spreads: dict[str, Spread], nbytes: int, **what: Any) -> list[Row]:
    return [
        {**what, "nbytes": nbytes, "method": name, "bytes_per_s": spread.rate(nbytes)}
        | spread_row(spread)
        for name, spread in spreads.items()
    ]


def bench_latency(session: Session) -> list[Row]:
    """From the call to the byte: one small copy, then wait for the stream."""
    rows = []
    for size in (64, 4 * KIB):
        hosts = {
            "cxl_offload": cxl_offload.empty(size, dtype=torch.uint8, pin=True),
            "torch pin_memory": torch.empty(size, dtype=torch.uint8, pin_memory=True),
        }
        on_gpu = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for direction in ("h2d", "d2h"):
            works = {
                name: copy_work(*((on_gpu, host) if direction == "h2d" else (host, on_gpu)))
                for name, host in hosts.items()
            }
            spreads = interleaved(works, clock=wall_seconds, rounds=11, repeats=200)
            rows += rated(spreads, size, direction=direction)
    return rows


def bench_pin(session: Session) -> list[Row]:
    """Fresh pinned memory: mapped, faulted in and registered."""

    def ours(pin: bool) -> None:
        allocation = session.allocate(PIN_BYTES, f"preferred:{node}", pin=pin)
        samples[names[pin]].append(time.perf_counter() - begin)
        del allocation
        session.trim()

    def torch_own() -> None:
        tensor = torch.empty(PIN_BYTES, dtype=torch.uint8, pin_memory=True)
        samples["torch pin_memory"].append(time.perf_counter() - begin)
        del tensor
        torch._C._host_emptyCache()

    node = session.kernel.local_node
    names = {False: "cxl_offload, not pinned", True: "cxl_offload"}
    samples: dict[str, list[float]] = {names[True]: [], names[False]: [], "torch pin_memory": []}
    torch.cuda.synchronize()
    for _ in range(3):
        for make in (partial(ours, True), partial(ours, False), torch_own):
            begin = time.perf_counter()
            make()
    spreads = {name: Spread.of(values) for name, values in samples.items()}
    return rated(spreads, PIN_BYTES)


def bench_swap(session: Session) -> list[Row]:
    """Scattered blocks of the GPU to and from scattered blocks of pinned host memory."""
    rows: list[Row] = []
    copier = BlockCopier(session, node=session.kernel.local_node)
    driver = session.gpu_driver()
    host = random_like(cxl_offload.empty(2 * SWAP_BYTES, dtype=torch.uint8, pin=True), 1)
    on_gpu = host.cuda()
    for block in SWAP_SIZES:
        count = SWAP_BYTES // block
        order = np.random.default_rng(block)
        for direction in ("h2d", "d2h"):
            ends = (host, on_gpu) if direction == "h2d" else (on_gpu, host)
            places = [order.permutation(2 * count)[:count] for _ in ends]
            sources, targets = (
                (end.data_ptr() + place * block).astype(np.uint64)
                for end, place in zip(ends, places, strict=True)
            )
            works = swap_works(copier, driver, sources, targets, block)
            check_swap(works, ends, places, block)
            spreads = interleaved(works, clock=wall_seconds, repeats=2)
            rows += rated(spreads, SWAP_BYTES, direction=direction, block_bytes=block)
    return rows


def swap_works(
    copier: BlockCopier,
    driver: _C.GpuDriver,
    sources: np.ndarray[Any, np.dtype[np.uint64]],
    targets: np.ndarray[Any, np.dtype[np.uint64]],
    block: int,
) -> dict[str, Work]:
    def kernel(stream: torch.cuda.Stream) -> None:
        copier.copy(sources=sources, targets=targets, block_bytes=block, stream=stream.cuda_stream)

    def by_driver(each: bool, stream: torch.cuda.Stream) -> None:
        driver.copy_blocks(
            targets=targets.ctypes.data,
            sources=sources.ctypes.data,
            count=len(sources),
            block_bytes=block,
            stream=stream.cuda_stream,
            each=each,
        )

    works: dict[str, Work] = {"kernel": kernel, "a copy each": partial(by_driver, True)}
    if driver.batched:
        works["batched copy"] = partial(by_driver, False)
    return works


def check_swap(
    works: dict[str, Work],
    ends: tuple[torch.Tensor, torch.Tensor],
    places: list[np.ndarray[Any, np.dtype[np.int64]]],
    block: int,
) -> None:
    """Every method leaves the sources' blocks in the targets."""
    source, target = (
        (end.view(-1, block), torch.from_numpy(place).to(end.device))
        for end, place in zip(ends, places, strict=True)
    )
    expected = source[0][source[1]].cpu()
    stream = torch.cuda.Stream()
    for name, work in works.items():
        target[0].fill_(0)
        torch.cuda.synchronize()
        work(stream)
        stream.synchronize()
        if not torch.equal(target[0][target[1]].cpu(), expected):
            raise SystemExit(f"bench_gpu: blocks of {block} bytes arrived wrong by {name}")


def check_round_trips(
    on_gpu: torch.Tensor, move: Callable[[str, bool, torch.cuda.Stream], None]
) -> None:
    """Blocks come back as they left, by as much as their codes keep."""
    stream, kept = torch.cuda.Stream(), on_gpu.clone()
    for name, bound in (("plain", 0.0), ("int4", 0.3), ("fp8", 0.2)):
        on_gpu.copy_(kept)
        torch.cuda.synchronize()
        move(name, True, stream)
        stream.synchronize()
        on_gpu.zero_()
        torch.cuda.synchronize()
        move(name, False, stream)
        stream.synchronize()
        if float((on_gpu.float() - kept.float()).abs().max()) > bound:
            raise SystemExit(f"bench_gpu: blocks came back wrong through {name}")


def bench_packed(session: Session) -> list[Row]:
    """Half-precision blocks of 64 KiB to and from host memory, plain and as codes.

    Rates count the plain bytes, so that they compare.
    """
    rows: list[Row] = []
    elements, count = PACKED_ELEMENTS, PACKED_BLOCKS
    nbytes = 2 * elements * count
    on_gpu = torch.randn(count, elements, device="cuda").half()
    plain = cxl_offload.empty(count, elements, dtype=torch.float16, pin=True)
    device_list = _addresses(on_gpu)
    copier = BlockCopier(session, node=session.kernel.local_node)
    host_lists = {"plain": _addresses(plain)}
    coded, packers = {}, {}
    for code in ("int4", "fp8"):
        layout = PackedFormat(code)  # type: ignore[arg-type]
        room = -(-layout.packed_bytes(elements) // 16) * 16
        coded[code] = cxl_offload.empty(count, room, dtype=torch.uint8, pin=True)
        host_lists[code] = _addresses(coded[code])
        packers[code] = BlockPacker(session, layout, node=session.kernel.local_node)

    def move(name: str, out: bool, stream: torch.cuda.Stream) -> None:
        host_list = host_lists[name]
        ends = {
            "targets": host_list if out else device_list,
            "sources": device_list if out else host_list,
        }
        if name == "plain":
            copier.copy(**ends, block_bytes=2 * elements, stream=stream.cuda_stream)
        elif out:
            packers[name].pack(**ends, elements=elements, stream=stream.cuda_stream)
        else:
            packers[name].unpack(**ends, elements=elements, stream=stream.cuda_stream)

    check_round_trips(on_gpu, move)
    for direction, out in (("d2h", True), ("h2d", False)):
        works: dict[str, Work] = {name: partial(move, name, out) for name in host_lists}
        rows += rated(interleaved(works), nbytes, direction=direction, block_bytes=2 * elements)
    return rows


def _addresses(rows: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint64]]:
    step = rows.stride(0) * rows.element_size()
    return (rows.data_ptr() + np.arange(rows.shape[0]) * step).astype(np.uint64)


def bench_engine(session: Session) -> list[Row]:
    """The copy engine against one non_blocking copy of torch, pinned and not."""
    rows: list[Row] = []
    with CopyEngine(session) as engine:
        for size in ENGINE_SIZES:
            on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
            for pin in (True, False):
                host = random_like(cxl_offload.empty(size, dtype=torch.uint8, pin=pin), 3)
                works: dict[str, Callable[[torch.cuda.Stream], None]] = {
                    "engine": partial(_by_engine, engine, on_gpu, host),
                    "torch": copy_work(on_gpu, host),
                }
                for name, work in works.items():
                    on_gpu.zero_()
                    torch.cuda.synchronize()
                    stream = torch.cuda.Stream()
                    with torch.cuda.stream(stream):
                        work(stream)
                    stream.synchronize()
                    if not torch.equal(on_gpu.cpu(), host):
                        raise SystemExit(f"bench_gpu: {size} bytes arrived wrong by {name}")
                spreads = interleaved(works, clock=wall_seconds)
                kind = "pinned" if pin else "not pinned"
                named = {f"{name}, {kind}": spread for name, spread in spreads.items()}
                rows += rated(named, size, direction="h2d")
    return rows


def _by_engine(
    engine: CopyEngine, on_gpu: torch.Tensor, host: torch.Tensor, stream: torch.cuda.Stream
) -> None:
    handle = engine.to_device(target=on_gpu, source=host)
    assert handle is not None
    handle.wait()


SECTIONS: dict[str, Callable[[Session], list[Row]]] = {
    "copy": bench_copy,
    "latency": bench_latency,
    "pin": bench_pin,
    "swap": bench_swap,
    "packed": bench_packed,
    "engine": bench_engine,
}


def print_table(section: str, rows: list[Row]) -> None:
    print(f"\n{section} (measured)")
    for row in rows:
        what = [row.get("direction", ""), size_text(int(row.get("block_bytes") or row["nbytes"]))]
        rate = f"{row['bytes_per_s'] / 1e9:9.2f} GB/s" if row["nbytes"] > 64 * KIB else ""
        spread = f"{row['least_s'] * 1e6:.1f}..{row['most_s'] * 1e6:.1f}"
        print(
            f"  {what[0]:5} {what[1]:>8}  {row['method']:24} {row['median_s'] * 1e6:12.1f} us"
            f"  ({spread}) {rate}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: needs a CUDA GPU", file=sys.stderr)
        return 1
    torch.zeros(1, device="cuda")
    report: dict[str, Any] = {"machine": describe_machine(), "kind": "measured"}
    print("\n".join(f"{key}: {value}" for key, value in report["machine"].items()))
    for name in options.only or SECTIONS:
        if name in ("swap", "packed") and cuda_kernels_path() is None:
            print(f"{name}: skipped, built without the CUDA kernels")
            continue
        session = Session.linux()
        with cxl_offload.use(session):
            begin = time.perf_counter()
            report[name] = SECTIONS[name](session)
        session.trim()
        print_table(name, report[name])
        print(f"  section took {time.perf_counter() - begin:.1f} s")
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
