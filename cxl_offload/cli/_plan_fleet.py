"""``cxl-offload plan fleet``: servers and their memory for a stream of requests, and the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._fleet_report import fleet_document, print_fleet
from cxl_offload.cli._options import MACHINE, AsJson, names
from cxl_offload.cli._plan_inputs import (
    AddedMemory,
    GpuOnPaper,
    ModelName,
    ProfileFile,
    profile_notes,
    read_machine,
    seconds_asked,
)
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_table import console_of
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import size
from cxl_offload.plan.vllm.defaults import MOST_RUNNING
from cxl_offload.units import format_number

if TYPE_CHECKING:
    from cxl_offload.plan.fleet.kinds import ServerKind
    from cxl_offload.plan.fleet.streams import RequestStream
    from cxl_offload.plan.vllm.plan import VllmRequest
    from cxl_offload.topology import Machine

_REQUESTS, _SERVERS, _TARGET = "Requests", "Servers", "Target"
_PROMPT, _ANSWER, _BLOCK = 512, 128, 512


# Long, with many parameters: a line for each option of the command line and field of the request.
def fleet(
    model: ModelName,
    ttft: Annotated[
        str, typer.Option(help="Time to the first token, e.g. 2s.", rich_help_panel=_TARGET)
    ],
    price: Annotated[
        list[str],
        typer.Option(
            help="NAME=AMOUNT in one currency; repeatable: server, dram and cxl (a GiB), card, "
            "watts, card_watts, kwh, years. server and dram must be given. MACHINE:NAME=AMOUNT: "
            "of one of several machines.",
            rich_help_panel=_SERVERS,
        ),
    ],
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help="A machine file or shipped name; by default this machine. Several are compared.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
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
    --ttft 2s --dram 256GiB,512GiB --cxl 0GiB --price server=40000 --price dram=5
    """
    from cxl_offload.plan.fleet.kinds import KindPlanner
    from cxl_offload.plan.vllm.serving import TokenTargets

    names_of = _machine_names(machine, profile)
    stream = _stream(trace, rate, prompt_len, gen_len, block_tokens)
    target = TokenTargets(
        first_token=seconds_asked("--ttft", ttft),
        per_token=seconds_asked("--per-token", per_token),
    )
    asked = partial(
        _request, model, stream=stream, most_sequences=max_num_seqs, gpus=gpus,
    )  # fmt: skip
    requests = [asked(read_machine(each, profile, add, gpu, gpus)) for each in names_of]
    kinds = _kinds(requests, names_of, dram, cxl, price)
    with progress_bar(keep=False, lines=not as_json) as tell:
        planner = KindPlanner(
            kinds, stream, target, block_tokens=block_tokens or _BLOCK, progress=tell
        )
        answers = planner.answers(servers)
        mixture = planner.mixture() if servers is None else None
    if as_json:
        write_json("-", fleet_document(answers, mixture, stream.rate))
        return
    prompt, generated = requests[0].prompt, requests[0].generated
    asked_for = f"{format_number(stream.rate)} requests/s of {prompt} + {generated} tokens, {model}"
    print_fleet(asked_for, answers, mixture)
    for note in profile_notes(profile):
        console_of().print(f"\nNote: {note}.")


def _machine_names(machines: list[str] | None, profile: str | None) -> list[str | None]:
    """What ``--machine`` says, each once; None: the machine at hand."""
    if not machines:
        return [None]
    if len(machines) > 1 and profile is not None:
        raise ConfigError(
            f"--profile {profile}: it is of one machine, and {len(machines)} are compared; "
            "leave it out"
        )
    for each in machines:
        if machines.count(each) > 1:
            raise ConfigError(f"--machine {each} is given twice; each once")
    return list(machines)


def _request(
    model: str, machine: Machine, *, stream: RequestStream, most_sequences: int, gpus: int
) -> VllmRequest:
    """What is asked of a machine: requests of the stream's mean lengths."""
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.vllm.plan import VllmRequest

    prompt, generated = (math.ceil(each) for each in stream.lengths())
    return VllmRequest(
        model=load_model(model), machine=machine, prompt=prompt, generated=generated,
        model_name=model, most_sequences=most_sequences, gpus=gpus, replay=None,
    )  # fmt: skip


def _kinds(
    requests: Sequence[VllmRequest],
    asked_as: Sequence[str | None],
    dram: str | None,
    cxl: str | None,
    price: Sequence[str],
) -> list[ServerKind]:
    """The machines with their sizes of memory and their prices."""
    from cxl_offload.cli._fleet_prices import Priced, prices_by_machine
    from cxl_offload.plan.fleet.kinds import ServerKind

    found = [request.machine for request in requests]
    for each in found:
        if sum(each.name == other.name for other in found) > 1:
            raise ConfigError(
                f"--machine: two are called {each.name}; give one of their files another name"
            )
    sizes = [_sizes_of(machine, dram, cxl, several=len(found) > 1) for machine in found]
    priced = [
        Priced(
            names=(machine.name, *([] if asked is None else [asked])),
            has_cards=any(each[1] for each in pairs),
        )
        for machine, asked, pairs in zip(found, asked_as, sizes, strict=True)
    ]
    return [
        ServerKind(request=request, sizes=pairs, prices=prices)
        for request, pairs, prices in zip(
            requests, sizes, prices_by_machine(price, priced), strict=True
        )
    ]


def _sizes_of(
    machine: Machine, dram: str | None, cxl: str | None, *, several: bool
) -> list[tuple[int, int]]:
    """Pairs of DRAM and CXL to compare; beside other machines one without CXL is asked for none."""
    installed = {
        kind: sum(node.capacity_bytes for node in machine.usable_nodes() if node.kind.value == kind)
        for kind in ("dram", "cxl")
    }
    drams, cards = _sizes("dram", dram, installed["dram"]), _sizes("cxl", cxl, installed["cxl"])
    if several and not installed["cxl"]:
        cards = [nbytes for nbytes in cards if not nbytes] or cards
    return list(product(drams, cards))


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
    block = block_tokens or _BLOCK
    return TraceStream(load_arrivals(trace, block_tokens=block))  # type: ignore[arg-type]


def _sizes(kind: str, text: str | None, installed: int) -> list[int]:
    """Those asked for; what the machine has, and for CXL also none, where nothing is."""
    if text is not None:
        found = list(dict.fromkeys(size(f"--{kind}", part) for part in names(text) or ()))
        if not found:
            raise ConfigError(f"--{kind} {text}: no size in it, such as 256GiB")
        return found
    return [installed] if kind == "dram" or not installed else [0, installed]
