"""A checkpoint that is larger than the near node: loaded with the rest far, and generated with.

    python -m benchmarks.large_checkpoint [--small] [--gib 8] [--near 6GiB] [--new 6] [--rows 2]
        [--threads 2] [--folder DIR] [--json out.json]

A LLaMA with seeded random weights in float32 is written, shard by shard, as safetensors. `load()`
reads it to simulated nodes, of which the near one may hold `--near`: pages of weights fill it, and
the rest goes to a CXL node. Then `generate()`, with KV there too, and a process of its own that
does the same with stock transformers. Measured are

- the most anonymous and shared memory that this process had since it began to load, less what it
  had before, over what was placed; pages of the file that the kernel caches are not in it, since
  the kernel gives them up where memory is short. At most 1.02 is the bar;
- what the near node held at most, which is at most `--near`;
- whether the tokens are stock's.

The nodes are simulated: both are this machine's ordinary memory. The defaults take 9 GiB of
memory, as much of the disk, and some minutes; `--small` takes seconds, and says nothing of the bar,
because what Python itself allocates meanwhile is not small beside it. A bar that is missed ends
the program with status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.bars import bars_of
from benchmarks.measurements import describe_machine, write_json
from cxl_offload import Session, load_machine
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.units import format_bytes, parse_bytes

MACHINE = "epyc9354-cxl-a"
NEAR, FAR = 0, 2
VOCAB, PROMPT = 512, 16
ROOT = Path(__file__).resolve().parents[1]
_SAMPLE_S = 0.005
_COUNTED = ("RssAnon:", "RssShmem:")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the layers; there are as many as make the size."""

    hidden: int
    inner: int
    heads: int


LARGE, SMALL = Shape(2048, 5632, 32), Shape(512, 1408, 8)
SMALL_GIB, SMALL_NEAR = 1 / 16, 40 << 20


def make_checkpoint(folder: Path, shape: Shape, nbytes: int) -> int:
    """Writes layer after layer; returns the bytes of all weights."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.device("meta"):
        one = LlamaForCausalLM(config)
    sizes = {name: tuple(weight.shape) for name, weight in one.named_parameters()}
    layer = {name: size for name, size in sizes.items() if ".layers.0." in name}
    count = math.ceil(nbytes / sum(4 * math.prod(size) for size in layer.values()))
    config.num_hidden_layers = count
    shards = [{name: size for name, size in sizes.items() if name not in layer}]
    shards += [
        {name.replace(".0.", f".{at}.", 1): size for name, size in layer.items()}
        for at in range(count)
    ]
    config.save_pretrained(folder)
    where: dict[str, str] = {}
    draw = torch.Generator().manual_seed(0)
    for at, shard in enumerate(shards):
        file = f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        save_file({name: _weight(size, draw) for name, size in shard.items()}, folder / file)
        where |= dict.fromkeys(shard, file)
    total = sum(4 * math.prod(size) for shard in shards for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def _weight(size: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Wide enough that every layer matters; a norm's are ones."""
    if len(size) == 1:
        return torch.ones(size)
    return torch.empty(size).uniform_(-1, 1, generator=draw).mul_(2 / math.sqrt(size[1]))


def generated(model: PreTrainedModel, args: argparse.Namespace) -> tuple[list[list[int]], float]:
    """Tokens, and the seconds that they took."""
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, VOCAB, (args.rows, PROMPT), generator=torch.Generator().manual_seed(1))
    begin = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.new,
        do_sample=False,
        pad_token_id=0,
    )
    return made.tolist(), time.perf_counter() - begin


def own_bytes() -> int:
    """Anonymous and shared memory of this process that is there now."""
    rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(row.split()[1]) << 10 for row in rows if row.startswith(_COUNTED))


@contextmanager
def watched_memory(found: dict[str, int]) -> Iterator[None]:
    """``found["peak_bytes"]``: the most that the process had inside more than at the beginning."""
    before, over = own_bytes(), threading.Event()
    most = before

    def watch() -> None:
        nonlocal most
        while not over.wait(_SAMPLE_S):
            most = max(most, own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        found["peak_bytes"] = max(most, own_bytes()) - before


def ours(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Loads to both nodes and generates; what was placed is what the session was asked for."""
    session = Session.simulated(load_machine(MACHINE), limits={NEAR: args.near})
    found: dict[str, Any] = {}
    policies = {"weights": f"bind:{NEAR},{FAR}"}
    with watched_memory(found):
        begin = time.perf_counter()
        model = load(folder, policies, session=session)
        found["load_seconds"] = time.perf_counter() - begin
        with offload(model, {"kv": f"bind:{FAR}"}, session=session):
            found["tokens"], found["generate_seconds"] = generated(model, args)
        held = session.stats()
    found["placed_bytes"] = held.asked_bytes.peak
    found["near_bytes"] = held.nodes[NEAR].peak_bytes
    found["far_bytes"] = held.nodes[FAR].peak_bytes
    found["peak_over_placed"] = found["peak_bytes"] / found["placed_bytes"]
    return found


def stock(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, whose memory nobody else has used."""
    asked = ["--new", str(args.new), "--rows", str(args.rows), "--threads", str(args.threads)]
    command = [sys.executable, "-m", "benchmarks.large_checkpoint", "--stock", str(folder), *asked]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_stock(folder: Path, args: argparse.Namespace) -> None:
    """What the process of stock transformers says, as its last line."""
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    loaded = time.perf_counter() - begin
    tokens, seconds = generated(model.eval(), args)
    said = {"tokens": tokens, "load_seconds": loaded, "generate_seconds": seconds}
    print(json.dumps(said))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {"machine": describe_machine(), "kind": "measured"}
    document["nodes"] = f"simulated: {MACHINE}"
    document["options"] = {name: str(value) for name, value in vars(args).items()}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        shape = SMALL if args.small else LARGE
        document["checkpoint_bytes"] = make_checkpoint(folder, shape, int(args.gib * (1 << 30)))
        document["near_limit_bytes"] = args.near
        document["ours"] = ours(folder, args)
        document["stock"] = stock(folder, args)
    document["tokens_equal"] = document["ours"]["tokens"] == document["stock"]["tokens"]
    return document


def bars(document: dict[str, Any]) -> dict[str, bool]:
    """What is asked, and whether it is met; of memory only where the sizes are those of the bar."""
    found = document["ours"]
    asked = {
        "checkpoint larger than the near node": document["checkpoint_bytes"] > found["near_bytes"],
        "near node within its limit": found["near_bytes"] <= document["near_limit_bytes"],
        "tokens equal to stock's": document["tokens_equal"],
    }
    return asked | {
        f"{bar.asked}, at least {bar.least:.3f} of it": bar.met
        for bar in bars_of("large_checkpoint", document)
    }


def show(document: dict[str, Any], met: dict[str, bool]) -> None:
    found, peer = document["ours"], document["stock"]
    print(
        f"checkpoint {format_bytes(document['checkpoint_bytes'])}, near node of at most "
        f"{format_bytes(document['near_limit_bytes'])}; nodes {document['nodes']}\n"
        f"placed, measured: near {format_bytes(found['near_bytes'])}, far "
        f"{format_bytes(found['far_bytes'])}\n"
        f"peak memory, measured: {format_bytes(found['peak_bytes'])}, "
        f"{found['peak_over_placed']:.3f} of what was placed\n"
        f"seconds, measured: load {found['load_seconds']:.1f} (stock {peer['load_seconds']:.1f}), "
        f"generate {found['generate_seconds']:.1f} (stock {peer['generate_seconds']:.1f})\n"
    )
    print("| bar | |\n|---|---|")
    for name, is_met in met.items():
        print(f"| {name} | {'met' if is_met else 'MISSED'} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="seconds, without the bar of memory")
    parser.add_argument("--gib", type=float, help="of the checkpoint (default: 8)")
    parser.add_argument("--near", type=parse_bytes, help="of the near node (default: 6GiB)")
    for name, default in {"new": 6, "rows": 2, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on a disk")
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.gib = args.gib or (SMALL_GIB if args.small else 8.0)
    args.near = args.near or (SMALL_NEAR if args.small else 6 << 30)
    return args


def main() -> None:
    args = parse()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    if args.stock is not None:
        print_stock(args.stock, args)
        return
    document = measure(args)
    met = bars(document)
    show(document, met)
    if args.json is not None:
        write_json(args.json, {**document, "bars": met})
    if not all(met.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
