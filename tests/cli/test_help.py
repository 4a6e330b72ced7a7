"""The help on a terminal of 80 columns: rich narrows what is wide, and names stay whole."""

from __future__ import annotations

import re

import pytest
import typer.main

from cxl_offload.cli.main import app

from .test_options import SUBCOMMANDS, run

OWN_HELP = ("flexgen",)
"""Prints that of FlexGen's parser."""
COMMANDS = {(): typer.main.get_command(app)} | {
    path: command for path, command in SUBCOMMANDS.items() if path != OWN_HELP
}


def names_in(text: str) -> set[str]:
    """Names of options at the beginning of a row, and what else of the kind is beside them."""
    rows = re.findall(r"^│ +(?:\* +)?(-.*?)│$", text, re.M)
    return {name for row in rows for name in re.split(r"[\s,]+", row) if name.startswith("-")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_names_of_options_are_whole_on_80_columns(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = run(*path, "--help")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    known = {name for each in COMMANDS[path].params for name in (*each.opts, *each.secondary_opts)}
    options = {name for name in known if name.startswith("-")}
    assert options <= names_in(text)
    assert "…" not in text
