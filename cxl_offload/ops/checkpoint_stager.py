"""Staging of asynchronous checkpoints in a tier, for ``torch.distributed.checkpoint.async_save``.

torch copies the state to ordinary memory and writes it out while training goes on, so that a node
holds weights and optimizer states twice for that time. Here the copy lies where a policy says.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from cxl_offload.memory import PolicyLike, Session, current_session, known_policy
from cxl_offload.memory.bounds import check_bounds, check_size
from cxl_offload.ops.view import local_tensor
from cxl_offload.tensor import copy_whole, empty
from cxl_offload.units import format_bytes

_ONE_PROCESS = (
    "a state that TierStager staged goes to no other process: torch would copy it once more, to "
    "shared memory of the near node; leave async_checkpointer_type out (its default is THREAD)"
)


class StagedState(dict[str, Any]):
    """What :meth:`TierStager.stage` returns: a dictionary that is not pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused; a saver in another process pickles the state.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError(_ONE_PROCESS)


_BEGUN = object()
"""Stands for the copy of a value whose parts are still being copied."""


class TierStager(AsyncStager):
    """Copies a state into memory of a policy, and returns before it is written out.

    >>> stager = TierStager("cxl", limit_bytes=64 << 30)
    >>> future = torch.distributed.checkpoint.async_save(state, async_stager=stager, ...)

    Memory returns to the session's pool when the save that reads it is done, and the next one takes
    it from there. Of a save that failed it returns when its future is dropped: the exception in it
    holds the copy.

    Parameters
    ----------
    policy
        Of the copies: a policy, ``{node: weight}``, a text such as ``"bind:2"``, or a tier.
    limit_bytes
        The most that copies may hold, of all saves that are under way; None: what the policy's
        nodes have.
    session
        What allocates; None means the current session.

    Raises
    ------
    ValueError
        A limit below 1, or a policy that names what the machine does not have.
    """

    def __init__(
        self,
        policy: PolicyLike,
        *,
        limit_bytes: int | None = None,
        session: Session | None = None,
    ) -> None:
        if limit_bytes is not None:
            check_size(limit_bytes, "limit_bytes")
        self._session = session or current_session()
        self._policy = known_policy(policy, self._session.machine, "a staged checkpoint")
        self._limit = limit_bytes
        self._lock = threading.RLock()  # a finalizer may run inside of our own statements
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of copies that a save still reads."""
        return self._held

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state: tensors in the tier, everything else copied as Python does.

        A tensor that is there twice stays one; an expanded one takes room for all of its elements.
        Distributed tensors keep their mesh and placements, and only this process's part is copied.

        Raises
        ------
        MemoryError
            The limit or a node is too small, or the save before is not done yet; nothing of this
            copy is left.
        TypeError
            A tensor of a class of its own, sparse, nested, quantised or of no device: its bytes are
            not its values. Or a state that is no mapping.
        ValueError
            A tensor whose storage somebody resized, as FSDP does, a state that contains itself,
            or is nested too deeply.
        MemoryLostError
            Memory of the state failed; nothing of this copy is left.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"stage takes a state dict; this is a {type(state_dict).__name__}")
        seen: dict[int, Any] = {}
        try:
            return StagedState((key, self._copied(each, seen)) for key, each in state_dict.items())
        except RecursionError:
            raise ValueError(
                "stage takes a state of fewer levels; Python's stack is full"
            ) from None

    def synchronize_staging(self) -> None:
        """Does nothing: stage() returns only when everything is copied."""

    def close(self) -> None:
        """Nothing is held that a save does not read."""

    def _copied(self, value: Any, seen: dict[int, Any]) -> Any:
        if id(value) in seen:
            if seen[id(value)] is _BEGUN:
                raise ValueError("stage takes a state of finite depth; this one contains itself")
            return seen[id(value)]
        seen[id(value)] = _BEGUN
        if isinstance(value, torch.Tensor):
            made: Any = self._in_tier(value)
        elif isinstance(value, dict):
            made = {key: self._copied(each, seen) for key, each in value.items()}
        elif isinstance(value, list | tuple) and type(value) in (list, tuple):
            made = type(value)(self._copied(each, seen) for each in value)
        else:
            made = copy.deepcopy(value)
        seen[id(value)] = made
        return made

    @torch.no_grad()
    def _in_tier(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor).detach()
        _check_plain(local)
        check_bounds(local, "a tensor of the state")
        self._take(local.nbytes)
        try:
            staged = empty(
                tuple(local.shape), dtype=local.dtype, policy=self._policy, session=self._session
            )
            copy_whole(staged, local)
        except BaseException:
            self._give(local.nbytes)
            raise
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            staged = DTensor.from_local(
                staged, mesh, placements, run_check=False, shape=tensor.shape,
                stride=tensor.stride(),
            )  # fmt: skip
        weakref.finalize(local_tensor(staged), self._give, local.nbytes).atexit = False
        return staged

    def _take(self, nbytes: int) -> None:
        with self._lock:
            if self._limit is not None and self._held + nbytes > self._limit:
                raise MemoryError(
                    f"staging {format_bytes(nbytes)} more than the {format_bytes(self._held)} that "
                    f"saves under way hold, limit {format_bytes(self._limit)}: wait for the save "
                    "before (its future's result()), drop the future of one that failed, or raise "
                    "limit_bytes"
                )
            self._held += nbytes

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes


def _check_plain(tensor: torch.Tensor) -> None:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if type(tensor) is torch.Tensor and is_dense and not (tensor.is_meta or tensor.is_quantized):
        return
    raise TypeError(
        f"TierStager copies dense tensors of torch's own class and distributed ones; this is a "
        f"{type(tensor).__name__} ({tensor.layout}, {tensor.device}): save the state with torch's "
        "own stager (leave async_stager out)"
    )
