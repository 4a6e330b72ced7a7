"""Runs optimizer updates: the checked way from tensors to the one-pass kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cxl_offload import _C
from cxl_offload.memory.copies import any_copies, has_copies
from cxl_offload.ops.threads import Threads, kernel_for, team_for
from cxl_offload.ops.view import INCREMENT_VERSION, PLAIN, tensor_view, touching, untraced

_STATE_DTYPES = (torch.float32, torch.bfloat16)
_CODED_DTYPES = (torch.uint8,)
_COPY_DTYPES = (torch.bfloat16, torch.float16)


UpdateRule = _C.AdamRule | _C.AdagradRule | _C.LionRule
"""The settings of one step of a parameter."""

Given = tuple[torch.Tensor, dict[str, Any], torch.Tensor | None]
"""A parameter, its group, and the copy that receives its new values."""

GivenPart = tuple[torch.Tensor, dict[str, Any], int, int]
"""A parameter, its group, the first of its elements and the one after the last."""


class ParamUpdate(NamedTuple):
    """One parameter's update; csrc/bindings/updates.cc reads it by the order of its fields.

    Attributes
    ----------
    rule
        The settings of this step.
    param, grad
        float32, bfloat16 or float16, of one shape.
    states
        Name and tensor, in the order of the rule; float32, bfloat16 or codes of 8 bits (uint8),
        all alike.
    copy
        bfloat16 or float16 of the same shape beside float32 parameters, or None: receives the new
        parameters.
    scales
        Of states in 8 bits, one each: uint8, one a block of 128 elements.
    rounding
        Seed and step where states, and parameters of bfloat16, are rounded at random; None: to the
        nearest.
    """

    rule: UpdateRule
    param: torch.Tensor
    grad: torch.Tensor
    states: Sequence[tuple[str, torch.Tensor]]
    copy: torch.Tensor | None = None
    scales: Sequence[torch.Tensor] = ()
    rounding: tuple[int, int] | None = None

    def part(self, begin: int, end: int) -> ParamUpdate:
        """The same of elements ``begin`` to ``end``, counted through all dimensions.

        Not where states are in blocks of 8 bits or something is rounded at random, which goes by
        an element's place in the whole.
        """
        assert not self.scales
        assert self.rounding is None
        assert self.copy is None
        return self._replace(
            param=self.param.view(-1)[begin:end],
            grad=self.grad.view(-1)[begin:end],
            states=[(name, state.view(-1)[begin:end]) for name, state in self.states],
        )

    def written(self) -> list[torch.Tensor]:
        states = [state for _, state in self.states]
        return [self.param, *states, *self.scales, *([] if self.copy is None else [self.copy])]


def check_copies(
    optimizer: torch.optim.Optimizer, copies: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Refuses low-precision copies of what the optimizer does not update (ValueError)."""
    own = {param for group in optimizer.param_groups for param in group["params"]}
    strangers = sum(param not in own for param in copies)
    if strangers:
        raise ValueError(
            f"low_precision_copies: {strangers} of {len(copies)} are of tensors that are no "
            f"parameters of this {type(optimizer).__name__}; their copies would never be written"
        )


def _check_shapes(update: ParamUpdate) -> None:
    named = [("grad", update.grad), *update.states]
    if update.copy is not None:
        named.append(("low_precision_copy", update.copy))
    for name, tensor in named:
        if tensor.shape != update.param.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and param {tuple(update.param.shape)}; "
                "they must be the same"
            )


def _refuse_copies(update: ParamUpdate) -> None:
    for tensor in update.written():
        if has_copies(tensor.data_ptr()):
            raise ValueError(
                f"a parameter of shape {tuple(update.param.shape)} has copies on several nodes "
                "(replicate), of which an optimizer would write one only; train weights that have "
                "none"
            )


def _prepare(updates: Sequence[ParamUpdate]) -> _C.Updates:
    prepared = _C.plain_updates(PLAIN, updates)
    if prepared is None:
        prepared = _C.Updates([_checked(update) for update in updates])
    if any_copies():
        for update in updates:
            _refuse_copies(update)
    return prepared


def _checked(update: ParamUpdate) -> _C.Update:
    """Of tensors that are not plain; most of them are refused, each for its reason."""
    param = tensor_view(update.param, "param")
    grad = tensor_view(update.grad, "grad")
    dtypes = _CODED_DTYPES if update.scales else _STATE_DTYPES
    states = [tensor_view(state, name, dtypes=dtypes) for name, state in update.states]
    scales = [
        tensor_view(scale, f"{name}_scales", dtypes=_CODED_DTYPES)
        for (name, _), scale in zip(update.states, update.scales, strict=False)
    ]
    copy = update.copy
    low = copy if copy is None else tensor_view(copy, "low_precision_copy", dtypes=_COPY_DTYPES)
    _check_shapes(update)
    return _C.Update(update.rule, param, grad, states, low, scales=scales, rounding=update.rounding)


@untraced
def run(
    updates: Sequence[ParamUpdate],
    *,
    threads: Threads = None,
    isa: str | None = None,
    then: Sequence[Callable[[], object]] = (),
    counts: Iterable[tuple[int, int]] = (),
) -> None:
    """Runs all updates in one go of the team; nothing is written unless all of them are right.

    Parameters
    ----------
    then
        Built-in functions to call when everything is written. Python looks at signals between steps
        of its own code only, so a handler that raises finds both done or neither.
    counts
        Address and bytes of what ``then`` writes, where no tensor of the updates may be.
    threads
        See :data:`cxl_offload.ops.threads.Threads`.
    isa
        ``"scalar"``, ``"neon"``, ``"sve256"``, ``"avx2"`` or ``"avx512"``; None takes the best of
        this processor. All give the same bits.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit; see :func:`cxl_offload.ops.view.tensor_view`. Or what is written has
        copies on several nodes.
    """
    prepared = _prepare(updates)
    for address, nbytes in counts:
        prepared.count_at(address, nbytes)
    written = [tensor for update in updates for tensor in update.written()]
    _run(prepared, threads, isa=isa or "", then=[touching(written), *then])


def run_plain(step: _C.PlainStep, *, threads: Threads) -> None:
    """As :func:`run`, of what the core has read by itself; steps are counted too."""
    _run(step.updates, threads, isa="", then=[functools.partial(step.finish, INCREMENT_VERSION)])


def _run(
    updates: _C.Updates, threads: Threads, *, isa: str, then: Sequence[Callable[[], object]]
) -> None:
    team = team_for(threads)
    _C.run_updates(updates, team, isa=isa, kernel=kernel_for(team), then=then)
