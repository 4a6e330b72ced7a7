"""Machine files: configs/machines/NAME.yaml, read strictly, every number with its source.

docs/machines.md has every key. A test holds it against what is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.files import (
    Field,
    MappedFields,
    read_document,
    read_text,
    shipped_file,
    shipped_names,
)
from cxl_offload.topology.machine_schema import Sections
from cxl_offload.topology.model import Machine, Variant
from cxl_offload.topology.node import Node
from cxl_offload.topology.quantity import Citations

_MOST_DIGITS = 9  # of a choice
_REQUIRED = ("name", "description", "paper", "nodes", "tiers")
_OPTIONAL = (
    "initiator",
    "variants",
    "distances",
    "accesses",
    "gpus",
    "dma_paths",
    "drives",
    "facts",
    "notes",
)


def machine_names() -> tuple[str, ...]:
    """Names of the machine files that come with the package."""
    return shipped_names("machines")


def load_machine(
    name_or_path: str | Path, *, variant: Mapping[str, str | int | bool] | None = None
) -> Machine:
    """The simulated machine of a file, by name or by path.

    Parameters
    ----------
    name_or_path
        ``"epyc9354-cxl-a"``, ``"my/machine.yaml"``, or either with choices:
        ``"xeon8468:snc=4,prefetch=off"``.
    variant
        Choices for the file's variants; the rest take their defaults.

    Raises
    ------
    ConfigError
        If no such machine is known, or its file is wrong (with file and line).
    """
    wanted = str(name_or_path)
    base, _, choices = wanted.rpartition(":")
    if not base or "=" not in choices:
        base, choices = wanted, ""
    chosen = {**_parse_choices(choices, wanted), **(variant or {})}
    if base.endswith((".yaml", ".yml")) or "/" in base:
        return parse_machine(read_text(base), file=base, variant=chosen)
    if base not in machine_names():
        known = ", ".join(machine_names())
        raise ConfigError(f"no machine file is called {base!r}; known: {known}; or give a path")
    text = read_text(shipped_file("machines", base))
    return parse_machine(text, file=f"{base}.yaml", variant=chosen)


def machine_path(name_or_path: str | Path) -> Path | None:
    """The file that :func:`load_machine` reads for this name or path; None where there is none."""
    wanted = str(name_or_path)
    base, _, choices = wanted.rpartition(":")
    if not base or "=" not in choices:
        base = wanted
    if base in machine_names():
        return shipped_file("machines", base)
    path = Path(base)
    return path if path.is_file() else None


def parse_machine(
    text: str, *, file: str, variant: Mapping[str, str | int | bool] | None = None
) -> Machine:
    """The machine of the text of a machine file; ``file`` is for messages.

    Raises
    ------
    ConfigError
        With file and line, for anything that is unknown, missing, impossible or inconsistent.
    """
    document = read_document(text, file=file)
    parts = document.mapping(_REQUIRED, _OPTIONAL)
    citations = Citations([])
    chosen = _choose(parts.get("variants"), dict(variant or {}), file)
    sections = Sections(citations, chosen)
    nodes = sections.nodes(parts["nodes"])
    ids = {node.id for node in nodes}
    gpus = sections.gpus(parts.get("gpus"), ids)
    try:
        return Machine(
            name=parts["name"].text(),
            description=parts["description"].text(),
            nodes=nodes,
            distances=sections.distances(parts.get("distances"), ids),
            accesses=sections.accesses(parts.get("accesses"), ids),
            gpus=gpus,
            dma_paths=sections.dma_paths(parts.get("dma_paths"), ids, gpus),
            drives=sections.drives(parts.get("drives")),
            tiers=sections.tiers(parts["tiers"], nodes),
            facts=sections.facts(parts.get("facts")),
            initiator=_initiator(parts, nodes),
            variant=chosen,
            simulated=True,
            source=parts["paper"].text(),
            citations=tuple(citations.collected),
            notes=tuple(note.text() for note in parts["notes"].items()) if "notes" in parts else (),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), file=file, line=document.line) from error


def _initiator(parts: MappedFields, nodes: Iterable[Node]) -> int:
    by_id = {node.id: node for node in nodes}
    if "initiator" not in parts:
        with_cpus = [node.id for node in by_id.values() if node.cpus]
        if not with_cpus:
            parts["nodes"].fail("no node has CPUs, so nothing can reach the memory")
        return min(with_cpus)
    field = parts["initiator"]
    node_id = field.integer()
    if node_id not in by_id or not by_id[node_id].cpus:
        field.fail(f"node {node_id} is not a node with CPUs")
    return node_id


def _parse_choices(text: str, wanted: str) -> Variant:
    choices: Variant = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"{wanted!r}: {part!r} is not a choice like snc=4")
        if key in choices:
            raise ConfigError(f"{wanted!r}: {key} is chosen twice; choose it once")
        words = {"on": True, "true": True, "off": False, "false": False}
        is_number = value.isdecimal() and len(value) <= _MOST_DIGITS
        choices[key] = words.get(value, int(value) if is_number else value)
    return choices


def _choose(field: Field | None, wanted: Variant, file: str) -> Variant:
    """Defaults of the file's variants, with the wanted choices on top."""
    chosen: Variant = {}
    for name, entry in (field.entries() if field else {}).items():
        parts = entry.mapping(["choices", "default", "description"])
        choices = [item.choice() for item in parts["choices"].items()]
        default = parts["default"].choice()
        if default not in choices:
            parts["default"].fail(f"{default!r} is not one of the choices {choices}")
        chosen[name] = wanted.pop(name, default)
        # bool is an int in Python: 1 must not pass for true
        if not any(chosen[name] == item and type(chosen[name]) is type(item) for item in choices):
            shown = ", ".join(map(_shown, choices))
            raise ConfigError(f"{name}={_shown(chosen[name])}: choices are {shown}", file=file)
    if wanted:
        known = ", ".join(chosen) or "none"
        raise ConfigError(f"no variant {next(iter(wanted))!r}; variants are {known}", file=file)
    return chosen


def _shown(choice: str | int | bool) -> str:
    return {True: "on", False: "off"}[choice] if isinstance(choice, bool) else str(choice)
