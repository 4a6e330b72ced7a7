"""How close decode attention comes to the memory's read speed, and to its peers.

    python -m benchmarks.bench_attention [--batch 8] [--heads 32] [--seq 2048] [--json out.json]

Over one KV cache in transparent huge pages: the bound (the bytes of K and V read once by pinned
threads, csrc/probe), this package in the contiguous and in FlexGen's layout, torch's SDPA, and what
FlexGen does on the CPU (K and V copied into float32 workspaces, then products and a softmax; its
code is not needed). Where they are installed, vLLM's own attention on the CPU over its blocks and
llama.cpp's take part too; they have the same threads, and what they need in a layout of their own
is copied before anything is timed. vLLM has an environment of its own:

    .venv-vllm/bin/python -m benchmarks.bench_attention --peers vLLM

This package also attends to a cache whose positions are all the same one, which stays in the first
cache. The longer of that (the instructions alone, as these loops have them) and of the bound is the
roofline.

Beside them, the same cache in 8-bit floats and in 4-bit codes: their share of the bound is that of
fewer bytes, and what they are to be compared with is this package on the uncompressed cache. Every
contender is first compared with float64 on a few heads; then they take turns in a rotating order.
Reported are medians in GB/s of KV, the share of the bound, the speed-up over the peers, and 95 %
bootstrap intervals of the paired ratios. All figures are measured. At the end stand the bars
(bars.py), which the lower ends of the intervals have to reach.

On a machine that is busy with other work `--clock cpu` takes CPU seconds a thread instead of wall
time, which leaves out the time in which others had the CPUs but not what they took of the memory's
bandwidth. Such figures are an indication, not the bar's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import cxl_offload
from benchmarks.attention_peers import MODULES, peers_of, tolerance
from benchmarks.bars import bars_of, print_bars
from benchmarks.compressed_caches import Cache, cache_bytes, fewer_bits, worth
from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload import _C
from cxl_offload.ops.attention import decode_attention, from_flexgen

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHECKED_HEADS = 4
CHOOSING_CALLS = 40
"""The first 36 calls with a type and a layout find out how rows are prefetched, in turns."""
OURS = "this, (b, h, s, d)"
OURS_FLEXGEN = "this, FlexGen's layout"
CACHED = "this, KV in the first cache"
SDPA, FLEXGEN = "torch SDPA", "FlexGen's path"
PEERS = (SDPA, FLEXGEN, *MODULES)

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """One query a head, and the same cache in both layouts; then in fewer bits."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_flexgen: torch.Tensor
    v_flexgen: torch.Tensor
    small: dict[str, tuple[Cache, Cache]]

    @property
    def group(self) -> int:
        """Heads of q that share a head of the caches."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def nbytes_of(self, name: str) -> int:
        """Bytes of K and V that a contender reads."""
        if name not in self.small:
            return self.nbytes
        return sum(cache_bytes(cache) for cache in self.small[name])


def make_inputs(args: argparse.Namespace, dtype: torch.dtype) -> Inputs:
    heads = args.kv_heads
    shape = (args.batch, heads, args.seq, args.dim)
    source = torch.Generator().manual_seed(0)
    caches = []
    for _ in "kv":
        cache = cxl_offload.empty(shape, dtype=dtype, pages="thp").normal_(generator=source)
        turned = cxl_offload.empty(
            (args.seq, args.batch * heads, args.dim), dtype=dtype, pages="thp"
        )
        from_flexgen(turned, args.batch).copy_(cache)
        caches.append((cache, turned))
    q = torch.randn(args.batch, args.heads, args.dim, generator=source).to(dtype)
    k, v = caches[0][0], caches[1][0]
    small = fewer_bits(k, v)
    return Inputs(q, k, v, caches[0][1], caches[1][1], small)


def flexgen_path(inputs: Inputs) -> Attend:
    """Zheng et al., FlexGen: decode attention on the CPU, with its float32 workspaces."""
    work_k, work_v = (
        torch.empty(cache.shape, dtype=torch.float32)
        for cache in (inputs.k_flexgen, inputs.v_flexgen)
    )
    batch, heads, dim = inputs.q.shape
    seq = work_k.shape[0]
    mask = torch.ones(batch, 1, 1, seq, dtype=torch.bool)

    def run() -> torch.Tensor:
        work_k.copy_(inputs.k_flexgen)
        work_v.copy_(inputs.v_flexgen)
        q = (inputs.q * dim**-0.5).view(batch * heads, 1, dim).float()
        scores = torch.bmm(q, work_k.permute(1, 2, 0)).view(batch, heads, 1, seq)
        weights = torch.where(mask, scores, -1e4).view(batch * heads, 1, seq).softmax(dim=2)
        return torch.bmm(weights, work_v.permute(1, 0, 2)).view(batch, heads, dim)

    return run


def contenders(
    inputs: Inputs, args: argparse.Namespace
) -> tuple[dict[str, Attend], dict[str, str]]:
    """Who takes part, and why a peer does not; with ``--peers`` nothing in fewer bits does."""
    batch = inputs.q.shape[0]
    views = [from_flexgen(cache, batch) for cache in (inputs.k_flexgen, inputs.v_flexgen)]
    made: dict[str, Attend] = {
        OURS: lambda: decode_attention(inputs.q, inputs.k, inputs.v, threads=args.threads),
        OURS_FLEXGEN: lambda: decode_attention(inputs.q, *views, threads=args.threads),
    }
    asked = args.peers or PEERS
    if SDPA in asked:
        made[SDPA] = lambda: scaled_dot_product_attention(
            inputs.q.unsqueeze(2), inputs.k, inputs.v, enable_gqa=inputs.group > 1
        ).squeeze(2)
    if FLEXGEN in asked and inputs.group == 1:  # which has no heads that share a cache
        made[FLEXGEN] = flexgen_path(inputs)
    others, left_out = peers_of(asked, inputs.q, inputs.k, inputs.v, args.threads)
    made |= others
    small = {} if args.peers else inputs.small
    for name, (k, v) in small.items():
        made[name] = lambda k=k, v=v: decode_attention(  # type: ignore[misc]
            inputs.q, k, v, threads=args.threads
        )
    return made, left_out


def check(name: str, attend: Attend, inputs: Inputs) -> None:
    """The last heads of the last sequence against float64."""
    group = inputs.group
    caches = max(1, CHECKED_HEADS // group)
    found = attend()[-1, -caches * group :].double()
    q = inputs.q[-1, -caches * group :].double()
    k, v = (
        worth(cache, caches).repeat_interleave(group, dim=0)
        for cache in inputs.small.get(name, (inputs.k, inputs.v))
    )
    weights = (torch.einsum("hd,hsd->hs", q, k) * q.shape[1] ** -0.5).softmax(dim=1)
    expected = torch.einsum("hs,hsd->hd", weights, v)
    off = float((found - expected).abs().max())
    if not off <= tolerance(name, inputs.k) * float(expected.abs().max()) + 1e-5:
        raise SystemExit(f"{name}: wrong by {off:.3g}")


def clocked(call: Callable[[], Any], args: argparse.Namespace) -> float:
    cpu = args.clock == "cpu"
    begin = time.process_time() if cpu else time.perf_counter()
    call()
    took = (time.process_time() if cpu else time.perf_counter()) - begin
    return took / args.threads if cpu else took


def bound_s(inputs: Inputs, args: argparse.Namespace) -> float:
    """Seconds in which the probe reads K and V once, from the first thread to the last."""
    cpus = _C.allowed_cpus()[: args.threads]
    once = _C.Traffic(reads=1, writes=0, passes=1)
    total = 0.0
    for cache in (inputs.k, inputs.v):
        nbytes = cache.numel() * cache.element_size()
        done = _C.run_traffic(cache.data_ptr(), nbytes, once, cpus)
        read = sum(each.bytes_read for each in done)
        if args.clock == "cpu":
            took = sum(each.cpu_seconds for each in done) / len(done)
        else:
            took = max(each.seconds for each in done)
        total += took * nbytes / read  # the probe leaves a few lines out
    return total


def measure(
    inputs: Inputs, attends: dict[str, Attend], args: argparse.Namespace
) -> dict[str, list[float]]:
    for name, attend in attends.items():
        check(name, attend, inputs)
        for _ in range(CHOOSING_CALLS if name.startswith("this,") else 0):
            attend()
    kept = [cache[:1, :1, :1].expand_as(cache) for cache in (inputs.k, inputs.v)]
    cached = lambda: decode_attention(inputs.q, *kept, threads=args.threads)  # noqa: E731
    steps: dict[str, Callable[[], float]] = {
        "read bound": lambda: bound_s(inputs, args),
        CACHED: lambda: clocked(cached, args),
    }
    for name, attend in attends.items():
        steps[name] = lambda attend=attend: clocked(attend, args)  # type: ignore[misc]
    names = list(steps)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(steps[name]())
    return samples


def report(inputs: Inputs, samples: dict[str, list[float]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    print(f"{'':30}{'GB/s':>7}  {'of the bound':24}{'this over it*':>24}")
    roofline = [*map(max, samples["read bound"], samples[CACHED])]
    for name, values in samples.items():
        nbytes = inputs.nbytes_of(name)
        rate = nbytes / float(np.median(values)) / 1e9
        bound = [seconds * nbytes / inputs.nbytes for seconds in samples["read bound"]]
        share = paired_ratio(bound, values)
        mine = samples[OURS_FLEXGEN if "FlexGen" in name else OURS]
        ahead = paired_ratio(mine, values) if name in inputs.small else paired_ratio(values, mine)
        share_text = f"{share.median:.2f} [{share.low:.2f}, {share.high:.2f}]"
        ahead_text = f"{ahead.median:.2f} [{ahead.low:.2f}, {ahead.high:.2f}]"
        print(f"{name:30}{rate:7.1f}  {share_text:24}{ahead_text:>24}")
        if name == CACHED:
            continue
        rows[name] = {
            "nbytes": nbytes,
            "bytes_per_s": rate * 1e9,
            "of_bound": asdict(share),
            ("over_ours" if name in inputs.small else "ours_over_it"): asdict(ahead),
            "samples_s": values,
        }
        if name in (OURS, OURS_FLEXGEN):
            of = paired_ratio(roofline, values)
            rows[name]["of_roofline"] = asdict(of)
            print(f"{'':30}{'':7}  {of.median:.2f} [{of.low:.2f}, {of.high:.2f}] of the roofline")
    if samples.keys() & inputs.small.keys():
        print("* in fewer bits: it over this package on the uncompressed cache")
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, help="of the caches; default: as many as --heads")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp16"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="these only, and no fewer bits")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads}: no multiple of --kv-heads {args.kv_heads}")
    return args


def main() -> int:
    args = parse()
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks.bench_attention", *sys.argv[1:]]
        )
    torch.set_num_threads(args.threads)
    machine = describe_machine()
    print(f"measured, {args.clock} clock: {machine['processor']}, {args.threads} threads, ", end="")
    heads = f"{args.heads} heads ({args.kv_heads} of K and V)"
    print(f"{args.batch} x {heads} x {args.seq} x {args.dim}, commit {machine['commit']}")
    cases, missing = {}, {}
    for name in args.dtypes:
        inputs = make_inputs(args, DTYPES[name])
        print(f"\n{name}: {inputs.nbytes / 2**20:.0f} MiB of KV")
        attends, left_out = contenders(inputs, args)
        for peer, reason in left_out.items():
            print(f"{peer} is left out: {reason}")
        cases[name] = report(inputs, measure(inputs, attends, args))
        missing[name] = left_out
    loads = machine["load_average"], os.getloadavg()
    print(f"\nload average {loads[0][0]:.1f} before, {loads[1][0]:.1f} after")
    settings = {key: str(value) for key, value in vars(args).items()}
    document: dict[str, Any] = {"kind": "measured", "machine": machine, "settings": settings}
    document |= {"cases": cases, "peers": args.peers, "left_out": missing, "load_after": loads[1]}
    good = print_bars([*bars_of("attention", document)])
    if args.json:
        write_json(args.json, document)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
