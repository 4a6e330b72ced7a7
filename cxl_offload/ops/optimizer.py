"""What the one-pass optimizers share: states in tiers, one kernel call a step, checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, overload

import torch

from cxl_offload import _C
from cxl_offload.memory import Pages, PolicyLike, Session
from cxl_offload.ops.checkpoint import read_states
from cxl_offload.ops.late_clip import LateClip, check_norm
from cxl_offload.ops.overlap import EarlyUpdates
from cxl_offload.ops.state_options import (
    OPTIONS,
    check_keywords,
    check_no_options,
    kept_options,
    taken_options,
)
from cxl_offload.ops.step_updates import StepUpdates
from cxl_offload.ops.threads import Threads, check_threads
from cxl_offload.ops.update import check_copies
from cxl_offload.ops.view import untraced
from cxl_offload.renamed import renamed_attribute


class OnePassOptimizer(StepUpdates, torch.optim.Optimizer):
    """Base of the optimizers that update all parameters in one pass over memory.

    A subclass names its states and makes the rule of a step; see
    :class:`cxl_offload.ops.adam.CPUAdam`.

    Parameters
    ----------
    params, defaults
        As in ``torch.optim.Optimizer``.
    state_dtype
        ``torch.float32``, ``torch.bfloat16`` for states of half the size, or ``torch.uint8`` for
        states of a quarter, in blocks of 128 (Adam and Lion; see docs/adam.md).
    rounding_seed
        States of bfloat16 or 8 bits, and parameters of bfloat16, are rounded up or down at random,
        so that small changes are not lost: master weights can be left out. The bits come from the
        seed, the step and the number of the element. None: bfloat16 is rounded to the nearest, and
        states of 8 bits, which cannot be, at random from 0.
    policy, pages, session
        Where the states live: see :func:`cxl_offload.empty`. Without a policy the nearest node is
        preferred, without a session the current one allocates, also states made later. A policy
        that the session does not know is a ValueError. Copies share the session, pickles lack it.
    threads
        See :data:`cxl_offload.ops.threads.Threads`.
    overlap
        Whether parameters are updated in the backward, as their gradients arrive; see
        :meth:`accumulate`.
    late_max_norm
        With ``overlap``: gradients are clipped by their global norm one step late, which
        ``torch.nn.utils.clip_grad_norm_`` cannot do there. Each is multiplied by
        ``min(1, late_max_norm / norm)``, where ``norm`` is that of the step before. The first step,
        and one after a norm that is no number, waits for its own norm and updates in ``step()``.
        The norm is kept in the groups, so also in checkpoints.
    **torchs
        Those of torch's class that say how torch computes, and what is turned off: nothing.
    """

    counts_steps: ClassVar[bool] = True
    """Whether a step's number changes what the step does."""
    unsupported: ClassVar[tuple[str, ...]] = ("amsgrad", "differentiable")
    option_settings: ClassVar[Mapping[str, str]] = {}
    """Options of the constructor that have another name in a group."""

    # Many parameters: by keyword only, each with a default.
    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype = torch.float32,
        rounding_seed: int | None = None,
        policy: PolicyLike | None = None,
        pages: Pages = "thp",
        session: Session | None = None,
        threads: Threads = None,
        overlap: bool = False,
        late_max_norm: float | None = None,
        **torchs: Any,
    ) -> None:
        self.check_variant(torchs)
        check_keywords(type(self).__name__, torchs.keys() - {*self.unsupported})
        self._check_state_dtype(state_dtype)
        self._place_by(policy, pages, session)
        self.state_dtype = state_dtype
        self.rounding_seed = self._seed(rounding_seed)
        check_threads(threads)
        self.threads, self.late_max_norm = threads, late_max_norm
        self.overlap = _C.flag({"overlap": overlap}, "overlap")
        self._begin_early()
        super().__init__(params, defaults)

    def _begin_early(self) -> None:
        """What works in the backward; a copy begins its own."""
        if self.late_max_norm is not None and not self.overlap:
            raise ValueError(
                "late_max_norm is for overlap=True; without it torch.nn.utils.clip_grad_norm_ "
                "before step() clips by the norm of the step itself"
            )
        self._late = None if self.late_max_norm is None else LateClip(self.late_max_norm)
        self.early_updates = EarlyUpdates(self, self._late) if self.overlap else None

    placement = renamed_attribute("placement", "policy")

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether the states are float32; DeepSpeed asks by this name."""
        return self.state_dtype is torch.float32

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = {**self.defaults, **param_group}
        self.check_group(given)
        super().add_param_group(param_group)
        if self.early_updates is not None:
            for param in self.param_groups[-1]["params"]:
                self.early_updates.follow(param)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """For every backward but the last before a step, where ``overlap`` is on.

        With ``overlap`` a parameter changes as soon as a backward has its gradient, and is as
        ``step()`` would leave it when the backward returns; ``step()`` updates what is left.
        Learning rates are those of the backward. Between backward and step, gradients must not be
        changed (clipping by global norm, unscaling): that is an error, in ``step()``. Where an
        update or the backward itself fails, others may have been made: call ``step()``, which
        counts those and makes the rest, before going on.
        """
        with contextlib.nullcontext() if self.early_updates is None else self.early_updates.held():
            yield

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises TypeError or ValueError for settings that no step can be made with."""
        self.check_variant(group)
        self.rule_class(group, 1, 1.0)
        check_norm(group)
        if self._late is not None:
            self._late.check(group)

    def check_variant(self, group: dict[str, Any]) -> None:
        """Raises ValueError for a variant of the optimizer that this class does not have, and for
        an option of all groups in one of them."""
        if self._doubtful().isdisjoint(group):  # nearly always
            return
        check_no_options(type(self).__name__, self.option_settings, group)
        for name in self.unsupported:
            if group.get(name):
                raise ValueError(f"{type(self).__name__} has no {name}; turn it off")

    @classmethod
    @functools.cache
    def _doubtful(cls) -> frozenset[str]:
        """Names that a group must not have, or only turned off."""
        return frozenset({*cls.option_settings, *OPTIONS, *cls.unsupported})

    def __getstate__(self) -> dict[str, Any]:
        if self.early_updates is not None:
            self.early_updates.wait()
        return {**super().__getstate__(), **kept_options(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(taken_options(state))
        is_copy = "overlap" in state
        if is_copy:
            self.__dict__.setdefault("late_max_norm", None)  # kept before there was one
            self._begin_early()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for param in group["params"]:
                self._place_again(param)
                if is_copy and self.early_updates is not None:
                    self.early_updates.follow(param)

    @torch.no_grad()
    def _place_again(self, param: torch.Tensor) -> None:
        """Moves the states of a parameter to their tier: copies and pickles bring ordinary ones."""
        state = self.state.get(param, {})
        for name in self.kept_names:
            if name in state:
                state[name] = (
                    self._placed(state[name]) if self.in_codes else self._place(param, state[name])
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; with ``overlap`` only after :meth:`step`.

        Raises
        ------
        RuntimeError
            Parameters were updated with these gradients already, and no step was made since.
        """
        if self.early_updates is not None:
            self.early_updates.check_stepped("gradients are to be cleared")
        super().zero_grad(set_to_none)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @untraced  # the states would be made for the trace only
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float = 1.0,
        low_precision_copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> float | None:
        """Updates every parameter that has a gradient; all of them or, on an error, none.

        Inside of ``torch.compile`` it runs as it is.

        Parameters
        ----------
        closure
            Computes the loss again, as in ``torch.optim``.
        grad_scale
            Multiplies every gradient before use: the inverse of the loss scale times the clip
            coefficient. The gradients themselves are not changed.
        low_precision_copies
            Parameter to the bfloat16 or float16 tensor that receives its new values.

        Raises
        ------
        TypeError, ValueError
            A parameter, gradient, state or copy does not fit, or a group asks for what this class
            does not have; nothing has been written.
        MemoryLostError
            Memory failed under one of them, see docs/reliability.md.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies = low_precision_copies or {}
        if copies:
            check_copies(self, copies)
        updated: set[torch.Tensor] = set()
        if self.early_updates is not None:
            if copies or grad_scale != 1.0:
                raise ValueError(
                    "step: grad_scale and low_precision_copies come too late with overlap=True, "
                    "which updates in the backward; leave one of them out"
                )
            updated = self.early_updates.finish()
        for group in self.param_groups:
            self.check_variant(group)
        # Looking up a tensor calls Python's code of torch, so it is done where there is something.
        left = [
            (param, group, copies.get(param) if copies else None)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None and not (updated and param in updated)
        ]
        if self._late is not None:
            self._late.see(param for param, *_ in left)
            grad_scale = self._late.scale_now(self.param_groups)
        self.update(left, grad_scale)
        if self._late is not None:
            self._late.keep(self.param_groups)
        return loss

    @untraced
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a checkpoint of this class, of the class of torch, or of DeepSpeed.

        The states keep this optimizer's ``state_dtype`` and placement; torch's own loading would
        give them the type of the parameters. What was here stays until all of the checkpoint is
        known to fit and its states are in their tier, so that an error changes nothing; the tier
        has to have room for both.

        Raises
        ------
        ValueError
            The checkpoint is of another optimizer, of other shapes, or of a variant that this class
            does not have.
        MemoryLostError
            Memory of the checkpoint failed; it may be that of the states that were here.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"load_state_dict: a {type(state_dict).__name__} is no checkpoint")
        loaded: dict[torch.Tensor, dict[str, Any]] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            states, others = read_states(self, given)
            loaded.update(states)
            return {**given, "state": others}

        def put(_: torch.optim.Optimizer) -> None:
            self.state.update(loaded)

        if self.early_updates is not None:
            self.early_updates.check_stepped("states are to be loaded")

        # After all other hooks that change what is loaded, before all that look at the result.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ):
            super().load_state_dict(state_dict)
