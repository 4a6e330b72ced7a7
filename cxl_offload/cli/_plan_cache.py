"""``cxl-offload plan cache`` and ``plan compare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._plan_inputs import (
    AddedMemory,
    GpuOnPaper,
    MachineName,
    ProfileFile,
    profile_notes,
    read_machine,
)
from cxl_offload.cli._plan_words import KINDS, PLACES
from cxl_offload.cli._progress import counted, progress_bar
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs
from cxl_offload.plan.headline import copies_in_words
from cxl_offload.units import GIB, format_bytes, format_number, format_seconds, parse_bytes

if TYPE_CHECKING:
    from cxl_offload.plan.fleet.cache import CachedRequest, PromptCosts, TierSize
    from cxl_offload.plan.hardware import HostNode
    from cxl_offload.plan.model.config import ModelConfig
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.plan.vllm.steps import ServerSteps
    from cxl_offload.topology import Machine

_SIZES = "0GiB,16GiB,64GiB,256GiB,1TiB"


# Long, with many parameters: a line for each option of the command line and field of the request.
def cache(
    trace: Annotated[Path, typer.Option(help="Requests, a line each: hash_ids, input_length.")],
    model: Annotated[str, typer.Option(help="The model whose KV is kept.")],
    machine: MachineName = None,
    profile: ProfileFile = None,
    add: AddedMemory = None,
    gpu: GpuOnPaper = None,
    gen_len: Annotated[int, typer.Option(min=1, help="Tokens of the answers.")] = 128,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    sizes: Annotated[str, typer.Option(help="Sizes of the cache to answer for.")] = _SIZES,
    first: Annotated[
        list[str] | None,
        typer.Option(
            help="TIER=SIZE that the cache fills before the tier whose sizes are answered for, "
            "such as ldram=64GiB; repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hit rate and time to the first token of a host KV cache, by its size and tier.

    Example: cxl-offload plan cache --trace t.jsonl --model llama-3-8b --machine epyc9354-cxl-a
    """
    from cxl_offload.plan.fleet.cache import load_requests
    from cxl_offload.plan.model.file import load_model

    config, read = load_model(model), read_machine(machine, profile, add, gpu)
    block_bytes = block_tokens * config.kv_bytes_per_token()
    if not block_bytes:
        raise ConfigError(f"{config.name} is an encoder ({config.family}): it keeps no KV")
    requests = load_requests(trace, block_tokens=block_tokens)
    longest = max(each.tokens for each in requests)
    if longest > config.positions:
        raise ConfigError(
            f"--trace {trace}: a prompt of {longest} tokens; {config.name} reads at most "
            f"{config.positions}"
        )
    curve = _curve(requests, config, read, (model, gen_len, block_tokens))
    upper = pairs("--first", first, parse_bytes, form="TIER=SIZE, such as ldram=64GiB")
    with progress_bar(keep=False, lines=not as_json) as tell:
        asked = counted(
            [parse_bytes(each) for each in sizes.split(",")], "sizes of the cache", tell
        )
        rows = [curve.row(nbytes, upper) for nbytes in asked]
    copied = round(curve.steps.offload_bytes)
    if as_json:
        document = {"requests": len(curve.requests), "block_bytes": block_bytes, "sizes": rows}
        write_json("-", {"kind": "predicted", **document, "weights_copied_a_step_bytes": copied})
        return
    below = "".join(f", below {format_bytes(n)} in {PLACES.get(t, t)}" for t, n in upper.items())
    _print_cache(f"{len(curve.requests)} requests, {config.name} on {read.name}{below}", rows)
    largest = max(parse_bytes(each) for each in sizes.split(","))
    smaller = ", ".join(
        f"{format_bytes(node.usable_bytes)} in {PLACES.get(node.where, node.where)}"
        for node in curve.costs.hardware.nodes
        if node.where not in upper and node.usable_bytes < largest
    )
    if smaller:
        console_of().print(f"\nThere are {smaller}; larger caches are what more would bring.")
    if copied:
        console_of().print(
            f"\n{format_bytes(copied)} of weights are off the GPU, as planned for vLLM; every step "
            "of a prompt copies them."
        )
    for note in profile_notes(profile):
        console_of().print(f"\nNote: {note}.")


def _curve(
    requests: list[CachedRequest],
    config: ModelConfig,
    machine: Machine,
    named: tuple[str, int, int],
) -> _Curve:
    """With vLLM as it is planned for the mean of the requests; ``named``: model, answer, block."""
    from cxl_offload.plan.fleet.cache import PromptCosts
    from cxl_offload.plan.vllm.plan import VllmRequest, planned_server

    model, generated, block_tokens = named
    mean = round(sum(each.tokens for each in requests) / len(requests))
    request = VllmRequest(
        model=config, machine=machine, prompt=max(1, min(mean, config.positions - generated)),
        generated=generated, model_name=model, replay=None,
    )  # fmt: skip
    steps, hardware = planned_server(request)
    return _Curve(requests, PromptCosts(config, hardware, block_tokens), steps)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Answers by the size of the last tier."""

    requests: Sequence[CachedRequest]
    costs: PromptCosts
    steps: ServerSteps

    def row(self, nbytes: int, upper: Mapping[str, int]) -> dict[str, Any]:
        """So many bytes in each tier alone, below those of ``upper``."""
        from cxl_offload.plan.fleet.cache import hit_rate, mean_ttft_s

        nodes = {node.where: node for node in self.costs.hardware.nodes}
        for tier in upper:
            if tier not in nodes:
                raise ConfigError(f"--first {tier}: the machine has {', '.join(nodes)}")
            if upper[tier] > nodes[tier].usable_bytes:
                raise ConfigError(
                    f"--first {tier}={format_bytes(upper[tier])}: the tier has "
                    f"{format_bytes(nodes[tier].usable_bytes)}; suppose more with --add"
                )
        before = [self._tier(nodes[tier], size) for tier, size in upper.items()]
        ttft = {
            where: mean_ttft_s(
                self.requests, [*before, self._tier(node, nbytes)], costs=self.costs,
                steps=self.steps,
            )
            for where, node in nodes.items()
            if where not in upper
        }  # fmt: skip
        blocks = sum(each.blocks for each in before) + nbytes / self.costs.block_bytes
        return {"bytes": nbytes, "hit_rate": hit_rate(self.requests, blocks), "ttft_s": ttft}

    def _tier(self, node: HostNode, nbytes: int) -> TierSize:
        from cxl_offload.plan.fleet.cache import TierSize

        return TierSize(nbytes / self.costs.block_bytes, node.copy_bytes_per_s)


def _print_cache(what: str, rows: list[dict[str, Any]]) -> None:
    places = list(rows[0]["ttft_s"])
    columns = ("cache", "blocks found", *(f"first token, in {place}" for place in places))
    known = "hits exact for least recently used; times predicted, without waiting"
    made = table(f"{what} ({known})", *columns, right=columns)
    for row in rows:
        times = [format_seconds(row["ttft_s"][place]) for place in places]
        made.add_row(format_bytes(row["bytes"]), f"{row['hit_rate']:.1%}", *times)
    show(console_of(), made)


def compare(
    first: Annotated[Path, typer.Argument(help="A plan.yaml.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Two plans side by side.

    Example: cxl-offload plan compare without.yaml with.yaml
    """
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.plan.two_plans import compare_plans

    plans = [load_plan(first), load_plan(second)]
    compared = compare_plans(*plans)
    gain = compared.gain
    if as_json:
        write_json("-", {"kind": "predicted", "gain": gain, "rows": _rows(plans, {})})
        return
    console = console_of()
    for name, file in (("first", first), ("second", second)):
        console.print(f"{name}: {file}", soft_wrap=True)
    made = table("Predicted", "", "first", "second")
    for name, cells in _rows(plans, PLACES).items():
        made.add_row(_ROWS.get(name, name), *cells)
    show(console, made)
    said = "How much faster the second is cannot be said"
    if gain is not None:
        faster = "faster" if gain >= 0 else "slower"
        said = f"The second is {abs(gain):.1%} {faster} than the first (predicted)"
    console.print(f"\n{said}.")
    for note in compared.notes:
        console.print(f"Note: {note}.")


def _rows(plans: Sequence[Plan], places: Mapping[str, str]) -> dict[str, list[str]]:
    """Cells of both plans by name; homes are called as ``places`` says."""
    rows = {name: [pick(plan) for plan in plans] for name, pick in _FIGURES.items()}
    for kind in dict.fromkeys(home.kind for plan in plans for home in plan.homes):
        rows[kind] = [_placed(plan, kind, places) for plan in plans]
    for phase in dict.fromkeys(phase.name for plan in plans for phase in plan.phases):
        rows[phase] = [_phase(plan, phase) for plan in plans]
    return rows


_FIGURES: dict[str, Callable[[Plan], str]] = {
    "model": lambda plan: plan.model,
    "machine": lambda plan: plan.machine,
    "executor": lambda plan: plan.executor,
    "tokens/s": lambda plan: format_number(plan.tokens_per_s),
    "batch": lambda plan: f"{plan.batch.size} x {plan.batch.count}",
    "lengths": lambda plan: f"{plan.batch.prompt} + {plan.batch.tokens}",
    "GPU": lambda plan: format_bytes(plan.gpu_bytes),
    "host": lambda plan: f"{sum(plan.node_bytes.values()) / GIB:.4g} GiB",
    "drive": lambda plan: format_bytes(plan.drive_bytes),
    "CXL memory": lambda plan: f"{'used' if plan.cxl.used else 'left alone'}: {plan.cxl.reason}",
    "copies": lambda plan: "-" if plan.copies is None else copies_in_words(plan.copies),
}

_ROWS = {
    "executor": "runs with",
    "batch": "sequences at once x batches",
    "lengths": "tokens of a prompt + of an answer",
    "GPU": "bytes on the GPU",
    "host": "bytes in host memory",
    "drive": "bytes on the drive",
    "copies": "copies of weights",
    **KINDS,
}
"""What rows are called for people."""


def _placed(plan: Plan, kind: str, places: Mapping[str, str]) -> str:
    found = plan.of(kind).items()
    return ", ".join(f"{places.get(where, where)} {format_bytes(n)}" for where, n in found) or "-"


def _phase(plan: Plan, name: str) -> str:
    for phase in plan.phases:
        if phase.name == name:
            return f"{format_seconds(phase.seconds)}, {phase.bottleneck}"
    return "-"
