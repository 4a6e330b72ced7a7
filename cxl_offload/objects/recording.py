"""How often the tensors of a step are read and written, counted from torch's own operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.plan.tensor_policy import TensorUse

Objects = Mapping[str, torch.Tensor | Iterable[torch.Tensor]]


class Recording(TorchDispatchMode):
    """Counts the bytes that operations read and write of named tensors; use it with ``with``.

    An operation is charged each of its arguments once: what it writes (by its schema) as written,
    in place also as read, everything else as read. Views cost nothing until they are used. The
    counts are what the algorithm asks for; caches and gathers of a few rows (an embedding is
    charged its whole table) may ask less of memory. Code that reads pointers by itself, such as
    DeepSpeed's CPU optimizer, is not seen.

    Parameters
    ----------
    objects
        Name to a tensor, or to several that count as one object. Only their storage is watched,
        so that views of them count too; it must stay alive and in place.

    Raises
    ------
    ValueError
        A storage under two names.
    """

    def __init__(self, objects: Objects) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner: dict[int, str] = {}
        self._held: list[torch.UntypedStorage] = []
        self._footprint: Counter[str] = Counter()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        for name, given in objects.items():
            self._footprint[name] += 0
            for tensor in [given] if isinstance(given, torch.Tensor) else given:
                self._watch(name, tensor.untyped_storage())

    def _watch(self, name: str, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        owner = self._owner.setdefault(address, name)
        if owner != name:
            raise ValueError(f"objects {owner} and {name} share their memory; name it once")
        if all(held.data_ptr() != address for held in self._held):
            self._held.append(storage)  # its address must not be given to another tensor
            self._footprint[name] += storage.nbytes()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count, then do what was asked for."""
        kwargs = kwargs or {}
        if not _is_view(func):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                self._count(argument, value)
            for argument in func._schema.arguments:
                if argument.name in kwargs:
                    self._count(argument, kwargs[argument.name])
        return func(*args, **kwargs)

    def _count(self, argument: Any, value: Any) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            if tensor.device.type != "cpu":
                continue
            name = self._owner.get(tensor.untyped_storage().data_ptr())
            if name is None:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            if writes:
                self._written[name] += nbytes
            if not (writes and argument.kwarg_only):  # an `out` is written only
                self._read[name] += nbytes

    def uses(self) -> tuple[TensorUse, ...]:
        """Every object with its bytes and what was read and written so far."""
        return tuple(
            TensorUse(name, nbytes, self._read[name], self._written[name])
            for name, nbytes in self._footprint.items()
        )


def record(objects: Objects) -> Recording:
    """Watch named tensors around a step.

    >>> import torch
    >>> from cxl_offload.objects import record
    >>> weight, state = torch.ones(4, 4), torch.zeros(4)
    >>> with record({"weight": weight, "state": state}) as seen:
    ...     _ = state.add_(weight @ torch.ones(4))
    >>> [(use.name, use.read_bytes, use.written_bytes) for use in seen.uses()]
    [('weight', 64, 0), ('state', 16, 16)]
    """
    return Recording(objects)


def _is_view(func: Any) -> bool:
    """Whether the operation only makes another view of an argument."""
    returned = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
