"""Prompts as a command line gives them."""

from __future__ import annotations

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_text


def read_prompts(file: str) -> tuple[str, ...]:
    """Prompts of a text file, one a line; blank lines are left out.

    Raises
    ------
    ConfigError
        The file cannot be read or has no prompt.
    """
    try:
        lines = read_text(file).splitlines()
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise ConfigError(f"--prompts {error}") from None
        raise ConfigError(
            f"--prompts {file}: there is no such file; write it, with one prompt a line, or name "
            "yours"
        ) from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ConfigError(f"--prompts {file}: no prompt in it")
    return prompts
