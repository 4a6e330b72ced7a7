"""The states of the one-pass optimizers as tensors: of what types, how made, and where they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cxl_offload import tensor
from cxl_offload.memory import Pages, PolicyLike, Session, current_session, known_policy
from cxl_offload.ops.state_codes import CODES, SCALES, Code, encoded, scale_count
from cxl_offload.ops.view import local_tensor


class PlacedStates:
    """What an optimizer knows of its states; a base of
    :class:`cxl_offload.ops.optimizer.OnePassOptimizer`, which sets the attributes."""

    state_names: ClassVar[tuple[str, ...]]
    codes: ClassVar[Mapping[str, Code]] = {}
    """How each state is kept in 8 bits; empty where none can be."""

    state: defaultdict[torch.Tensor, Any]
    state_dtype: torch.dtype
    rounding_seed: int | None
    policy: PolicyLike | None
    pages: Pages
    session: Session | None = None
    """What allocates; None: the session that is current when states are made."""

    def _place_by(self, policy: PolicyLike | None, pages: Pages, session: Session | None) -> None:
        """Takes over where states live, if the session knows the policy."""
        if session is not None and not isinstance(session, Session):
            raise TypeError(
                f"{type(self).__name__}: session is a {type(session).__name__}; give a session, "
                "such as Session.linux(), or leave it out"
            )
        if policy is not None:
            known_policy(policy, (session or current_session()).machine, "optimizer states")
        self.policy, self.pages, self.session = policy, pages, session

    def _check_state_dtype(self, dtype: torch.dtype) -> None:
        known = [torch.float32, torch.bfloat16, *([torch.uint8] if self.codes else [])]
        if dtype not in known:
            names = " or ".join(map(str, known))
            raise ValueError(f"{type(self).__name__}: state_dtype {dtype}; it is {names}")

    def _seed(self, seed: int | None) -> int | None:
        if seed is None:
            return 0 if self.in_codes else None
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(
                f"rounding_seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1"
            )
        if not self.codes:
            raise ValueError(f"{type(self).__name__} has no rounding_seed; leave it out")
        return seed

    def keep_states_as(self, dtype: torch.dtype, *, rounding_seed: int = 0) -> None:
        """Makes states of another type than the constructor was told, rounded at random.

        Raises
        ------
        ValueError
            No type of this class's states, or there are states already.
        """
        self._check_state_dtype(dtype)
        if any(self.state.values()):
            raise ValueError(
                f"{type(self).__name__}: its states are in {self.state_dtype} already; load them "
                f"into an optimizer made with state_dtype={dtype}"
            )
        self.state_dtype = dtype
        if self.rounding_seed is None:
            self.rounding_seed = self._seed(rounding_seed)

    @property
    def in_codes(self) -> bool:
        """Whether the states are in 8 bits."""
        return self.state_dtype is torch.uint8

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The names of the tensors in the state of a parameter."""
        if not self.in_codes:
            return self.state_names
        return tuple(name + part for name in self.state_names for part in (CODES, SCALES))

    def placed_state(
        self, param: torch.Tensor, name: str, value: float | torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The tensors of one state where states live, filled with or made of the value, by name."""
        if not self.in_codes:
            return {name: self._place(param, value)}
        local = self._local(param)
        if local is not param:
            raise ValueError(
                f"a parameter is a {type(param).__name__}, whose states cannot be in 8 bits; use "
                "state_dtype torch.float32 or torch.bfloat16"
            )
        if isinstance(value, torch.Tensor):
            codes, scales = encoded(local_tensor(value), self.codes[name])
            return {name + CODES: self._placed(codes), name + SCALES: self._placed(scales)}
        return {
            name + CODES: self._zeros(tuple(local.shape)),
            name + SCALES: self._zeros((scale_count(local.numel()),)),
        }

    def place_codes(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """States that are in 8 bits already where states live, by name."""
        return {name: self._placed(values[name]) for name in self.kept_names}

    def _local(self, param: torch.Tensor) -> torch.Tensor:
        local = local_tensor(param)
        if local.device.type != "cpu":
            raise ValueError(
                f"a parameter is on {local.device}; {type(self).__name__} updates parameters in "
                "host memory (DeepSpeed: set offload_optimizer to cpu)"
            )
        return local

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor.empty(
            shape,
            dtype=self.state_dtype,
            policy=self.policy,
            pages=self.pages,
            session=self.session,
        )

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._empty(shape).zero_()

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        return tensor.copy_whole(self._empty(tuple(value.shape)), value)

    def _place(self, param: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
        """A state of a parameter of their type: filled with, or copied from."""
        local = self._local(param)
        placed = self._empty(tuple(local.shape))
        if isinstance(value, torch.Tensor):
            tensor.copy_whole(placed, local_tensor(value))
        else:
            placed.fill_(value)
        if local is param:
            return placed
        like = torch.zeros_like(param, dtype=self.state_dtype)
        local_tensor(like).data = placed
        return like
