"""Hidden states in a tier, copied to an accelerator some rows at a time and back.

While a layer computes some rows, the copy engine brings the next ones to the other of two buffers,
and takes the result of those before from the other of two more. So the accelerator has hidden
states of four times as many rows as are computed at once, however many there are. Before a
layer computes its last rows, the first ones of its result are on their way to the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from cxl_offload.integrations.transformers.current_rows import RowPart
from cxl_offload.integrations.transformers.parted_copies import WeightCopies
from cxl_offload.integrations.transformers.tier_states import TierStates
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.transfer import CopyHandle


class StateCopies(WeightCopies, Protocol):
    """What hidden states ask of an accelerator, besides what weights do."""

    def copy_back(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]
    ) -> CopyHandle:
        """Queue a copy to the host behind what streams have queued now."""

    def behind(self, handle: CopyHandle) -> int:
        """A stream on which a copy has been waited for: other copies can be put behind it."""

    def finish(self, handles: Sequence[CopyHandle]) -> None:
        """Wait until these copies are over, refused ones too, and hold nothing of them."""


@dataclass(slots=True)
class _RowBuffer:
    """Memory on the accelerator for some rows, and the last copy to it or from it."""

    memory: torch.Tensor | None = None
    last: CopyHandle | None = None

    def view(self, like: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
        """As many rows as ``like`` has; the memory has room for ``rows``, and for no more."""
        nbytes = rows * like[:1].nbytes
        if self.memory is None or self.memory.nbytes != nbytes:
            self.memory = None  # two are not needed; copies under way keep theirs
            with torch.inference_mode(False):
                self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.memory[: like.nbytes].view(like.dtype).view(like.shape)


@dataclass(slots=True)
class _ComingRows:
    """Rows on their way to a buffer, or there."""

    source: torch.Tensor
    begin: int
    handle: CopyHandle
    view: torch.Tensor

    def are(self, states: TierStates, begin: int) -> bool:
        """Whether these are rows of such states."""
        same = self.source.data_ptr() == states.host.data_ptr() and self.begin == begin
        return same and self.view.dtype == states.dtype and self.view.shape[1:] == states.shape[1:]


class StateStream:
    """Gives layers the rows that they compute, and takes their results to the tier.

    Parameters
    ----------
    copies
        To the accelerator and back.
    store
        Has the policy of ``activations``, and counts; its memory is pinned where the copies ask
        for that.
    rows_at_once
        Rows that a layer computes at once.
    on_host
        Modules that the CPU computes: what they find needs no copy to reach the tier.

    Attributes
    ----------
    device
        Where layers compute.
    beside
        Called when a part has been asked for: what else is to come over the link goes beside it.
    copied_in_bytes, copied_out_bytes
        Handed to the copies so far, to the accelerator and back.
    """

    def __init__(
        self,
        copies: StateCopies,
        store: TierStore,
        rows_at_once: int,
        on_host: Collection[nn.Module] = (),
    ) -> None:
        self.device = copies.device
        self.rows_at_once = rows_at_once
        self.on_host = frozenset(on_host)
        self.copied_in_bytes = self.copied_out_bytes = 0
        self.beside: Callable[[], None] = _nothing
        self._copies, self._store = copies, store
        self._in, self._out = [_RowBuffer(), _RowBuffer()], [_RowBuffer(), _RowBuffer()]
        self._ahead: _ComingRows | None = None
        self._under_way: list[CopyHandle] = []

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, in the tier of ``activations``.

        Raises
        ------
        MemoryError
            A node has no room.
        """
        with torch.inference_mode(False):
            made = self._store.empty(STATES, 0, tuple(shape), dtype, pin=True)
        self._store.count(made, STATES, 0, made)
        return made

    def whole(self, out: torch.Tensor, total: int) -> TierStates:
        """Room for all rows of what a module makes of a part."""
        with torch.inference_mode(False):
            return TierStates(self.host_memory((total, *out.shape[1:]), out.dtype), self)

    def rows(
        self, states: torch.Tensor, part: RowPart, result: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rows of a part where layers compute; the next ones are on their way then.

        Parameters
        ----------
        states
            Of all rows; what is on the accelerator already is not copied.
        result
            What the module makes of all rows: its first ones follow the last of ``states``.

        Raises
        ------
        OSError
            The driver refused a copy of them.
        """
        if not isinstance(states, TierStates):
            return states[part.rows]
        coming, self._ahead = self._ahead, None
        if coming is None or not coming.are(states, part.begin):
            coming = self._copy(states, part.begin)
        self._copies.wait_for(coming.handle)
        if not part.is_last:
            self._ahead = self._copy(states, part.end)
        elif isinstance(result, TierStates):
            self._ahead = self._copy(result, 0)
        if part.begin:  # with the first part of a layer they have begun
            self.beside()
        return coming.view

    def keep(self, whole: torch.Tensor, part: RowPart, out: torch.Tensor, *, here: bool) -> None:
        """Take the result of a part to its place among all rows.

        Parameters
        ----------
        here
            Whether it was made on the host.
        """
        assert isinstance(whole, TierStates)
        target = whole.host[part.rows]
        if here:
            target.copy_(out)
            return
        buffer = self._turn(self._out)
        source = buffer.view(out, self.rows_at_once, self.device)
        if buffer.last is not None:
            self._wait_unless_refused(buffer.last)
        source.copy_(out)
        buffer.last = self._copies.copy_back(target, source, (self._copies.stream(),))
        whole.coming[part.begin] = buffer.last
        self._follow(buffer.last)
        self.copied_out_bytes += target.nbytes

    def end(self) -> None:
        """A pass has ended, perhaps by an error: no rows are ahead of their use.

        Copies hold what they read and write, so they are waited for; not those of others, as of the
        first weights of the next pass.
        """
        self._ahead = None
        self._copies.finish(self._under_way)
        self._under_way.clear()
        for buffer in (*self._in, *self._out):
            buffer.last = None

    def close(self) -> None:
        """Hold nothing on the accelerator any more."""
        self.end()
        self._in, self._out = [_RowBuffer(), _RowBuffer()], [_RowBuffer(), _RowBuffer()]

    def _copy(self, states: TierStates, begin: int) -> _ComingRows:
        """Rows to the buffer that was read longest ago, behind what made them and what read it."""
        source = states.host[begin : begin + self.rows_at_once]
        buffer = self._turn(self._in)
        view = buffer.view(source, self.rows_at_once, self.device)
        after = {self._copies.stream()}
        if buffer.last is not None:
            after |= self._behind_unless_refused(buffer.last)
        if begin in states.coming:
            after.add(self._copies.behind(states.coming[begin]))
        buffer.last = self._copies.copy(view, source, tuple(after))
        self._follow(buffer.last)
        self.copied_in_bytes += source.nbytes
        return _ComingRows(states.host, begin, buffer.last, view)

    def _follow(self, handle: CopyHandle) -> None:
        """Until it is over: a handle holds memory."""
        self._under_way = [each for each in self._under_way if not _is_over(each)]
        self._under_way.append(handle)

    @staticmethod
    def _turn(buffers: list[_RowBuffer]) -> _RowBuffer:
        buffers.reverse()
        return buffers[0]

    def _wait_unless_refused(self, handle: CopyHandle) -> None:
        """Of a copy that was refused nothing is running; who reads its target is told."""
        try:
            self._copies.wait_for(handle)
        except OSError:
            return

    def _behind_unless_refused(self, handle: CopyHandle) -> set[int]:
        try:
            return {self._copies.behind(handle)}
        except OSError:
            return set()


def _nothing() -> None:
    """Of a stream that has the link to itself."""


def _is_over(handle: CopyHandle) -> bool:
    try:
        return handle.query()
    except OSError:
        return True
