"""``cxl-offload profile``: measures latency and bandwidth of this machine's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cxl_offload.cli._operator_report import print_operators
from cxl_offload.cli._options import AsJson
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_file import ReportFile, findings_here, write_page
from cxl_offload.cli._report_table import NONE, WIDE, console_of, need_matplotlib, show, table
from cxl_offload.errors import ConfigError
from cxl_offload.profile.model import Estimate, OperatorProfile, PathProfile, Profile
from cxl_offload.report import machine_section, profile_sections
from cxl_offload.units import MIB, counted, format_bandwidth, format_bytes, parse_bytes

if TYPE_CHECKING:
    from cxl_offload.memory import Session


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("profile")(profile)


# Long, with many parameters: a line for each option of the command line and field of the request.
def profile(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer points: at most 8 s instead of 110 s a path.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profile as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a PNG of each thing measured.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Nodes or tiers to measure; default: all usable."),
    ] = None,
    initiators: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Nodes from whose CPUs; default: all with CPUs."),
    ] = None,
    interleave: Annotated[
        list[str] | None,
        typer.Option(metavar="N,M[,...]", help="Sweep interleaves over these; repeatable."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.01, help="Bound for each path and each sweep.")
    ] = None,
    working_set: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="E.g. 64MiB; default: 4 to 8 last-level caches."),
    ] = None,
    copy_rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure too how host copies are quickest, and write the table."
        ),
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="Time torch's operators on cpu or cuda: decode speed is predicted from them.",
        ),
    ] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency and bandwidth of every node, and copies between it and every GPU.

    A path is the CPUs of one node on the memory of one node. Let nothing else run meanwhile.

    Example: cxl-offload profile --quick --output profile.json
    """
    from cxl_offload.memory import Session
    from cxl_offload.profile import FULL, QUICK, measure_machine, save_profile
    from cxl_offload.profile.store import profile_text

    check_outputs({"--output": output, "--copy-rules": copy_rules, "--report": report})
    for device in operators or ():
        _check_device(device)
    if plot is not None:
        need_matplotlib("--plot")
    session = Session.linux()
    with progress_bar() as progress:
        found = measure_machine(
            session,
            mode=QUICK if quick else FULL,
            seconds_per_path=seconds,
            nodes=_nodes(session, nodes),
            initiators=_nodes(session, initiators),
            interleaves=None
            if interleave is None
            else [tuple(_nodes(session, chosen) or ()) for chosen in interleave],
            working_set_bytes=None if working_set is None else parse_bytes(working_set),
            progress=progress,
        )
    if operators:
        found = replace(found, operators=tuple(map(_operators, dict.fromkeys(operators))))
    said: list[str] = []
    if output is not None:  # all files before what is printed, whose reader may stop early
        save_profile(found, output)
        said.append(f"\nwritten: {output}")
    if copy_rules is not None:
        said.append(f"\nhost copies: {_measure_copies(session, copy_rules)}")
    if report is not None:
        machine = found.applied_to(session.machine)
        sections = [*profile_sections(found), machine_section(machine), *findings_here(machine)]
        write_page(report, f"Profile of {machine.name}", sections)
    if plot is not None:
        from cxl_offload.profile.plot import save_plots

        said += [f"written: {picture}" for picture in save_plots(found, plot)]
    if as_json:
        typer.echo(profile_text(found), nl=False)
    else:
        print_profile(console_of(piped_width=WIDE), found)
    console = Console(stderr=True) if as_json else console_of(piped_width=WIDE)
    for line in said:
        console.print(line, soft_wrap=True)


def _check_device(device: str) -> None:
    """Before the minutes that the paths take."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--operators {device}: must be cpu or cuda")
    try:
        from cxl_offload.profile.operators.measure import device_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"--operators {device}: {error.name} is not installed") from None
    device_of(device)


def _operators(device: str) -> OperatorProfile:
    from cxl_offload.profile.operators.measure import measure_operators

    with progress_bar() as progress:
        return measure_operators(device, progress=progress)


def _nodes(session: Session, text: str | None) -> list[int] | None:
    """Node ids of a list of ids and names of tiers."""
    if text is None:
        return None
    found: list[int] = []
    for name in text.split(","):
        name = name.strip()
        if name.isdecimal():
            found.append(int(name))
        else:
            found += session.machine.tier(name).nodes
    return found


def print_profile(console: Console, found: Profile) -> None:
    """The tables of a profile."""
    how = "measured" if found.measured else "simulated"
    machine = found.machine
    console.print(
        f"{machine.cpu_model}, {counted(machine.cpus, 'CPU')}, "
        f"{counted(len(machine.nodes), 'node')}, kernel {machine.kernel}: {how} {found.date} "
        f"in {found.seconds:.0f} s with {machine.isa} "
        f"loops ({found.mode})"
    )
    _print_latencies(console, found, how)
    _print_curves(console, found, how)
    _print_loaded(console, found, how)
    _print_mixes(console, found, how)
    _print_sweeps(console, found, how)
    _print_copies(console, found, how)
    for each in found.operators:
        print_operators(console, each, how)
    notes = [f"{_path_name(path)}: {note}" for path in found.paths for note in path.notes] + list(
        found.notes
    )
    if notes:
        console.print()
    for note in notes:
        console.print(f"note: {note}")


def _path_name(path: PathProfile) -> str:
    return f"{path.initiator} -> {path.node}"


def _spread(value: Estimate, scale: float) -> str:
    return f"{value.low / scale:.3g} to {value.high / scale:.3g}"


def _print_latencies(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Idle latency, ns a dependent load in random order ({how})",
        *("CPUs -> memory", "pages", "median", "10 % to 90 %", "over"),
        right=("median", "10 % to 90 %", "over"),
    )
    for path in found.paths:
        for entry in path.latencies:
            made.add_row(
                _path_name(path),
                entry.pages,
                f"{entry.latency_ns.median:.1f}",
                _spread(entry.latency_ns, 1.0),
                format_bytes(entry.working_set_bytes),
            )
    show(console, made)


def _print_curves(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Bandwidth of the program's own loads and stores ({how})",
        *("CPUs -> memory", "what", "pages", "1 thread", "peak", "saturated by", "tried up to"),
        right=("1 thread", "peak", "saturated by", "tried up to"),
    )
    for path in found.paths:
        for curve in path.curves:
            first = curve.points[0]
            alone = format_bandwidth(first.bandwidth_bytes_per_s.median)
            made.add_row(
                _path_name(path),
                curve.kind,
                curve.pages,
                alone if first.threads == 1 else NONE,
                format_bandwidth(curve.peak_bytes_per_s),
                counted(curve.saturation_threads, "thread") if len(curve.points) > 1 else NONE,
                counted(curve.points[-1].threads, "thread"),
            )
    show(console, made)


def _print_loaded(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Latency under load ({how})",
        *("CPUs -> memory", "load", "pause after 4 KiB", "bandwidth", "ns a load", "10 % to 90 %"),
        right=("pause after 4 KiB", "bandwidth", "ns a load", "10 % to 90 %"),
    )
    for path in found.paths:
        for curve in path.loaded:
            for point in curve.points:
                made.add_row(
                    _path_name(path),
                    counted(curve.threads, "thread"),
                    f"{point.delay_ns} ns",
                    format_bandwidth(point.bandwidth_bytes_per_s),
                    f"{point.latency_ns.median:.1f}",
                    _spread(point.latency_ns, 1.0),
                )
    show(console, made)


def _print_mixes(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Reads mixed with writes past the caches ({how})",
        *("CPUs -> memory", "reads:writes", "threads", "bandwidth"),
        right=("reads:writes", "threads", "bandwidth"),
    )
    for path in found.paths:
        for mix in path.mixes:
            made.add_row(
                _path_name(path),
                f"{mix.reads}:{mix.writes}",
                str(mix.threads),
                format_bandwidth(mix.bandwidth_bytes_per_s.median),
            )
    show(console, made)


def _print_sweeps(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Weighted interleaves, loads ({how})",
        *("CPUs of", "nodes", "weights", "bandwidth"),
        right=("bandwidth",),
    )
    for sweep in found.sweeps:
        for point in sweep.points:
            mark = "  best" if point == sweep.best else ""
            made.add_row(
                str(sweep.initiator),
                ", ".join(map(str, sweep.nodes)),
                ":".join(str(point.weights.get(node, 0)) for node in sweep.nodes),
                format_bandwidth(point.bandwidth_bytes_per_s.median) + mark,
            )
    show(console, made)


def _print_copies(console: Console, found: Profile, how: str) -> None:
    made = table(
        f"Copies between GPUs and nodes, pinned ({how})",
        *("GPU", "node", "to the GPU", "to the host", "64 bytes to", "64 bytes from"),
        right=("to the GPU", "to the host", "64 bytes to", "64 bytes from"),
    )
    for copy in found.copies:
        made.add_row(
            copy.gpu,
            str(copy.node),
            format_bandwidth(copy.h2d_bandwidth_bytes_per_s.median),
            format_bandwidth(copy.d2h_bandwidth_bytes_per_s.median),
            f"{copy.h2d_latency_ns.median / 1e3:.2f} µs",
            f"{copy.d2h_latency_ns.median / 1e3:.2f} µs",
        )
    if found.copies:
        show(console, made)


def _measure_copies(session: Session, file: Path) -> str:
    """Writes the table of host copies on the local node; returns it in words."""
    from cxl_offload.profile.measure.effort import ASSUMED_CACHE_BYTES
    from cxl_offload.transfer.host import RULES_VARIABLE, measure_rules, save_rules

    local = session.machine.node(session.machine.initiator)
    free = local.capacity_bytes if local.free_bytes is None else local.free_bytes
    # Several last-level caches, or copies of cached bytes would be measured.
    room = min(8 * (local.llc_bytes or ASSUMED_CACHE_BYTES), free // 8) // MIB * MIB
    if room < MIB:
        raise ConfigError(f"--copy-rules: node {local.id} has {format_bytes(free)} free; too few")
    target, source = (session.allocate(room, f"bind:{local.id}") for _ in range(2))
    rules = measure_rules(target=target.address, source=source.address, room_bytes=room)
    save_rules(file, rules)
    ways = [
        f"from {format_bytes(rule.from_bytes)} on "
        f"{'past the caches' if rule.non_temporal else 'memcpy'} "
        f"by {counted(rule.threads, 'thread')}"
        for rule in rules
    ]
    return f"{'; '.join(ways)} (measured); for programs: {RULES_VARIABLE}={file}"
