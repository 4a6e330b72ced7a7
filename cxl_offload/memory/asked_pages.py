"""What became of pages long after they were placed, by asking them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cxl_offload import _C
from cxl_offload.errors import LostMemory
from cxl_offload.memory.lost import in_words, lost_memory, name_of
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class StrayPages:
    """Pages that were on another node than they had been put on.

    Attributes
    ----------
    name
        The allocation in words.
    offset, nbytes
        Which bytes of it; whole pages, so that a small allocation's may begin before it.
    placed_on, found_on
        Nodes.
    is_back
        Whether they are where they were put again.
    """

    name: str
    offset: int
    nbytes: int
    placed_on: int
    found_on: int
    is_back: bool

    def __str__(self) -> str:
        now = "brought back" if self.is_back else "still there"
        return (
            f"{format_bytes(self.nbytes)} at byte {self.offset} of {self.name}: placed on node "
            f"{self.placed_on}, found on node {self.found_on}, {now}"
        )


@dataclass(frozen=True, slots=True)
class CheckedPages:
    """What :meth:`cxl_offload.memory.Session.check` found."""

    lost: tuple[LostMemory, ...]
    strays: tuple[StrayPages, ...]


class AskedPages:
    """What a session asks of its pages; a base of :class:`cxl_offload.memory.Session`."""

    _session: _C.Session

    def _granted(self, owner: _C.Allocation | None, address: int, nbytes: int) -> dict[int, int]:
        """Bytes on every node of a range, and of the same range in its owner's other copies."""
        found = self._session.bytes_per_node(address, nbytes)
        if owner is None or not (copies := owner.copies()):
            return found
        offset = address - owner.address
        total = Counter(found)
        for copy in copies:
            if copy.address != owner.address:
                within = min(nbytes, owner.nbytes - offset)
                total.update(self._session.bytes_per_node(copy.address + offset, within))
        return dict(total)

    def lost(self) -> tuple[LostMemory, ...]:
        """Bytes of its allocations that are gone, as far as it is known without asking pages."""
        return tuple(each for each in lost_memory() if self._session.find(each.address) is not None)

    def check(self, *, bring_back: bool = True) -> CheckedPages:
        """Asks the pages of all allocations whether they are there, and where they were put.

        The kernel takes pages out of use that nobody has read yet, and moves others to another node
        after corrected errors, without a word. Takes about as long as asking all their placements.

        Parameters
        ----------
        bring_back
            Moves pages back to the node that they were put on; pinned ones are only told.

        Returns
        -------
        CheckedPages
            What is lost and what was elsewhere. Nothing is raised for it; lost pages read as
            ``0xff`` from now on, and the package's operators refuse them.

        Raises
        ------
        OSError
            The kernel refused to be asked.
        """
        strays = []
        for block in self._session.blocks():
            _, moved = block.ask_pages(bring_back)
            strays += [_stray_of(block, row) for row in moved]
        return CheckedPages(self.lost(), tuple(strays))


def _stray_of(block: _C.Allocation, row: tuple[int, int, int, int, bool]) -> StrayPages:
    """What the core says of stray pages, with a name."""
    address, nbytes, placed_on, found_on, is_back = row
    name, begin = name_of(address) or (in_words(block), block.address)
    return StrayPages(name, address - begin, nbytes, placed_on, found_on, is_back)
