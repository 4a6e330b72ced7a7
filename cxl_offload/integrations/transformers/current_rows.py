"""Which rows of a batch a layer computes now, where it computes them in parts."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a batch of ``total``, which a layer computes before the next ones."""

    begin: int
    end: int
    total: int

    @property
    def rows(self) -> slice:
        """As an index."""
        return slice(self.begin, self.end)

    @property
    def is_first(self) -> bool:
        """Whether nothing of the step is in the cache yet."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether the step is in the cache then."""
        return self.end == self.total


class CurrentRows(threading.local):
    """The rows that a layer computes now in this thread, since others may share the model.

    Attributes
    ----------
    part
        None: all of the batch.
    """

    def __init__(self) -> None:
        self.part: RowPart | None = None

    def __deepcopy__(self, memo: object) -> CurrentRows:
        return self
