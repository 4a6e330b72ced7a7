"""``with placing(policy)``: tensors that ordinary torch code makes go where the policy says."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.errors import MOST_NAMED
from cxl_offload.memory import Pages, PolicyLike, Session, current_session, known_policy
from cxl_offload.objects.factories import (
    FACTORIES,
    Operator,
    is_given_a_storage,
    is_plain,
    made_by,
    reason_to_leave,
)
from cxl_offload.ops.view import untraced
from cxl_offload.tensor import copy_whole, empty
from cxl_offload.units import format_bytes

_LOG = logging.getLogger(__name__)


class _EnteredHere(threading.local):
    """Scopes that this thread has entered, and whether one of them is at work."""

    def __init__(self) -> None:
        self.scopes: list[PlacingScope] = []
        self.busy = False


_thread = _EnteredHere()


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """A tensor made inside of ``placing`` that stays in ordinary memory, and why."""

    what: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        return f"{self.what} ({format_bytes(self.nbytes)}): {self.why}"


def span_elements(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor, gaps included; 0 for one without any."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((length - 1) * stride for length, stride in pairs)


class PlacingScope(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What :func:`placing` makes; says what it placed and what it could not.

    Attributes
    ----------
    tensors, nbytes
        How many tensors were placed, and their bytes.
    """

    def __init__(
        self, policy: PolicyLike, *, min_bytes: int, pages: Pages, session: Session | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if min_bytes < 0:
            raise ValueError(f"placing of tensors from {min_bytes} bytes on: 0 or more")
        self._session = session or current_session()
        self._policy = known_policy(policy, self._session.machine, "what torch writes")
        self._pages: Pages = pages
        self._min_bytes = max(min_bytes, 1)
        self._process = os.getpid()
        self._left: list[tuple[ReferenceType[torch.Tensor], str, str]] = []
        self._hooks: list[Any] = []
        self._among: list[PlacingScope] | None = None  # of the thread that entered it
        self.tensors = 0
        self.nbytes = 0

    @untraced
    def __enter__(self) -> PlacingScope:
        if self._among is not None:
            raise RuntimeError("placing: entered already; make another with placing(policy)")
        super().__enter__()  # type: ignore[no-untyped-call]
        self._among = _thread.scopes
        self._among.append(self)
        self._hooks = [
            register_module_parameter_registration_hook(self._register),
            register_module_buffer_registration_hook(self._register),
        ]
        return self

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        among, self._among = self._among, None
        if among is None:
            raise RuntimeError("placing: it was not entered, or has ended")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        among.remove(self)
        if among is _thread.scopes:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        else:  # a generator that another thread closed; torch's modes are a thread's own
            _LOG.warning(
                "placing: ended by another thread than the one that entered it; that one places "
                "nothing from now on, and compiles nothing any more"
            )
        if left := self.left():
            named = "; ".join(map(str, left[:MOST_NAMED]))
            more = f"; and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
            _LOG.warning("placing: stays in ordinary memory: %s%s", named, more)

    def left(self) -> tuple[LeftTensor, ...]:
        """Tensors seen inside that are alive and in ordinary memory, each with its reason."""
        found = []
        for mark, what, why in self._left:
            tensor = mark()
            if tensor is not None and not self._is_placed(tensor):
                found.append(LeftTensor(what, _bytes(tensor), why))
        return tuple(found)

    def _is_placed(self, tensor: torch.Tensor) -> bool:
        return is_plain(tensor) and self._session.find(tensor.data_ptr()) is not None

    def _name_left(self, tensor: object, what: str, why: str) -> None:
        if isinstance(tensor, torch.Tensor):
            self._left.append((ref(tensor), what, why))

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        # A forked child has no memory of its parent's session, and an inner scope goes first.
        if _thread.busy or self._among is None or os.getpid() != self._process:
            return func(*args, **given)
        if is_given_a_storage(func):
            made = func(*args, **given)
            self._name_left(made, "a tensor of a storage", "what loaded it allocated it")
            return made
        if func.overloadpacket not in FACTORIES or "out" in given:
            return func(*args, **given)
        why = reason_to_leave(func, args, given)
        if why is not None:
            made = func(*args, **given)
            if why:
                self._name_left(made, str(func.overloadpacket), why)
            return made
        _thread.busy = True
        try:
            found = made_by(func, args, given, self._made)
            return self._copied(found) if is_plain(found) else found
        finally:
            _thread.busy = False

    def _made(self, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised, like a tensor on meta: placed unless it is small."""
        count = span_elements(like)
        nbytes = count * like.itemsize
        if nbytes < self._min_bytes:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        base = empty(
            count,
            dtype=like.dtype,
            policy=self._policy,
            pages=self._pages,
            session=self._session,
        )
        self.tensors += 1
        self.nbytes += nbytes
        return base if like.dim() == 1 and like.is_contiguous() else _shown(base, like)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at its place: itself, or a copy of all that it spans."""
        count = span_elements(tensor)
        if count * tensor.itemsize < self._min_bytes or self._is_placed(tensor):
            return tensor
        shown = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        made = self._made(shown)
        copy_whole(made.as_strided((count,), (1,)), tensor.as_strided((count,), (1,)))
        return made

    def _register(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """A parameter or buffer that a module is given: loaders allocate theirs by other ways."""
        is_ours = bool(_thread.scopes) and _thread.scopes[-1] is self
        if not is_ours or tensor is None or os.getpid() != self._process:
            return
        if tensor.device.type != "cpu" or _bytes(tensor) < self._min_bytes:
            return
        if not is_plain(tensor):
            what = f"{name} of {type(module).__name__}"
            self._name_left(tensor, what, f"it is a {type(tensor).__name__}, {tensor.layout}")
            return
        if _is_part_of_a_buffer(tensor):
            what = f"{name} of {type(module).__name__}"
            self._name_left(tensor, what, "it is a part of a larger tensor")
            return
        busy, _thread.busy = _thread.busy, True
        try:
            with torch.no_grad():
                tensor.data = self._copied(tensor.data)
        finally:
            _thread.busy = busy


def _bytes(tensor: torch.Tensor) -> int:
    """Of the elements, as if they were dense."""
    return tensor.numel() * tensor.element_size()


def _is_part_of_a_buffer(tensor: torch.Tensor) -> bool:
    """Whether others may hold more of its storage; that of a mapped checkpoint is only read."""
    storage = tensor.untyped_storage()
    is_part = storage.nbytes() > span_elements(tensor) * tensor.itemsize
    return is_part and getattr(storage, "filename", None) is None


def _shown(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of its own, no view of another, over the memory of ``base``."""
    made = torch.empty(0, dtype=like.dtype, device="cpu")
    shape, strides = tuple(like.shape), like.stride()
    return made.set_(base.untyped_storage(), 0, shape, strides)


def placing(
    policy: PolicyLike,
    *,
    min_bytes: int = BASE_PAGE_BYTES,
    pages: Pages = "base",
    session: Session | None = None,
) -> PlacingScope:
    """CPU tensors that ordinary torch code makes inside of ``with`` go where a policy says.

    >>> with cxl_offload.placing("cxl"):
    ...     model = AutoModelForCausalLM.from_pretrained(folder)

    Parameters
    ----------
    policy
        As in :func:`cxl_offload.empty`.
    min_bytes
        Smaller tensors stay in ordinary memory, such as the step of an optimizer.
    pages, session
        See :func:`cxl_offload.empty`.

    Returns
    -------
    PlacingScope
        A context manager: ``tensors`` and ``nbytes`` count, ``left()`` names what stayed. When the
        block ends, the log warns of what stayed.

    Raises
    ------
    ValueError
        No policy of this machine. Inside of the block a factory raises what
        :func:`cxl_offload.empty` raises: a full node is a MemoryError that names it.

    Notes
    -----
    Caught are factories (``empty``, ``zeros``, ``full``, ``rand``, ``arange``, ``tensor``, the
    ``*_like`` and ``new_*`` ones), copies (``clone``, ``contiguous``, ``to`` another type,
    ``Module.half``, ``Module.to_empty``, ``deepcopy`` of parameters), ``stack`` and ``cat``, and
    every parameter and buffer that a module is given, whoever made it (``from_pretrained``,
    ``load_state_dict(assign=True)``). Results of arithmetic stay in ordinary memory: nobody keeps
    most of them. So does memory that numpy, DLPack or a loader's worker made, and what
    ``torch.load`` or ``deepcopy`` of a plain tensor puts in a storage, until a module is given it;
    pinned and sparse tensors, parameters that are parts of a larger tensor (a flat buffer), and
    tensors of other threads. What of these is seen is in ``left()``.
    A block is its thread's: where a generator is suspended inside of one, or a task of asyncio
    waits, the rest of the thread is inside of it too; so yield and await after it.
    A compiled function runs as it was compiled: its results are not placed. An inner block goes
    before an outer one; in a forked child a block does nothing.
    """
    return PlacingScope(policy, min_bytes=min_bytes, pages=pages, session=session)
