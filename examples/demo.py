"""An OPT answers prompts with its weights, KV cache and activations in memory tiers.

What ``make demo`` runs. A small model that it teaches the Zen of Python completes its lines, on
this machine and on the simulated nodes of a published CXL server, by FlexGen and by transformers.
A larger one, with weights
from a seed, shows speed: real FlexGen without tiers and with them, and on that server, where pages
are placed on simulated nodes, the tokens are real, and tokens/s are replayed from the bytes that
every run moved. The tokens are checked to be the same in all runs, and a page reports it all.

    python examples/demo.py [--output DIR] [--model PATH] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from demo_progress import Steps
from demo_report import (
    Result,
    draw,
    print_nodes,
    print_placement,
    print_speed,
    speed_notes,
    write_page,
)
from rich.console import Console
from zen import ANSWER_TOKENS, BEGINNINGS, expected, first_line, train_zen

from cxl_offload import Session, load_machine
from cxl_offload.errors import CxlOffloadError
from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.integrations.flexgen.seeded import DEMO_SHAPE, make_opt
from cxl_offload.integrations.prompts import read_prompts
from cxl_offload.integrations.transformers import GenerateRun
from cxl_offload.integrations.transformers import run as generate_by_transformers
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.decoding.trace import cpu_engines
from cxl_offload.plan.equations.interleave import bandwidth_bound, best_weights, shares_of_weights
from cxl_offload.profile import Profile, quick
from cxl_offload.sim import replay
from cxl_offload.topology import Machine
from cxl_offload.units import format_bandwidth

PROMPTS = Path(__file__).with_name("prompts.txt")
PUBLISHED = "epyc9354-cxl-a"
GRANULE = "16KiB"
SEED = 2026

# About how long the steps take beside each other; what is left to do is estimated from them.
TEACH, COMPLETE, MAKE, MEASURE, RUN_HERE, RUN_SIMULATED, DRAW = 8, 5, 3, 1, 20, 15, 2
ZEN_STEPS = (TEACH, COMPLETE, COMPLETE, COMPLETE)
RUN_STEPS = (MEASURE, RUN_HERE, RUN_HERE, RUN_SIMULATED, RUN_SIMULATED, RUN_SIMULATED, DRAW)

Answers = list[tuple[str, str, str]]
Places = dict[str, str]
Run = tuple[str, Session, Places]


def bandwidth_policy(rates: Sequence[tuple[int, float]]) -> str:
    """Interleave in proportion to bandwidth: ``rates`` are node and bytes/s of loads."""
    if len(rates) == 1:
        return f"bind:{rates[0][0]}"
    bandwidths = [rate for _, rate in rates]
    # Small weights: a whole cycle of them must fit into the tensors of a small model.
    choices = (best_weights(bandwidths, total=total) for total in range(1, 21))
    weights = max(choices, key=lambda w: bandwidth_bound(bandwidths, shares_of_weights(w)))
    shares = [f"{node}={w}" for (node, _), w in zip(rates, weights, strict=True) if w > 0]
    return f"weighted:{','.join(shares)}@{GRANULE}"


def measured_policy(console: Console, profile: Profile) -> str:
    """What was measured of every node, and the policy that follows."""
    rates = []
    for path in profile.paths:
        loads, latency_ns = path.peak_bytes_per_s("load"), path.latency_ns()
        if loads is None:
            console.print(f"measured node {path.node}: nothing, other work used all the time")
            loads = 1.0  # nodes that were not measured count alike
        else:
            idle = "" if latency_ns is None else f", {latency_ns:.0f} ns when idle"
            console.print(f"measured node {path.node}: {format_bandwidth(loads)} of loads{idle}")
        rates.append((path.node, loads))
    return bandwidth_policy(rates)


def published_policy(machine: Machine) -> str:
    """The same from the bandwidths of a machine file."""
    rates = []
    for node in machine.usable_nodes():
        access = machine.access(machine.initiator, node.id)
        if access is not None and access.read_bandwidth_bytes_per_s is not None:
            rates.append((node.id, access.read_bandwidth_bytes_per_s))
    return bandwidth_policy(rates)


def runs_here(session: Session, policy: str) -> Iterator[Run]:
    """This machine: untiered, and by measured bandwidth."""
    yield "this machine, untiered", session, {}
    kinds = ("weights", "kv", "act")
    yield f"this machine, {policy}", session, dict.fromkeys(kinds, policy)


def runs_published(machine: Machine) -> Iterator[Run]:
    """A published server: all in local DRAM, all in CXL, and each kind where it does least harm."""
    kinds = ("weights", "kv", "act")
    yield "system A, all in DRAM", Session.simulated(machine), dict.fromkeys(kinds, "bind:ldram")
    yield "system A, all in CXL", Session.simulated(machine), dict.fromkeys(kinds, "bind:cxl")
    # The link to the GPU is slower than any tier, so weights lose nothing in CXL; attention on the
    # CPU is bound by memory, so its KV cache is spread by bandwidth.
    spread = published_policy(machine)
    places = {"weights": "bind:cxl", "kv": spread, "act": "bind:ldram"}
    yield "system A, by kind", Session.simulated(machine), places


def generate(steps: Steps, request: FlexGenRun, at: Run) -> Result:
    """One run, and on simulated nodes the time that the published machine would take."""
    name, session, places = at
    # Times are taken of real nodes only, so only there is it worth warming up.
    # One way of linear layers in all runs: the fastest is found by turns, which round differently.
    wanted = replace(request, place=places, cpu_linear="kernel", warmup=not session.is_simulated)
    with steps.step(f"FlexGen answers: {name}") as progress:
        report = run(wanted, session=session, progress=progress)
    timeline = replay(report.trace, session.machine) if session.is_simulated else None
    return Result(name, report, timeline)


def answer_by_heart(
    console: Console, steps: Steps, folder: Path, published: Machine
) -> tuple[bool, Answers]:
    """The lines of the Zen of Python, completed on this machine and with tiers of the server.

    Returns
    -------
    bool
        Whether the tokens were the same on both.
    Answers
        Beginning, and how it went on by FlexGen and by transformers.
    """
    with steps.step("teaching a small OPT the Zen of Python") as progress:
        train_zen(folder, progress=progress)
    request = FlexGenRun(
        model=str(folder),
        prompts=list(BEGINNINGS),
        gen_len=ANSWER_TOKENS,
        gpu_batch_size=len(BEGINNINGS),
        percent=(0, 100, 0, 100, 0, 100),
        cpu_cache_compute=True,
    )
    places = {"weights": "bind:cxl", "kv": "interleave:ldram,cxl@4KiB", "act": "bind:ldram"}
    runs: list[Run] = [
        ("Zen of Python, this machine", Session.linux(), {}),
        ("Zen of Python, system A", Session.simulated(published), places),
    ]
    plain, tiered = (generate(steps, request, at).report for at in runs)
    by_transformers, rates = answer_by_transformers(steps, folder, published)
    both = zip(BEGINNINGS, tiered.answers, by_transformers, strict=True)
    answers = [(given, first_line(one), first_line(other)) for given, one, other in both]
    console.print("\nGiven -> how it went on, its weights on the CXL node of system A (simulated)")
    for beginning, *lines in answers:
        for line in dict.fromkeys(lines):  # one, where FlexGen and transformers say the same
            right = "" if line == expected(beginning) else f"   (it says {expected(beginning)!r})"
            console.print(f"  {beginning} -> {line.strip()}{right}")
    same = all(one == other for _, one, other in answers)
    said = "the same lines" if same else "OTHER LINES"
    console.print(
        f"transformers: {said}; decode at most {rates['decode']:,.0f} tokens/s, simulated: memory "
        "and arithmetic of system A's CPUs alone\n"
    )
    return same and np.array_equal(plain.tokens, tiered.tokens), answers


def answer_by_transformers(
    steps: Steps, folder: Path, published: Machine
) -> tuple[tuple[str, ...], Mapping[str, float]]:
    """The same by a decoder of transformers under ``generate()``, with its tensors in tiers.

    Returns
    -------
    answers
        Of every beginning.
    rates
        Tokens/s of prefill and decode, replayed on the published machine, whose CPUs compute.
    """
    request = GenerateRun(
        model=str(folder),
        prompts=BEGINNINGS,
        gen_len=ANSWER_TOKENS,
        place={"weights": "bind:cxl", "kv": "interleave:ldram,cxl@4KiB"},
        record=True,
    )
    with steps.step("transformers answers: Zen of Python, system A") as progress:
        report = generate_by_transformers(
            request, session=Session.simulated(published), progress=progress
        )
    engines = cpu_engines(published, TRANSFORMERS)
    timeline = replay(report.trace, published, engines=engines)
    return report.answers, timeline.tokens_per_s


def demonstrate(
    console: Console, steps: Steps, model: str, tokens: int, output: Path, answers: Answers
) -> bool:
    """All runs, tables, picture and page; whether the tokens were the same in all of them."""
    here = Session.linux()
    published = load_machine(PUBLISHED)
    print_nodes(console, here.machine, published)
    prompts = read_prompts(str(PROMPTS))
    request = FlexGenRun(
        model=model,
        prompts=prompts,
        gen_len=tokens,
        gpu_batch_size=len(prompts) // 2,
        num_gpu_batches=2,
        # 20 % of the weights are asked for on the accelerator, of which FlexGen makes 8; the KV
        # cache is on the host, and attention there.
        percent=(20, 80, 0, 100, 0, 100),
        cpu_cache_compute=True,
    )
    with steps.step("measuring the memory of this machine"):
        profile = quick(here)  # of a few seconds
        policy = measured_policy(console, profile)
    runs = [*runs_here(here, policy), *runs_published(published)]
    results = [generate(steps, request, at) for at in runs]
    same = [np.array_equal(results[0].report.tokens, result.report.tokens) for result in results]
    print_placement(console, results)
    print_speed(console, results, same, speed_notes(here.machine))
    if not answers:
        console.print(f"\n{prompts[-1]!r} -> {results[0].report.answers[-1]!r}")
    machine = profile.applied_to(here.machine)
    with steps.step("drawing the picture and the page"):
        output.mkdir(parents=True, exist_ok=True)
        documents = [result.to_json() for result in results]
        (output / "demo.json").write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
        draw(results, output / "demo.png")
        write_page(output / "demo.html", results, same, answers, (machine, published))
    written = ", ".join(str(output / f"demo.{kind}") for kind in ("html", "png", "json"))
    console.print(f"\nwritten: {written}; open the first in a browser", soft_wrap=True)
    return all(same)


def seeded_model(steps: Steps, folder: Path) -> Path:
    """The demonstration's own OPT; one that an earlier run kept is taken as it is."""
    there = (folder / "config.json").is_file()
    what = f"an OPT of {DEMO_SHAPE.parameters / 1e6:.0f} M parameters"
    with steps.step(f"taking {what} from {folder}" if there else f"making {what}"):
        if not there:
            make_opt(folder, DEMO_SHAPE, seed=SEED)
    return folder


def main() -> int:
    """Exit status: 0 when every run made the same tokens."""
    parser = argparse.ArgumentParser(description="FlexGen with its host memory in tiers")
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="for picture, JSON")
    parser.add_argument("--model", help="an OPT checkpoint; without it one is made from a seed")
    parser.add_argument(
        "--keep-model", type=Path, metavar="DIR", help="make that one there and leave it"
    )
    parser.add_argument("--tokens", type=int, default=16, help="to generate for every prompt")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    console = Console(markup=False, emoji=False, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="cxl-offload-demo-") as scratch:
            model, known, answers = options.model, True, []
            steps = Steps(console, RUN_STEPS if model else (*ZEN_STEPS, MAKE, *RUN_STEPS))
            if model is None:
                zen = Path(scratch, "zen")
                known, answers = answer_by_heart(console, steps, zen, load_machine(PUBLISHED))
                model = str(seeded_model(steps, options.keep_model or Path(scratch, "opt-demo")))
            same = demonstrate(console, steps, model, options.tokens, options.output, answers)
            same = same and known
    except KeyboardInterrupt:
        print("demo: stopped; nothing is left behind", file=sys.stderr)
        return 130
    except (CxlOffloadError, MemoryError, OSError, ValueError) as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 2
    if not same:
        print("demo: error: placement changed the tokens; this must never happen", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
