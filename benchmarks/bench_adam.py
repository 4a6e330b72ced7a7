"""How close CPU Adam comes to the memory's speed, and to its peers.

    python -m benchmarks.bench_adam [--numel 50e6] [--rounds 15] [--models small gpt2]
        [--json out.json] [--plot out.png]

For every combination of types: the bound (the same streams, each read once and written back where
the optimizer writes, without its arithmetic; the best of several prefetch distances), this
package, DeepSpeedCPUAdam where DeepSpeed is installed, and torch's fused AdamW. Every contender
first takes three steps on a small tensor that are compared with fp64. Then they take turns, in a
rotating order, and a sample is taken again when something else ran on the CPUs meanwhile. Steps of
the parameters of whole models in fp32 (adam_models.py) stand beside the same peers. Reported are
medians, the speed as a share of the bound (bound's time / contender's time, in pairs of one round),
and 95 % bootstrap intervals. All figures are measured. At the end stand the bars (bars.py),
which the lower ends of the intervals have to reach.

On a machine that is busy with other work `--clock cpu` compares CPU seconds a thread instead of
wall time, which leaves out the time in which others had the CPUs, but not what they took of the
memory's bandwidth; OpenMP then waits passively. Such figures are an indication, not the bar's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cxl_offload
from benchmarks.adam_models import MODELS, SHORT, model_makers, run_model, show_model
from benchmarks.adam_report import Case, Result, plot, show
from benchmarks.bars import bars_of, print_bars
from benchmarks.measurements import check_plot, commit, processor
from cxl_offload import _C
from cxl_offload.ops.adam import CPUAdam

F32, BF16 = torch.float32, torch.bfloat16
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PREFETCH_BYTES = (0, 512, 1024, 2048, 4096)
BLOCK = 32  # elements of a block of the bound's streams


CASES = {
    case.name: case
    for case in (
        Case("fp32", F32, F32),
        Case("bf16-fp32-states", BF16, F32),
        Case("all-bf16", BF16, BF16),
    )
}

Step = Callable[[], float]
"""Runs once and returns its seconds."""


def timed(call: Callable[[], Any]) -> Step:
    def run() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return run


def cpu_timed(step: Callable[[], Any], threads: int) -> Step:
    """CPU seconds a thread, of all threads of the process."""

    def run() -> float:
        begin = time.process_time()
        step()
        return (time.process_time() - begin) / threads

    return run


# Contenders ---------------------------------------------------------------------------------------


def tensors(numel: int, case: Case, *, huge: bool) -> list[torch.Tensor]:
    """Parameter, gradient and two states, in transparent huge pages or in torch's own memory."""
    made = []
    for dtype in (case.param, case.param, case.state, case.state):
        if huge:
            made.append(cxl_offload.empty(numel, dtype=dtype, pages="thp"))
        else:
            made.append(torch.empty(numel, dtype=dtype))
    source = torch.Generator().manual_seed(0)
    made[0].normal_(0, 0.02, generator=source)
    made[1].normal_(0, 1e-3, generator=source)
    made[2].zero_()
    made[3].zero_()
    return made


def ours(data: list[torch.Tensor], case: Case, threads: int) -> torch.optim.Optimizer:
    optimizer = CPUAdam([leaf(data)], state_dtype=case.state, threads=threads, **SETTINGS)
    return with_states(optimizer, data, torch.tensor(0.0))


def deepspeed_adam(data: list[torch.Tensor], case: Case, threads: int) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(
        [leaf(data)], fp32_optimizer_states=case.state is F32, adamw_mode=True, **SETTINGS
    )
    return with_states(optimizer, data, 0)


def torch_fused(data: list[torch.Tensor], case: Case, threads: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([leaf(data)], fused=True, **SETTINGS)
    return with_states(optimizer, data, torch.tensor(0.0))


def leaf(data: list[torch.Tensor]) -> torch.nn.Parameter:
    param = torch.nn.Parameter(data[0])
    param.grad = data[1]
    return param


def with_states(
    optimizer: torch.optim.Optimizer, data: list[torch.Tensor], step: torch.Tensor | int
) -> torch.optim.Optimizer:
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param].update(step=step, exp_avg=data[2], exp_avg_sq=data[3])
    return optimizer


def bound(data: list[torch.Tensor], threads: int, ahead_bytes: int) -> Step:
    streams = [(t.data_ptr(), BLOCK * t.element_size() // 64, i != 1) for i, t in enumerate(data)]
    streams.insert(0, streams.pop(1))  # what is only read comes first
    cpus = _C.allowed_cpus()
    chosen = [cpus[i % len(cpus)] for i in range(threads)]
    blocks = data[0].numel() // BLOCK
    return lambda: _C.update_traffic(streams, blocks, chosen, ahead_bytes=ahead_bytes)


# Correctness --------------------------------------------------------------------------------------


def check_against_fp64(name: str, make: Callable[..., torch.optim.Optimizer], case: Case) -> None:
    """Three steps on a small tensor, each compared with fp64 on what it started from."""
    data = tensors(10_000, case, huge=False)
    optimizer = make(data, case, 2)
    beta1, beta2 = SETTINGS["betas"]
    lr, decay = SETTINGS["lr"], SETTINGS["weight_decay"]
    for step in range(1, 4):
        p, g, m, v = (tensor.double().numpy().copy() for tensor in data)
        optimizer.step()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        root = np.sqrt(v / (1 - beta2**step)) + SETTINGS["eps"]
        expected = p * (1 - lr * decay) - lr / (1 - beta1**step) * m / root
        # One rounding of the type, and of the step: 1 - beta2 in float32 is 1.3e-5 off.
        limit = float(torch.finfo(case.param).eps) * np.abs(expected) + 1e-4 * lr
        off = np.abs(data[0].double().numpy() - expected) - limit
        if off.max() > 0:
            raise SystemExit(f"{name}, {case.name}: step {step} is wrong by {off.max():.3g}")


# Timing -------------------------------------------------------------------------------------------


def others_busy_s() -> float:
    """CPU seconds of the whole machine but this process, stolen ones included."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


@dataclass
class Sampler:
    """Takes samples in which nothing else ran on the CPUs, as far as it ever gets any.

    A sample is dropped when a thread of it was preempted more than once, or others used the CPUs.
    """

    tries: int
    rejected: int = 0
    loud: int = 0

    def sample(self, step: Step) -> float:
        step()  # what another contender left in the caches and the page tables is not timed
        least = float("inf")
        for attempt in range(self.tries):
            time.sleep(0.01 * min(attempt, 5))
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            before = others_busy_s()
            took = step()
            switched = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
            if switched <= 1 and others_busy_s() - before <= 0.011:
                return took
            self.rejected += 1
            least = min(least, took)
        self.loud += 1
        return least


def interval(
    numerator: np.ndarray, denominator: np.ndarray, draws: int = 4000
) -> tuple[float, float, float]:
    """The median of the rounds' ratios and its 95 % bootstrap interval over the rounds."""
    ratios = numerator / denominator
    picks = np.random.default_rng(0).integers(0, len(ratios), (draws, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def has_deepspeed() -> bool:
    try:
        import deepspeed.ops.adam  # noqa: F401
    except ImportError:
        return False
    return True


def contenders(case: Case) -> dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]]:
    """Name to maker, and whether it works on huge pages."""
    found: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
        "cxl_offload": (ours, True),
        "cxl_offload, torch memory": (ours, False),
    }
    if has_deepspeed():
        found["DeepSpeedCPUAdam"] = (deepspeed_adam, False)
        found["DeepSpeedCPUAdam, huge pages"] = (deepspeed_adam, True)
    if case.param is case.state:  # torch has no states of another type
        found["torch AdamW fused"] = (torch_fused, False)
    return found


def run_case(case: Case, args: argparse.Namespace, sampler: Sampler) -> list[Result]:
    makers = contenders(case)
    print(f"measuring {case.name}: {args.rounds} rounds of {len(makers) + 1}", flush=True)
    for name, (make, _) in makers.items():
        check_against_fp64(name, make, case)
    sets = {huge: tensors(args.numel, case, huge=huge) for huge in (True, False)}
    spare = tensors(args.numel, case, huge=True)
    bounds = {ahead: bound(spare, args.threads, ahead) for ahead in PREFETCH_BYTES}
    if args.clock == "cpu":
        bounds = {ahead: cpu_timed(step, args.threads) for ahead, step in bounds.items()}
    pilots = {ahead: min(sampler.sample(step) for _ in range(5)) for ahead, step in bounds.items()}
    best = min(pilots, key=lambda ahead: pilots[ahead])
    steps: dict[str, Step] = {f"bound (prefetch {best} B)": bounds[best]}
    for name, (make, huge) in makers.items():
        step = make(sets[huge], case, args.threads).step
        wall = args.clock == "wall"
        steps[name] = timed(step) if wall else cpu_timed(step, args.threads)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(args.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(sampler.sample(steps[name]))
    return evaluate(case, args.numel, {name: np.array(values) for name, values in samples.items()})


def run_named_model(name: str, args: argparse.Namespace, sampler: Sampler) -> dict[str, Any]:
    wall = args.clock == "wall"

    def sample(step: Callable[[], Any]) -> float:
        return sampler.sample(timed(step) if wall else cpu_timed(step, args.threads))

    print(f"measuring the model {name}", flush=True)
    made = model_makers(SETTINGS, args.threads, deepspeed=has_deepspeed())
    found = run_model(MODELS[name], made, args.rounds * SHORT.get(name, 1), sample)
    show_model(name, found)
    return found


def evaluate(case: Case, numel: int, samples: dict[str, np.ndarray]) -> list[Result]:
    limit = next(iter(samples.values()))
    mine = samples["cxl_offload"]
    results = []
    for name, values in samples.items():
        median = float(np.median(values))
        result = Result(
            name,
            median,
            case.bytes_per_param * numel / median,
            *interval(limit, values),
            samples_s=values.tolist(),
        )
        if name.startswith(("Deep", "torch")):
            result.speedup, result.speedup_low, result.speedup_high = interval(values, mine)
        results.append(result)
    return results


def whole_lines(text: str) -> int:
    """``50e6`` as a number of elements, rounded down to whole lines of every type."""
    return int(float(text)) // 64 * 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--numel", type=whole_lines, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tries", type=int, default=12, help="for a sample without other work")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    check_plot(args.plot)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.bench_adam", *sys.argv[1:]])
    torch.set_num_threads(args.threads)
    print(f"{processor()}, {args.threads} threads, {args.numel} parameters, commit {commit()}")
    if not has_deepspeed():
        print("DeepSpeed is not installed: its column is missing")
    sampler = Sampler(args.tries if args.clock == "wall" else 1)
    begin = os.getloadavg()
    all_results = {}
    for name in args.cases:
        all_results[name] = run_case(CASES[name], args, sampler)
        show(CASES[name], all_results[name])
    models = {name: run_named_model(name, args, sampler) for name in args.models}
    end = os.getloadavg()
    print(f"\nload average {begin[0]:.1f} before, {end[0]:.1f} after; {sampler.rejected} samples")
    print(f"rejected because of other work, {sampler.loud} kept in spite of it")
    report = {
        "kind": "measured", "clock": args.clock, "cpu": processor(),
        "threads": args.threads, "numel": args.numel,
        "commit": commit(), "torch": torch.__version__, "load_average": [begin, end],
        "rejected": sampler.rejected, "loud": sampler.loud,
        "cases": {name: [asdict(r) for r in results] for name, results in all_results.items()},
        "models": models,
    }  # fmt: skip
    good = print_bars([*bars_of("adam", report)])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(args.plot, all_results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
