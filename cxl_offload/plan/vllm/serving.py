"""What a request sees of a planned vLLM server, and how many sequences a target leaves room for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import Serving
from cxl_offload.plan.vllm.offload import WeightOffload, running_sequences, step_seconds
from cxl_offload.plan.vllm.steps import PromptWork, ServerSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTargets:
    """The most seconds to a first token, and between later ones.

    Plans of one server hold them to be of the mean request, those of fleets of 95 in 100.

    Raises
    ------
    ConfigError
        One that is not above 0.
    """

    first_token: float = math.inf
    per_token: float = math.inf

    def __post_init__(self) -> None:
        if not self.first_token > 0 < self.per_token:
            raise ConfigError(
                f"first tokens within {self.first_token:g} s and later ones within "
                f"{self.per_token:g} s: a number above 0 is needed (--ttft, --per-token)"
            )

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return min(self.first_token, self.per_token) < math.inf

    def __str__(self) -> str:
        named = {"a first token within": self.first_token, "later ones within": self.per_token}
        return " and ".join(f"{n} {s:.4g} s" for n, s in named.items() if s < math.inf)


NO_TARGETS = TokenTargets()


def serving(case: WeightOffload, offload_bytes: float, prompt: int) -> Serving:
    """What a request of ``prompt`` tokens sees while as many run as fit.

    It comes in the middle of a step in the mean, and its prompt is then computed beside those that
    run; ``per_token_s`` has the prompts' part of a step in it.
    """
    steps = ServerSteps(case, offload_bytes)
    computed = case.prefill_flops / case.gpu.products_flops_per_s
    work = PromptWork(computed, prompt, case.request_s)
    others = max(1, round(running_sequences(case, offload_bytes)))
    held = others * case.mean_tokens_per_sequence
    mean = step_seconds(case, offload_bytes)
    return Serving(
        first_token_s=mean / 2 + steps.beside(others, held, work),
        alone_s=steps.alone(work),
        per_token_s=mean,
    )


def within(
    case: WeightOffload, offload_bytes: float, prompt: int, targets: TokenTargets
) -> WeightOffload | None:
    """The case with as many sequences at once as meet the targets, up to its own most.

    More of them make every step longer, so the most are found by bisection. None: not even one.
    """

    def meets(sequences: int) -> bool:
        fewer = replace(case, max_running_sequences=sequences)
        seen = serving(fewer, offload_bytes, prompt)
        return seen.first_token_s <= targets.first_token and seen.per_token_s <= targets.per_token

    most = int(case.max_running_sequences)
    if meets(most):
        return case
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return replace(case, max_running_sequences=low) if low else None
