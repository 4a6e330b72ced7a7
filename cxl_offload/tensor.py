"""Tensors in tiers: the one place where this package's memory becomes torch's, without a copy.

A tensor made here behaves like any other CPU tensor. Its bytes belong to an allocation that stays
alive as long as any view, storage or DLPack consumer of it; the last drop returns them to the pool.

What leaves the pool, because torch then allocates by itself: ``clone()``, ``copy.deepcopy``,
``to()`` another dtype (``half()``, ``float()``), ``contiguous()`` of a tensor that is not,
``pin_memory()``, ``share_memory_()`` and the results of operators. Copy into a tensor made here
(``dst.copy_(src)``) to stay. Storages cannot be resized.

A tensor with copies (``policy="replicate:0,1"``) is the first of them. What torch writes into it in
place, ``dst.copy_(src)`` too, the other copies do not get: write it by :func:`write_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from cxl_offload.memory import (
    Pages,
    Placement,
    PolicyLike,
    Preferred,
    Session,
    Stats,
    current_session,
)
from cxl_offload.memory.bounds import check_bounds, quoted, whole_number
from cxl_offload.memory.copies import any_copies, copies_at, is_later_copy
from cxl_offload.memory.whole import copying
from cxl_offload.renamed import renamed_keywords
from cxl_offload.tensor_bytes import check_tensor, has_own_bytes, held_tensors, host_ranges, span_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_QUANTIZED = (torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4)


class Options(TypedDict, total=False):
    """The keywords of :func:`empty`, which says what they mean."""

    dtype: torch.dtype | None
    policy: PolicyLike | None
    pin: bool
    pages: Pages
    strict: bool
    session: Session | None


def _shape(size: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """``empty(2, 3)`` and ``empty((2, 3))`` mean the same, as in torch."""
    given: Any = size[0] if len(size) == 1 and hasattr(size[0], "__iter__") else size
    shape = tuple(whole_number(length, "a length of the shape") for length in given)
    for length in shape:
        if length < 0:
            raise ValueError(f"shape {shape} has a negative length")
    return shape


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


@renamed_keywords(placement="policy", memory="session")
def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    policy: PolicyLike | None = None,
    pin: bool = False,
    pages: Pages = "base",
    strict: bool = True,
    session: Session | None = None,
) -> torch.Tensor:
    """A contiguous CPU tensor whose bytes live where ``policy`` says.

    Parameters
    ----------
    *size
        Lengths of the dimensions, as integers or one sequence.
    dtype
        Any torch dtype but the deprecated quantized ones: also bfloat16, float8 and the packed
        four-bit types, which hold one element or pair a byte as torch counts them. None means
        torch's default dtype.
    policy
        A policy, ``{node: weight}``, a text such as ``"interleave:0,2"``, or the name of a tier.
        None prefers the nearest node.
    pin
        Register with the GPU driver, for asynchronous copies. Needs a CUDA context in this
        thread; never creates one. After an asynchronous copy on a stream other than the current
        one call :func:`record_stream`, or the pool has to wait for the whole context before it
        can reuse the memory.
    pages
        ``"base"``, ``"thp"``, ``"2MiB"`` or ``"1GiB"``.
    strict
        Refuse rather than spill when a node of an interleave is full or pinning moves pages.
    session
        What allocates; None means the current session.

    Returns
    -------
    torch.Tensor
        Uninitialised. A tensor without elements owns no memory.

    Raises
    ------
    MemoryError, OSError, ValueError, PlacementError
        As :meth:`cxl_offload.memory.Session.allocate`.
    """
    shape = _shape(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {quoted(dtype)} is no torch.dtype; torch.float16 is one")
    if dtype in _QUANTIZED:
        raise ValueError(f"{dtype} has no plain storage; allocate its integer type instead")
    count = _count(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    session = session or current_session()
    if policy is None:
        policy = Preferred((session.kernel.local_node,))
    allocation = session.allocate(
        count * dtype.itemsize, policy, pages=pages, pin=pin, strict=strict
    )
    base = torch.utils.dlpack.from_dlpack(cast("Any", allocation))
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(base.untyped_storage(), 0, shape)  # type: ignore[call-overload, no-any-return]


@renamed_keywords(placement="policy", memory="session")
def zeros(*size: int | Sequence[int], **options: Unpack[Options]) -> torch.Tensor:
    """:func:`empty`, filled with zeros; so are all copies."""
    return write_copies(empty(*size, **options).zero_())


@renamed_keywords(placement="policy", memory="session")
def full(size: Sequence[int], value: float | bool, **options: Unpack[Options]) -> torch.Tensor:
    """:func:`empty`, filled with ``value``; so are all copies."""
    return write_copies(empty(size, **options).fill_(value))


@renamed_keywords(placement="policy", memory="session")
def empty_like(tensor: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
    """:func:`empty` with the shape and, unless given, the dtype of ``tensor``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a {type(tensor).__name__} is no tensor; make one with torch.as_tensor first"
        )
    options.setdefault("dtype", tensor.dtype)
    return empty(tuple(tensor.shape), **options)


@renamed_keywords(placement="policy", memory="session")
def from_tensor(tensor: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
    """A contiguous copy of ``tensor``, from any device, placed as :func:`empty` says.

    The copy is detached from the graph and keeps the dtype unless another is given.
    """
    made = empty_like(tensor, **options)
    if tensor.device.type == "cpu" and tensor.layout is torch.strided:
        check_bounds(tensor, "tensor")
    return copy_whole(made, tensor.detach())


def copy_whole(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target.copy_(source)`` of memory that is there; every copy of the package goes this way.

    Where the target has copies, all of them are written.

    Raises
    ------
    MemoryLostError
        Something of the source is lost, or memory of either failed meanwhile.
    ValueError, TypeError
        As :func:`write_copies`.
    """
    others = _other_copies(target) if any_copies() else ()
    overwritten = [target, *others] if target.is_contiguous() else []
    with copying(source=lambda: host_ranges([source]), target=lambda: host_ranges(overwritten)):
        if others:
            read = source.resolve_conj().resolve_neg()
            _copy_at_once([target, *others], [read, *[target] * len(others)])
        else:
            target.copy_(source)
    return target


def copies_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor in each of its copies, in the order of the policy's nodes; itself is the first.

    Parameters
    ----------
    tensor
        A CPU tensor, or a view of one.

    Returns
    -------
    tuple of torch.Tensor
        Of its shape and strides. Each keeps its own copy alive. Only the tensor itself where it has
        no copies.

    Raises
    ------
    ValueError
        A view of copies that torch conjugates or negates when it is read, or that begins inside of
        an element.
    TypeError
        A subclass around other tensors that have copies.
    """
    if isinstance(tensor, torch.Tensor) and not has_own_bytes(tensor):
        _refuse_copies_inside(tensor)
        return (tensor,)
    address, _ = span_of(tensor)
    found = copies_at(address)
    copies = [tensor]
    for copy in found[1:]:
        offset, rest = divmod(address - found[0].address, tensor.element_size())
        if rest or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "a view that torch conjugates or negates when it is read, or that begins inside of "
                "an element, has no copies; take those of the tensor that it is a view of"
            )
        base = torch.utils.dlpack.from_dlpack(cast("Any", copy))
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copies.append(made.set_(base.untyped_storage(), offset, tensor.shape, tensor.stride()))
    return tuple(copies)


@torch.no_grad()
def write_copies(tensor: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Writes a tensor and all its copies (``policy="replicate:0,1"``).

    Parameters
    ----------
    tensor
        What :func:`empty` and its like made, or a view of it; without copies this is ``copy_``.
    source
        What is written, of a shape and type that ``tensor.copy_`` takes. None: what the tensor
        holds, so that the other copies get what was written in place.

    Returns
    -------
    torch.Tensor
        ``tensor``.

    Raises
    ------
    MemoryLostError
        Something of the source is lost, or memory failed meanwhile.
    ValueError
        The tensor is a later one of the copies, or a view that :func:`copies_of` refuses.
    TypeError
        No tensor, or a subclass around other tensors that have copies.

    Notes
    -----
    No operator may read the copies meanwhile: it would find some of them old and some new. A signal
    (Ctrl-C) finds all of them old or all new: Python looks at signals between two steps only, and
    they are written in one.
    """
    check_tensor(tensor)
    if source is not None:
        check_tensor(source)
        return copy_whole(tensor, source)
    others = _other_copies(tensor)
    if others:
        overwritten = others if tensor.is_contiguous() else ()
        with copying(source=lambda: host_ranges([tensor]), target=lambda: host_ranges(overwritten)):
            _copy_at_once(list(others), [tensor] * len(others))
    return tensor


def _other_copies(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The other copies of a tensor that is written.

    Raises
    ------
    ValueError, TypeError
        As :func:`write_copies`.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return ()
    if has_own_bytes(tensor) and is_later_copy(span_of(tensor)[0]):
        raise ValueError(
            "the tensor is a copy of another one, which would not get what is written here; write "
            "that one, the first of copies_of()"
        )
    return copies_of(tensor)[1:]


@torch.no_grad()
def _copy_at_once(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One after the other, in one step of Python."""
    torch._foreach_copy_(targets, sources)


def _refuse_copies_inside(tensor: torch.Tensor) -> None:
    """Of a subclass whose operators are its own; one that holds no memory (fake) has none."""
    for held in held_tensors(tensor) if any_copies() else ():
        if held.untyped_storage().device.type == "cpu" and copies_at(held.data_ptr()):
            raise TypeError(
                f"a {type(tensor).__name__} is around tensors that have copies; write those, and "
                "ask for theirs"
            )


@renamed_keywords(memory="session")
def placement_of(tensor: torch.Tensor, *, session: Session | None = None) -> Placement:
    """Where the bytes of a tensor are, by asking its pages; also for tensors of others.

    For a view only its own range counts, from its first to its last element.
    """
    address, nbytes = span_of(tensor)
    return (session or current_session()).placement(address, nbytes)


@renamed_keywords(placement="policy", memory="session")
def move(
    tensor: torch.Tensor,
    policy: PolicyLike,
    *,
    strict: bool = True,
    session: Session | None = None,
) -> torch.Tensor:
    """Moves the memory of a tensor to other nodes, in place.

    The whole allocation moves, whichever of its views is given: addresses and contents stay, so
    all views follow. Pages move one by one, so that nothing is held twice. A pinned tensor is
    moved once the GPU work queued on its recorded streams (:func:`record_stream`) is done, or all
    work of the context where none was recorded; no more may be queued meanwhile.

    Raises
    ------
    ValueError, MemoryError, PlacementError
        As :meth:`cxl_offload.memory.Session.move`; ValueError also for a tensor that is not this
        package's.
    """
    session = session or current_session()
    address, _ = span_of(tensor)
    owner = session.find(address)
    if owner is None:
        raise ValueError(
            "move: the tensor is not in memory of the current session; "
            "make it with cxl_offload.from_tensor"
        )
    session.move(owner, policy, strict=strict)
    return tensor


@renamed_keywords(memory="session")
def record_stream(tensor: torch.Tensor, stream: int, *, session: Session | None = None) -> None:
    """Tells the pool that work queued on ``stream`` uses a pinned tensor.

    The memory is reused only after that work is done, even when the tensor is dropped before.

    Parameters
    ----------
    stream
        The stream's handle as an integer, e.g. ``torch.cuda.current_stream().cuda_stream``.
    """
    address, _ = span_of(tensor)
    owner = (session or current_session()).find(address)
    if owner is None:
        raise ValueError("record_stream: the tensor is not in memory of the current session")
    owner.record_stream(stream)


def stats() -> Stats:
    """What the current session holds, per node, tier and pool."""
    return current_session().stats()
