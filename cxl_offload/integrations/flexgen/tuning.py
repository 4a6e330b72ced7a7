"""Tunes where the weights of a run live on the host, by the time of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import torch
from flexgen.pytorch_backend import TorchTensor

from cxl_offload.memory import Session
from cxl_offload.tune import StepTuner, TuneOptions
from cxl_offload.tune.optimizer import step_tuner


class TunedRun:
    """Follows the tokens that a run decodes; pages move between two of them.

    The prompt is not measured: there the weights are read once for all of its tokens.

    Parameters
    ----------
    weights
        Every weight, wherever it lies; those outside of the session's memory are left out.
    session
        The session that host memory comes from.
    options
        Budget and state file.
    before_moves
        Waits for every copy that is under way, then forgets where weights were.

    Attributes
    ----------
    tuner
        The tuner; None where no weight is on the host.
    """

    def __init__(
        self,
        weights: Iterable[TorchTensor],
        session: Session,
        options: TuneOptions,
        *,
        before_moves: Callable[[], None],
    ) -> None:
        found = {str(at): one for at, one in enumerate(_on_host(weights, session))}
        self.tuner: StepTuner | None = None
        if found:
            self.tuner = step_tuner(
                found,
                session=session,
                budget_bytes_per_step=options.budget_bytes,
                state=options.state,
                framework="flexgen",
            )
        self._before_moves = before_moves
        self._last = 0.0

    def token_begins(self, token: int) -> None:
        """The loop turns to a token; nothing of it is computed yet."""
        now = time.perf_counter()
        if self.tuner is not None and token > 1:
            if self.tuner.is_moving:
                self._before_moves()
            self.tuner.step(now - self._last)
        self._last = time.perf_counter()


def _on_host(weights: Iterable[TorchTensor], session: Session) -> Iterator[torch.Tensor]:
    for weight in weights:
        data = weight.data
        is_plain = isinstance(data, torch.Tensor) and data.device.type == "cpu"
        if is_plain and session.find(data.data_ptr()) is not None:
            yield data
