"""When each token of a generation came."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import StoppingCriteria

from cxl_offload.profile.schedule import Progress


class TokenClock(StoppingCriteria):  # type: ignore[misc]
    """Asked after every token whether to stop; it only looks at its watch."""

    def __init__(self, tokens: int, progress: Progress | None) -> None:
        self._tokens = tokens
        self._progress = progress
        self._length = 0
        self.times: list[float] = []

    def start(self) -> None:
        """The prompt begins."""
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Never stop."""
        if input_ids.shape[1] <= self._length:  # begun again: memory failed
            self.start()
        self._length = input_ids.shape[1]
        self.times.append(time.perf_counter())
        if self._progress is not None:
            self._progress("generate", len(self.times) - 1, self._tokens)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
