"""A server that goes from event to event, against one that goes step by step and a known queue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.fleet.server import ServerRates, serve
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.vllm.offload import WeightOffload, tokens_per_s
from cxl_offload.plan.vllm.steps import PromptWork, ServerSteps

GB = 1e9
COPIED = 2 * GB
"""Weights off the GPU; a step copies them in 100 ms."""


def case(*, most: int = 8, mean: float = 600.0, room: float = 40.0) -> WeightOffload:
    """A model of 14 GB whose KV is 0.5 MB a token, with ``room`` GB for it."""
    return WeightOffload(
        params=7e9,
        weight_bytes=14 * GB,
        kv_bytes_per_token=5e5,
        gpu_memory_bytes=(14 + room) * GB,
        usable_fraction=1.0,
        gpu_reserved_bytes=0.0,
        gpu=GpuRates(3e14, 2e12),
        mean_tokens_per_sequence=mean,
        max_running_sequences=most,
        link_bytes_per_s=20 * GB,
    )


def rates_of(
    one: WeightOffload, prefill_s_per_token: float, *, most_tokens: int = 8192
) -> ServerRates:
    return ServerRates(
        ServerSteps(one, COPIED, most_tokens),
        lambda arrival: PromptWork(arrival.prompt * prefill_s_per_token, arrival.prompt),
    )


class StepByStep:
    """The same server, written out: one step after the other, from the numbers of the case."""

    def __init__(self, one: WeightOffload, prompt_s: float, most_tokens: int) -> None:
        self.one, self.prompt_s, self.most_tokens = one, prompt_s, most_tokens
        self.kv_tokens = (
            one.gpu_memory_bytes * one.usable_fraction
            - one.gpu_reserved_bytes
            - (one.weight_bytes - COPIED)
        ) / one.kv_bytes_per_token

    def step(self, running: int, kv_tokens: float, prompt_tokens: int) -> float:
        one = self.one
        copies = COPIED / one.link_bytes_per_s
        weights = one.weight_bytes / one.gpu.memory_bytes_per_s
        prompts = prompt_tokens * self.prompt_s
        if not running:
            return copies + max(weights, prompts)
        kv = kv_tokens * one.kv_bytes_per_token / one.gpu.memory_bytes_per_s
        flops = 2 * one.params * running / one.gpu.flops_per_s
        return copies + max(weights + kv, flops) + prompts

    def run(self, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
        """When each request has its first and its last token."""
        now, nxt = 0.0, 0
        left, answers = dict[int, int](), dict[int, int]()  # of prompts begun, of answers begun
        first, last = [0.0] * len(arrivals), [0.0] * len(arrivals)
        while nxt < len(arrivals) or left or answers:
            if not left and not answers:
                now = max(now, arrivals[nxt].seconds)
            budget, prompt_tokens, done = self.most_tokens - len(answers), 0, []
            while True:
                if not left:
                    under_way = [*answers, *done]
                    kept = sum(arrivals[at].prompt + arrivals[at].generated / 2 for at in under_way)
                    if nxt == len(arrivals) or arrivals[nxt].seconds > now or budget == 0:
                        break
                    mean = arrivals[nxt].prompt + arrivals[nxt].generated / 2
                    if len(under_way) == self.one.max_running_sequences:
                        break
                    if kept + mean > self.kv_tokens:
                        break
                    left[nxt] = arrivals[nxt].prompt
                    nxt += 1
                (at,) = left
                part = min(budget, left[at])
                left[at] -= part
                budget -= part
                prompt_tokens += part
                if left[at]:
                    break
                del left[at]
                done.append(at)
            held = sum(arrivals[at].prompt + arrivals[at].generated / 2 for at in answers)
            now += self.step(len(answers), held, prompt_tokens)
            for at in list(answers):
                answers[at] -= 1
            for at in done:
                first[at] = now
                answers[at] = arrivals[at].generated - 1
            for at in [at for at, count in answers.items() if count == 0]:
                last[at] = now
                del answers[at]
        return list(zip(first, last, strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [40.0, 1.5])
@pytest.mark.parametrize("most_tokens", [8192, 256])
def test_events_and_steps_agree(seed: int, room: float, most_tokens: int) -> None:
    draw = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(60):
        now += draw.expovariate(draw.choice((0.1, 0.5, 4.0)))
        arrivals.append(Arrival(now, draw.randrange(1, 900), draw.randrange(1, 80)))
    one = case(room=room)
    found = serve(rates_of(one, 2e-4, most_tokens=most_tokens), arrivals)
    expected = StepByStep(one, 2e-4, most_tokens).run(arrivals)
    for arrival, served, (first, last) in zip(arrivals, found, expected, strict=True):
        begun = served.first_token + arrival.seconds
        ended = begun + served.per_token * max(1, arrival.generated - 1)
        assert begun == pytest.approx(first, rel=1e-9)
        assert ended == pytest.approx(last, rel=1e-9)
    # No first token is there before the weights were copied for its prompt, and some waited longer.
    copies = COPIED / one.link_bytes_per_s
    assert min(served.first_token for served in found) > copies
    assert max(served.first_token for served in found) > 2 * copies


def test_a_request_that_comes_within_a_step_waits_for_its_end_and_then_for_the_copies() -> None:
    one = case()
    rates = rates_of(one, 1e-4)
    begun = rates.alone(Arrival(0.0, 100, 50))
    step = rates.steps.seconds(1, 100 + 25)
    comes = begun + 2.25 * step  # in the third step of the first
    seen = serve(rates, [Arrival(0.0, 100, 50), Arrival(comes, 100, 1)])
    assert seen[0].first_token == pytest.approx(begun)
    mixed = step + 100 * 1e-4
    assert seen[1].first_token == pytest.approx(0.75 * step + mixed)
    resident = replace(one, link_bytes_per_s=1e30)
    assert begun - rates_of(resident, 1e-4).alone(Arrival(0.0, 100, 50)) == pytest.approx(
        COPIED / one.link_bytes_per_s
    )


def test_a_prompt_longer_than_a_step_takes_several_with_the_copies_of_each() -> None:
    one = case()
    at_once, parts = (rates_of(one, 1e-3, most_tokens=most) for most in (1000, 300))
    alone = Arrival(0.0, 1000, 1)
    copies = COPIED / one.link_bytes_per_s
    assert at_once.alone(alone) == pytest.approx(copies + 1.0)
    assert parts.alone(alone) == pytest.approx(4 * copies + 1.0)
    assert serve(parts, [alone])[0].first_token == pytest.approx(parts.alone(alone))


def test_requests_of_one_token_wait_as_in_the_queue_of_pollaczek_and_khinchine() -> None:
    """One at a time, as where the step has room for one prompt."""
    draw, now, arrivals = random.Random(3), 0.0, []
    resident = replace(case(), link_bytes_per_s=1e30)
    service, load = 0.1, 0.6
    for _ in range(60_000):
        now += draw.expovariate(load / service)
        arrivals.append(Arrival(now, 100, 1))
    served = serve(rates_of(resident, service / 100, most_tokens=100), arrivals)
    mean_wait = sum(each.first_token - service for each in served) / len(served)
    assert mean_wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_a_server_that_is_never_idle_makes_the_tokens_of_the_plan() -> None:
    prompt, generated, seconds = 500, 200, 1e-4
    one = case(most=16, mean=prompt + generated / 2)
    arrivals = [Arrival(0.0, prompt, generated) for _ in range(2000)]
    served = serve(rates_of(one, seconds), arrivals)
    ends = max(each.first_token + each.per_token * (generated - 1) for each in served)
    made = 2000 * generated / ends
    decode = tokens_per_s(one, COPIED)  # without prompts, which the server computes in between
    assert made == pytest.approx(1 / (1 / decode + prompt * seconds / generated), rel=0.02)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(
        MemoryError, match=r"5000 \+ 10 tokens: the GPU has room for the KV of 3000"
    ):
        serve(rates_of(case(room=1.5 - 2), 1e-4), [Arrival(0.0, 5000, 10)])
