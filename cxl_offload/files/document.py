"""A YAML document whose every part knows its line, so that errors can say where.

``yaml.compose`` keeps the marks that ``yaml.load`` throws away; nothing is constructed from tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

import yaml

from cxl_offload.errors import ConfigError

__all__ = ["Field", "read_document"]

_TAG = "tag:yaml.org,2002:"
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
                close = get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                value.fail(f"unknown key {key!r}; {hint}")
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
            value = Field(value_node, self.file, f"{self.path}.{key}".lstrip("."), line)
            if key in fields:
                value.fail(f"key {key!r} appears twice")
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
        return str(self.node.value)

    def integer(self, *, minimum: int = 0) -> int:
        """A whole number of at least ``minimum``."""
        text = self.text()
        if not _INTEGER.fullmatch(text):
            self.fail(f"must be a whole number, not {text!r}")
        if int(text) < minimum:
            self.fail(f"must be at least {minimum}, not {text}")
        return int(text)

    def boolean(self) -> bool:
        """``true``/``false`` (or ``on``/``off``, ``yes``/``no``)."""
        text = self.text()
        if self.node.tag != _TAG + "bool":
            self.fail(f"must be true or false, not {text!r}")
        return text.lower() in _TRUE

    def choice(self) -> str | int | bool:
        """A scalar as text, whole number or boolean, whatever it was written as."""
        text = self.text()
        if self.node.tag == _TAG + "bool":
            return self.boolean()
        return int(text) if _INTEGER.fullmatch(text) else text

    def value(self) -> Any:
        """What the field says, as plain values; keys that appear twice are refused."""
        if isinstance(self.node, yaml.MappingNode):
            return {key: entry.value() for key, entry in self.entries().items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [entry.value() for entry in self.items()]
        try:
            return yaml.SafeLoader("").construct_object(self.node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            self.fail(f"not a plain value: {error}")

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
        return f"the value {self.node.value!r}"


MappedFields = dict[str, Field]


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def read_document(text: str, *, file: str) -> Field:
    """The root of a YAML document.

    Raises
    ------
    ConfigError
        If the text is not YAML, or empty; with the line.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise ConfigError(f"not YAML: {error.problem}", file=file, line=line) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", file=file) from error
    if node is None:
        raise ConfigError("the file is empty", file=file, line=1)
    return Field(node, file, "", _line(node))
