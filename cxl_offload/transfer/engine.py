"""Copies between host tiers and the GPU ahead of their use, overlapped and accounted.

Each direction is a queue of its own. Inside a direction every node has a stream, so that chunks of
a slow tier are under way together with those of a fast one: a transfer over tiers i takes
``max(sum of bytes / link, bytes_i / rate_i)`` where the GPU's copy engines overlap them, not the
sum over the tiers. Pinned bytes are copied where they lie; others go through a bounded ring of
pinned slots.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from cxl_offload import _C
from cxl_offload.memory import Preferred, Session, bounds
from cxl_offload.renamed import old_names, renamed_keywords
from cxl_offload.transfer.host import HostCopier
from cxl_offload.transfer.link_counts import (
    DIRECTIONS,
    CopyLink,
    DirectionName,
    LinkRecord,
    LinkUse,
    counts_of,
)

NO_NODE = -1
"""The node of host bytes that are not in memory of the engine's session."""


class ContiguousTensor(Protocol):
    """What torch's tensors have, so that they can be copied without importing torch."""

    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...


End = ContiguousTensor | int
"""A contiguous tensor, or an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes from a host tier to a place on the GPU."""

    target: End
    source: End
    nbytes: int | None = None


class CopyHandle:
    """A transfer under way. Keeps both ends alive until it is dropped."""

    def __init__(self, core: _C.CopyHandle, ends: tuple[Any, ...]) -> None:
        self._core = core
        self._ends = ends

    @property
    def nbytes(self) -> int:
        return self._core.nbytes

    def query(self) -> bool:
        """Whether all bytes have arrived.

        Raises
        ------
        OSError
            The driver refused a copy. Nothing of the transfer is running any more.
        """
        return self._core.query()

    def wait(self) -> None:
        """Returns when all bytes have arrived. Raises as :meth:`query`."""
        self._core.wait()

    def stream_wait(self, stream: int) -> None:
        """What is queued on ``stream`` from now on runs after the transfer.

        Does not wait for the bytes; waits until the transfer is handed to the GPU, which takes
        the copying by hand of bytes that are not pinned. Raises as :meth:`query`.
        """
        self._core.stream_wait(stream)


class CopyEngine:
    """Copies between host memory and one GPU; thread-safe.

    Parameters
    ----------
    session
        The session whose allocations are copied: it knows their nodes and whether they are pinned.
    chunk_bytes
        Transfers over several nodes, or of memory that is not pinned, are cut into these.
    staging_bytes
        Pinned slots for memory that is not pinned, four chunks at least; 0 refuses such memory.
    staging_node
        Where the slots are; best the node the GPU is attached to. None is the nearest.
    limit_bytes
        Unfinished bytes in a direction; a transfer that would exceed them waits for older ones.
    node_bandwidth
        Bytes/s that the GPU reads a node at, for the order of chunks; nodes without are alike.
    copier
        Fills and empties slots.
    driver
        None is that of ``memory``.

    Raises
    ------
    ValueError
        There is no CUDA context in use, or sizes do not fit each other.
    MemoryError
        No room for the slots.
    """

    @renamed_keywords(memory="session")
    def __init__(
        self,
        session: Session,
        *,
        chunk_bytes: int = 4 << 20,
        staging_bytes: int = 64 << 20,
        staging_node: int | None = None,
        limit_bytes: int = 1 << 30,
        node_bandwidth: Mapping[int, float] | None = None,
        copier: HostCopier | None = None,
        driver: _C.GpuDriver | None = None,
    ) -> None:
        self._core: _C.CopyEngine | None = None
        self._live: deque[CopyHandle] = deque()
        self._lock = threading.Lock()
        self._session = session
        bounds.check_size(chunk_bytes, "chunk_bytes")
        bounds.check_size(staging_bytes, "staging_bytes", least=0)
        bounds.check_size(limit_bytes, "limit_bytes")
        node = session.kernel.local_node if staging_node is None else staging_node
        slots = (
            session.allocate(staging_bytes, Preferred((node,)), pin=True) if staging_bytes else None
        )
        self._core = _C.CopyEngine(
            driver or session.gpu_driver(),
            (copier or HostCopier()).core,
            slots,
            chunk_bytes=chunk_bytes,
            limit_bytes=limit_bytes,
            rates=dict(node_bandwidth or {}),
        )
        self._record = LinkRecord(self._core)

    def __enter__(self) -> CopyEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def to_device(
        self,
        *,
        target: End,
        source: End,
        nbytes: int | None = None,
        after: Sequence[int] = (),
        pinned: bool | None = None,
        wait: bool = True,
    ) -> CopyHandle | None:
        """Queues a copy from host memory to the GPU.

        Parameters
        ----------
        target, source
            Contiguous tensors of as many bytes, or addresses. They are kept alive until the copy
            has finished; the source must not change before that.
        nbytes
            Needed where both are addresses.
        after
            Handles of streams: the copy runs behind the work they have queued now.
        pinned
            Whether host memory of others than this session is pinned; None asks the tensor
            (``is_pinned()``), and takes addresses for not pinned.
        wait
            Whether to wait where the limit is reached; else None is returned.

        Raises
        ------
        ValueError
            Sizes differ, a tensor is not contiguous, the engine is closed, or memory is not pinned
            and there is no staging.
        """
        ends = (target, source)
        return self._submit("to_device", ends, source, target, nbytes, after, pinned, wait)

    def to_host(
        self,
        *,
        target: End,
        source: End,
        nbytes: int | None = None,
        after: Sequence[int] = (),
        pinned: bool | None = None,
        wait: bool = True,
    ) -> CopyHandle | None:
        """Queues a copy from the GPU to host memory; as :meth:`to_device`."""
        ends = (target, source)
        return self._submit("to_host", ends, target, source, nbytes, after, pinned, wait)

    def is_pinned(self, host: ContiguousTensor) -> bool:
        """Whether copies of this memory need no staging."""
        owner = self._session.find(host.data_ptr()) if host.nbytes else None
        return owner.pinned if owner is not None else _is_pinned(host, None)

    def drain(self) -> None:
        """Waits for all transfers; their failures are their handles' to tell."""
        self._open().drain()
        self._forget_finished()

    def finish(self, handles: Iterable[CopyHandle]) -> None:
        """Waits for these transfers, and for no other; their failures are their own to tell.

        Nothing of them is held then, but by who has the handles.
        """
        for handle in handles:
            try:
                handle.wait()
            except OSError:  # nothing of it is running
                continue
        self._forget_finished()

    def links(self) -> dict[CopyLink, LinkUse]:
        """Bytes handed to the GPU so far, per direction and node; exact."""
        return counts_of(self._open())

    def unfinished_bytes(self, direction: DirectionName) -> int:
        """Bytes submitted and not seen finished."""
        return self._open().unfinished_bytes(DIRECTIONS[direction])

    def close(self) -> None:
        """Waits for all transfers and gives threads and slots back; so does dropping the engine.

        In a forked child it only forgets them: they are the parent's.
        """
        core, self._core = self._core, None
        if core is None or core.in_child:
            return
        try:
            core.drain()
        finally:
            self._record.end(core)
        self._forget_finished()

    # Without this, both ends of transfers under way could go before the engine, which waits.
    __del__ = close

    def _open(self) -> _C.CopyEngine:
        if self._core is None:
            raise ValueError("the copy engine is closed")
        return self._core

    def _submit(
        self,
        direction: DirectionName,
        ends: tuple[End, End],
        host: End,
        device: End,
        nbytes: int | None,
        after: Sequence[int],
        pinned: bool | None,
        wait: bool,
    ) -> CopyHandle | None:
        core = self._open()
        size = _size(ends, nbytes)
        address = _address(host)
        owner = self._session.find(address) if size else None
        pieces = _pieces(owner, _address(device), address, size, _is_pinned(host, pinned))
        submitted = core.submit(DIRECTIONS[direction], pieces, list(after), wait)
        self._forget_finished()
        if submitted is None:
            return None
        if owner is not None and owner.pinned:
            # So that dropping it later waits for these streams rather than for the whole GPU.
            for stream in core.streams:
                owner.record_stream(stream)
        handle = CopyHandle(submitted, (*ends, owner))
        with self._lock:
            self._live.append(handle)
        return handle

    def _forget_finished(self) -> None:
        with self._lock:
            over = [handle for handle in self._live if _is_over(handle)]
            for handle in over:
                self._live.remove(handle)
        del over  # the ends go without the lock, which what they run may want


def _is_over(handle: CopyHandle) -> bool:
    try:
        return handle.query()
    except OSError:
        return True


def _address(end: End) -> int:
    return end if isinstance(end, int) else end.data_ptr()


def _is_pinned(host: End, given: bool | None) -> bool:
    if given is not None or isinstance(host, int):
        return bool(given)
    ask = getattr(host, "is_pinned", None)
    return bool(ask()) if ask is not None else False


def _size(ends: tuple[End, End], nbytes: int | None) -> int:
    sizes = {end.nbytes for end in ends if not isinstance(end, int)}
    if nbytes is not None:
        sizes.add(nbytes)
    if len(sizes) != 1:
        found = " and ".join(str(size) for size in sorted(sizes)) or "no size"
        raise ValueError(f"copy between ends of {found}: name one number of bytes")
    for end in (each for each in ends if not isinstance(each, int)):
        if not end.is_contiguous():
            raise ValueError("copy of a tensor that is not contiguous: copy its parts")
        bounds.check_bounds(end, "a tensor to copy")
    size = sizes.pop()
    if size < 0:
        raise ValueError(f"copy {size} bytes")
    return size


def _pieces(
    owner: _C.Allocation | None, device: int, host: int, nbytes: int, pinned: bool
) -> list[tuple[int, int, int, int, bool]]:
    """(device, host, bytes, node, pinned) of every part on one node."""
    if nbytes == 0:
        return []
    if owner is None:
        return [(device, host, nbytes, NO_NODE, pinned)]
    runs = owner.runs(host - owner.address, nbytes) or [(0, nbytes, NO_NODE)]
    return [(device + at, host + at, size, node, owner.pinned) for at, size, node in runs]


def prefetched(
    engine: CopyEngine, transfers: Iterable[Transfer], *, depth: int, stream: int
) -> Iterator[Transfer]:
    """Transfers in order, each ready for work on ``stream``, with ``depth`` of them ahead.

    Yields a transfer once ``stream`` is made to wait for it. What the caller queues on the stream
    before asking for the next one may use its target; the next copy into that place is fenced
    behind that work.

    Parameters
    ----------
    transfers
        Any number, taken one at a time. Of ``depth + 1`` in a row no two may share a target.
    depth
        Copies under way ahead of the one in use, at least 1.
    stream
        The stream that uses the targets.
    """
    if depth < 1:
        raise ValueError(f"prefetch {depth} transfers ahead; at least 1")
    coming = iter(transfers)
    ahead: deque[tuple[Transfer, CopyHandle]] = deque()

    def start(transfer: Transfer, after: Sequence[int]) -> None:
        handle = engine.to_device(
            target=transfer.target, source=transfer.source, nbytes=transfer.nbytes, after=after
        )
        assert handle is not None
        ahead.append((transfer, handle))

    for transfer in itertools.islice(coming, depth):
        start(transfer, (stream,))
    while ahead:
        transfer, handle = ahead.popleft()
        # The next copy goes behind the work of the step before, which used its target last.
        following = next(coming, None)
        if following is not None:
            start(following, (stream,))
        handle.stream_wait(stream)
        yield transfer


__getattr__ = old_names(__name__)
