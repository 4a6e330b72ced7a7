"""A number that a machine lacks: where in its file it should be."""

from __future__ import annotations

from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_document, read_text


class MissingNumberError(ConfigError):
    """The machine has no such number.

    Parameters
    ----------
    message
        Which number, of what, and what would help.
    section
        Key of a machine file under which it belongs.
    """

    def __init__(self, message: str, *, section: str) -> None:
        super().__init__(message)
        self.section = section


def located(error: MissingNumberError, path: Path) -> ConfigError:
    """The same with the line of the section in the machine's file; of its first one if new."""
    document = read_document(read_text(path), file=path.name)
    field = document.entries().get(error.section, document)
    hint = "" if error.section in document.entries() else f" (the file has no {error.section!r})"
    return ConfigError(f"{error}{hint}", file=path.name, line=field.line)
