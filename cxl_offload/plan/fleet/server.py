"""One server under a stream of requests: who waits how long for the first token.

The server is that of a vLLM plan (:mod:`cxl_offload.plan.vllm.steps`). All running sequences get
one token a step. A step under way is not broken off: who arrives in one is looked at when it ends.
A request is then admitted in the order of arrival, once its KV fits beside that of the running,
each at its mean as in plans (vLLM admits by what a request needs now; that it sets one back when
too many grow at once is not modelled). Its prompt is computed in the steps that follow, which the
running wait for, and its first token is there at the end of the last of them. Between two
admissions or ends all steps are alike, so time goes from event to event and not step by step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.vllm.steps import NO_PROMPT, PromptWork, ServerSteps


@dataclass(frozen=True, slots=True)
class ServerRates:
    """What one server does.

    Attributes
    ----------
    steps
        Of the plan's server.
    prompt
        The work of a request's prompt: what is cached is loaded, the rest computed.
    """

    steps: ServerSteps
    prompt: Callable[[Arrival], PromptWork]

    def alone(self, arrival: Arrival) -> float:
        """Seconds to the first token of a request that waits for no other."""
        return self.steps.alone(self.prompt(arrival))


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds of one request: to the first token from its arrival, and between later tokens."""

    first_token: float
    per_token: float


def serve(rates: ServerRates, arrivals: Sequence[Arrival]) -> list[Served]:
    """What every request of one server sees, in the order of arrival.

    Raises
    ------
    MemoryError
        A request whose KV does not fit on an empty server.
    """
    return _Server(rates, arrivals).run()


class _Server:
    """The state between steps. ``clock`` counts them."""

    def __init__(self, rates: ServerRates, arrivals: Sequence[Arrival]) -> None:
        self._rates = rates
        self._steps = rates.steps
        self._arrivals = arrivals
        self._most = int(rates.steps.case.max_running_sequences)
        self._room = rates.steps.kv_room_tokens
        self._now = 0.0
        self._clock = 0
        self._waiting = 0  # the first request that is not admitted
        self._begun: PromptWork | None = None  # what is left of the prompt of the one before
        self._held = 0.0  # KV tokens of the running, each at its mean
        self._admitted = 0.0  # and of those whose prompts are being computed
        self._running: list[tuple[int, int]] = []  # (clock of the end, request)
        self._first = [0.0] * len(arrivals)
        self._last = [0.0] * len(arrivals)

    def run(self) -> list[Served]:
        while self._waiting < len(self._arrivals) or self._begun or self._running:
            if not self._running and self._begun is None:
                self._now = max(self._now, self._arrivals[self._waiting].seconds)
            work, whole = self._prompts()
            if work.tokens:
                self._mixed(work, whole)
            else:
                self._decode()
        return [self._served(at) for at in range(len(self._arrivals))]

    def _prompts(self) -> tuple[PromptWork, list[int]]:
        """Parts of prompts for the next step, and the requests whose prompts end in it."""
        room = max(1, self._steps.most_tokens - len(self._running))
        total = NO_PROMPT
        whole: list[int] = []
        while room > total.tokens:
            if self._begun is None and not self._admit(len(whole)):
                break
            assert self._begun is not None
            part = self._begun.part(min(self._begun.tokens, room - total.tokens))
            total = total.beside(part)
            if part.tokens < self._begun.tokens:
                self._begun = self._begun.part(self._begun.tokens - part.tokens)
            else:
                self._begun = None
                whole.append(self._waiting - 1)
        return total, whole

    def _admit(self, beside: int) -> bool:
        """Takes the next request, if it is there and fits beside the running and some more."""
        if self._waiting == len(self._arrivals):
            return False
        request = self._arrivals[self._waiting]
        whole = request.prompt + request.generated
        if whole > self._room:
            raise MemoryError(
                f"a request of {request.prompt} + {request.generated} tokens: the GPU has room for "
                f"the KV of {int(self._room)}"
            )
        if request.seconds > self._now or len(self._running) + beside >= self._most:
            return False
        mean = request.prompt + request.generated / 2
        if self._admitted + mean > self._room:
            return False
        self._admitted += mean
        self._begun = self._rates.prompt(request)
        self._waiting += 1
        return True

    def _mixed(self, work: PromptWork, whole: Sequence[int]) -> None:
        """One step in which prompts are computed too."""
        self._now += self._steps.seconds(len(self._running), self._held, work)
        self._clock += 1
        self._end()
        for at in whole:
            self._first[at] = self._now
            request = self._arrivals[at]
            self._held += request.prompt + request.generated / 2
            heapq.heappush(self._running, (self._clock + request.generated - 1, at))
        self._end()

    def _decode(self) -> None:
        """Steps until the first of the running ends, or one after the next request arrives."""
        step = self._steps.seconds(len(self._running), self._held)
        count = self._running[0][0] - self._clock
        if self._waiting < len(self._arrivals):
            comes = self._arrivals[self._waiting].seconds - self._now
            if comes > 0:  # one that is here and does not fit waits for an end
                count = min(count, max(1, math.ceil(comes / step)))
        self._now += count * step
        self._clock += count
        self._end()

    def _end(self) -> None:
        while self._running and self._running[0][0] <= self._clock:
            _, at = heapq.heappop(self._running)
            self._last[at] = self._now
            request = self._arrivals[at]
            mean = request.prompt + request.generated / 2
            self._held -= mean
            self._admitted -= mean

    def _served(self, at: int) -> Served:
        request = self._arrivals[at]
        later = max(1, request.generated - 1)
        first = self._first[at]
        return Served(first - request.seconds, (self._last[at] - first) / later)
