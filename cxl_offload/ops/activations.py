"""Activations in a tier between forward and backward, by torch's hooks on saved tensors."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Literal

import torch

from cxl_offload import tensor as tiers
from cxl_offload.memory import Pages, PolicyLike, Session, current_session, known_policy
from cxl_offload.ops.saved import HostWay, Order, Saved, StreamWay, Way, as_bytes, part_of
from cxl_offload.ops.view import untraced
from cxl_offload.plan.equations.activation_bytes import COPIES_AHEAD, LEAST_BYTES
from cxl_offload.renamed import renamed_keywords
from cxl_offload.units import whole_bytes

Reason = Literal["parameter", "small", "placed", "thin", "kind"]


@dataclass(frozen=True, slots=True)
class ActivationUse:
    """What a context did so far.

    Attributes
    ----------
    saved
        Tensors that autograd saved and the tier holds, or held.
    copies, copied_bytes
        Copies made for them: fewer, where several are views of one storage.
    kept
        Tensors left where they were, by reason: ``parameter``, ``small``, ``placed`` (in memory of
        this package already), ``thin`` (a view of little in much), ``kind`` (not plain, dense
        memory of a CPU or CUDA GPU).
    """

    saved: int
    copies: int
    copied_bytes: int
    kept: Mapping[str, int]


class _Kept:
    """A saved tensor that stays; torch checks versions only where there are no hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf itself, so that a framework that swaps its data is followed. Anything else
        # detached: the graph would hold itself.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def give(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.dtype} {tuple(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


class _View:
    """What autograd keeps of a tensor whose bytes are in the tier."""

    __slots__ = ("device", "dtype", "offset", "saved", "shape", "strides")

    def __init__(self, tensor: torch.Tensor, saved: Saved, start: int) -> None:
        self.saved = saved
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.shape = tuple(tensor.shape)
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset() - start // tensor.itemsize

    def of(self, raw: torch.Tensor) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=raw.device)
        return made.set_(raw.untyped_storage(), self.offset, self.shape, self.strides)


class _OfThread(threading.local):
    """What one thread entered, and what it packed in which order.

    Autograd packs on threads that entered nothing: those of a GPU, and those that it starts where
    checkpoints are nested deeply. Each begins with an order of its own.
    """

    def __init__(self) -> None:
        self.entered: list[torch.autograd.graph.saved_tensors_hooks] = []
        self.order = Order()


class OffloadedActivations:
    """The context manager that :func:`offload_activations` makes; may be entered many times."""

    def __init__(
        self,
        policy: PolicyLike,
        *,
        min_bytes: int | str,
        prefetch: int | None,
        pin: bool | None,
        pages: Pages,
        session: Session | None,
    ) -> None:
        try:
            least = whole_bytes(min_bytes)
        except ValueError as error:
            raise ValueError(f"offload_activations: min_bytes {min_bytes!r}: {error}") from None
        if prefetch is not None and (not isinstance(prefetch, int) or prefetch < 0):
            raise ValueError(f"offload_activations: prefetch {prefetch!r}: copies ahead, 0 or more")
        self._session = session or current_session()
        self._policy = known_policy(policy, self._session.machine, "activations")
        self._min_bytes = max(least, 1)
        self._prefetch = prefetch
        self._pin = pin
        self._pages: Pages = pages
        self._lock = threading.Lock()
        self._ways: dict[torch.device, Way] = {}
        self._thread = _OfThread()
        # By storage, version and part; a copy keeps a mark of its storage, so keys stay unique.
        self._copies: weakref.WeakValueDictionary[tuple[int, ...], Saved] = (
            weakref.WeakValueDictionary()
        )
        self._kept: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<activations offloaded, {self._policy}, tensors from {self._min_bytes} bytes>"

    @untraced
    def __enter__(self) -> OffloadedActivations:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._thread.entered.append(hooks)
        return self

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._thread.entered:
            raise RuntimeError(
                f"offload_activations: thread {threading.current_thread().name!r} leaves a context "
                "that it did not enter; autograd's hooks belong to a thread: leave it where it was "
                "entered"
            )
        self._thread.entered.pop().__exit__(kind, error, trace)
        with self._lock:
            for way in self._ways.values():
                way.forget()

    @property
    def use(self) -> ActivationUse:
        """What was saved, copied and left so far, by all threads."""
        with self._lock:
            counts = self._counts
            kept = MappingProxyType(dict(self._kept))
            return ActivationUse(counts["saved"], counts["copies"], counts["bytes"], kept)

    @untraced  # torch.compile would trace what autograd calls inside of a compiled function
    def _pack(self, tensor: torch.Tensor) -> _Kept | _View:
        reason = self._reason_to_stay(tensor)
        part = None if reason is not None else part_of(tensor)
        with self._lock:
            if part is None:
                self._kept[reason or "thin"] += 1
                return _Kept(tensor)
            storage = tensor.untyped_storage()
            key = (storage._cdata, tensor._version, part.start, part.nbytes)
            saved = self._copies.get(key)
            if saved is None:
                saved = self._copy(as_bytes(tensor, part))
                self._copies[key] = saved
            saved.handles += 1
            self._counts["saved"] += 1
            return _View(tensor, saved, part.start)

    def _reason_to_stay(self, tensor: torch.Tensor) -> Reason | None:
        if not _is_plain(tensor):
            return "kind"
        root = tensor if tensor._base is None else tensor._base
        if isinstance(root, torch.nn.Parameter) or (root.is_leaf and root.requires_grad):
            return "parameter"
        if tensor.nbytes < self._min_bytes:
            return "small"
        if tensor.device.type == "cpu" and self._session.find(tensor.data_ptr()) is not None:
            return "placed"
        return None

    def _copy(self, source: torch.Tensor) -> Saved:
        pin = source.is_cuda if self._pin is None else self._pin
        home = tiers.empty(
            source.numel(),
            dtype=torch.uint8,
            policy=self._policy,
            pin=pin,
            pages=self._pages,
            session=self._session,
        )
        way = self._way(source.device)
        saved = Saved(source.untyped_storage(), home, way, self._thread.order)
        way.leave(saved, source)
        self._counts["copies"] += 1
        self._counts["bytes"] += source.nbytes
        return saved

    def _ahead(self, device: torch.device) -> int:
        if self._prefetch is not None:
            return self._prefetch
        return COPIES_AHEAD if device.type == "cuda" else 0

    def _way(self, device: torch.device) -> Way:
        if device not in self._ways:
            self._ways[device] = (
                StreamWay(device, self._session)
                if device.type == "cuda"
                else HostWay(self._ahead(device))
            )
        return self._ways[device]

    @untraced
    def _unpack(self, packed: _Kept | _View) -> torch.Tensor:
        if isinstance(packed, _Kept):
            return packed.give()
        saved = packed.saved
        with self._lock:
            saved.way.start(saved)
            for earlier in saved.order.before(saved.number, self._ahead(packed.device)):
                earlier.way.start(earlier)
            return packed.of(saved.give())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are the bytes of its storage, where this module can copy."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@renamed_keywords(placement="policy", memory="session")
def offload_activations(
    policy: PolicyLike,
    *,
    min_bytes: int | str = LEAST_BYTES,
    prefetch: int | None = None,
    pin: bool | None = None,
    pages: Pages = "thp",
    session: Session | None = None,
) -> OffloadedActivations:
    """What autograd saves inside of ``with`` goes to a tier and comes back for the backward.

    Parameters
    ----------
    policy
        As in :func:`cxl_offload.empty`.
    min_bytes
        Smaller tensors stay where they are; a number of bytes or ``"1 MiB"``. A copy over PCIe
        takes some 10 us however small. A plan counts on the default, 256 KiB.
    prefetch
        Copies brought back ahead of the one that the backward needs, in reverse order of saving.
        None is 2 on a GPU and 0 on a CPU. On a CPU, 0 lets the backward read the tier itself;
        more copy to ordinary memory by a thread.
    pin
        See :func:`cxl_offload.empty`; None pins what comes from a GPU.
    pages
        See :func:`cxl_offload.empty`.
    session
        What allocates; None means the current session.

    Returns
    -------
    OffloadedActivations
        A context manager, to be entered for every forward; ``use`` counts. The backward may run
        inside or outside of it.

    Raises
    ------
    ValueError
        A negative size or number, or a policy that the session does not know. In the forward, what
        :func:`cxl_offload.empty` raises: a tier that is full is a MemoryError, and the forward can
        be repeated.

    Notes
    -----
    Gradients are the same bits: bytes, strides and alignment come back as they were. Views of one
    storage share one copy. Parameters, their views, tensors of this package and small ones stay.
    The copy is of the moment of saving, so that changing an offloaded tensor in place afterwards is
    no error, and not seen; for tensors that stay it is the error that it is in torch. Hooks are
    those of the thread that entered, which has to leave, and of the threads on which autograd runs
    for it; inner contexts (also those of non-reentrant checkpointing) take what is saved in them.
    ``torch.compile`` runs the context as it is: it breaks the graph, so ``fullgraph=True`` refuses
    it inside; a compiled function that is called inside of it is offloaded.
    """
    return OffloadedActivations(
        policy, min_bytes=min_bytes, prefetch=prefetch, pin=pin, pages=pages, session=session
    )
