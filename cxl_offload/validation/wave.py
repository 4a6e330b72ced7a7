"""Some requests that all come at once, until the last has ended: how papers measure serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.fleet.cache import PromptCosts
from cxl_offload.plan.fleet.server import Served, ServerRates, serve
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.vllm.plan import VllmRequest, planned_server
from cxl_offload.plan.vllm.steps import PromptWork, ServerSteps

MOST_REQUESTS = 100_000
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Wave:
    """What became of the requests.

    Attributes
    ----------
    seconds
        Until the last token of all.
    tokens_per_s
        Generated.
    served
        What each request saw.
    """

    seconds: float
    tokens_per_s: float
    served: Sequence[Served]

    @property
    def first_token_s(self) -> float:
        """Mean seconds to the first token, from the moment when all came."""
        return sum(each.first_token for each in self.served) / len(self.served)

    @property
    def per_token_s(self) -> float:
        """Mean seconds between later tokens, of requests that have some."""
        return sum(each.per_token for each in self.served) / len(self.served)


def spread_lengths(count: int, mean: float, most: int) -> list[int]:
    """Answers of lengths as unlike as those of conversations: exponential, with that mean.

    Not drawn: the quantiles of that distribution, in an order that is the same each time.
    """
    quantiles = (((at + 0.5) * _GOLDEN) % 1.0 for at in range(count))
    return [max(1, min(most, round(-mean * math.log1p(-each)))) for each in quantiles]


def serve_wave(request: VllmRequest, count: int, *, spread: bool = False) -> Wave:
    """So many of the request's prompts at once on the server that is planned for it.

    Parameters
    ----------
    spread
        Whether answers differ in length (:func:`spread_lengths`); their mean is the request's.

    Raises
    ------
    MemoryError
        No plan fits, or a request does not.
    ValueError
        No requests, or more than ``MOST_REQUESTS``.
    """
    if not 1 <= count <= MOST_REQUESTS:
        raise ValueError(f"{count} requests at once: 1 to {MOST_REQUESTS}")
    steps, hardware = planned_server(request)
    longest = request.model.positions - request.prompt
    answers = [request.generated] * count
    if spread:
        answers = spread_lengths(count, request.generated, longest)
    arrivals = [Arrival(0.0, request.prompt, each) for each in answers]
    served = serve(_rates(request, steps, hardware), arrivals)
    ends = [
        each.first_token + each.per_token * (tokens - 1)
        for each, tokens in zip(served, answers, strict=True)
    ]
    return Wave(max(ends), sum(answers) / max(ends), served)


def _rates(request: VllmRequest, steps: ServerSteps, hardware: Hardware) -> ServerRates:
    costs = PromptCosts(request.model, hardware, block_tokens=1, gpus=request.gpus)
    work: PromptWork = costs.work(request.prompt, (), ())
    return ServerRates(steps, lambda _: work)
