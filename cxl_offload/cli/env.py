"""``cxl-offload env``: what a bug report needs, in one block."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import cxl_offload
from cxl_offload.cli._machine_report import print_machine
from cxl_offload.cli._options import AsJson
from cxl_offload.cli._report_table import NONE, WIDE, console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.cli.doctor import hazards_here, print_hazards
from cxl_offload.files import encode
from cxl_offload.topology import Machine, discover

_PACKAGES = (
    "torch",
    "numpy",
    "highspy",
    "pyyaml",
    "rich",
    "typer",
    "deepspeed",
    "flexgen",
    "transformers",
    "accelerate",
    "vllm",
    "matplotlib",
)
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
_LIMITS = {
    "address space": resource.RLIMIT_AS,
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("env")(env)


def env(as_json: AsJson = False) -> None:
    """Print versions, settings, limits, the machine and doctor's findings, for a bug report.

    Names of people's folders are left out: the home folder is written as ~. Example:
    cxl-offload env > env.txt
    """
    machine, hazards = discover(), hazards_here()
    facts = {
        "versions": dict(_versions()),
        "core": {"GPUs": _gpus(machine), **dict(_core())},
        "settings": dict(_settings()),
        "limits": dict(_limits()),
    }
    if as_json:
        found = {"machine": encode(machine), "hazards": [asdict(hazard) for hazard in hazards]}
        write_json("-", {**facts, **found})
        return
    console = console_of(piped_width=WIDE)
    for title, rows in facts.items():
        _print(console, title, rows)
    console.print()
    print_machine(console, machine)
    console.print()
    print_hazards(console, hazards)


def _print(console: Console, title: str, rows: Mapping[str, Any]) -> None:
    made = table(title.capitalize(), "what", "value")
    for name, value in rows.items():
        made.add_row(name, str(value))
    show(console, made)


def _versions() -> Iterator[tuple[str, str]]:
    yield "cxl_offload", cxl_offload.__version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", _system()
    yield "kernel", f"{os.uname().release} {os.uname().machine}"
    yield "C library", " ".join(platform.libc_ver()) or NONE
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", NONE)
    except OSError:
        return NONE


def _gpus(machine: Machine) -> str:
    found = [f"{gpu.name} {gpu.model or ''}".strip() for gpu in machine.gpus]
    return ", ".join(found) or "none"


def _core() -> Iterator[tuple[str, str]]:
    """What of the C++ core runs here; a core that does not load is a finding, not an error."""
    try:
        from cxl_offload.core import features
    except ImportError as error:
        yield "C++ core", _without_home(f"does not load: {error}")
        return
    for name, value in features().items():
        yield name, _without_home(value)
    built = any(Path(cxl_offload.__file__).parent.glob("libcxl_offload_cuda*"))
    yield "CUDA kernels", "built" if built else "not built"


def _settings() -> Iterator[tuple[str, str]]:
    """Variables that change what the package or its threads do; those not set are left out."""
    for name, value in sorted(os.environ.items()):
        if name.startswith("CXL_OFFLOAD_") or name in _VARIABLES:
            yield name, _without_home(value)


def _limits() -> Iterator[tuple[str, str]]:
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        shown = [
            "no limit" if each == resource.RLIM_INFINITY else str(each) for each in (soft, hard)
        ]
        yield name, shown[0] if shown[0] == shown[1] else f"{shown[0]}, at most {shown[1]}"


def _without_home(text: str) -> str:
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
