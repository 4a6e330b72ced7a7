"""Updates while the backward goes on: a parameter as soon as its gradient is final.

Torch calls a hook of a parameter when its gradient has been accumulated. What arrives is updated by
a thread beside the backward, in the kernels' own threads, so that on a GPU the optimizer on the CPU
hides behind it. An element's update needs nothing but its own gradient, so the bits are those of
one step after the backward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import torch

from cxl_offload.ops.beside import OneThread
from cxl_offload.ops.lost import check_named, states_of
from cxl_offload.ops.used_gradient import UsedGradient, is_alone
from cxl_offload.ops.view import touch, untraced

if TYPE_CHECKING:
    from cxl_offload.ops.late_clip import LateClip
    from cxl_offload.ops.optimizer import OnePassOptimizer
    from cxl_offload.ops.update import Given, GivenPart, ParamUpdate


class EarlyUpdates:
    """The updates of one optimizer that begin in the backward.

    States are made and settings looked at on autograd's thread, so that an error ends the backward;
    parameters are updated on a thread of this object.
    """

    def __init__(self, optimizer: OnePassOptimizer, late: LateClip | None) -> None:
        # Weak, or the hooks of the parameters would keep the optimizer.
        self._optimizer = weakref.ref(optimizer)
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._thread = OneThread("cxl-offload-updates")
        self._waiting: list[Given] = []
        self._waiting_parts: list[tuple[GivenPart, Callable[[], object]]] = []
        self._parts: dict[torch.Tensor, list[tuple[int, int]]] = {}
        self._running: list[Future[None]] = []
        self._taken: dict[torch.Tensor, UsedGradient] = {}
        self._written: dict[torch.Tensor, int] = {}
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._held = 0
        self._unmade: set[torch.Tensor] = set()
        self._late = late
        self._scale = 1.0
        self._handles: list[Any] = []
        self._number = next(_numbers)
        self._followed: list[int] = []
        weakref.finalize(optimizer, _remove, self._handles, self._number, self._followed)
        # A GradScaler then says in step() what it would do, instead of leaving step() out.
        cast("Any", optimizer)._step_supports_amp_scaling = True

    def follow(self, param: torch.Tensor) -> None:
        """Takes the gradients of a parameter; one that wants none now is left to the step."""
        if param.requires_grad:
            hook = param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            self._handles.append(hook)
            _followers.setdefault(id(param), {})[self._number] = weakref.ref(self)
            self._followed.append(id(param))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leaves gradients that arrive meanwhile alone: more will be added to them."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @untraced
    @torch.no_grad()
    def _arrived(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._held or param.grad is None:
            return
        if param not in self._known_groups(optimizer):
            return  # a framework that divides parameters has put its own in their place
        if param in self._taken:
            raise RuntimeError(
                f"overlap: a second gradient for a parameter of shape {tuple(param.shape)} before "
                "step(); put every backward but the last under `with optimizer.accumulate():`, or "
                "leave overlap out (parameters shared by reentrant checkpoints)"
            )
        if not self._scaled(optimizer):
            return
        group = self._known_groups(optimizer)[param]
        optimizer.check_variant(group)
        optimizer.init_state(param, group)
        self._take(param, param.grad)
        # At once, so that autograd refuses whatever still needs the old values in this backward.
        touch(param)
        with self._lock:
            self._waiting.append((param, group, None))
            self._running.append(self._thread.submit(self._run))
        engine = cast("Any", torch.autograd.Variable)._execution_engine
        engine.queue_callback(_EndOfBackward(self))

    def _take(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Notes what the parameter is updated with, and by whom."""
        for weak in tuple(_followers.get(id(param), {}).values()):
            other = weak()
            if other is not None and other is not self and other._updates(param):
                if not self._taken:
                    self._groups = {}  # settings are those of the backward that is used
                raise RuntimeError(
                    f"overlap: two optimizers would update a parameter of shape "
                    f"{tuple(param.shape)} in this backward, as each does for as long as it lives; "
                    "delete one (and gc.collect(), if it is part of a cycle), or put the backward "
                    "under `with other.accumulate():`"
                )
        self._taken[param] = UsedGradient(grad)

    def _updates(self, param: torch.Tensor) -> bool:
        """Whether a gradient of the parameter would be taken now."""
        optimizer = self._optimizer()
        return optimizer is not None and not self._held and param in _parameters(optimizer)

    @untraced
    @torch.no_grad()
    def part_arrived(
        self, param: torch.Tensor, begin: int, end: int, *, ready: Callable[[], object]
    ) -> None:
        """Takes the gradient of some elements of a parameter that a framework fills by itself.

        The step updates the elements that did not arrive. Nothing waits at the end of the backward,
        for which such parameters are not used.

        Parameters
        ----------
        begin, end
            Elements, counted through all dimensions.
        ready
            Returns when the gradient is there; called on another thread.

        Raises
        ------
        RuntimeError
            Some of them arrived before, and no step was made since.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._held:
            return
        group = self._known_groups(optimizer)[param]
        arrived = self._parts.setdefault(param, [])
        if any(begin < other_end and other < end for other, other_end in arrived):
            raise RuntimeError(
                f"overlap: a second gradient for elements {begin} to {end - 1} of a parameter "
                "before step(); call step() after every backward whose gradients are final, or "
                "leave overlap out"
            )
        optimizer.check_variant(group)
        optimizer.init_state(param, group)
        arrived.append((begin, end))
        with self._lock:
            self._waiting_parts.append(((param, group, begin, end), ready))
            self._running.append(self._thread.submit(self._run_parts))

    def has_parts(self) -> bool:
        """Whether parts of some parameter arrived, so that not all of it is left to a step."""
        return bool(self._parts)

    def left_of(self, param: torch.Tensor, update: ParamUpdate) -> list[ParamUpdate]:
        """What the step has to update of a parameter: what did not arrive before."""
        arrived = sorted(self._parts.get(param, ()))
        if not arrived:
            return [update]
        begins = [0, *(end for _, end in arrived)]
        ends = [*(begin for begin, _ in arrived), param.numel()]
        return [
            update.part(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end
        ]

    def forgetting(self, param: torch.Tensor) -> Callable[[], object]:
        """A built-in function for the end of a step, after which parts may arrive again."""
        return functools.partial(self._parts.pop, param, None)

    def _scaled(self, optimizer: OnePassOptimizer) -> bool:
        """Whether it is known what gradients are multiplied by; else they are left to the step."""
        if self._late is not None:
            scale = self._late.scale_before(optimizer.param_groups)
            if scale is None:
                return False
            self._scale = scale
        return True

    def _known_groups(self, optimizer: OnePassOptimizer) -> dict[torch.Tensor, dict[str, Any]]:
        """Groups by parameter; read again after every step: loading replaces them."""
        if not self._groups:
            groups = optimizer.param_groups
            self._settings = [
                (group, {name: _now(value) for name, value in group.items() if name != "params"})
                for group in groups
            ]
            self._groups = {each: group for group in groups for each in group["params"]}
        return self._groups

    @torch.no_grad()
    def _run(self) -> None:
        optimizer = self._optimizer()
        with self._lock:
            given, self._waiting = self._waiting, []
        if given and optimizer is not None:
            if self._late is not None:
                self._late.see(param for param, *_ in given)
            counts = [int(optimizer.state[param]["step"]) for param, *_ in given]
            try:
                optimizer.update(given, self._scale)
            except BaseException:
                self._unmade.update(
                    param
                    for count, (param, *_) in zip(counts, given, strict=True)
                    if int(optimizer.state[param]["step"]) == count
                )
                raise
            self._written.update((param, param._version) for param, *_ in given)

    @torch.no_grad()
    def _run_parts(self) -> None:
        optimizer = self._optimizer()
        with self._lock:
            given, self._waiting_parts = self._waiting_parts, []
        for _, ready in given:
            ready()
        if given and optimizer is not None:
            optimizer.update_parts([part for part, _ in given])

    def wait(self) -> None:
        """Returns when everything that arrived is updated; raises what an update raised."""
        with self._lock:
            running, self._running = self._running, []
        for future in running:
            future.result()

    def wait_quietly(self) -> None:
        """Returns when everything that arrived is updated; what failed is raised by the step."""
        with self._lock:
            running = list(self._running)
        futures.wait(running)

    def check_stepped(self, what: str) -> None:
        """Refuses to go on without the step of gradients that parameters were updated with."""
        used = len(self._taken) + len(self._parts)
        if used:
            raise RuntimeError(
                f"overlap: {what} of {used} parameters, which the backward has updated already; "
                "call step() first, also after a backward that failed, or use overlap=False where "
                "steps are left out"
            )

    def finish(self) -> set[torch.Tensor]:
        """The parameters that are updated already, once for a step; what failed is left to it.

        Raises
        ------
        RuntimeError
            A gradient was changed or replaced after it was used, or a GradScaler scaled it; a
            parameter was written since.
        MemoryLostError
            Memory of what the backward has updated failed since; nothing is forgotten.
        """
        self.wait()
        optimizer = self._optimizer()
        if optimizer is not None:
            updated = [*self._taken, *self._parts]
            check_named(functools.partial(states_of, optimizer, updated))
        taken, self._taken, self._groups = self._taken, {}, {}
        written, self._written = self._written, {}
        unmade, self._unmade = self._unmade, set()
        if hasattr(self._optimizer(), "found_inf"):
            raise RuntimeError(
                "overlap: parameters were updated in the backward with gradients that a GradScaler "
                "scales, and it cannot skip their update any more; use overlap=False, or bfloat16, "
                "which needs no scaling"
            )
        self._check_settings()
        _check_unchanged(taken, written, optimizer)
        return set(taken) - unmade

    def _check_settings(self) -> None:
        settings, self._settings = self._settings, []
        for group, used_settings in settings:
            changed = [
                name for name, value in used_settings.items() if _differs(group, name, value)
            ]
            if changed:
                raise RuntimeError(
                    f"overlap: {', '.join(map(str, changed))} of a group was changed after the "
                    "backward had updated its parameters; change settings before the backward, or "
                    "use overlap=False"
                )


_numbers = itertools.count()
_followers: dict[int, dict[int, weakref.ref[EarlyUpdates]]] = {}
"""The id of a parameter, to the number and the object of each that takes its gradients. Their
optimizers keep the parameter. Weak references to it would keep torch from swapping tensors."""


def _check_unchanged(
    taken: dict[torch.Tensor, UsedGradient],
    written: dict[torch.Tensor, int],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Refuses gradients and parameters that changed since the backward used them."""
    left = set() if optimizer is None else _parameters(optimizer)
    for param, used in taken.items():
        if not used.is_still(param.grad):
            raise RuntimeError(
                f"overlap: the gradient of a parameter of shape {tuple(param.shape)} was "
                "changed or dropped after the parameter was updated with it (clipping, "
                "unscaling, DistributedDataParallel); what changes gradients between backward "
                "and step() needs overlap=False"
            )
        if param not in left:
            raise RuntimeError(
                f"overlap: a parameter of shape {tuple(param.shape)} was taken out of its "
                "group after the backward had updated it; do that after step()"
            )
        if is_alone(param) and written.get(param, param._version) != param._version:
            raise RuntimeError(
                f"overlap: a parameter of shape {tuple(param.shape)} was written after the "
                "backward had updated it; write it after step(), or use overlap=False"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}


def _differs(group: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a setting is another one now."""
    now = group.get(name)
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        return not torch.equal(now, value)
    return now is not value and bool(now != value)


def _now(value: Any) -> Any:
    """A setting as it is now: a scheduler writes to a learning rate that is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _EndOfBackward:
    """Waits until no parameter is between its old and its new value.

    Autograd calls it at the end of a backward, and where the backward fails only drops it.
    """

    __slots__ = ("_updates",)

    def __init__(self, updates: EarlyUpdates) -> None:
        self._updates: EarlyUpdates | None = updates

    def __call__(self) -> None:
        updates, self._updates = self._updates, None
        if updates is not None:
            updates.wait()

    def __del__(self) -> None:
        if self._updates is not None:
            self._updates.wait_quietly()


def _remove(handles: list[Any], number: int, followed: list[int]) -> None:
    for handle in handles:
        handle.remove()
    for param in followed:
        others = _followers.get(param, {})
        others.pop(number, None)
        if not others:
            _followers.pop(param, None)
