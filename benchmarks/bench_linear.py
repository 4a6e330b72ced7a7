"""How close linear layers of few rows come to the memory's read speed, and to torch.

    python -m benchmarks.bench_linear [--width 4096] [--outputs 4096] [--rows 1 4 8 32]
        [--weights fp16 bf16 fp32 fp8 int8 int4] [--x bf16] [--rounds 15] [--isa NAME]
        [--json out.json]

Several layers' weights lie in transparent huge pages, more bytes than the caches hold, and calls go
round them; the first call of a turn is not timed. For each type: the bound (the weights read once
by pinned threads, csrc/probe), this package with x in the weights' type (``--x`` where that is no
float type of 16 bits or more), the same calls where all outputs have the weights of the first one,
which stay in the first cache, and torch's linear where torch multiplies that type; and how fast the
threads add products to sums in registers by the same instructions. Every contender is first
compared with float64; then they take turns in a rotating order. Reported are medians in GB/s of
weights, what the products alone allow at most among them, the share of the bound, the share of the
roofline (the longer of reading and of the instructions alone, as these loops have them), the
speed-up over torch, and 95 % bootstrap intervals of the paired ratios. All figures are measured. At
the end stand the bars (bars.py), which the lower ends of the intervals have to reach; of a bar that
is missed they say when reading or products alone take longer than it allows.

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
from torch.nn import functional

import cxl_offload
from benchmarks.bars import bars_of, print_bars
from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload import _C
from cxl_offload.ops.int4_weight import Int4Weight, int4_quantized
from cxl_offload.ops.linear import linear
from cxl_offload.ops.threads import team_for
from cxl_offload.ops.view import tensor_view
from cxl_offload.profile.operators.ring import ring_bytes

FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WEIGHTS = [*FLOATS, "fp8", "int8", "int4"]
LEAST_BYTES = 256 << 20
"""Of all layers of one type together; more where caches hold some of that."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and what they are worth."""

    weight: torch.Tensor | Int4Weight
    scale: torch.Tensor | None
    bytes_at: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.bytes_at)

    def cached(self) -> Layer:
        """As large a layer whose outputs all have the weights of the first one: no memory moves."""

        def first(part: torch.Tensor) -> torch.Tensor:
            return part[:1].expand_as(part)

        if isinstance(self.weight, Int4Weight):
            kept = self.weight
            return Layer(Int4Weight(first(kept.codes), first(kept.groups), kept.form), None, ())
        return Layer(first(self.weight), self.scale, ())

    def worth(self) -> torch.Tensor:
        if isinstance(self.weight, Int4Weight):
            return self.weight.dequantized().double()
        worth = self.weight.double()
        return worth if self.scale is None else worth * self.scale.double().unsqueeze(1)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    raw = cxl_offload.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, pages="thp")
    return raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def make_layer(name: str, args: argparse.Namespace, seed: int) -> Layer:
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randn(args.outputs, args.width, generator=source) * args.width**-0.5
    if name in FLOATS:
        weight = in_huge_pages(numbers.to(FLOATS[name]))
        return Layer(weight, None, (weight,))
    if name == "int4":
        made = int4_quantized(numbers, args.group)
        codes, groups = in_huge_pages(made.codes), in_huge_pages(made.groups)
        return Layer(Int4Weight(codes, groups, made.form), None, (codes, groups))
    scale = numbers.abs().amax(dim=1) / (448 if name == "fp8" else 127)
    steps = numbers / scale.unsqueeze(1)
    small = steps.to(torch.float8_e4m3fn) if name == "fp8" else steps.round().to(torch.int8)
    weight = in_huge_pages(small)
    return Layer(weight, scale, (weight,))


def make_layers(name: str, args: argparse.Namespace) -> list[Layer]:
    layers = [make_layer(name, args, 0)]
    while sum(layer.nbytes for layer in layers) < max(LEAST_BYTES, ring_bytes()):
        layers.append(make_layer(name, args, len(layers)))
    return layers


CHOOSING_CALLS = 40
"""Calls of a shape in which the kernel finds the faster way to read; they are not timed."""

CACHED = "this, weights in the first cache"
PRODUCTS = "products of registers"

Call = Callable[[Layer], Any]


def check(call: Call, x: torch.Tensor, layer: Layer) -> None:
    found = call(layer).double()
    expected = x.double() @ layer.worth().t()
    off = float((found - expected).abs().max())
    if not off <= 4 * float(torch.finfo(x.dtype).eps) * float(expected.abs().max()) + 1e-5:
        raise SystemExit(f"wrong by {off:.3g}")


class Clock:
    """Times calls that go round the layers, by the wall or in CPU seconds a thread."""

    def __init__(self, layers: list[Layer], args: argparse.Namespace) -> None:
        self._layers = layers
        self._next = 0
        self._cpu = args.clock == "cpu"
        self._threads = args.threads
        self._calls = max(1, args.sample_bytes // layers[0].nbytes)

    def _layer(self) -> Layer:
        """The next one."""
        layer = self._layers[self._next]
        self._next = (self._next + 1) % len(self._layers)
        return layer

    def seconds(self, call: Call) -> float:
        """Of one layer, the mean of as many as a sample has.

        One call before them is not timed. A model calls layers one after another; here another
        contender was called before, whose threads still spin, and ours still sleep.
        """
        now = time.process_time if self._cpu else time.perf_counter
        call(self._layer())
        begin = now()
        for _ in range(self._calls):
            call(self._layer())
        took = (now() - begin) / self._calls
        return took / self._threads if self._cpu else took

    def bound(self) -> float:
        cpus = _C.allowed_cpus()[: self._threads]
        once = _C.Traffic(reads=1, writes=0, passes=1)
        total = 0.0
        for _ in range(self._calls):
            layer = self._layer()
            for part in layer.bytes_at[:1]:
                done = _C.run_traffic(
                    part.data_ptr(), part.numel() * part.element_size(), once, cpus
                )
                read = sum(each.bytes_read for each in done)
                if self._cpu:
                    took = sum(each.cpu_seconds for each in done) / len(done)
                else:
                    took = max(each.seconds for each in done)
                total += took * layer.nbytes / read
        return total / self._calls


def seconds_of_products(
    x: torch.Tensor, layer: Layer, args: argparse.Namespace
) -> Callable[[], float]:
    """What the products of a layer take if nothing is read; 0 where that is not known."""
    weight = layer.weight.codes if isinstance(layer.weight, Int4Weight) else layer.weight
    groups = layer.weight.groups_view() if isinstance(layer.weight, Int4Weight) else None
    views = tensor_view(x, "x"), tensor_view(weight, "weight", dtypes=(weight.dtype,))
    team = team_for(args.threads)
    count = x.shape[0] * args.outputs * args.width

    def seconds() -> float:
        rate = _C.linear_products_per_s(*views, team, groups=groups, isa=args.isa)
        return count / rate if rate else 0.0

    return seconds


def contenders(name: str, x: torch.Tensor, args: argparse.Namespace) -> dict[str, Call]:
    made: dict[str, Call] = {
        "this": lambda layer: linear(
            x, layer.weight, scale=layer.scale, threads=args.threads, isa=args.isa
        )
    }
    if name in FLOATS:
        made["torch"] = lambda layer: functional.linear(x, layer.weight)  # type: ignore[arg-type]
    return made


def measure(
    name: str, layers: list[Layer], rows: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    x = torch.randn(rows, args.width, generator=torch.Generator().manual_seed(1))
    x = x.to(FLOATS.get(name, FLOATS[args.x]))
    calls = contenders(name, x, args)
    for call in calls.values():
        check(call, x, layers[0])
    for number in range(CHOOSING_CALLS):  # as a model's first tokens do
        calls["this"](layers[number % len(layers)])
    clock = Clock(layers, args)
    cached = layers[0].cached()
    steps: dict[str, Callable[[], float]] = {
        "read bound": clock.bound,
        CACHED: lambda: clock.seconds(lambda _: calls["this"](cached)),
        PRODUCTS: seconds_of_products(x, layers[0], args),
    }
    for contender, call in calls.items():
        steps[contender] = lambda call=call: clock.seconds(call)  # type: ignore[misc]
    names = list(steps)
    samples: dict[str, list[float]] = {contender: [] for contender in names}
    for number in range(args.rounds):
        turn = number % len(names)
        for contender in names[turn:] + names[:turn]:
            samples[contender].append(steps[contender]())
    return samples


def report(name: str, rows: int, nbytes: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    bound, ours = samples["read bound"], samples["this"]
    share = paired_ratio(bound, ours)
    roofline = paired_ratio([*map(max, bound, samples[CACHED])], ours)
    products = samples[PRODUCTS]
    least = [*map(max, bound, products)]
    allowed = nbytes / float(np.median(products)) if all(products) else None
    row: dict[str, Any] = {
        "weights": name,
        "rows": rows,
        "bytes_per_s": nbytes / float(np.median(ours)),
        "bound_bytes_per_s": nbytes / float(np.median(bound)),
        "cached_bytes_per_s": nbytes / float(np.median(samples[CACHED])),
        "products_bytes_per_s": allowed,
        "most_of_bound": paired_ratio(bound, least).median,
        "of_bound": asdict(share),
        "of_roofline": asdict(roofline),
        "samples_s": samples,
    }
    text = f"{name:6}{rows:5}{row['bytes_per_s'] / 1e9:8.1f}{row['bound_bytes_per_s'] / 1e9:8.1f}"
    text += f"{row['cached_bytes_per_s'] / 1e9:8.1f}"
    text += f"{'-':>10}" if allowed is None else f"{allowed / 1e9:10.1f}"
    text += "".join(f"  {of.median:.2f} [{of.low:.2f}, {of.high:.2f}]" for of in (share, roofline))
    if "torch" in samples:
        ahead = paired_ratio(samples["torch"], ours)
        row["over_torch"] = asdict(ahead)
        row["most_over_torch"] = paired_ratio(samples["torch"], least).median
        text += f"{ahead.median:10.2f} [{ahead.low:.2f}, {ahead.high:.2f}]"
    print(text, flush=True)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument(
        "--x", choices=FLOATS, default="bf16", help="of x, for weights of 8 bits and fewer"
    )
    parser.add_argument("--group", type=int, default=64, help="of 4-bit codes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sample-bytes", type=int, default=64 << 20, help="of weights, at least")
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--isa", default="", help="as of cxl_offload.ops.linear; empty: the best")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.bench_linear", *sys.argv[1:]])
    torch.set_num_threads(args.threads)
    machine = describe_machine()
    print(f"measured, {args.clock} clock: {machine['processor']}, {args.threads} threads, ", end="")
    print(f"{args.outputs} x {args.width}, commit {machine['commit']}")
    print("weights rows    GB/s   bound  cached  products", end="")
    print("  of the bound       of the roofline    over torch")
    cases = []
    for name in args.weights:
        layers = make_layers(name, args)
        for rows in args.rows:
            samples = measure(name, layers, rows, args)
            cases.append(report(name, rows, layers[0].nbytes, samples))
        del layers
    loads = machine["load_average"], os.getloadavg()
    print(f"\nload average {loads[0][0]:.1f} before, {loads[1][0]:.1f} after")
    settings = {key: str(value) for key, value in vars(args).items()}
    document = {"kind": "measured", "machine": machine, "settings": settings, "cases": cases}
    good = print_bars([*bars_of("linear", document)])
    if args.json:
        write_json(args.json, {**document, "load_after": loads[1]})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
