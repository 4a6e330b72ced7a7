"""Puts the states of any ``torch.optim`` optimizer where a policy says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cxl_offload import tensor
from cxl_offload.memory import Pages, Placement, PolicyLike, Session, current_session
from cxl_offload.ops.view import local_tensor
from cxl_offload.renamed import renamed_keywords

__all__ = ["OffloadedStates", "offload_optimizer"]

StatePolicy = PolicyLike | Mapping[str, PolicyLike]


class OffloadedStates:
    """The states of one optimizer, kept in their tiers; made by :func:`offload_optimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: StatePolicy,
        *,
        pages: Pages,
        pin: bool,
        session: Session,
    ) -> None:
        self._optimizer = optimizer
        self._policy = policy
        self._options: dict[str, Any] = {"pages": pages, "pin": pin, "session": session}
        self._session = session
        # Names to the addresses that this object put there: whatever else is found is moved.
        self._homes: dict[tuple[int, int, str], int] = {}
        self.sweep()
        self._hooks = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.sweep()

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self.sweep()

    def _states(self) -> Iterator[tuple[tuple[int, int, str], torch.Tensor]]:
        """Group, index in it and name, with every state that has one value an element."""
        for number, group in enumerate(self._optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                for name, value in self._optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0:
                        yield (number, index, name), local_tensor(value)

    def _policy_of(self, name: str) -> PolicyLike | None:
        """None for a state that is not to be moved."""
        chosen = self._policy
        if isinstance(chosen, Mapping) and all(isinstance(key, str) for key in chosen):
            return chosen.get(name)  # type: ignore[call-overload]
        return chosen  # type: ignore[return-value]

    @torch.no_grad()
    def sweep(self) -> int:
        """Moves every state that is not at its place yet; the hooks call it.

        Returns
        -------
        int
            States moved.

        Raises
        ------
        ValueError
            A state is on a GPU: the optimizer needs it there, beside its parameter.
        """
        moved = 0
        for key, state in self._states():
            policy = self._policy_of(key[2])
            if policy is None or self._homes.get(key) == state.data_ptr():
                continue
            if state.device.type != "cpu":
                raise ValueError(
                    f"state {key[2]!r} is on {state.device} because its parameter is; offload the "
                    "parameters first (ZeRO-Offload, FSDP2's CPUOffloadPolicy)"
                )
            # The tensor object stays, so that whatever holds it sees the new memory.
            state.data = tensor.from_tensor(state, policy=policy, **self._options)
            self._homes[key] = state.data_ptr()
            moved += 1
        return moved

    def placements(self) -> dict[tuple[int, int, str], Placement]:
        """Where every state is, by asking its pages.

        Keys are the number of the group, the parameter's index in it and the state's name.
        """
        return {
            key: tensor.placement_of(state, session=self._session) for key, state in self._states()
        }

    def remove(self) -> None:
        """Stops following the optimizer. States stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


@renamed_keywords(placement="policy", memory="session")
def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    policy: StatePolicy,
    *,
    pages: Pages = "thp",
    pin: bool = False,
    session: Session | None = None,
) -> OffloadedStates:
    """Moves the states of ``optimizer`` where a policy says, also those it makes or loads later.

    Parameters
    ----------
    optimizer
        Any ``torch.optim.Optimizer`` whose parameters are in host memory; parameters may be
        distributed tensors (FSDP2 with ``CPUOffloadPolicy``). Scalars such as ``step`` stay.
    policy
        One for all states, or one for each name, e.g. ``{"exp_avg": "cxl"}``; states that
        are not named are left alone.
    pages, pin
        See :func:`cxl_offload.empty`.
    session
        What allocates, also states made later; None means the current session.

    Returns
    -------
    OffloadedStates
        With ``placements()``, and ``remove()`` to stop.

    Notes
    -----
    An optimizer makes its states inside of its first step; they are moved when that step is over,
    so for a moment each state is there twice. :class:`cxl_offload.ops.adam.CPUAdam` allocates its
    states in place.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"offload_optimizer of a {type(optimizer).__name__}: give a torch.optim.Optimizer, "
            "such as torch.optim.AdamW(model.parameters())"
        )
    return OffloadedStates(
        optimizer, policy, pages=pages, pin=pin, session=session or current_session()
    )
