"""How wrong options end vLLM: under its command with one line instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from cxl_offload.errors import ConfigError


@contextlib.contextmanager
def one_line_under_the_command() -> Iterator[None]:
    """Lets a ConfigError end the command ``vllm`` with that line; a program of one's own gets it.

    Raises
    ------
    SystemExit
        Under the command: what it says is all that is printed.
    """
    try:
        yield
    except ConfigError as error:
        if Path(sys.argv[0]).name == "vllm":
            raise SystemExit(f"vllm: {error}") from error
        raise
