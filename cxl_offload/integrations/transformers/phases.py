"""Prefill and decode of a model, each with a share on the far tier and threads of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cxl_offload.memory import Session
from cxl_offload.tune import PhaseSteps, TuneOptions, follow_phases
from cxl_offload.tune.homes import tensors_of

PREFILL, DECODE = "prefill", "decode"


class TunedPhases:
    """Follows prompts and decode steps; weights move between them where that pays.

    A forward pass that reads one new token of every sequence is a step of decode, any other is
    prefill, timed by its tokens. A cycle is a prompt and the tokens that follow it.

    Parameters
    ----------
    weights
        Name to weight; those that are not in memory of the session are left out.

    Attributes
    ----------
    steps
        What is decided; None where no weight is in memory of the session, and outside of the block.
    """

    def __init__(
        self, weights: dict[str, torch.Tensor], session: Session, options: TuneOptions
    ) -> None:
        self._found = tensors_of(session, weights)
        self._session = session
        self._options = options
        self.steps: PhaseSteps | None = None
        self._phase = ""
        self._began = 0.0
        self._rows = 0

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Measures and moves inside of the block; lets go of the weights at its end."""
        threads = torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, threads)
            stack.callback(self._let_go)
            if self._found:
                self.steps = self._follow()
            for hook in (
                model.register_forward_pre_hook(self._before, with_kwargs=True),
                model.register_forward_hook(self._after, with_kwargs=True),
            ):
                stack.callback(hook.remove)
            yield

    def _let_go(self) -> None:
        self.steps, self._found = None, {}

    def _follow(self) -> PhaseSteps:
        """Sets the threads of the first phase, and may move pages."""
        return follow_phases(
            self._found,
            (PREFILL, DECODE),
            self._options,
            session=self._session,
            framework="transformers",
            set_threads=torch.set_num_threads,
            clock=lambda: time.perf_counter(),
        )

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        given = new_tokens(args, kwargs)
        if self.steps is not None and given is not None:
            phase = DECODE if given.shape[1] == 1 else PREFILL
            if phase == PREFILL or phase != self._phase:
                self.steps.begin(phase)
            self._phase = phase
        self._began = time.perf_counter()

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seconds = time.perf_counter() - self._began
        given = new_tokens(args, kwargs)
        if self.steps is None or given is None or not self._phase:
            return
        rows, tokens = int(given.shape[0]), int(given.shape[1])
        if self._phase == PREFILL:
            self.steps.step(PREFILL, seconds, equal_parts=rows * tokens)
            return
        if rows != self._rows:
            self._rows = rows
            self.steps.restart(DECODE)
        self.steps.step(DECODE, seconds)


def new_tokens(args: Any, kwargs: Any) -> torch.Tensor | None:
    """What a forward pass is given: ``(sequences, tokens, ...)``; None where it is not known."""
    given = kwargs.get("input_ids", args[0] if args else None)
    found: torch.Tensor | None = kwargs.get("inputs_embeds") if given is None else given
    return found
