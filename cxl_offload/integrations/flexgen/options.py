"""The command line of one run: FlexGen's own flags, and where each kind of tensor lives."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from flexgen.flex_opt import add_parser_arguments
from flexgen.utils import write_benchmark_log

from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import limits, size
from cxl_offload.integrations.fit import TierLimit, tier_limits
from cxl_offload.integrations.flexgen.places import KINDS, parse_place
from cxl_offload.integrations.flexgen.report import FlexGenReport
from cxl_offload.integrations.flexgen.request import (
    ALL_ON_HOST,
    CPU_LINEAR,
    FlexGenRun,
    planned_options,
)
from cxl_offload.integrations.named_tiers import limited, parse_tier
from cxl_offload.integrations.prompts import read_prompts
from cxl_offload.integrations.run_options import STOP, TIER, TUNE, TUNE_BUDGET, TUNE_STATE, WARMUP
from cxl_offload.plan.plan_file import load_plan
from cxl_offload.topology import discover, load_machine

_TEST_PROMPT = "Paris is the capital city of"  # FlexGen's own, when no prompts are given


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        raise ConfigError(f"{message}; see {self.prog} --help")


# Long: a line for each option of the command line and field of the request.
def build_parser(prog: str) -> argparse.ArgumentParser:
    """FlexGen's parser with our flags, and help of its own where a flag means something else."""
    parser = _OneLineParser(
        prog=prog,
        conflict_handler="resolve",
        description="Generate with FlexGen, its host memory in tiers. Nothing is downloaded.",
        epilog=f"Example: {prog} --model my-opt --prompts prompts.txt --place kv=bind:cxl",
    )
    add_parser_arguments(parser)
    _replace_flexgen_flags(parser)
    ours = parser.add_argument_group("where tensors live")
    ours.add_argument(
        "--plan",
        metavar="FILE",
        help="a plan of `cxl-offload plan inference`: it decides batch, lengths and every home, "
        "and flags that say otherwise are refused",
    )
    ours.add_argument(TIER.flag, action="append", default=[], metavar=TIER.metavar, help=TIER.help)
    ours.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="TIER=SIZE",
        help="most of a tier to use, e.g. cxl=64GiB; may be repeated",
    )
    ours.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="KIND=POLICY",
        help=f"where the host's share of {', '.join(KINDS)} goes: bind:cxl, preferred:ldram,cxl, "
        f"interleave:ldram,cxl@64KiB, weighted:ldram=3,cxl=1, first-touch, or for weights and kv "
        f"split:ldram=50,cxl=50 (by whole tensors and sequences); may be repeated",
    )
    ours.add_argument(
        "--machine",
        metavar="FILE",
        help="a machine file or the name of one that comes with the package: placements are on its "
        "simulated nodes; without it, on this machine's",
    )
    ours.add_argument(
        "--accelerator",
        choices=("cuda", "host"),
        help="host: ordinary memory and the CPU stand in for the GPU (default without CUDA)",
    )
    ours.add_argument(
        "--cpu-attention",
        choices=("in-place", "workspace"),
        default="in-place",
        help="with --cpu-cache-compute or --accelerator host: read the KV cache where it lies "
        "(default), or as FlexGen does, over copies; a cache with a share on disk always goes "
        "through the copies",
    )
    ours.add_argument(
        "--cpu-linear",
        choices=CPU_LINEAR,
        default="fastest",
        help="with --accelerator host: the fastest of this package's kernel, single and half "
        "precision, which the first calls of every shape measure (default); always the kernel, "
        "with the same bits in every run; or always PyTorch in single precision or in half, as "
        "FlexGen does; as exact, but not the same in the last bit",
    )
    ours.add_argument(
        "--copies",
        choices=("stream", "engine"),
        default="stream",
        help="between host and GPU: on FlexGen's streams (default), or by the copy engine, where a "
        "slow tier's bytes cross together with a fast one's",
    )
    ours.add_argument(TUNE.flag, choices=("step_time",), help=TUNE.help)
    ours.add_argument(
        TUNE_BUDGET.flag, metavar=TUNE_BUDGET.metavar, default="0B", help=TUNE_BUDGET.help
    )
    ours.add_argument(TUNE_STATE.flag, metavar=TUNE_STATE.metavar, help=TUNE_STATE.help)
    more = parser.add_argument_group("prompts and results")
    more.add_argument("--prompts", metavar="FILE", help="a text file with one prompt a line")
    more.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="folder with tokenizer files (default: the model's, else one token a byte)",
    )
    more.add_argument("--json", action="store_true", help="print JSON and nothing else")
    more.add_argument("--output", metavar="FILE", help="write the same as JSON there")
    more.add_argument(STOP.flag, type=int, metavar=STOP.metavar, help=STOP.help)
    more.add_argument(WARMUP.flag, action="store_true", help=WARMUP.help)
    more.add_argument(
        "--profile",
        metavar="FILE",
        help="predict the decode speed from this profile of operators (cxl-offload profile "
        "--operators cpu --output FILE), and print it beside the measured one",
    )
    more.add_argument("--trace", metavar="FILE", help="write the recorded events there")
    more.add_argument(
        "--report", metavar="FILE", type=Path, help="write it all as one HTML page there"
    )
    more.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        default=os.environ.get("CXL_OFFLOAD_METRICS"),
        help="serve metrics to Prometheus there while it runs",
    )
    more.add_argument(
        "--events",
        metavar="FILE",
        default=os.environ.get("CXL_OFFLOAD_EVENTS"),
        help="append every move and every decision of a tuner there, a line of JSON each",
    )
    return parser


def _replace_flexgen_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a Hugging Face OPT folder, a FlexGen -np folder, or a name such as opt-1.3b whose "
        "weights are in --path",
    )
    parser.add_argument(
        "--path",
        help="folder for FlexGen's weight files; a checkpoint is converted into it once, without "
        "it the conversion is temporary; _DUMMY_ gives weights of ones",
    )
    parser.add_argument("--prompt-len", type=int, help="default: the longest prompt")
    parser.add_argument("--gpu-batch-size", type=int, help="default: all prompts in one batch")
    parser.add_argument(
        "--percent",
        nargs="+",
        type=float,
        default=list(ALL_ON_HOST),
        help="of weights, KV cache and activations, on the accelerator and on the host (default: "
        "0 100 0 100 0 100, all on the host; FlexGen by itself has all on the GPU)",
    )
    parser.add_argument(
        "--cut-gen-len", type=int, help="compute only so many tokens and project the rest"
    )
    parser.add_argument(
        "--debug-mode",
        choices=("fewer_batch", "breakdown"),
        help="refused: it stops after 20 batches and gives no tokens; use --cut-gen-len",
    )
    parser.add_argument("--log-file", help="append FlexGen's log lines there (default: no log)")


def parse_flags(prog: str, words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line; what its ``--plan`` decides is the default of those flags.

    Raises
    ------
    ConfigError
        A flag that is unknown or malformed, or a plan that cannot be read or run.
    """
    parser = build_parser(prog)
    args = parser.parse_args(words)
    if args.model is None:
        parser.error("the following arguments are required: --model")
    args.planned = None
    if args.plan is not None:
        plan = load_plan(args.plan)
        parser.set_defaults(**planned_options(plan), planned=plan)
        parser.set_defaults(percent=None, place=[])
        args = parser.parse_args(words)
    return args


def request_from(args: argparse.Namespace) -> FlexGenRun:
    """The request that a parsed command line means.

    Raises
    ------
    ConfigError
        A flag that is refused or malformed.
    """
    if args.debug_mode is not None:
        raise ConfigError(
            f"--debug-mode {args.debug_mode}: FlexGen stops after 20 batches and gives no tokens; "
            f"use --cut-gen-len"
        )
    if args.log_file == "auto":
        raise ConfigError("--log-file auto: name the file; without the flag there is no log")
    prompts, batch_size = _prompts(args)
    # An option of the name of a field says the field; these say it in another form.
    given = vars(args)
    same = {each.name: given[each.name] for each in fields(FlexGenRun) if each.name in given}
    asked: dict[str, Any] = {
        **same,
        "prompts": prompts,
        "gpu_batch_size": batch_size,
        "plan": args.planned,
        "percent": _percent(args),
        "place": _places(args.place),
        "tiers": _tiers(args),
        "accelerator": args.accelerator or ("cuda" if torch.cuda.is_available() else "host"),
        "tune_budget_bytes": size("--tune-budget", args.tune_budget),
    }
    return FlexGenRun(**asked)


def _tiers(args: argparse.Namespace) -> tuple[TierLimit, ...]:
    """What ``--tier`` and ``--limit`` say together."""
    tiers, asked = limited([parse_tier(text) for text in args.tier], limits(args.limit))
    if not asked:
        return tiers
    machine = discover() if args.machine is None else load_machine(args.machine)
    return (*tiers, *tier_limits(machine, asked))


def _percent(args: argparse.Namespace) -> tuple[float, float, float, float, float, float]:
    if args.planned is not None:
        if args.percent is not None:
            raise ConfigError("--percent: the plan says where everything lives; leave it out")
        return ALL_ON_HOST
    if len(args.percent) != 6:
        raise ConfigError(f"--percent takes six numbers, got {len(args.percent)}")
    weights, weights_host, kv, kv_host, act, act_host = args.percent
    return (weights, weights_host, kv, kv_host, act, act_host)


def _prompts(args: argparse.Namespace) -> tuple[tuple[str, ...], int]:
    """Prompts and the batch size that they, or FlexGen's defaults, give."""
    batches = args.num_gpu_batches
    if args.prompts is None:
        size = 4 if args.gpu_batch_size is None else args.gpu_batch_size
        return (_TEST_PROMPT,) * max(0, size * batches), size
    prompts = read_prompts(args.prompts)
    if args.gpu_batch_size is not None:
        return prompts, args.gpu_batch_size
    if batches < 1 or len(prompts) % batches != 0:
        raise ConfigError(
            f"--num-gpu-batches {batches}: {len(prompts)} prompts cannot be shared out evenly"
        )
    return prompts, len(prompts) // batches


def _places(texts: Sequence[str]) -> dict[str, str]:
    places: dict[str, str] = {}
    for text in texts:
        kind, policy = parse_place(text)
        if kind in places:
            raise ConfigError(f"--place {text}: {kind} is placed twice")
        places[kind] = policy
    return places


def write_flexgen_log(report: FlexGenReport, file: str) -> None:
    """Append the lines that FlexGen's own benchmark logs, with the accelerator's peak as zero on
    a host without one.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    config = report.config
    tokens = report.prompt_len + report.gen_len
    write_benchmark_log(
        file,
        config.model_bytes(),
        config.cache_bytes(report.rows, tokens),
        config.hidden_bytes(report.rows, tokens),
        torch.cuda.max_memory_allocated() if report.accelerator == "cuda" else 0,
        report.projected,
        report.prefill_seconds,
        report.prefill_tokens_per_s,
        report.decode_seconds,
        report.decode_tokens_per_s,
        report.prefill_seconds + report.decode_seconds,
        report.tokens_per_s,
    )
