"""What ``cxl-offload plan fleet`` found, as a table with the answer above it, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cxl_offload.cli._report_table import NONE, console_of, show, table
from cxl_offload.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from cxl_offload.plan.fleet.kinds import FleetPart, KindAnswer, Mixture
    from cxl_offload.plan.fleet.search import FleetOption

_COLUMNS = (
    "DRAM", "CXL", "servers", "busy", "1M tokens cost", "1 hour costs", "first token, p50",
    "p95", "later tokens, p95", "KV found", "a card pays below",
)  # fmt: skip
_WIDTH, _MACHINE_WIDTH = 140, 18


def fleet_document(
    answers: Sequence[KindAnswer], mixture: Mixture | None, requests_per_s: float
) -> dict[str, Any]:
    """For JSON: options of all kinds, the cheapest first, the answer of each, and a mixture."""
    from cxl_offload.plan.fleet.kinds import answer_document, mixture_document
    from cxl_offload.plan.fleet.search import as_document

    first = answers[0]
    several = len(answers) > 1
    return {
        "kind": "predicted",
        "model": first.kind.request.model.name,
        "machine": None if several and first.cheapest is None else first.kind.name,
        "requests_per_s": requests_per_s,
        "options": [
            {"machine": name, **as_document(option)} for name, option in _all_options(answers)
        ],
        "kinds": [answer_document(each) for each in answers],
        "mixture": mixture_document(mixture),
    }


def print_fleet(asked: str, answers: Sequence[KindAnswer], mixture: Mixture | None) -> None:
    """The cheapest kind in words, a table of all options, and why some have no servers.

    Parameters
    ----------
    asked
        The requests and the model, for the title.
    """
    several = len(answers) > 1
    console = console_of(piped_width=_WIDTH + _MACHINE_WIDTH * several)
    if several:
        for said in (_cheapest_in_words(answers), *_mixture_in_words(answers, mixture)):
            console.print(said)
    where = f"{len(answers)} machines" if several else answers[0].kind.name
    columns = ("machine", *_COLUMNS) if several else _COLUMNS
    made = table(f"{asked} on {where} (predicted; waiting simulated)", *columns, right=_COLUMNS)
    for name, option in _all_options(answers):
        made.add_row(*([name] if several else []), *_row(option))
    show(console, made)
    console.print(
        "\nCosts are in the currency of --price; a card pays below that price of one. p50 and p95: "
        "at most so long for 50 and 95 of 100 requests. Busy: share of the time. KV found: share "
        "of the prompts' tokens."
    )
    for name, option in _all_options(answers):
        if option.reason:
            console.print(f"{f'{name}, ' if several else ''}{_memory(option)}: {option.reason}")
    for each in answers:
        if each.refused is not None:
            console.print(f"{each.kind.name}: {each.refused}")


def _all_options(answers: Sequence[KindAnswer]) -> list[tuple[str, FleetOption]]:
    """Of all kinds, with the machine's name; the cheapest first, those without servers last."""
    found = [(each.kind.name, option) for each in answers for option in each.options]
    return sorted(found, key=lambda each: (not each[1].servers, each[1].cost_per_hour))


def _row(option: FleetOption) -> list[str]:
    sizes = [format_bytes(option.memory.dram_bytes), format_bytes(option.memory.cxl_bytes)]
    seen, card = option.seen, option.break_even_card
    if seen is None:
        return [*sizes, *[NONE] * (len(_COLUMNS) - 2)]
    return [
        *sizes, str(option.servers), f"{option.load:.0%}",
        format_number(option.cost_per_million), format_number(option.cost_per_hour),
        format_seconds(seen.first_token[0]), format_seconds(seen.first_token[1]),
        format_seconds(seen.per_token[1]), f"{option.hit_rate:.1%}",
        NONE if card is None else "never" if card <= 0 else format_number(card),
    ]  # fmt: skip


def _memory(option: FleetOption) -> str:
    memory = option.memory
    return f"{format_bytes(memory.dram_bytes)} DRAM, {format_bytes(memory.cxl_bytes)} CXL"


def _servers(machine: str, option: FleetOption) -> str:
    count = f"{option.servers} server{'s' * (option.servers != 1)}"
    return f"{count} {machine} with {_memory(option)}"


def _cheapest_in_words(answers: Sequence[KindAnswer]) -> str:
    first, cheapest = answers[0].kind.name, answers[0].cheapest
    if cheapest is None:
        return "No machine meets the target."
    cost = format_number(cheapest.cost_per_million)
    return f"The cheapest kind: {_servers(first, cheapest)}; 1M tokens cost {cost}."


def _mixture_in_words(answers: Sequence[KindAnswer], mixture: Mixture | None) -> list[str]:
    """What the best mixture is, and whether it is the mixture that saves; nothing without one."""
    if mixture is None:
        return []
    cost, cheapest = mixture.cost_per_million, answers[0].cheapest
    saved = None if cheapest is None else 1 - cost / cheapest.cost_per_million
    verdict = (
        ""
        if saved is None
        else f", {saved:.1%} less than one kind"
        if saved > 0
        else f", {-saved:.1%} more than one kind"
    )
    said = [
        f"The best mixture: prompts of up to {mixture.longest} tokens "
        f"({_part(mixture.short)}), longer ones ({_part(mixture.long)}); "
        f"1M tokens cost {format_number(cost)}{verdict}."
    ]
    same = mixture.one_kind_per_million
    if saved is not None and saved > 0 and same is not None and same <= cost:
        said.append(
            f"Divided in the same way, servers of one kind cost {format_number(same)}: it is the "
            "division that saves, not the mixture."
        )
    return said


def _part(part: FleetPart) -> str:
    return f"{part.share:.0%} of requests: {_servers(part.machine, part.option)}"
