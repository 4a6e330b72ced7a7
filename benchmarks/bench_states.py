"""How fast steps with states of 8 bits are, beside float32 states and the peers' 8-bit optimizers.

    python -m benchmarks.bench_states [--numel 50e6] [--rounds 15] [--json out.json]

Contenders take turns in a rotating order: the bound (the same streams without arithmetic: float32
parameters and gradients, two states of a byte), this package with states of 8 bits and of float32,
DeepSpeedCPUAdam with float32 states, torchao's and bitsandbytes' AdamW8bit, each where it is
installed and runs on this CPU; who does not is named. Each is there twice: with parameters,
gradients and states in transparent huge pages, as this package has them, and in torch's own memory.
Reported are medians, the share of the bound, and how much faster this package's 8-bit step is, with
95 % bootstrap intervals over the rounds. All figures are measured; samples in which others used the
CPUs are taken again. At the end stand the bars (bars.py), which the lower ends of the intervals
have to reach.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

import cxl_offload
from benchmarks.bars import bars_of, print_bars
from benchmarks.bench_adam import SETTINGS, Sampler, Step, interval, timed, whole_lines
from benchmarks.measurements import commit, processor
from cxl_offload import _C
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.tensor_bytes import held_tensors

PREFETCH_BYTES = (0, 1024, 2048, 4096)
LEAST_HUGE_BYTES = 2 << 20
BYTES = {"8 bit": 12 + 4 + 4 / 128, "fp32": 28.0}

Maker = Callable[[int, int], Step]
"""Of a step, for so many elements and threads."""


def parameter(numel: int, *, huge: bool) -> torch.nn.Parameter:
    source = torch.Generator().manual_seed(0)
    pair = [cxl_offload.empty(numel, pages="thp") if huge else torch.empty(numel) for _ in "pg"]
    param = torch.nn.Parameter(pair[0].normal_(0, 0.02, generator=source))
    param.grad = pair[1].normal_(0, 1e-3, generator=source)
    return param


def into_huge_pages(states: Iterable[object]) -> None:
    """Other memory for an optimizer's states, also where they lie inside of a tensor of its own."""
    for state in states:
        for held in held_tensors(state) if isinstance(state, torch.Tensor) else ():
            if held.nbytes >= LEAST_HUGE_BYTES:
                made = cxl_offload.empty(tuple(held.shape), dtype=held.dtype, pages="thp")
                held.data = made.copy_(held)


def of_class(module: str, name: str, *, huge: bool) -> Maker:
    def make(numel: int, threads: int) -> Step:
        param = parameter(numel, huge=huge)
        optimizer = getattr(importlib.import_module(module), name)([param], **SETTINGS)
        optimizer.step()
        if huge:
            into_huge_pages(optimizer.state[param].values())
        return timed(optimizer.step)

    return make


def ours(dtype: torch.dtype, *, huge: bool) -> Maker:
    def make(numel: int, threads: int) -> Step:
        param = parameter(numel, huge=huge)
        optimizer = CPUAdam([param], state_dtype=dtype, threads=threads, **SETTINGS)  # type: ignore[arg-type]
        optimizer.step()
        return timed(optimizer.step)

    return make


PEERS = {
    "DeepSpeedCPUAdam, fp32": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
}

CONTENDERS: dict[str, Maker] = {
    "cxl_offload, 8 bit": ours(torch.uint8, huge=True),
    "cxl_offload, 8 bit, torch memory": ours(torch.uint8, huge=False),
    "cxl_offload, fp32": ours(torch.float32, huge=True),
}
for _name, _where in PEERS.items():
    CONTENDERS[_name] = of_class(*_where, huge=False)
    CONTENDERS[f"{_name}, huge pages"] = of_class(*_where, huge=True)


def bound(numel: int, threads: int, sampler: Sampler) -> Step:
    """The best of several prefetch distances."""
    param, states = parameter(numel, huge=True), cxl_offload.empty(2 * numel, dtype=torch.uint8)
    assert param.grad is not None
    half = numel * 2
    streams = [(param.grad.data_ptr() + at, 2, False) for at in (0, half)]
    streams += [(param.data_ptr() + at, 2, True) for at in (0, half)]
    streams += [(states.data_ptr() + at, 1, True) for at in (0, numel)]
    cpus = _C.allowed_cpus()
    chosen = [cpus[i % len(cpus)] for i in range(threads)]

    def with_prefetch(ahead: int) -> Step:
        held = param, states
        return lambda: _C.update_traffic(
            streams, numel // 64, chosen, ahead_bytes=ahead * bool(held)
        )

    steps = [with_prefetch(ahead) for ahead in PREFETCH_BYTES]
    return min(steps, key=lambda step: min(sampler.sample(step) for _ in range(3)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--numel", type=whole_lines, default=whole_lines("50e6"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--tries", type=int, default=12, help="for a sample without other work")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(args.threads)
    print(f"{processor()}, {args.threads} threads, {args.numel} parameters, commit {commit()}")
    sampler = Sampler(args.tries)
    steps = {"bound, 8 bit": bound(args.numel, args.threads, sampler)}
    for name, make in CONTENDERS.items():
        try:
            steps[name] = make(args.numel, args.threads)
        except (ImportError, RuntimeError, NotImplementedError) as error:
            print(f"{name}: does not run here: {str(error).splitlines()[0][:120]}")
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    print(f"measuring {args.rounds} rounds of {len(names)}", flush=True)
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(sampler.sample(steps[name]))
    taken = {name: np.array(values) for name, values in samples.items()}
    mine = taken["cxl_offload, 8 bit"]
    share = interval(taken["bound, 8 bit"], mine)
    print(f"share of the bound: {share[0]:.3f} ({share[1]:.3f} .. {share[2]:.3f})")
    faster = {}
    for name, values in taken.items():
        faster[name] = interval(values, mine)
        middle, low, high = faster[name]
        print(
            f"  {name:36s} {np.median(values) * 1e3:8.1f} ms, the 8-bit step is {middle:.2f} "
            f"({low:.2f} .. {high:.2f}) times as fast"
        )
    print(f"{sampler.rejected} samples rejected because of other work, {sampler.loud} kept")
    report = {"kind": "measured", "cpu": processor(), "commit": commit(), "numel": args.numel}
    report |= {"threads": args.threads, "bytes": BYTES, "samples_s": samples}
    report |= {"of_bound": share, "times_as_fast": faster}
    good = print_bars([*bars_of("states", report)])
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
