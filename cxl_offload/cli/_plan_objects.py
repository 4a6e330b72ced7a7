"""``cxl-offload plan objects``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import AsJson, names
from cxl_offload.cli._plan_inputs import MachineName, ProfileFile, profile_notes, read_machine
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs, size

if TYPE_CHECKING:
    from cxl_offload.plan.tensor_policy import TensorUse


def objects(
    given: Annotated[
        list[str],
        typer.Option("--object", help="NAME=SIZE, or NAME=SIZE,READ,WRITTEN; may be repeated."),
    ],
    machine: MachineName = None,
    profile: ProfileFile = None,
    trace: Annotated[
        str | None, typer.Option(help="Accesses by kind of tensor, of `flexgen --trace`.")
    ] = None,
    tiers: Annotated[str, typer.Option(help="The local tier, then those to spread over.")] = (
        "ldram,cxl"
    ),
    min_share: Annotated[float, typer.Option(help="Share from which an object is large.")] = 0.1,
    top_k: Annotated[int | None, typer.Option(help="Interleave so many of them.")] = None,
    as_json: AsJson = False,
) -> None:
    """Object-level interleaving: which objects to spread over tiers, and with which policy.

    Example: cxl-offload plan objects --machine epyc9354-cxl-a --object kv=40GiB --object x=1GiB
    """
    from cxl_offload.plan.machine_rates import MachineRates
    from cxl_offload.plan.tensor_policy import TierRate, tensor_policies

    numbers = MachineRates(read_machine(machine, profile))
    rates = [TierRate(name, numbers.read_bytes_per_s(name)) for name in names(tiers) or ()]
    found = tensor_policies(_uses(given, trace), rates, min_share=min_share, top_k=top_k)
    if as_json:
        entries = [{"name": e.name, "policy": e.policy, "reason": e.reason} for e in found]
        write_json("-", {"objects": entries})
        return
    made = table("Policies, in the order to allocate", "object", "policy", "why")
    for each in found:
        made.add_row(each.name, each.policy, each.reason)
    console = console_of()
    show(console, made)
    for note in (*numbers.notes, *profile_notes(profile)):
        console.print(f"Note: {note}.")


def _uses(given: list[str], trace: str | None) -> tuple[TensorUse, ...]:
    """Sizes and accesses, as they are given, recorded or assumed."""
    from cxl_offload.plan.tensor_policy import TensorUse, uses_by_kind, uses_of_trace
    from cxl_offload.sim.trace import Trace

    form = "NAME=SIZE or NAME=SIZE,READ,WRITTEN"
    counts = pairs(
        "--object", given, lambda text: [size("--object", t) for t in text.split(",")], form=form
    )
    for name, each in counts.items():
        if len(each) not in (1, 3):
            raise ConfigError(f"--object {name}: expected {form}")
    footprint = {name: each[0] for name, each in counts.items()}
    has_counts = {name: len(each) == 3 for name, each in counts.items()}
    counted = next((name for name, has in has_counts.items() if has), None)
    if counted is not None and (trace is not None or not all(has_counts.values())):
        why = (
            "--trace says what was read and written"
            if trace is not None
            else "READ,WRITTEN are compared, so all objects need them"
        )
        raise ConfigError(f"--object {counted}: {why}; leave them out")
    if trace is not None:
        return uses_of_trace(Trace.load(trace), footprint)
    if counted is not None:
        return tuple(
            TensorUse(name, nbytes, read, written)
            for name, (nbytes, read, written) in counts.items()
        )
    return uses_by_kind(footprint)
