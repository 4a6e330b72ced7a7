"""Puts the states of any ``torch.optim`` optimizer where a policy says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cxl_offload import tensor
from cxl_offload.memory import (
    Pages,
    Placement,
    Policy,
    PolicyLike,
    Session,
    current_session,
    known_policy,
)
from cxl_offload.ops.view import local_tensor, untraced
from cxl_offload.renamed import renamed_keywords

StatePolicy = PolicyLike | Mapping[str, PolicyLike]

Key = tuple[int, int, str]
"""Number of the group, index of the parameter in it, name of the state."""

_followed: WeakSet[torch.optim.Optimizer] = WeakSet()


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
        if optimizer in _followed:
            raise ValueError(
                f"offload_optimizer: the states of this {type(optimizer).__name__} are offloaded "
                "already; call remove() of the first handle, or name all states in one call"
            )
        self._optimizer = optimizer
        self._policies = _policies_of(policy, session)
        self._are_known = False
        self._options: dict[str, Any] = {"pages": pages, "pin": pin, "session": session}
        self._session = session
        # The memory that this object put there: whatever else is found is moved. Marks of storages
        # rather than addresses, which another storage may have later.
        self._homes: dict[Key, StorageWeakRef] = {}
        self.sweep()
        self._hooks = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        _followed.add(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.sweep()

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self.sweep()

    def _states(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Group, index in it and name, with every state that has one value an element."""
        for number, group in enumerate(self._optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                for name, value in self._optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0:
                        yield (number, index, name), local_tensor(value)

    def _policy_of(self, name: str) -> Policy | None:
        """None for a state that is not to be moved."""
        policies = self._policies
        return policies.get(name) if isinstance(policies, dict) else policies

    def _check_names(self) -> None:
        """Whether the optimizer has every state that is named, once it has any."""
        known = getattr(self._optimizer, "state_names", ())
        names = {*known, *(name for state in self._optimizer.state.values() for name in state)}
        if self._are_known or not names or not isinstance(self._policies, dict):
            return
        strange = [name for name in self._policies if name not in names]
        if strange:
            raise ValueError(
                f"offload_optimizer: {type(self._optimizer).__name__} keeps no state "
                f"{', '.join(map(repr, strange))}; its states are {', '.join(sorted(names))}"
            )
        self._are_known = True

    @untraced
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
            A state is on a GPU: the optimizer needs it there, beside its parameter. A policy is for
            a state that the optimizer does not have.
        """
        self._check_names()
        moved = 0
        for key, state in self._states():
            policy = self._policy_of(key[2])
            if policy is None or self._is_home(key, state):
                continue
            if state.device.type != "cpu":
                raise ValueError(
                    f"state {key[2]!r} is on {state.device} because its parameter is; offload the "
                    "parameters first (ZeRO-Offload, FSDP2's CPUOffloadPolicy)"
                )
            # The tensor object stays, so that whatever holds it sees the new memory.
            state.data = tensor.from_tensor(state, policy=policy, **self._options)
            self._homes[key] = StorageWeakRef(state.untyped_storage())  # type: ignore[no-untyped-call]
            moved += 1
        return moved

    def _is_home(self, key: Key, state: torch.Tensor) -> bool:
        home = self._homes.get(key)
        return home is not None and home.cdata == state.untyped_storage()._cdata

    def placements(self) -> dict[Key, Placement]:
        """Where every state is, by asking its pages.

        Keys are the number of the group, the parameter's index in it and the state's name.
        """
        return {
            key: tensor.placement_of(state, session=self._session) for key, state in self._states()
        }

    def remove(self) -> None:
        """Stops following the optimizer. States stay where they are."""
        if self._hooks:
            _followed.discard(self._optimizer)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _policies_of(policy: StatePolicy, session: Session) -> Policy | dict[str, Policy]:
    """One policy for all states, or one for each name, all of them known to the machine."""
    if isinstance(policy, Mapping) and policy and all(isinstance(key, str) for key in policy):
        named = cast("Mapping[str, PolicyLike]", policy)
        return {name: known_policy(each, session.machine, name) for name, each in named.items()}
    return known_policy(cast("PolicyLike", policy), session.machine, "optimizer states")


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

    Raises
    ------
    ValueError
        The optimizer is offloaded already; a policy is none on this machine, or for a state that
        the optimizer does not have. What an optimizer of torch calls its states shows in its first
        step, so a name that is wrong may be an error only there.

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
