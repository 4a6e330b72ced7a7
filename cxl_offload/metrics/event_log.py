"""Events as lines of JSON: what moved, and what tuners decided."""

from __future__ import annotations

import atexit
import copy
import json
import logging
import os
import queue
import stat
import sys
import threading
import time
from logging.handlers import QueueHandler, QueueListener
from types import TracebackType

from cxl_offload.core import ForkGuard
from cxl_offload.errors import ConfigError
from cxl_offload.events import EVENTS

EVENTS_VARIABLE = "CXL_OFFLOAD_EVENTS"
"""A file; several processes append to it."""

_LOG = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """One record as one line: time, process, event and its fields; for handlers of your own too."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "process": record.process}
        event = getattr(record, "event", None)
        if event is None:
            said = {"event": "log", "level": record.levelname, "message": record.getMessage()}
        else:
            said = {"event": event, **getattr(record, "event_fields", {})}
        return json.dumps({**line, **said}, default=str)


class _Lines(logging.FileHandler):
    """A file of lines. One that cannot be written any more costs its lines and one warning."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        self._tell(sys.exc_info()[1])

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if not self._told:
            self._told = True
            lost = "what cannot be written is left out"
            _LOG.warning("events %s: %s; %s", self.baseFilename, error, lost)


def check_events_file(path: str | os.PathLike[str]) -> None:
    """Refuses what events cannot be appended to (ConfigError), without waiting for a reader."""
    try:
        if not os.fspath(path):
            raise ConfigError("events: the name of the file is empty")
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            raise ConfigError(f"events {os.fspath(path)!r}: a FIFO, not a file")
        with open(path, "a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"events {os.fspath(path)!r}: {reason}") from None


def _end_the_last_line(path: str) -> None:
    """A process that was killed, or a full disk, may have left half a line."""
    if not os.path.isfile(path):
        return
    with open(path, "rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


class _Hand(QueueHandler):
    """Gives records to the thread that writes; in a forked child, which has none, drops them."""

    def __init__(self, records: queue.SimpleQueue[logging.LogRecord]) -> None:
        super().__init__(records)
        self._guard = ForkGuard()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return copy.copy(record)  # as it is: the writer is in this process

    def emit(self, record: logging.LogRecord) -> None:
        if not self._guard.in_child:
            super().emit(record)


_lock = threading.Lock()  # taken by who opens and closes logs, never by who logs
_hands: list[_Hand] = []
_before = (EVENTS.level, EVENTS.propagate)


def _listen(hand: _Hand) -> None:
    """The events go to a log, and while there is one not to the program's own."""
    global _before
    with _lock:
        if not _hands:
            _before = (EVENTS.level, EVENTS.propagate)
            EVENTS.setLevel(logging.DEBUG)
            EVENTS.propagate = False
        _hands.append(hand)
        EVENTS.addHandler(hand)


def _leave(hand: _Hand) -> None:
    with _lock:
        _hands.remove(hand)
        EVENTS.removeHandler(hand)
        if not _hands:
            EVENTS.setLevel(_before[0])
            EVENTS.propagate = _before[1]


class EventLog:
    """A file of events that grows until it is closed, or the process ends."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        check_events_file(self.path)
        _end_the_last_line(self.path)
        self._file = _Lines(self.path, mode="a", encoding="utf-8")
        self._file.setFormatter(JsonLines())
        records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        self._hand = _Hand(records)
        self._writer: QueueListener | None = QueueListener(records, self._file)
        self._guard = ForkGuard()
        self._writer.start()
        _listen(self._hand)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is left; again, or in a forked child, does nothing."""
        writer, self._writer = self._writer, None
        if writer is None or self._guard.in_child:
            return
        _leave(self._hand)
        writer.stop()
        self._file.close()


def log_events(path: str | os.PathLike[str]) -> EventLog:
    """Appends every move and every decision of a tuner to a file, a line of JSON each.

    The file is written by a thread of its own, which the program never waits for; what is still to
    be written when the process ends is written then. Forked children write nothing.

    Raises
    ------
    ConfigError
        The file cannot be written.
    """
    made = EventLog(path)
    atexit.register(made.close)
    return made


def start_from_environment() -> None:
    """Logs where the variable asks for it; a file that cannot be written is a warning."""
    try:
        log_events(os.environ[EVENTS_VARIABLE])
    except ConfigError as error:
        _LOG.warning("%s", error)
