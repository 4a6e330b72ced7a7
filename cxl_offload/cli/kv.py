"""``cxl-offload kv``: KV blocks that outlive their engines, by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.units import format_bytes

if TYPE_CHECKING:
    from cxl_offload.kept import KeptFile

Folder = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where they are: persist_folder; without it, /dev/shm."),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="Names, or devices such as /dev/dax0.0; without any, all."),
]


def _folder(given: str | None) -> Path:
    from cxl_offload.kept import kept_folder
    from cxl_offload.memory.shared import SHARED_ROOT

    try:
        return kept_folder(given) or SHARED_ROOT
    except ValueError as error:
        raise ValueError(f"--folder {given!r}: {error}") from None


def _chosen(folder: str | None, names: list[str] | None) -> list[KeptFile]:
    from cxl_offload.kept import find_kept, find_kept_devices, is_device, look_at

    if folder is not None and names and all(map(is_device, names)):
        raise ConfigError(f"--folder {folder}: {names[0]} is a device; leave it out")
    devices = {name: look_at(Path(name)) for name in names or () if is_device(name)}
    found = {each.name: each for each in find_kept(_folder(folder))}
    unknown = [name for name in names or () if name not in found and name not in devices]
    if unknown:
        there = ", ".join(found) or "none"
        raise ValueError(f"no kept blocks of the name {unknown[0]!r}; there are: {there}")
    if names:
        return [devices.get(name) or found[name] for name in names]
    return [*found.values(), *(find_kept_devices() if folder is None else ())]


def list_kept(folder: Folder = None, as_json: AsJson = False) -> None:
    """List kept blocks: of which model, how many, and what they take.

    Example: cxl-offload kv list
    """
    found = _chosen(folder, None)
    if as_json:
        write_json("-", {"kept": [_row(each) for each in found]})
        return
    if not found:
        typer.echo("No kept KV blocks.")
        return
    numbers = ("blocks", "of", "takes")
    made = table("Kept KV blocks", "name", *numbers, "model", "state", right=numbers)
    for each in found:
        state = each.problem or ("in use" if each.in_use else "")
        what = " ".join(filter(None, (each.facts.get("model"), each.facts.get("dtype"))))
        takes = format_bytes(each.held_bytes)
        made.add_row(each.name, str(each.blocks), str(each.slots), takes, what, state)
    show(console_of(), made)


def _row(each: KeptFile) -> dict[str, Any]:
    return {
        "name": each.name,
        "path": str(each.path),
        "blocks": each.blocks,
        "slots": each.slots,
        "block_bytes": each.block_bytes,
        "held_bytes": each.held_bytes,
        "in_use": each.in_use,
        "problem": each.problem,
        "facts": dict(each.facts),
    }


def verify(names: Names = None, folder: Folder = None, as_json: AsJson = False) -> None:
    """Read every kept block and compare it with its checksum; status 1 where one is damaged.

    Example: cxl-offload kv verify chat
    """
    from cxl_offload.kept import verify_kept

    rows: list[dict[str, Any]] = []
    with progress_bar(keep=False, lines=not as_json) as tell:
        for each in _chosen(folder, names):
            row: dict[str, Any] = {"name": each.name, "right": 0, "damaged": {}, "unreadable": []}
            if not each.problem:
                found = verify_kept(each.path, progress=functools.partial(tell, each.name))
                row |= {"right": found.right, "damaged": dict(found.damaged)}
                row["unreadable"] = list(found.unreadable)
            rows.append(row | {"problem": each.problem})
    if as_json:
        write_json("-", {"verified": rows})
    else:
        for row in rows:
            wrong = len(row["damaged"]) + len(row["unreadable"])
            said = row["problem"] or f"{row['right']} right, {wrong} damaged"
            typer.echo(f"{row['name']}: {said}")
            for slot, key in row["damaged"].items():
                typer.echo(f"  slot {slot}: block {key} is damaged; an engine drops it when read")
            for slot in row["unreadable"]:
                typer.echo(
                    f"  slot {slot}: its entry is damaged or was not finished; an engine drops it "
                    "when it opens the file"
                )
    if any(row["damaged"] or row["unreadable"] or row["problem"] for row in rows):
        raise typer.Exit(1)


def drop(
    names: Annotated[list[str], typer.Argument(help="Names of what is to be dropped, or devices.")],
    folder: Folder = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also what is on a device and is no store.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Drop kept blocks that no engine writes, and give back what they take.

    Example: cxl-offload kv drop chat
    """
    from cxl_offload.kept import drop_kept, is_device

    if force and not any(map(is_device, names)):
        raise ConfigError(f"--force: {names[0]} is no device; leave it out")
    rows = [
        {"name": each.name, "freed_bytes": drop_kept(each.path, force=force)}
        for each in _chosen(folder, names)
    ]
    if as_json:
        write_json("-", {"dropped": rows})
        return
    for row in rows:
        typer.echo(f"{row['name']}: dropped, {format_bytes(int(str(row['freed_bytes'])))} free")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    made = typer.Typer(help="KV blocks that outlive their engines: list, verify, drop.")
    made.command("list")(list_kept)
    made.command("verify")(verify)
    made.command("drop")(drop)
    app.add_typer(made, name="kv")
