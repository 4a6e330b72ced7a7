"""Keys of the JSON that commands and benchmarks write: others may come, none may go.

``python -m tests.cli.test_json_keys`` adds new keys to the list. A key that goes is taken off by
hand, together with a new ``version`` of the form and a line in the changelog.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cxl_offload.cli.main import app

LIST = Path(__file__).parents[1] / "fixtures" / "json_keys.json"

_HERE = ["--machine", "epyc9354-cxl-a"]
_DECODE = ["plan", "inference", *_HERE, "--prompt-len", "128", "--gen-len", "8", "--why"]
COMMANDS = {
    "topology": ["topology", *_HERE],
    "validate": ["validate"],
    "plan inference, flexgen": [*_DECODE, "--model", "opt-30b", "--executor", "flexgen"],
    "plan inference, transformers": [
        *(*_DECODE, "--model", "opt-13b", "--executor", "transformers", "--max-batches", "1"),
    ],
    "plan inference, vllm": [*_DECODE, "--model", "opt-30b", "--executor", "vllm"],
    "plan training": ["plan", "training", *_HERE, "--model", "gpt2-xl"],
    "plan objects": ["plan", "objects", *_HERE, "--object", "kv=60GiB"],
}
BENCHMARKS = {
    "bench_adam": ["--numel", "1e5", "--rounds", "2"],
    "bench_attention": ["--batch", "1", "--heads", "2", "--seq", "64", "--rounds", "2"],
    "bench_copy": ["--largest", "64KiB", "--room", "8MiB"],
    "bench_kept": ["--bytes", "16MiB", "--rounds", "1"],
    "bench_linear": ["--rounds", "2", "--weights", "fp16", "--rows", "1", "--width", "512"],
    "bench_sim": ["--events", "20000"],
    "bench_states": ["--numel", "1e5", "--rounds", "2"],
}
PEERS = ("bitsandbytes", "deepspeed", "torchao")
"""Left out: the first step of some compiles kernels for minutes, and their names are no keys."""
HIDDEN = tuple(f"{peer}." for peer in PEERS)
"""Their modules that are loaded already: an import would find them without their package."""

_DEPTH = 2
"""Of a benchmark's keys: below are names of what was compared, which depend on the machine."""


_OF_DATA = {"terms", "policies", "settings", "cases", "bytes", "samples_s", "of_bound"}
"""What these hold is called by what was planned or compared."""


def keys_of(document: Any, depth: int = 99, path: str = "") -> Iterator[str]:
    """Every key by its path; names of nodes and of what was compared as one, ``*``."""
    if isinstance(document, list):
        for each in document:
            yield from keys_of(each, depth, f"{path}[]")
    elif isinstance(document, dict) and depth:
        of_data = path.rpartition(".")[2] in _OF_DATA
        for key, value in document.items():
            is_name = re.fullmatch("[a-z][a-z0-9_]*", key) and not of_data
            inner = f"{path}.{key if is_name else '*'}".lstrip(".")
            yield inner
            yield from keys_of(value, depth - 1, inner)


def keys_of_command(name: str) -> set[str]:
    done = CliRunner().invoke(app, [*COMMANDS[name], "--json"])
    assert done.exit_code == 0, done.output
    return set(keys_of(json.loads(done.stdout)))


def keys_of_benchmark(name: str) -> set[str]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "result.json"
        for module in {*PEERS, *(each for each in sys.modules if each.startswith(HIDDEN))}:
            patch.setitem(sys.modules, module, None)
        patch.setattr(sys, "argv", [name, *BENCHMARKS[name], "--json", str(file)])
        threads = torch.get_num_threads()
        # It ends with 1 where a figure is not as good as it should be; the file is written first.
        with contextlib.suppress(SystemExit):
            importlib.import_module(f"benchmarks.{name}").main()
        torch.set_num_threads(threads)
        return set(keys_of(json.loads(file.read_text()), _DEPTH))


def lost(name: str, found: set[str]) -> list[str]:
    return sorted(set(json.loads(LIST.read_text())[name]) - found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_loses_no_key(name: str) -> None:
    found = keys_of_command(name)
    assert not lost(name, found)
    gone = min(found)
    assert gone in json.loads(LIST.read_text())[name]
    assert lost(name, found - {gone}) == [gone]


@pytest.mark.slow(reason="runs benchmarks")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_loses_no_key(name: str) -> None:
    assert not lost(name, keys_of_benchmark(name))


def test_keys_of_lists_and_nodes_are_one_each() -> None:
    document = {"rows": [{"a": 1}, {"b": {"0": {"c": 1}, "1": 2}, "terms": {"d": 1}}], "-1": None}
    inner = {"a", "b", "b.*", "b.*.c", "terms", "terms.*"}
    assert set(keys_of(document)) == {"rows", "*", *(f"rows[].{each}" for each in inner)}
    assert set(keys_of(document, 1)) == {"rows", "*"}


def main() -> None:
    known = json.loads(LIST.read_text()) if LIST.exists() else {}
    for names, read in ((COMMANDS, keys_of_command), (BENCHMARKS, keys_of_benchmark)):
        for name in names:
            known[name] = sorted({*known.get(name, []), *read(name)})
    LIST.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
