"""``cxl-offload plan cache`` and ``plan compare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._plan_words import KINDS, PLACES
from cxl_offload.cli._progress import counted, progress_bar
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.plan.headline import copies_in_words
from cxl_offload.units import GIB, format_bytes, format_number, format_seconds, parse_bytes

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan

_SIZES = "0GiB,16GiB,64GiB,256GiB,1TiB"


def cache(
    trace: Annotated[Path, typer.Option(help="Requests, a line each: hash_ids, input_length.")],
    model: Annotated[str, typer.Option(help="The model whose KV is kept.")],
    machine: Annotated[str, typer.Option(help="A machine file or shipped name.")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block of the trace.")] = 512,
    sizes: Annotated[str, typer.Option(help="Sizes of the cache to answer for.")] = _SIZES,
    as_json: AsJson = False,
) -> None:
    """Hit rate and time to the first token of a host KV cache, by its size and tier.

    Example: cxl-offload plan cache --trace t.jsonl --model llama-3-8b --machine epyc9354-cxl-a
    """
    from cxl_offload.plan.cache import TierSize, hit_rate, load_requests, mean_ttft_s
    from cxl_offload.plan.hardware import hardware_of
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.topology import load_machine

    config, hardware = load_model(model), hardware_of(load_machine(machine))
    block_bytes = block_tokens * config.kv_bytes_per_token()
    if not block_bytes:
        raise ConfigError(f"{config.name} is an encoder ({config.family}): it keeps no KV")
    requests = load_requests(trace)
    rows: list[dict[str, Any]] = []
    with progress_bar(keep=False, lines=not as_json) as tell:
        for nbytes in counted(list(map(parse_bytes, sizes.split(","))), "sizes of the cache", tell):
            blocks = nbytes / block_bytes
            ttft = {
                node.where: mean_ttft_s(
                    requests,
                    [TierSize(blocks, node.copy_bytes_per_s)],
                    model=config,
                    hardware=hardware,
                    block_tokens=block_tokens,
                )
                for node in hardware.nodes
            }
            rows.append({"bytes": nbytes, "hit_rate": hit_rate(requests, blocks), "ttft_s": ttft})
    if as_json:
        document = {"requests": len(requests), "block_bytes": block_bytes, "sizes": rows}
        write_json("-", {"kind": "predicted", **document})
        return
    _print_cache(f"{len(requests)} requests, {config.name} on {hardware.machine}", rows)


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
    faster = "faster" if gain >= 0 else "slower"
    console.print(f"\nThe second is {abs(gain):.1%} {faster} than the first (predicted).")
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
