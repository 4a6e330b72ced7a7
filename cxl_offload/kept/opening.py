"""A store to write, or to read where another process writes it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping

from cxl_offload.kept.layout import KeptLayout, NoStoreError
from cxl_offload.kept.place import Prepare
from cxl_offload.kept.reader import KeptReader
from cxl_offload.kept.store import KeptStore

_logger = logging.getLogger(__name__)

_WAIT_SECONDS = 120.0
"""For another process that makes the store at this moment: it gives memory to all of it."""


class WrittenByAnotherError(ValueError):
    """Another process writes the store, and this one cannot read it."""


def open_or_read(
    path: str | os.PathLike[str],
    layout: KeptLayout,
    facts: Mapping[str, str],
    *,
    prepare: Prepare | None = None,
) -> KeptStore | KeptReader:
    """The store at a path: to write, or to read where another process writes it.

    Parameters
    ----------
    prepare
        As of :class:`KeptStore`.

    Raises
    ------
    WrittenByAnotherError
        With the reason in a few words: it has blocks of something else, or is not finished.
    OSError, MemoryError
        As :class:`KeptStore`.
    """
    give_up = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            return KeptStore(path, layout, facts, prepare=prepare)
        except BlockingIOError:
            pass
        try:
            reader = KeptReader(path, facts)
        except (NoStoreError, FileNotFoundError):  # it is being made, or was just dropped
            if time.monotonic() > give_up:
                raise WrittenByAnotherError("it is not finished") from None
            time.sleep(0.05)
            continue
        except (OSError, ValueError) as error:
            raise WrittenByAnotherError(str(error)) from error
        if reader.layout.block_bytes != layout.block_bytes:
            reader.close()
            raise WrittenByAnotherError("it has other blocks")
        _logger.warning("%s: another process writes it, this one reads it only", path)
        return reader
