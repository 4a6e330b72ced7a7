"""Weights that do not fit the near node: accelerate's disk offload beside a far tier.

The nodes are simulated: both tiers are this machine's ordinary memory, at its speed. A real far
tier is slower, so each row also says what would be left with the bandwidth that the described
machine's CXL node has, if none of those reads overlapped with anything (predicted). accelerate's
side is measured as it is. A near node without room for the weights has none for their files
either, so these are dropped from the page cache before every step; rows without that stand beside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.llama_shape import Pace, decode_seconds, in_turns, make_model, random_ids
from benchmarks.measurements import paired_ratio
from cxl_offload import Session, load_machine
from cxl_offload.integrations.transformers import offload

MACHINE = "epyc9354-cxl-a"
NEAR, FAR = 0, 2
BATCH, PROMPT = 32, 32
NEAR_SHARES = (0.0, 0.75)
"""Of the weights, in quarters, that fit the near node; with 0 accelerate has all on the disk."""


def drop_from_page_cache(folder: Path) -> None:
    """The next read of a file is one of the disk, where the folder is on one."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def on_disk(model: LlamaForCausalLM, near_share: float, folder: str) -> LlamaForCausalLM:
    """What accelerate makes of the model where so much of it fits."""
    from accelerate import disk_offload, dispatch_model, infer_auto_device_map

    if not near_share:
        return disk_offload(model, folder, execution_device=torch.device("cpu"))
    room = int(near_share * weight_bytes(model))
    # Without a GPU it keeps a place for the largest layer in the memory that computes.
    places = infer_auto_device_map(
        model,
        max_memory={"cpu": room, "disk": 1 << 50},
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    if set(places.values()) != {"cpu", "disk"}:
        raise SystemExit(
            f"accelerate does not divide a model of {model.config.num_hidden_layers} "
            "layers between memory and disk; give more --layers"
        )
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder)


def weight_bytes(model: LlamaForCausalLM) -> int:
    return sum(weight.nbytes for weight in model.parameters())


@contextlib.contextmanager
def in_far_tier(model: LlamaForCausalLM, near_share: float, rows: int) -> Iterator[None]:
    """Ours, on simulated nodes; weights that fit the near node are there."""
    near = round(4 * near_share)
    policy = f"weighted:ldram={near},cxl={4 - near}@64KiB" if near else "cxl"
    session = Session.simulated(load_machine(MACHINE))
    with offload(model, {"weights": policy, "kv": "ldram"}, linear_rows=rows, session=session):
        yield


def bytes_read() -> int:
    """From disks, by this process, since it began."""
    rows = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("read_bytes"))


def far_bytes_per_s() -> float:
    """What CPUs read of the CXL node of the described machine."""
    access = load_machine(MACHINE).access(NEAR, FAR)
    assert access is not None
    assert access.read_bandwidth_bytes_per_s is not None
    return access.read_bandwidth_bytes_per_s


def compare(args: argparse.Namespace, pace: Pace) -> Iterator[dict[str, Any]]:
    """A row for each share of the weights that fits, with and without files in the page cache."""
    for near_share in NEAR_SHARES:
        ours = make_model(args, args.heads)
        held = weight_bytes(ours)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            stock = on_disk(make_model(args, args.heads), near_share, folder)
            with in_far_tier(ours, near_share, args.linear_rows):
                _check(stock, ours)
                for cached in (False, True):
                    step = partial(drop_from_page_cache, Path(folder)) if not cached else None
                    row = _row(stock, ours, args, pace, step)
                    far = (1 - near_share) * held / far_bytes_per_s()
                    row["predicted_on_cxl"] = (
                        row["ratio"][0] * row["ours_s"] / (row["ours_s"] + far)
                    )
                    yield {"near_share": near_share, "page_cache": cached, **row}


def _check(stock: LlamaForCausalLM, ours: LlamaForCausalLM) -> None:
    ids = random_ids(2, 40)
    with torch.no_grad():
        found, expected = (each(ids, use_cache=False).logits for each in (ours, stock))
    # Sums of bfloat16 are rounded in another order; what is wrong is off by about its own size.
    off = float((found - expected).float().norm() / expected.float().norm())
    if not off < 0.05:
        raise SystemExit(f"wrong: logits from the far tier are off by {off:.2g} from the disk's")


def _row(
    stock: LlamaForCausalLM,
    ours: LlamaForCausalLM,
    args: argparse.Namespace,
    pace: Pace,
    before_step: Callable[[], None] | None,
) -> dict[str, Any]:
    ids = random_ids(BATCH, PROMPT)
    read: list[int] = []

    def theirs() -> float:
        begin = bytes_read()
        took = decode_seconds(stock, nullcontext, ids, args.new, pace.now, before_step)
        read.append((bytes_read() - begin) // args.new)
        return took

    def mine() -> float:
        return decode_seconds(ours, nullcontext, ids, args.new, pace.now)

    samples = in_turns({"stock": theirs, "ours": mine}, pace)
    ratio = paired_ratio(samples["stock"], samples["ours"])
    return {
        "stock_s": statistics.median(samples["stock"]),
        "ours_s": statistics.median(samples["ours"]),
        "read_bytes_a_step": statistics.median(read[1:]),
        "ratio": [ratio.median, ratio.low, ratio.high],
    }
