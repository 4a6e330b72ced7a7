"""``cxl-offload plan fleet``: servers and their memory for a stream of requests, and the cost."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import MACHINE, AsJson, names
from cxl_offload.cli._plan_inputs import (
    AddedMemory,
    GpuOnPaper,
    MachineName,
    ModelName,
    ProfileFile,
    read_machine,
    seconds_asked,
)
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_table import NONE, console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs, size
from cxl_offload.plan.vllm.defaults import MOST_RUNNING
from cxl_offload.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from cxl_offload.plan.fleet.search import FleetOption
    from cxl_offload.plan.fleet.streams import RequestStream

_REQUESTS, _SERVERS, _TARGET = "Requests", "Servers", "Target"
_PROMPT, _ANSWER, _BLOCK = 512, 128, 512


def fleet(
    model: ModelName,
    ttft: Annotated[
        str, typer.Option(help="Time to the first token, e.g. 2s.", rich_help_panel=_TARGET)
    ],
    price: Annotated[
        list[str],
        typer.Option(
            help="NAME=AMOUNT in one currency; repeatable: server, dram and cxl (a GiB), card, "
            "watts, card_watts, kwh, years. server and dram must be given.",
            rich_help_panel=_SERVERS,
        ),
    ],
    machine: MachineName = None,
    profile: ProfileFile = None,
    add: AddedMemory = None,
    gpu: GpuOnPaper = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests, a line each: timestamp (ms), input_length, output_length, hash_ids.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s, without a trace.", rich_help_panel=_REQUESTS)
    ] = None,
    prompt_len: Annotated[
        int | None,
        typer.Option(
            help=f"With --rate: tokens of a prompt; default {_PROMPT}.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    gen_len: Annotated[
        int | None,
        typer.Option(
            help=f"With --rate: tokens to generate; default {_ANSWER}.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"With --trace: tokens of a block of it; default {_BLOCK}.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    per_token: Annotated[
        str | None,
        typer.Option(help="Time between later tokens, e.g. 50ms.", rich_help_panel=_TARGET),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(help="Sizes of DRAM to compare, e.g. 256GiB,512GiB.", rich_help_panel=MACHINE),
    ] = None,
    cxl: Annotated[
        str | None,
        typer.Option(help="Sizes of CXL memory, e.g. 0GiB,256GiB.", rich_help_panel=MACHINE),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            help="So many, whether they meet the target or not.", rich_help_panel=_SERVERS
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most sequences at once on one.", rich_help_panel=_SERVERS)
    ] = MOST_RUNNING,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of one, which share a model.", rich_help_panel=_SERVERS)
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Servers for a stream of requests, with how much DRAM and CXL memory each, and what they cost.

    Servers run vLLM. Waiting is simulated over the planned rates; the target is for 95 of 100
    requests. Example: cxl-offload plan fleet --model llama-65b --machine spr3-h100 --rate 20
    --ttft 2s --dram 256GiB,512GiB --price server=40000 --price dram=5
    """
    from cxl_offload.plan.fleet.prices import prices_of, refuse_unused
    from cxl_offload.plan.fleet.search import FleetPlanner, Target, as_document, options
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.vllm.plan import VllmRequest

    read = read_machine(machine, profile, add, gpu, gpus)
    stream = _stream(trace, rate, prompt_len, gen_len, block_tokens)
    prompt, generated = (math.ceil(each) for each in stream.lengths())
    request = VllmRequest(
        model=load_model(model), machine=read, prompt=prompt, generated=generated,
        model_name=model, most_sequences=max_num_seqs, gpus=gpus, replay=None,
    )  # fmt: skip
    target = Target(
        first_token=seconds_asked("--ttft", ttft),
        per_token=seconds_asked("--per-token", per_token),
    )
    priced = pairs("--price", price, float, form="NAME=AMOUNT, such as server=40000")
    prices = prices_of(priced)
    planner = FleetPlanner(request, stream, target, block_tokens=block_tokens or _BLOCK)
    installed = {
        kind: sum(node.capacity_bytes for node in read.usable_nodes() if node.kind.value == kind)
        for kind in ("dram", "cxl")
    }
    drams, cards = _sizes("dram", dram, installed["dram"]), _sizes("cxl", cxl, installed["cxl"])
    refuse_unused(priced, has_cards=any(cards))
    sizes = list(product(drams, cards))
    with progress_bar(keep=False, lines=not as_json) as tell:
        found = options(
            planner,
            sizes,
            prices,
            servers=servers,
            progress=lambda done: tell("sizes of memory planned", done, len(sizes)),
        )
    if as_json:
        document = {
            "kind": "predicted",
            "model": request.model.name,
            "machine": read.name,
            "requests_per_s": stream.rate,
            "options": [as_document(each) for each in found],
        }
        write_json("-", document)
        return
    _print(
        f"{format_number(stream.rate)} requests/s of {prompt} + {generated} tokens, "
        f"{model} on {read.name}",
        found,
    )


def _stream(
    trace: Path | None,
    rate: float | None,
    prompt_len: int | None,
    gen_len: int | None,
    block_tokens: int | None,
) -> RequestStream:
    """The requests of ``--trace`` or of ``--rate``; an option of the other one is refused."""
    from cxl_offload.plan.fleet.arrivals import load_arrivals
    from cxl_offload.plan.fleet.streams import DrawnStream, TraceStream

    if (trace is None) == (rate is None):
        raise ConfigError("requests: give --trace FILE or --rate REQUESTS/S, one of them")
    if rate is not None:
        if block_tokens is not None:
            raise ConfigError(
                f"--block-tokens {block_tokens}: requests of --rate have no blocks; leave it out"
            )
        return DrawnStream(
            rate,
            _PROMPT if prompt_len is None else prompt_len,
            _ANSWER if gen_len is None else gen_len,
        )
    for option, value in (("--prompt-len", prompt_len), ("--gen-len", gen_len)):
        if value is not None:
            raise ConfigError(f"{option} {value}: --trace says the lengths; leave it out")
    return TraceStream(load_arrivals(trace))  # type: ignore[arg-type]


def _sizes(kind: str, text: str | None, installed: int) -> list[int]:
    """Those asked for; what the machine has, and for CXL also none, where nothing is."""
    if text is not None:
        found = list(dict.fromkeys(size(f"--{kind}", part) for part in names(text) or ()))
        if not found:
            raise ConfigError(f"--{kind} {text}: no size in it, such as 256GiB")
        return found
    return [installed] if kind == "dram" or not installed else [0, installed]


def _print(what: str, found: list[FleetOption]) -> None:
    columns = (
        "DRAM", "CXL", "servers", "busy", "1M tokens cost", "1 hour costs", "first token, p50",
        "p95", "later tokens, p95", "KV found", "a card pays below",
    )  # fmt: skip
    made = table(f"{what} (predicted; waiting simulated)", *columns, right=columns)
    console = console_of(piped_width=140)
    for each in found:
        sizes = [format_bytes(each.memory.dram_bytes), format_bytes(each.memory.cxl_bytes)]
        seen = each.seen
        if seen is None:
            made.add_row(*sizes, *[NONE] * (len(columns) - 2))
            continue
        card = each.break_even_card
        made.add_row(
            *sizes, str(each.servers), f"{each.load:.0%}",
            format_number(each.cost_per_million), format_number(each.cost_per_hour),
            format_seconds(seen.first_token[0]), format_seconds(seen.first_token[1]),
            format_seconds(seen.per_token[1]), f"{each.hit_rate:.1%}",
            NONE if card is None else "never" if card <= 0 else format_number(card),
        )  # fmt: skip
    show(console, made)
    console.print(
        "\nCosts are in the currency of --price; a card pays below that price of one. p50 and p95: "
        "at most so long for 50 and 95 of 100 requests. Busy: share of the time. KV found: share "
        "of the prompts' tokens."
    )
    for each in found:
        if each.reason:
            memory = each.memory
            console.print(
                f"{format_bytes(memory.dram_bytes)} DRAM, {format_bytes(memory.cxl_bytes)} CXL: "
                f"{each.reason}"
            )
