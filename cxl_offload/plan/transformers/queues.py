"""Layouts with their bounds, in the order in which a search looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.bound import least_seconds
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout, fullest, most_batches

_JOINED_MARGIN = 0.01
"""By how much a cache in two places has to be faster than one in one place: no GPU has measured
what joining the two takes."""

_STATES_MARGIN = 0.001
"""By how much hidden states on the host have to be faster than those on the GPU: where both are
alike, nothing is copied. With more a better machine might get a plan as much slower."""

Entry = tuple[float, int, int, Layout]
"""Least seconds of a sequence, place of the layout among all, its most batches, and the layout."""


@dataclass(frozen=True, slots=True)
class Queues:
    """Layouts in the order of their bounds.

    ``counts`` are the most batches that memory is filled with, ``most`` those of any block.
    """

    job: DecoderJob
    hardware: Hardware
    batches: Sequence[int]
    counts: int
    most: int | None

    def of(self, found: Iterable[Layout], worth: Callable[[Layout], bool]) -> list[Entry]:
        """Of these layouts, and of the rows that fill all memory in each.

        ``worth`` says of which it may pay to know more.
        """
        return self._sorted(self._every(found, worth))

    def of_one(self, layout: Layout) -> list[Entry]:
        """Of one layout with its rows."""
        return self._sorted([(layout, most_batches(self.job, self.hardware, layout))])

    def _sorted(self, found: Iterable[tuple[Layout, int]]) -> list[Entry]:
        queue = []
        for at, (layout, fit) in enumerate(found):
            top = fit if self.most is None else min(fit, self.most)
            if top >= layout.fewest_batches:
                bound = least_seconds(self.job, self.hardware, layout, top)
                queue.append((bound, at, top, layout))
        return sorted(queue, key=lambda each: (compared(each[3], each[0]), each[1]))

    def _every(
        self, found: Iterable[Layout], worth: Callable[[Layout], bool]
    ) -> Iterator[tuple[Layout, int]]:
        """With their most batches."""
        known: dict[Layout, dict[int, int]] = {}
        looked_at = set[Layout]()
        for layout in found:
            kind = layout.with_rows(1)
            rows = known.setdefault(kind, dict.fromkeys(self.batches, 0))
            if not worth(layout):
                del rows[layout.rows]  # as if nobody had asked for so many
                continue
            looked_at.add(kind)
            rows[layout.rows] = most_batches(self.job, self.hardware, layout)
            yield layout, rows[layout.rows]
        for layout in known if self.hardware.has_gpu else ():
            if layout in looked_at:
                fits = known[layout]
                yield from fullest(self.job, self.hardware, layout, fits, counts=self.counts)


def compared(layout: Layout, seconds: float) -> float:
    """Seconds of a sequence as layouts are compared by."""
    joined = 1 + _JOINED_MARGIN * (layout.kv == "both")
    return seconds * joined * (1 + _STATES_MARGIN * (layout.states == "host"))
