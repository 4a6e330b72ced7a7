"""A YAML document whose every part knows its line, so that errors can say where.

``yaml.compose`` keeps the marks that ``yaml.load`` throws away; nothing is constructed from tags.
Documents come from anywhere: what is nested without end, or huge (by its aliases too), is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

import yaml

from cxl_offload.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_MOST_LEVELS = 100
_MOST_REPEATED = 100_000
_MOST_DIGITS = 19
_MOST_KEPT_CHARACTERS = 1 << 14
_MOST_CHARACTERS = 1 << 20
"""Of a document: a hundred times what the longest shipped one has. Composing so much takes seconds,
and whoever gives more has named a file of another kind (weights, a log, a tokenizer)."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but line ends and tabs: YAML and JSON can escape them, and whoever prints
such a text would write to the reader's terminal."""

_PLAIN_KEY = re.compile(r"[\w.:@/+-]{1,60}")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_TRUE = {"true", "yes", "on"}


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a document.

    ``path`` names it for people (``nodes[0].capacity``); ``line``, from 1, is that of its key
    where it has one: the line a reader looks for.
    """

    node: yaml.Node
    file: str
    path: str
    line: int

    def fail(self, message: str) -> NoReturn:
        """Raise :class:`ConfigError` that points here."""
        where = f"{self.path}: " if self.path else ""
        raise ConfigError(f"{where}{message}", file=self.file, line=self.line)

    def mapping(self, required: Iterable[str] = (), optional: Iterable[str] = ()) -> MappedFields:
        """The entries, after checking that the required keys are there and no other is."""
        required = tuple(required)
        known = (*required, *optional)
        fields = self.entries()
        for key, value in fields.items():
            if key not in known:
                value.fail(f"unknown key {shown(key)}; {hint(key, known)}")
        for key in required:
            if key not in fields:
                self.fail(f"key {key!r} is missing")
        return fields

    def entries(self) -> MappedFields:
        """The entries of a mapping whose keys are free."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"must be a mapping of keys to values, not {self._kind()}")
        fields: MappedFields = {}
        for key_node, value_node in self.node.value:
            line = _line(key_node)
            key = Field(key_node, self.file, self.path, line).text()
            value = Field(value_node, self.file, f"{self.path}.{plain_key(key)}".lstrip("."), line)
            if key in fields:
                value.fail(f"key {shown(key)} appears twice")
            fields[key] = value
        return fields

    def items(self) -> list[Field]:
        """The items of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"must be a list, not {self._kind()}")
        return [
            Field(item, self.file, f"{self.path}[{index}]", _line(item))
            for index, item in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """A scalar, as written."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail(f"must be a single value, not {self._kind()}")
        text = str(self.node.value)
        if CONTROL.search(text):
            self.fail(f"must be text without control characters, not {shown(text)}")
        return text

    def integer(self, *, minimum: int = 0) -> int:
        """A whole number of at least ``minimum``."""
        text = self.text()
        if not _INTEGER.fullmatch(text):
            self.fail(f"must be a whole number, not {shown(text)}")
        number = self._whole(text)
        if number < minimum:
            self.fail(f"must be at least {minimum}, not {number}")
        return number

    def boolean(self) -> bool:
        """``true``/``false`` (or ``on``/``off``, ``yes``/``no``)."""
        text = self.text()
        if self.node.tag != _TAG + "bool":
            self.fail(f"must be true or false, not {shown(text)}")
        return text.lower() in _TRUE

    def choice(self) -> str | int | bool:
        """A scalar as text, whole number or boolean, whatever it was written as."""
        text = self.text()
        if self.node.tag == _TAG + "bool":
            return self.boolean()
        return self._whole(text) if _INTEGER.fullmatch(text) else text

    def value(self) -> Any:
        """What the field says, as plain values; keys that appear twice are refused."""
        if isinstance(self.node, yaml.MappingNode):
            return {key: entry.value() for key, entry in self.entries().items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [entry.value() for entry in self.items()]
        try:
            return yaml.SafeLoader("").construct_object(self.node, deep=True)
        # What the constructors of PyYAML raise for a tag that its text does not fit.
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            self.fail(f"{shown(self.node.value)} is not a plain value ({shown(self.node.tag)})")

    @property
    def is_null(self) -> bool:
        """Whether the field says ``null``, or nothing."""
        return isinstance(self.node, yaml.ScalarNode) and self.node.tag == _TAG + "null"

    def nearest(self, where: Iterable[str | int]) -> Field:
        """What keys and list indices lead to, as far as the document goes."""
        found = self
        for step in where:
            try:
                found = found.items()[step] if isinstance(step, int) else found.entries()[step]
            except (ConfigError, LookupError):
                break
        return found

    def _kind(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        return f"the value {shown(self.node.value)}"

    def _whole(self, text: str) -> int:
        if len(text) > _MOST_DIGITS:
            self.fail(f"must be a whole number below 10^{_MOST_DIGITS - 1}, not {shown(text)}")
        return int(text)


MappedFields = dict[str, Field]


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def shown(value: object) -> str:
    """A value for a message: on one line, and not longer than a line."""
    try:
        text = repr(value)
    except ValueError:  # Python's limit of digits, which hexadecimal ones pass
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def plain_key(key: str) -> str:
    """A key for the path to a value: as it is, or as :func:`shown` where it would be misread."""
    return key if _PLAIN_KEY.fullmatch(key) else f"[{shown(key)}]"


def hint(key: str, known: Iterable[str]) -> str:
    """What somebody may have meant who wrote a key that is not known."""
    close = get_close_matches(key[:100], list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


class _Composer(yaml.SafeLoader):
    """Refuses what is nested too deeply; aliases may repeat so many values and no more."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values: dict[int, int] = {}
        self._repeated = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._levels += 1
        if self._levels > _MOST_LEVELS:
            problem = f"nested more than {_MOST_LEVELS} levels deep"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._levels -= 1
        if is_alias:
            self._count_repeated(node, event.start_mark)
        else:
            self._values[id(node)] = 1 + sum(self._values[id(part)] for part in _parts(node))
        return node

    def _count_repeated(self, node: yaml.Node | None, mark: yaml.Mark) -> None:
        values = self._values.get(id(node))
        if values is None:
            problem = "an alias inside of what it stands for"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._repeated += values
        if self._repeated > _MOST_REPEATED:
            problem = f"aliases repeat more than {_MOST_REPEATED} values"
            raise yaml.composer.ComposerError(None, None, problem, mark)


def _parts(node: yaml.Node | None) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return (part for pair in node.value for part in pair)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _composed(text: str) -> yaml.Node | None:
    node: yaml.Node | None = yaml.compose(text, Loader=_Composer)
    return node


_composed_once = functools.lru_cache(maxsize=64)(_composed)
"""For texts as short as machine and model files, which one run reads again and again: composing
takes nearly all of the time of loading a machine. Nobody changes what is composed."""


def read_document(text: str, *, file: str) -> Field:
    """The root of a YAML document.

    Raises
    ------
    ConfigError
        If the text is not YAML, empty, nested too deeply, or huge by its aliases, with the line; or
        if it is longer than 2^20 characters.
    """
    if len(text) > _MOST_CHARACTERS:
        problem = f"{len(text):,} characters are too many; {_MOST_CHARACTERS:,} are read at most"
        raise ConfigError(f"{problem}: is it a file of another kind?", file=file)
    try:
        node = (_composed_once if len(text) <= _MOST_KEPT_CHARACTERS else _composed)(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise ConfigError(f"not YAML: {error.problem}", file=file, line=line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character {text[error.position]!r} is not allowed"
        raise ConfigError(f"not YAML: {problem}", file=file, line=line) from error
    except RecursionError as error:  # called with little room left on the stack
        raise ConfigError("not YAML: nested too deeply", file=file) from error
    if node is None:
        raise ConfigError("the file is empty", file=file, line=1)
    return Field(node, file, "", _line(node))
