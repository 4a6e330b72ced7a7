"""Starts the placement in scripts that cannot be changed, once they import their framework.

Python imports a module of this name when it starts. Nothing else is imported here, and no
framework is: a finder waits for the import of one, lets it happen, and then calls the adapter. A
``sitecustomize`` of others further down the path is run as if this one were not there.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ADAPTERS = {"deepspeed": "cxl_offload.integrations.deepspeed"}
"""Framework to the adapter whose ``start_from_environment()`` is called."""

MEMORY = "cxl_offload.memory"
"""Whoever imports this may have something to measure; a launcher does not."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_LAUNCHERS = ("deepspeed", "deepspeed.pt", "ds", "ds_report", "dsr", "ds_io", "ds_nvme_tune")
"""Programs of DeepSpeed that only start others: no engine, and no CUDA context for them."""
_OF_LAUNCHERS = (b"deepspeed.launcher.", b"deepspeed.env_report", b"deepspeed.nvme")
"""What their text imports; a script of somebody else may have any name."""
_HEAD_BYTES = 4096


def starts_others(command: Sequence[str]) -> bool:
    """Whether the command line of this process is that of a launcher."""
    for at, word in enumerate(command[1:], 1):
        if word == "-m":
            return command[at + 1 : at + 2] != [] and command[at + 1].startswith("deepspeed.")
        if not word.startswith("-"):
            return os.path.basename(word) in _LAUNCHERS and _is_of_deepspeed(word)
    return False


def _is_of_deepspeed(path: str) -> bool:
    try:
        with open(path, "rb") as script:
            head = script.read(_HEAD_BYTES)
    except OSError:
        return False
    return any(name in head for name in _OF_LAUNCHERS)


def start(framework: str) -> None:
    """Calls the adapter of a framework that was just imported."""
    name = ADAPTERS[framework]
    try:
        adapter = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("cxl_offload"):
            raise
        raise ImportError(
            f"cxl-offload run: {sys.executable} has no {error.name}, so {framework} would run "
            "without placement; install cxl_offload there"
        ) from error
    adapter.start_from_environment(on_placed=functools.partial(leave_mark, framework))


def leave_mark(framework: str, placed: Any = None) -> None:
    """Tells ``cxl-offload run`` that this process has placed something, and what is where.

    Written at once, and again when the process ends if the engine lives until then.

    Parameters
    ----------
    placed
        What has a ``to_json()``; None where the script keeps it to itself.
    """
    _write_mark(framework, placed)
    if placed is not None:
        atexit.register(_write_again, framework, weakref.ref(placed))


def _write_again(framework: str, reference: weakref.ref[Any]) -> None:
    placed = reference()
    if placed is not None:
        _write_mark(framework, placed)


def _write_mark(framework: str, placed: Any) -> None:
    folder = os.environ.get("CXL_OFFLOAD_RUN")
    if folder and os.path.isdir(folder):
        document = {"framework": framework, **({} if placed is None else placed.to_json())}
        with open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8") as mark:
            json.dump(document, mark)


def start_metrics() -> None:
    """Serves metrics and logs events, as the environment asks.

    Metrics start in a thread: what imports the memory may be half imported itself, and is waited
    for. Events start here, so that the first of them is written.
    """
    if "CXL_OFFLOAD_EVENTS" in os.environ:
        importlib.import_module("cxl_offload.metrics.event_log").start_from_environment()
    if "CXL_OFFLOAD_METRICS" in os.environ:
        threading.Thread(target=_start_metrics, name="cxl_offload metrics", daemon=True).start()


def _start_metrics() -> None:
    importlib.import_module("cxl_offload.metrics.environment").start_from_environment()


class _Then(importlib.abc.Loader):
    """Loads a framework as its own loader does, and starts the adapter when that is done."""

    def __init__(self, finder: _Finder, loader: importlib.abc.Loader) -> None:
        self._finder = finder
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.waiting.discard(module.__name__)
        if module.__name__ == MEMORY:
            importlib.import_module("cxl_offload.memory.lost").survive_by_default()
            start_metrics()
        else:
            start(module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting = {*ADAPTERS, MEMORY}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(self, spec.loader)
                return spec  # type: ignore[no-any-return]
        return None


def run_other() -> None:
    """Runs the next ``sitecustomize`` on the path, under its own name."""
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if "CXL_OFFLOAD_PLAN" in os.environ and not starts_others(sys.orig_argv):
        sys.meta_path.insert(0, _Finder())
    run_other()
