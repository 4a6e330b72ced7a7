"""Every command that the documentation shows is run here, or its block says why not."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from cxl_offload.cli.main import main

from .blocks import PAGES, ROOT, Block, all_blocks, make_model, read_blocks

# What a fence may hold. `output` and `text` (a message) are not commands.
LANGUAGES = {"python", "bash", "json", "output", "text", "yaml", "{toctree}", "{eval-rst}"}
LANGUAGES |= {"{include} ../CHANGELOG.md"}
COMMAND = re.compile(r"^\s*(cxl-offload|python|make|pip|vllm|deepspeed|torchrun)\s+[\w./-]", re.M)

RUN = {block.where: block for block in all_blocks("bash") if not block.is_marked}
LONG = re.compile(r"^cxl-offload (flexgen|profile|plan fleet) ", re.M)
"""Commands that run models, measure the machine, or plan for many machines: seconds each."""

MARKED = {block.where: block for block in all_blocks("bash") if block.is_marked}

# Rows of the table in does-cxl-pay.md: the command, the verdict, the gain, and how many fit.
VERDICT = re.compile(
    r"^\| `(cxl-offload plan [^`]+)` \| (used|left alone), \+(\d+) % \|"
    r"(?: room for (\d+) sequences instead of (\d+))?",
    re.M,
)
ROOM = "its room allows {} sequences at once, not {}"


def commands(block: Block) -> list[list[str]]:
    """The words of every command of a block, as a shell would split it."""
    found, begun = [], ""
    for line in block.text.replace("\\\n", " ").splitlines():
        begun += line
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quotation goes on in the next line
            begun += "\n"
            continue
        found.append(words)
        begun = ""
    assert not begun, f"{block.where}: a quotation without an end"
    return [words for words in found if words]


def started(words: list[str]) -> list[list[str]]:
    """The command before ``--`` and those after it; of torchrun, what it starts.

    It ends by itself at an option that torchrun does not have.
    """
    if "--" in words:
        at = words.index("--")
        return [*started(words[:at]), *started(words[at + 1 :])]
    if words[:1] != ["torchrun"]:
        return [words]
    asked = get_args_parser().parse_args(words[1:])
    return started([asked.training_script, *asked.training_script_args])


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of ``cxl-offload`` with these words."""
    assert words[0] == "cxl-offload", f"only cxl-offload is run here; mark the block: {words}"
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone as the reader has it: examples, docs, and the model of ``zen.py my-opt``."""
    make_model(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    # `run` starts processes, which import the package that is tested.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return tmp_path


def each_block() -> list[Any]:
    """Names of blocks; those of long commands run with the slow tests."""
    slow = pytest.mark.slow(reason="runs models, measures, or plans for many machines")
    return [
        pytest.param(where, marks=slow if LONG.search(block.text) else ())
        for where, block in RUN.items()
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("where", each_block())
def test_commands_of_a_block_run_one_after_the_other(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(RUN[where]):
        assert run(words, monkeypatch) == 0, (words, capsys.readouterr())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_say_what_they_hold_and_commands_are_in_bash(page: Path) -> None:
    for block in read_blocks(page):
        assert block.language in LANGUAGES, f"{block.where}: fence {block.language!r}"
        if block.language in ("output", "text", "json"):
            assert not COMMAND.search(block.text), f"{block.where}: a command outside of bash"


def options_of(subcommand: list[str], monkeypatch: pytest.MonkeyPatch, shown: object) -> set[str]:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["cxl-offload", *subcommand, "--help"], monkeypatch) == 0
    return set(re.findall(r"--[a-z][\w-]*", shown.readouterr().out))  # type: ignore[attr-defined]


def test_options_of_commands_that_are_not_run_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs a GPU is not run, but its options are those of the command."""
    known: dict[tuple[str, ...], set[str]] = {}
    for block in MARKED.values():
        for command, *own in (each for words in commands(block) for each in started(words)):
            if command != "cxl-offload":
                continue
            name = tuple(own[: 2 if own[0] == "plan" else 1])
            if name not in known:
                known[name] = options_of(list(name), monkeypatch, capsys)
            given = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert given <= known[name], f"{block.where}: {sorted(given - known[name])}"


def test_commands_that_others_start_are_looked_at_too() -> None:
    own = ["cxl-offload", "generate", "--ranks", "rows"]
    by_torchrun = ["torchrun", "--nproc-per-node", "2", "--no-python", *own]
    assert started(by_torchrun) == [own]
    assert started(["cxl-offload", "run", "--", *by_torchrun]) == [["cxl-offload", "run"], own]
    with pytest.raises(SystemExit):
        started(["torchrun", "--nproc-per-knot", "2", "train.py"])
    lines = [words for block in MARKED.values() for words in commands(block)]
    assert [words for words in lines if words[0] == "torchrun" and "cxl-offload" in words]


def verdicts() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    text = (ROOT / "docs/does-cxl-pay.md").read_text(encoding="utf-8")
    return {command: (verdict, gain, fit) for command, verdict, gain, *fit in VERDICT.findall(text)}


def test_there_are_verdicts_of_both_kinds() -> None:
    assert {verdict for verdict, _, _ in verdicts().values()} == {"used", "left alone"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", verdicts())
def test_planner_gives_the_verdict_that_the_page_prints(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(command), monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"CXL memory: (used|left alone) \(\+([\d.]+)% predicted\)", out)
    assert found is not None, out[:400]
    verdict, gain, fit = verdicts()[command]
    assert (found.group(1), f"{float(found.group(2)):.0f}") == (verdict, gain)
    assert not any(fit) or ROOM.format(*fit) in out
