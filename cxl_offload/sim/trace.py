"""What a run moved and computed: the events that :func:`cxl_offload.sim.replay` charges time for.

A trace holds bytes and operations, never seconds, so the same trace can be replayed on any machine
that has the nodes it names.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cxl_offload.errors import ConfigError
from cxl_offload.files import DecodeError, decode, parse_json, read_text, shown, write_text

Engine = Literal["h2d", "d2h", "cpu", "gpu", "nvme"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

_FORMAT = "cxl_offload.trace"
_VERSION = 1
_COLUMNS = (
    "phase",
    "step",
    "queue",
    "engine",
    "tensor_kind",
    "read_bytes",
    "write_bytes",
    "accelerator_bytes",
    "flops",
)
_OF_CPUS = (*_COLUMNS, "cpus")
"""Where an event names its CPUs; without, files are as they were before there was such a column."""


@dataclass(frozen=True, slots=True)
class Event:
    """One copy or one computation.

    Attributes
    ----------
    phase
        ``"prefill"``, ``"decode"``, ``"train"``, ...
    step
        Barrier index: steps run one after another; inside a step, queues run side by side.
    queue
        ``"load_weight"``, ``"compute"``, ...; the events of one queue in one step run in the order
        in which they were appended.
    engine
        ``"h2d"``, ``"d2h"``: copies over the accelerator's link; ``"cpu"``: host work on node
        memory; ``"gpu"``: accelerator compute; ``"nvme"``: a drive. Bytes that a drive reads from
        node memory to store them are ``read_bytes``, bytes it loads into node memory
        ``write_bytes``.
    tensor_kind
        ``"weights"``, ``"kv"``, ``"act"``, ``"workspace"``, ...
    read_bytes, write_bytes
        Node -> bytes read from, written to its memory.
    accelerator_bytes
        Bytes moved in accelerator memory.
    flops
        Floating point operations.
    cpus
        Of ``"cpu"`` events: the node whose CPUs work. None: those of the replay's initiator.
    """

    phase: str
    step: int
    queue: str
    engine: Engine
    tensor_kind: str
    read_bytes: Mapping[int, int]
    write_bytes: Mapping[int, int]
    accelerator_bytes: int = 0
    flops: float = 0.0
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r} is unknown; engines are {', '.join(ENGINES)}")
        if self.cpus is not None and (self.engine != "cpu" or self.cpus < 0):
            raise ValueError(
                f"event of queue {self.queue!r}: CPUs of node {self.cpus} for engine "
                f"{self.engine!r}; only the work of cpu is that of a node's CPUs"
            )
        if self.step < 0 or self.accelerator_bytes < 0 or not 0 <= self.flops < float("inf"):
            raise ValueError(
                f"event of queue {self.queue!r}: step {self.step}, accelerator bytes "
                f"{self.accelerator_bytes} and flops {self.flops} must be finite and not negative"
            )
        for per_node in (self.read_bytes, self.write_bytes):
            for node, count in per_node.items():
                if node < 0 or count < 0:
                    raise ValueError(
                        f"event of queue {self.queue!r}: {count} bytes on node {node}; "
                        "neither may be negative"
                    )

    @property
    def host_bytes(self) -> int:
        """Bytes read from and written to node memory, together."""
        return sum(self.read_bytes.values()) + sum(self.write_bytes.values())


class Trace:
    """Events in the order in which they were issued, and the tokens that every phase made.

    Parameters
    ----------
    events
        Initial events.
    tokens
        Phase -> tokens generated in it; what tokens/s are counted with.
    """

    __slots__ = ("_events", "_tokens")

    def __init__(
        self, events: Iterable[Event] = (), *, tokens: Mapping[str, int] | None = None
    ) -> None:
        self._events = list(events)
        self._tokens: Counter[str] = Counter()
        for phase, count in (tokens or {}).items():
            self.count_tokens(phase, count)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self._events == other._events and self._tokens == other._tokens

    __hash__ = None  # type: ignore[assignment]

    @property
    def events(self) -> Sequence[Event]:
        """All events; not a copy."""
        return self._events

    @property
    def tokens(self) -> Mapping[str, int]:
        """Tokens generated in each phase; phases without tokens are missing."""
        return dict(self._tokens)

    def append(self, event: Event) -> None:
        """Adds one event."""
        self._events.append(event)

    def extend(self, events: Iterable[Event]) -> None:
        """Adds events in order."""
        self._events.extend(events)

    def count_tokens(self, phase: str, count: int) -> None:
        """Adds ``count`` generated tokens to ``phase``.

        Raises
        ------
        ValueError
            If ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"{count} tokens in phase {phase!r}; a count must not be negative")
        self._tokens[phase] += count

    def bytes_per_node(self) -> dict[int, int]:
        """Node -> bytes read and written there by all events."""
        total: Counter[int] = Counter()
        for event in self._events:
            total.update(event.read_bytes)
            total.update(event.write_bytes)
        return dict(sorted(total.items()))

    def to_json(self) -> str:
        """The trace as JSON text; events are rows under named columns."""
        named = any(event.cpus is not None for event in self._events)
        columns = _OF_CPUS if named else _COLUMNS
        rows = [[_encode(getattr(event, column)) for column in columns] for event in self._events]
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "tokens": dict(self._tokens),
            "columns": columns,
            "events": rows,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace of a text that :meth:`to_json` wrote.

        Raises
        ------
        ConfigError
            The text is not such a trace.
        """
        document = parse_json(text)
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ConfigError(f'this is no trace: its "format" is not {_FORMAT!r}')
        known = (_COLUMNS, _OF_CPUS)
        columns = next((c for c in known if document.get("columns") == list(c)), None)
        if document.get("version") != _VERSION or columns is None:
            raise ConfigError(
                f"trace of version {shown(document.get('version'))} with columns "
                f"{shown(document.get('columns'))}; this release reads version {_VERSION}"
            )
        events, tokens = document.get("events"), document.get("tokens")
        if not isinstance(events, list) or not isinstance(tokens, dict):
            raise ConfigError("trace: 'events' is a list and 'tokens' a mapping; one is missing")
        for phase, count in tokens.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ConfigError(f"trace: tokens of {shown(phase)} are {shown(count)}, no count")
        return cls((_decode(row, columns) for row in events), tokens=tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON; a file of that name is replaced as a whole (OSError: not)."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a trace that :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read, or is not a trace; the message names it.
        """
        text = read_text(path)
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ConfigError(str(error), file=os.fspath(path)) from error


def _encode(value: Any) -> Any:
    # JSON has no integer keys: nodes become text and are read back as integers.
    if isinstance(value, Mapping):
        return {str(node): int(count) for node, count in value.items()}
    return value


def _decode(row: Any, columns: Sequence[str]) -> Event:
    if not isinstance(row, list) or len(row) != len(columns):
        raise ConfigError(f"trace: an event is a list of {len(columns)} values, not {shown(row)}")
    try:
        return decode(Event, dict(zip(columns, row, strict=True)))
    except DecodeError as error:
        raise ConfigError(f"trace: event {shown(row)}: {error}") from error
