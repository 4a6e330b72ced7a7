"""One server under a stream of requests: who waits how long for the first token.

The server is that of a vLLM plan. All running sequences get one token a step; a step copies the
weights that are off the GPU, reads all weights and the KV of the running, and takes longer the more
of them there are. A request is admitted in the order of arrival, once its KV fits beside that of
the running; then its prompt is computed, which the others wait for (chunks of a prompt share steps
with decoding, so the sum is the same). Between two admissions or ends all steps are alike, so time
goes from event to event and not step by step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.vllm.offload import WeightOffload, copy_seconds_per_step, kv_room_bytes


@dataclass(frozen=True, slots=True)
class ServerRates:
    """What one server does.

    Attributes
    ----------
    case
        Of the plan: model, GPU and link.
    offload_bytes
        Weights that every step copies.
    prefill_seconds
        Of a request, alone on the server: what is cached is loaded, the rest computed.
    """

    case: WeightOffload
    offload_bytes: float
    prefill_seconds: Callable[[Arrival], float]

    @property
    def kv_room_tokens(self) -> float:
        """Tokens whose KV fits on the GPU."""
        return kv_room_bytes(self.case, self.offload_bytes) / self.case.kv_bytes_per_token

    def step_seconds(self, running: int, kv_tokens: float) -> float:
        """A token of each of the running."""
        case = self.case
        copies = copy_seconds_per_step(case, self.offload_bytes)
        exchange = running * case.exchange_seconds_per_token
        return copies + case.gpu_seconds(running, kv_tokens) + exchange


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
    """The state between events. ``clock`` counts the tokens that a running sequence has got."""

    def __init__(self, rates: ServerRates, arrivals: Sequence[Arrival]) -> None:
        self._rates = rates
        self._arrivals = arrivals
        self._most = int(rates.case.max_running_sequences)
        self._room = rates.kv_room_tokens
        self._now = 0.0
        self._clock = 0.0
        self._held = 0.0  # KV tokens of the running, each at its mean
        self._reserved = 0.0  # at its end, which admission looks at
        self._running: list[tuple[float, int]] = []  # (clock of the end, request)
        self._first = [0.0] * len(arrivals)
        self._last = [0.0] * len(arrivals)

    def run(self) -> list[Served]:
        waiting = 0
        for at in range(len(self._arrivals)):
            waiting = self._until(self._arrivals[at].seconds, waiting, at)
        self._until(float("inf"), waiting, len(self._arrivals))
        return [self._served(at) for at in range(len(self._arrivals))]

    def _until(self, end: float, waiting: int, arrived: int) -> int:
        """Goes on to the time ``end``; who waits are ``waiting`` to ``arrived``."""
        while self._now < end:
            if waiting < arrived and self._fits(waiting):
                self._admit(waiting)
                waiting += 1
            elif not self._running:
                if end == float("inf"):
                    break
                self._now = end
            else:
                self._decode(end)
        return waiting

    def _fits(self, at: int) -> bool:
        request = self._arrivals[at]
        whole = request.prompt + request.generated
        if whole > self._room:
            raise MemoryError(
                f"a request of {request.prompt} + {request.generated} tokens: the GPU has room for "
                f"the KV of {int(self._room)}"
            )
        return len(self._running) < self._most and self._reserved + whole <= self._room

    def _admit(self, at: int) -> None:
        request = self._arrivals[at]
        self._now += self._rates.prefill_seconds(request)
        self._first[at] = self._now
        self._held += request.prompt + request.generated / 2
        self._reserved += request.prompt + request.generated
        heapq.heappush(self._running, (self._clock + request.generated - 1, at))

    def _decode(self, end: float) -> None:
        """Steps until the first of the running ends, or the time does."""
        step = self._rates.step_seconds(len(self._running), self._held)
        ends, at = self._running[0]
        done = self._now + (ends - self._clock) * step
        if done > end:
            self._clock += (end - self._now) / step
            self._now = end
            return
        heapq.heappop(self._running)
        self._now, self._clock = done, ends
        self._last[at] = done
        request = self._arrivals[at]
        self._held -= request.prompt + request.generated / 2
        self._reserved -= request.prompt + request.generated

    def _served(self, at: int) -> Served:
        request = self._arrivals[at]
        later = max(1, request.generated - 1)
        first = self._first[at]
        return Served(first - request.seconds, (self._last[at] - first) / later)
