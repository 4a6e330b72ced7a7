"""A subcommand is in the module of its name, so that calling one imports no other."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer.main

from cxl_offload.cli.main import _app_for, app

CALLED = """
import sys
from cxl_offload.cli.main import main
try:
    main(sys.argv[1:])
finally:
    others = [name for name in sys.modules if name.startswith("cxl_offload.cli.")]
    print("loaded", *(name.rpartition(".")[2] for name in others))
"""
WHOLE: Any = typer.main.get_command(app)


@pytest.mark.parametrize("name", WHOLE.commands)
def test_command_called_alone_is_that_of_the_whole(name: str) -> None:
    alone: Any = typer.main.get_command(_app_for(["--version", name, "--help"]))
    assert list(alone.commands) == [name]
    ours, whole = alone.commands[name], WHOLE.commands[name]
    assert [each.opts for each in ours.params] == [each.opts for each in whole.params]
    assert ours.help == whole.help
    assert list(getattr(ours, "commands", {})) == list(getattr(whole, "commands", {}))


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["plam"], ["main"], ["_options"], ["vllm_flags"]]
)
def test_all_commands_are_there_where_none_is_named(words: list[str]) -> None:
    """Help lists them, and what is mistyped is compared with them."""
    named: Any = typer.main.get_command(_app_for(words))
    assert list(named.commands) == list(WHOLE.commands)


def test_modules_of_other_commands_are_not_loaded() -> None:
    def loaded(*words: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", CALLED, *words], capture_output=True, text=True, check=True
        )
        return set(done.stdout.rpartition("loaded")[2].split())

    assert {"memory", "main"} <= (alone := loaded("memory", "--help"))
    assert not {"plan", "report", "tune", "validate"} & alone
    assert {"memory", "plan", "report", "tune", "validate"} <= loaded("--help")
