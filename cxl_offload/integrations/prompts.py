"""Prompts as a command line gives them."""

from __future__ import annotations

from pathlib import Path

from cxl_offload.errors import ConfigError


def read_prompts(file: str) -> tuple[str, ...]:
    """Prompts of a text file, one a line; blank lines are left out.

    Raises
    ------
    ConfigError
        The file cannot be read or has no prompt.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"--prompts {file}: there is no such file; write it, with one prompt a line, or name "
            "yours, in the command that a plan keeps too"
        ) from None
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {file}: {error}") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise ConfigError(f"--prompts {file}: no prompt in it")
    return prompts
