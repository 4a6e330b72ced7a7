"""Reading of ``config.json``, key by key."""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.files import Field, MappedFields


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Reads the keys of one ``config.json``; what is wrong is named with its line."""

    document: Field
    entries: MappedFields
    name: str
    family: str

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return key in self.entries and not self.entries[key].is_null

    def whole(self, key: str, default: int | None = None) -> int:
        """A number of 1 or more."""
        if not self.has(key):
            if default is None:
                self.document.fail(f"key {key!r} is missing")
            return default
        return self.entries[key].integer(minimum=1)

    def count(self, key: str) -> int:
        """A number of 0 or more; 0 where it is not there."""
        return self.entries[key].integer() if self.has(key) else 0

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        return self.entries[key].boolean() if self.has(key) else default

    def word(self, key: str, default: str) -> str:
        """Text."""
        return self.entries[key].text() if self.has(key) else default

    def divides(self, key: str, part: int, whole: int, what: str) -> int:
        """``whole / part``, refused where that is no whole number."""
        if whole % part != 0:
            self.entries[key].fail(f"{whole} of {what} is no multiple of {part}")
        return whole // part
