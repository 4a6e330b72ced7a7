"""Documents as strangers write them: each is answered, or refused in one line that says where.

:func:`check_document` takes bytes for decisions: which reader, which sound document to begin with,
and how to spoil it. Sound documents that are spoilt at some places come further into the readers
than bytes alone would.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import cxl_offload
from cxl_offload.errors import ConfigError

from .readers import FILE, READERS, Reader
from .spoilt import Decisions, spoil

_PACKAGE = str(Path(cxl_offload.__file__).parent)
_LONGEST_MESSAGE = 2000
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def document_of(data: bytes) -> tuple[Reader, str]:
    """The reader and the text that the decisions mean."""
    decisions = Decisions(data)
    reader = READERS[decisions.byte() % len(READERS)]
    how = decisions.byte()
    if how % 8 == 0:
        return reader, decisions.rest().decode("utf-8", "replace")
    sound = reader.sound()
    text = sound[decisions.below(len(sound))]
    for _ in range(how % 8):
        text = spoil(text, decisions)
    return reader, text


def _is_own(error: BaseException) -> bool:
    """Whether a ``raise`` of the package made the error, rather than something it stumbled over."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return False
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return line.lstrip().startswith("raise")


def _check_refusal(reader: Reader, text: str, error: ValueError) -> None:
    message = str(error)
    assert isinstance(error, ConfigError) or _is_own(error), f"stumbled: {message[:200]!r}"
    assert not reader.names_file or message.startswith(FILE), f"no place: {message[:200]!r}"
    found = _NOT_PRINTABLE.search(message)
    assert found is None, f"{found.group()!r} in the message {message[:300]!r}"  # type: ignore[union-attr]
    longest = _LONGEST_MESSAGE if reader.names_file else _LONGEST_MESSAGE + 4 * len(text)
    assert 0 < len(message) < longest, f"{len(message)} characters: {message[:80]}"
    message.encode("utf-8")


def check_document(data: bytes) -> str:
    """Reads one document.

    Returns
    -------
    str
        ``"read"`` or ``"refused"``.

    Raises
    ------
    Exception
        Whatever the reader raised that is no refusal of its own; AssertionError for a refusal that
        does not say where, or is not one line.
    """
    reader, text = document_of(data)
    try:
        value = reader.read(text)
    except ValueError as error:
        _check_refusal(reader, text, error)
        return "refused"
    if reader.again is not None:
        assert reader.read(reader.again(value)) == value, "written and read again it is another"
    return "read"
