"""All benchmarks in one go: each waits for a quiet machine, then one table and one JSON.

    python -m benchmarks.run_all --json docs/performance.json [--page docs/performance.md]
        [--only NAME ...] [--quick] [--grid] [--neighbour] [--patience MINUTES]

A benchmark runs in a process of its own. Before it the machine has to be quiet for a few seconds;
where it is not within ``--patience`` the benchmark runs all the same, and the tables name it, as
they name what was not run. What is slower than a peer stands first. Everything is measured.
``--grid`` also runs FlexGen, DeepSpeed and vLLM at all sizes of grid.py, and ``--neighbour``
measures them beside a busy process too (neighbour.py).
``--page`` writes the tables of a page anew; with ``--from`` nothing is run. vLLM's environment is
``.venv-vllm`` beside the clone's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.markdown_tables import filled, markdown_table
from benchmarks.measurements import describe_machine, write_json
from benchmarks.quiet_window import all_busy_s
from benchmarks.results import READERS, Row, rows_of

ROOT = Path(__file__).resolve().parents[1]
PEERS = (
    *("torch", "transformers", "accelerate", "llama-cpp-python", "deepspeed", "vllm"),
    *("torchao", "bitsandbytes", "numpy"),
)
VLLM_ENVIRONMENT = ".venv-vllm"
ELSEWHERE = {"vllm": VLLM_ENVIRONMENT}
"""Peers that run in an environment of their own: its version is the one that counts."""

QUIET_S = 3.0
QUIET_SHARE = 0.02
"""Of one CPU: what others may use while the machine counts as quiet."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module and its options; ``quick`` ones are added for a run of minutes.

    ``module`` is its name where that is not ``bench_`` and ``name``.
    """

    name: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    environment: str = ""
    module: str = ""

    @property
    def label(self) -> str:
        """The name, with the options that every run of it has."""
        return " ".join((self.name, *self.options))

    @property
    def is_grid(self) -> bool:
        return "--grid" in self.options

    def command(self, *, quick: bool, result: Path, neighbour: bool = False) -> list[str]:
        python = ROOT / self.environment / "bin" / "python" if self.environment else sys.executable
        options = [*self.options, *(self.quick if quick else ())]
        options += ["--neighbour"] if neighbour and self.name in WITH_CONDITIONS else []
        module = f"benchmarks.{self.module or f'bench_{self.name}'}"
        return [str(python), "-m", module, *options, "--json", str(result)]


SMALL_TRAINED = ("--layers", "2", "--hidden", "256", "--vocabulary", "4096")
"""A model that trains on 32 sequences of 512 tokens in a second or two."""

FEW_SERVED = ("--rounds", "2", "--starts", "1", "--layers", "4")
QUICKLY_SERVED = ("--rounds", "6", "--starts", "3", "--restarts", "1", "--layers", "4")

BENCHMARKS = (
    Benchmark("flexgen", quick=("--rounds", "3")),
    Benchmark("transformers", quick=("--rounds", "5", "--seconds", "12")),
    Benchmark("zero_offload", quick=("--rounds", "5")),
    Benchmark("adam", quick=("--rounds", "7")),
    Benchmark("states", ("--numel", "50e6"), ("--rounds", "7")),
    Benchmark("attention", quick=("--rounds", "7")),
    Benchmark("attention", ("--peers", "vLLM"), ("--rounds", "7"), environment=VLLM_ENVIRONMENT),
    Benchmark("linear", quick=("--rounds", "5")),
    Benchmark("copy", quick=("--largest", "256MiB")),
    Benchmark("load", quick=("--gib", "1", "--rounds", "3")),
    Benchmark("large_checkpoint", quick=("--small",), module="large_checkpoint"),
    Benchmark("shared_cpus", quick=("--rounds", "3")),
    Benchmark("prediction", quick=("--quick",)),
    Benchmark("plan", ("--measured",), ("--quick",)),
    Benchmark("vllm_kv", quick=QUICKLY_SERVED, environment=VLLM_ENVIRONMENT),
    Benchmark("flexgen", ("--grid",), ("--rounds", "3", "--layers", "2", "--gen-len", "6")),
    Benchmark("zero_offload", ("--grid",), ("--rounds", "5", *SMALL_TRAINED)),
    Benchmark(
        "vllm_kv",
        ("--grid",),
        ("--rounds", "2", "--starts", "1", "--layers", "4"),
        VLLM_ENVIRONMENT,
    ),
)
WITH_CONDITIONS = frozenset(each.name for each in BENCHMARKS if each.is_grid)
"""Those that take ``--neighbour``, at either size (conditions.py)."""


def wait_for_quiet(patience_s: float) -> bool:
    """Waits until others leave the CPUs alone for ``QUIET_S``; whether they did in time."""
    deadline = time.monotonic() + patience_s
    while True:
        begin, busy = time.monotonic(), all_busy_s()
        time.sleep(QUIET_S)
        if (all_busy_s() - busy) / (time.monotonic() - begin) <= QUIET_SHARE:
            return True
        if time.monotonic() > deadline:
            return False


def in_order(names: Sequence[str], *, grid: bool = False) -> list[Benchmark]:
    """The benchmarks of these names, in the order of the names: the important ones can be first."""
    found = [each for each in BENCHMARKS if grid or not each.is_grid]
    return [each for name in names for each in found if each.name == name]


def run(
    benchmark: Benchmark, folder: Path, *, quick: bool, quiet: bool, neighbour: bool = False
) -> dict[str, Any]:
    """Runs one; what it printed is shown, and how it ended is kept beside its rows."""
    path = folder / f"{BENCHMARKS.index(benchmark)}.json"
    command = benchmark.command(quick=quick, result=path, neighbour=neighbour)
    begin, load = time.monotonic(), os.getloadavg()[0]
    try:
        status: int | str = subprocess.run(command, cwd=ROOT, check=False).returncode
    except OSError as error:
        status = str(error)
    found: dict[str, Any] = {
        "benchmark": benchmark.name,
        "options": command[3:-2],
        "seconds": round(time.monotonic() - begin, 1),
        "status": status,
        "quiet_before": quiet,
        "load_before": load,
        "rows": [],
    }
    if path.exists():  # a benchmark that misses its bars ends with 1, and has written its figures
        document = json.loads(path.read_text(encoding="utf-8"))
        found["rows"] = [asdict(row) for row in rows_of(benchmark.name, document)]
    return found


def versions() -> dict[str, str]:
    """Of this package and of the peers that are installed."""
    found = {}
    for name in ("cxl_offload", *PEERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for name, environment in ELSEWHERE.items():
        told = version_elsewhere(name, environment)
        if told:
            found[name] = told
    return found


def version_elsewhere(name: str, environment: str) -> str:
    """Of a package in an environment beside this one; empty where one of them is not there."""
    python = ROOT / environment / "bin" / "python"
    asked = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    if not python.exists():
        return ""
    command = [str(python), "-c", asked, name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def label_of(run: Mapping[str, Any]) -> str:
    """Which of the benchmarks a run is: two of one name differ by options."""
    told = [each for each in BENCHMARKS if each.name == run["benchmark"]]
    of_this = [each for each in told if [*each.options] == run["options"][: len(each.options)]]
    return max((each.label for each in of_this), key=len, default=run["benchmark"])


def tables(document: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page: what is slower than a peer, the machine, the other rows that stand
    beside a peer, and those that stand beside a bound or a prediction."""
    rows = [Row(**row) for each in document["runs"] for row in each["rows"]]
    order = sorted(rows, key=lambda row: (row.of_bound, row.ratio))
    slower = [row for row in order if row.slower]
    of_bound = [row for row in order if row.of_bound]
    others = [row for row in order if not (row.slower or row.of_bound)]
    runs, machine = document["runs"], document["machine"]
    made = {label_of(run) for run in runs}
    facts = {
        "date": machine["date"][:10],
        "commit": machine["commit"],
        "processor": f"{machine['cores']} CPUs of {machine['processor']}",
        "kernel": machine["kernel"],
        **{name: machine[name] for name in ("memory", "caches", "instructions") if name in machine},
        "versions": ", ".join(f"{name} {each}" for name, each in document["versions"].items()),
        "rounds": "few (`--quick`)" if document["quick"] else "all",
        "run": _told(label_of(run) for run in runs),
        "not run": _told(each.label for each in BENCHMARKS if each.label not in made),
        "not quiet before": _told(_named(runs, "quiet_before", False)),
        "missed a bar": _told(label_of(run) for run in runs if run["status"] == 1 and run["rows"]),
        "failed": _told(label_of(run) for run in runs if _failed(run)),
    }
    head = ["benchmark", "case", "beside", "this package over it", "95 % interval"]
    none = "No row is slower than its peer.\n"
    return {
        "slower": markdown_table(head, [_cells(row) for row in slower]) if slower else none,
        "run": markdown_table(["", ""], [[key, str(each)] for key, each in facts.items()]),
        "rows": markdown_table(head, [_cells(row) for row in others]),
        "bounds": markdown_table(
            [*head, "at most"], [[*_cells(row), _told_most(row)] for row in of_bound]
        ),
    }


def _named(runs: Sequence[Mapping[str, Any]], key: str, value: object) -> list[str]:
    return [label_of(run) for run in runs if run[key] == value]


def _failed(run: Mapping[str, Any]) -> bool:
    """Python ends with 1 for what nobody caught, as a benchmark does that misses a bar."""
    return run["status"] not in (0, 1) or not run["rows"]


def _told(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _cells(row: Row) -> list[str]:
    interval = "-"
    if row.low is not None and row.high is not None:
        interval = f"{_ratio(row.low)} to {_ratio(row.high)}"
    return [row.benchmark, row.case, row.beside, _ratio(row.ratio), interval]


def _ratio(value: float) -> str:
    """Two decimals, and more where something slower would read as equal."""
    digits = next((digits for digits in (2, 3, 4) if value >= 1 or round(value, digits) < 1), 5)
    return f"{value:.{digits}f}"


def _told_most(row: Row) -> str:
    """What reading and products allow."""
    return "-" if row.most is None else f"{row.most:.2f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(READERS),
        default=list(READERS),
        help="these alone, in this order",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: an indication")
    parser.add_argument("--grid", action="store_true", help="stock at all sizes too: some hours")
    parser.add_argument("--neighbour", action="store_true", help="stock beside a busy process too")
    parser.add_argument("--patience", type=float, default=10.0, help="minutes for a quiet machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a page whose tables are written anew")
    parser.add_argument("--from", dest="source", type=Path, help="the JSON of an earlier run")
    return parser.parse_args()


def run_benchmarks(args: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": "measured",
        "machine": describe_machine(),
        "versions": versions(),
        "quick": args.quick,
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        for benchmark in in_order(args.only, grid=args.grid):
            quiet = wait_for_quiet(args.patience * 60)
            print(f"== {benchmark.label}{'' if quiet else ', beside other work'}", flush=True)
            how = {"quick": args.quick, "quiet": quiet, "neighbour": args.neighbour}
            document["runs"].append(run(benchmark, Path(scratch), **how))
            if args.json is not None:  # what is done is kept if a later one is interrupted
                write_json(args.json, document)
    return document


def main() -> int:
    args = parse()
    if args.source is not None:
        document = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        document = run_benchmarks(args)
    made = tables(document)
    print("\n".join(made[name] for name in ("slower", "rows", "bounds", "run")))
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(filled(page, made), encoding="utf-8")
    without = _named(document["runs"], "rows", [])
    return 1 if without else 0


if __name__ == "__main__":
    sys.exit(main())
