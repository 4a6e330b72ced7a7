"""From parameters that have gradients to one call of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch

from cxl_offload import _C
from cxl_offload.errors import MemoryLostError
from cxl_offload.memory.copies import any_copies
from cxl_offload.ops.lost import naming, tensors_of, with_names
from cxl_offload.ops.overlap import EarlyUpdates
from cxl_offload.ops.placed_states import PlacedStates
from cxl_offload.ops.state_codes import CODES, SCALES
from cxl_offload.ops.step_counts import StepCounts, next_step, step_count
from cxl_offload.ops.threads import Threads
from cxl_offload.ops.update import Given, GivenPart, ParamUpdate, UpdateRule, run, run_plain
from cxl_offload.ops.view import PLAIN, local_tensor


class StepUpdates(PlacedStates):
    """What an optimizer does in a step, whose settings are known; a base of
    :class:`cxl_offload.ops.optimizer.OnePassOptimizer`, which sets the attributes."""

    rule_class: ClassVar[type[UpdateRule]]
    """Made of a group, the number of the step, and what gradients are multiplied by."""
    param_groups: list[dict[str, Any]]
    threads: Threads
    early_updates: EarlyUpdates | None

    def _first_value(self, group: dict[str, Any], name: str) -> float:
        """What a state begins with."""
        return 0.0

    def init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Makes the states of a parameter that has none yet, and returns them."""
        state = cast("dict[str, Any]", self.state[param])
        if "step" in state and all(map(state.__contains__, self.kept_names)):
            return state
        missing = [name for name in ("step", *self.kept_names) if name not in state]
        if len(missing) <= len(self.kept_names):
            raise ValueError(
                f"the states of a parameter of shape {tuple(param.shape)} have no "
                f"{', '.join(missing)}; load a whole checkpoint, or clear them to begin again"
            )
        made: dict[str, Any] = {}
        for name in self.state_names:
            made |= self.placed_state(param, name, self._first_value(group, name))
        state["step"] = step_count(0.0)
        state.update(made)
        return state

    def update(self, given: Sequence[Given], grad_scale: float) -> None:
        """One call of the kernels for all, and their steps counted with it."""
        # As `naming` does, which takes as long as the rest of a small step.
        try:
            plain = self._plain_step(given, grad_scale)
            if plain is not None:
                run_plain(plain, threads=self.threads)
            else:
                self._run_updates(given, grad_scale)
        except MemoryLostError as error:
            raise with_names(error, self._named(given)) from None

    def _run_updates(self, given: Sequence[Given], grad_scale: float) -> None:
        counts = StepCounts()
        updates, then = self._updates(given, grad_scale, counts)
        then = [*counts.setting(), *then]
        run(updates, threads=self.threads, then=then, counts=counts.places())

    def _plain_step(self, given: Sequence[Given], grad_scale: float) -> _C.PlainStep | None:
        """What :meth:`_updates` says, where the core can read it all by itself: of tensors that are
        ordinary ones, whose states are made and of which no part was updated before."""
        if any_copies() or (self.early_updates is not None and self.early_updates.has_parts()):
            return None
        names = self.state_names
        scale_names: tuple[str, ...] = ()
        if self.in_codes:
            names = tuple(name + CODES for name in self.state_names)
            scale_names = tuple(name + SCALES for name in self.state_names)
        return _C.plain_step(
            PLAIN,
            self.state,
            given,
            rule=self.rule_class,
            grad_scale=grad_scale,
            names=names,
            scale_names=scale_names,
            seed=self.rounding_seed,
            is_exact=self.state_dtype is torch.float32,
        )

    def _named(self, given: Sequence[Given]) -> Iterator[tuple[str, torch.Tensor]]:
        """All that a step reads and writes, by names for people."""
        return tensors_of(self.param_groups, self._updates(given, 1.0, StepCounts())[0])

    def _updates(
        self, given: Sequence[Given], grad_scale: float, counts: StepCounts
    ) -> tuple[list[ParamUpdate], list[Callable[[], object]]]:
        """The updates of a step, and what else is to be called when all are made; notes in
        ``counts`` what is to be counted then."""
        updates = []
        then = []
        rules: dict[tuple[int, int], UpdateRule] = {}  # one for all parameters of a group, mostly
        for param, group, copy in given:
            state = self.init_state(param, group)
            step = next_step(state, param)
            counts.add(state, step)
            rule = rules.get((id(group), step))
            if rule is None:
                rule = rules[id(group), step] = self.rule_class(group, step, grad_scale)
            whole = self._update(param, rule, state, step, copy)
            if self.early_updates is None:
                updates.append(whole)
            else:
                updates += self.early_updates.left_of(param, whole)
                then.append(self.early_updates.forgetting(param))
        return updates, then

    def update_parts(self, given: Sequence[GivenPart]) -> None:
        """Updates elements before the step of their parameter, which updates the others."""
        updates = []
        for param, group, begin, end in given:
            state = self.init_state(param, group)
            step = next_step(state, param)
            rule = self.rule_class(group, step, 1.0)
            updates.append(self._update(param, rule, state, step, None).part(begin, end))
        with naming(lambda: tensors_of(self.param_groups, updates)):
            run(updates, threads=self.threads)

    def _update(
        self,
        param: torch.Tensor,
        rule: UpdateRule,
        state: dict[str, Any],
        step: int,
        copy: torch.Tensor | None,
    ) -> ParamUpdate:
        grad = param.grad
        assert grad is not None
        scales: Sequence[torch.Tensor] = ()
        if self.in_codes:
            states = [(name, local_tensor(state[name + CODES])) for name in self.state_names]
            scales = [state[name + SCALES] for name in self.state_names]
        else:
            states = [(name, local_tensor(state[name])) for name in self.state_names]
        rounding = None if self.rounding_seed is None else self._rounding(param, step)
        # By place, since this runs for every tensor of every step, and names take longer.
        return ParamUpdate(
            rule, local_tensor(param), local_tensor(grad), states, copy, scales, rounding
        )

    def _rounding(self, param: torch.Tensor, step: int) -> tuple[int, int] | None:
        """Seed and step, where something is rounded at random."""
        is_exact = self.state_dtype is torch.float32 and param.dtype is torch.float32
        return None if is_exact or self.rounding_seed is None else (self.rounding_seed, step)
