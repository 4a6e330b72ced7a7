"""What the one-pass optimizers share: states in tiers, one kernel call a step, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar, cast, overload

import torch

from cxl_offload import _C, tensor
from cxl_offload.memory import Pages, PolicyLike
from cxl_offload.ops.threads import Threads
from cxl_offload.ops.update import ParamUpdate, run
from cxl_offload.ops.view import local_tensor
from cxl_offload.renamed import renamed_attribute

__all__ = ["OnePassOptimizer"]


class OnePassOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that update all parameters in one pass over memory.

    A subclass names its states and makes the rule of a step; see
    :class:`cxl_offload.ops.adam.CPUAdam`.

    Parameters
    ----------
    params, defaults
        As in ``torch.optim.Optimizer``.
    state_dtype
        ``torch.float32`` or ``torch.bfloat16``.
    policy, pages
        Where the states live; see :func:`cxl_offload.empty`.
    threads
        See :data:`cxl_offload.ops.threads.Threads`.
    """

    state_names: ClassVar[tuple[str, ...]]
    unsupported: ClassVar[tuple[str, ...]] = ("amsgrad", "maximize", "differentiable")

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype,
        policy: PolicyLike | None,
        pages: Pages,
        threads: Threads,
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype {state_dtype}; it is torch.float32 or torch.bfloat16")
        self.state_dtype = state_dtype
        self.policy = policy
        self.pages: Pages = pages
        self.threads = threads
        super().__init__(params, defaults)

    placement = renamed_attribute("placement", "policy")

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether the states are float32; DeepSpeed asks by this name."""
        return self.state_dtype is torch.float32

    @abstractmethod
    def _rule(
        self, group: dict[str, Any], step: int, grad_scale: float
    ) -> _C.AdamRule | _C.AdagradRule | _C.LionRule:
        """The settings of one step of a group."""

    def _first_value(self, group: dict[str, Any], name: str) -> float:
        """What a state begins with."""
        return 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = {**self.defaults, **param_group}
        self._check_group(given)
        super().add_param_group(param_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        for name in self.unsupported:
            if group.get(name):
                raise ValueError(f"{type(self).__name__} has no {name}; turn it off")
        self._rule(group, 1, 1.0)

    def __getstate__(self) -> dict[str, Any]:
        own = ("state_dtype", "policy", "pages", "threads")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def init_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Makes the states of a parameter that has none yet, and returns them."""
        state = cast("dict[str, Any]", self.state[param])
        if state:
            return state
        made = {name: self._make_state(param, group, name) for name in self.state_names}
        state["step"] = torch.tensor(0.0)
        state.update(made)
        return state

    def _make_state(self, param: torch.Tensor, group: dict[str, Any], name: str) -> torch.Tensor:
        local = local_tensor(param)
        if local.device.type != "cpu":
            raise ValueError(
                f"a parameter is on {local.device}; {type(self).__name__} updates parameters in "
                "host memory (DeepSpeed: set offload_optimizer to cpu)"
            )
        placed = tensor.full(
            tuple(local.shape),
            self._first_value(group, name),
            dtype=self.state_dtype,
            policy=self.policy,
            pages=self.pages,
        )
        if local is param:
            return placed
        like = torch.zeros_like(param, dtype=self.state_dtype)
        local_tensor(like).data = placed
        return like

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float = 1.0,
        low_precision_copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> float | None:
        """Updates every parameter that has a gradient; all of them or, on an error, none.

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
            A parameter, gradient, state or copy does not fit; nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies = low_precision_copies or {}
        updates: list[ParamUpdate] = []
        steps: list[tuple[dict[str, Any], int]] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.init_state(param, group)
                step = int(state["step"]) + 1
                steps.append((state, step))
                updates.append(
                    ParamUpdate(
                        rule=self._rule(group, step, grad_scale),
                        param=local_tensor(param),
                        grad=local_tensor(param.grad),
                        states=[(name, local_tensor(state[name])) for name in self.state_names],
                        copy=copies.get(param),
                    )
                )
        run(updates, threads=self.threads)
        for state, step in steps:
            _count(state, step)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a checkpoint of this class, of the class of torch, or of DeepSpeed.

        The states keep this optimizer's ``state_dtype`` and placement; torch's own loading would
        give them the type of the parameters.
        """
        for group in state_dict["param_groups"]:
            self._check_group({**self.defaults, **group})
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = [(group, param) for group in self.param_groups for param in group["params"]]
        for index, (group, param) in zip(saved, own, strict=True):
            values = state_dict["state"].get(index)
            if values:
                self._take_over(param, group, values)

    def _take_over(
        self, param: torch.Tensor, group: dict[str, Any], values: Mapping[str, Any]
    ) -> None:
        state = self.state[param]
        for name in self.state_names:
            placed = self._make_state(param, group, name)
            local_tensor(placed).copy_(local_tensor(values[name]))
            state[name] = placed
        state.setdefault("step", torch.tensor(0.0))


def _count(state: dict[str, Any], step: int) -> None:
    """Sets the step, which is a tensor of torch's optimizers and an int of DeepSpeed's."""
    if isinstance(state["step"], torch.Tensor):
        state["step"].fill_(step)
    else:
        state["step"] = step
