"""The old form of ``--json``, which took a file: it works for one more version, with a warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from cxl_offload.cli._outputs import STDOUT

_OPTION = "--json"


def in_new_form(command: str, words: Sequence[str]) -> list[str]:
    """``--json FILE`` as ``--output FILE`` and ``--json -`` as ``--json``, each with a warning.

    Parameters
    ----------
    command
        Its name, for the warning.
    words
        Of a command that has no arguments, only options: a word behind ``--json`` that begins no
        option can only be its file.
    """
    made: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, is_joined, file = word.partition("=")
        if name != _OPTION or not (is_joined or (left and _is_file(left[0]))):
            made.append(word)
            continue
        if not is_joined:
            file = left.pop(0)
        new = [_OPTION] if file == STDOUT else ["--output", file]
        typer.echo(
            f"cxl-offload: warning: {command}: {_OPTION} {file} is now {' '.join(new)}; the old "
            "form goes with the next version",
            err=True,
        )
        made += new
    return made


def _is_file(word: str) -> bool:
    return word == STDOUT or not word.startswith("-")


class OldJsonCommand(TyperCommand):
    """A command without arguments that understands the old form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_new_form(ctx.info_name or "", args))
