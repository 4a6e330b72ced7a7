"""Does training end as well with states in fewer bytes? Loss curves, by seed.

    python -m benchmarks.loss_curves [--steps 2000] [--seeds 0 1 2] [--states fp32 bf16 8bit]
        [--optimizer adam|lion] [--parameters fp32|bf16] [--small] [--json FILE]

Runs `examples/train_gpt_zero_offload.py --plain` for every seed: an OPT on the source of Python's
standard library, in float32, once with torch's own AdamW and once with CPUAdam for each type of its
states. torch has no Lion: with `--optimizer lion` CPULion with states of float32 takes the place of
torch's AdamW. `--parameters bf16` compares parameters of bfloat16 without master weights, which are
rounded at random, with the same reference in float32.

The losses are *measured*; time is not, so the machine may do other work. What counts is the mean
loss of the last tenth of the steps and that on text that was held out, at the end: the mean over
the seeds may be no further above the reference's than its seeds are from each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown_tables import markdown_table
from benchmarks.measurements import describe_machine, write_json

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt_zero_offload.py"
REFERENCES = {"adam": "torch AdamW", "lion": "CPULion, fp32 parameters and states"}
LEARNING_RATES = {"adam": 1e-3, "lion": 2e-4}
"""Every element of a step of Lion is as large as the rate, so it takes a smaller one."""
SHAPES = {
    False: {"layers": 4, "hidden": 256, "heads": 4, "micro-batch": 4, "length": 256},
    True: {"layers": 2, "hidden": 128, "heads": 4, "micro-batch": 8, "length": 128},
}

Curves = dict[str, dict[int, dict[str, Any]]]


def flags_of(states: str, args: argparse.Namespace) -> list[str]:
    """Of the example, for the reference or a type of states."""
    flags = [f"--optimizer={args.optimizer}", f"--lr={LEARNING_RATES[args.optimizer]}"]
    if states == REFERENCES[args.optimizer]:
        return flags
    return [*flags, f"--states={states}", f"--parameters={args.parameters}"]


def trained(states: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Losses of one run."""
    shape = [f"--{name}={value}" for name, value in SHAPES[args.small].items()]
    command = [sys.executable, str(EXAMPLE), "--plain", f"--steps={args.steps}", f"--seed={seed}"]
    command += [*shape, f"--output={folder}", *flags_of(states, args)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found


def ends(found: dict[str, Any]) -> dict[str, float]:
    """Of a run: the last tenth of its steps, and what was held out."""
    losses = found["losses"]
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "training": sum(last) / len(last),
        "held_out": found["validation"][str(len(losses))],
    }


def judged(curves: Curves, reference: str) -> list[dict[str, Any]]:
    """A row for each type of states: means over seeds, beside the spread of the reference's."""
    rows = []
    for phase in ("training", "held_out"):
        stock = [ends(run)[phase] for run in curves[reference].values()]
        spread = max(stock) - min(stock)
        for states, runs in curves.items():
            mean = statistics.mean(ends(run)[phase] for run in runs.values())
            above = mean - statistics.mean(stock)
            rows.append(
                {
                    "states": states,
                    "loss": phase,
                    "mean": mean,
                    "above_torch": above,
                    "spread_of_torchs_seeds": spread,
                    "within": above <= spread,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--states", nargs="+", default=["fp32", "bf16", "8bit"])
    parser.add_argument("--optimizer", choices=tuple(REFERENCES), default="adam")
    parser.add_argument("--parameters", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--small", action="store_true", help="0.5 M parameters instead of 3.7 M")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if len(args.seeds) < 2:
        parser.error("--seeds: at least two, for a spread")
    curves: Curves = {}
    reference = REFERENCES[args.optimizer]
    with tempfile.TemporaryDirectory() as folder:
        for states in (reference, *args.states):
            for seed in args.seeds:
                found = trained(states, seed, args, Path(folder))
                curves.setdefault(states, {})[seed] = found
                print(f"  measured: {states}, seed {seed}: {ends(found)}", flush=True)
    rows = judged(curves, reference)
    head = ["states", "loss", "mean over seeds", "above the reference's", "spread of its seeds", ""]
    cells = [
        [
            row["states"],
            row["loss"].replace("_", " "),
            f"{row['mean']:.4f}",
            f"{row['above_torch']:+.4f}",
            f"{row['spread_of_torchs_seeds']:.4f}",
            "within" if row["within"] else "OUTSIDE",
        ]
        for row in rows
    ]
    print(markdown_table(head, cells))
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        document = {"machine": describe_machine(), "kind": "measured", "options": options}
        write_json(args.json, {**document, "rows": rows, "curves": curves})
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
