"""A server that goes from event to event, against one that goes step by step and a known queue."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.fleet.server import ServerRates, serve
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.vllm.offload import WeightOffload, tokens_per_s

GB = 1e9


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


def rates_of(one: WeightOffload, prefill_s_per_token: float) -> ServerRates:
    return ServerRates(one, 2 * GB, lambda arrival: arrival.prompt * prefill_s_per_token)


def step_by_step(rates: ServerRates, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    """When each request has its first and its last token: one step after the other."""
    now, waiting, running = 0.0, 0, dict[int, int]()
    first, last = [0.0] * len(arrivals), [0.0] * len(arrivals)

    def tokens(at: int) -> int:
        return arrivals[at].prompt + arrivals[at].generated

    while waiting < len(arrivals) or running:
        if not running and arrivals[waiting].seconds > now:
            now = arrivals[waiting].seconds
        while (
            waiting < len(arrivals)
            and arrivals[waiting].seconds <= now
            and len(running) < rates.case.max_running_sequences
            and sum(map(tokens, running)) + tokens(waiting) <= rates.kv_room_tokens
        ):
            now += rates.prefill_seconds(arrivals[waiting])
            first[waiting] = last[waiting] = now
            if arrivals[waiting].generated > 1:
                running[waiting] = arrivals[waiting].generated - 1
            waiting += 1
        if running:
            held = sum(arrivals[at].prompt + arrivals[at].generated / 2 for at in running)
            now += rates.step_seconds(len(running), held)
            for at in list(running):
                running[at] -= 1
                if running[at] == 0:
                    last[at] = now
                    del running[at]
    return list(zip(first, last, strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [40.0, 1.5])
def test_events_and_steps_agree_to_a_step(seed: int, room: float) -> None:
    draw = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(60):
        now += draw.expovariate(draw.choice((0.5, 4.0)))
        arrivals.append(Arrival(now, draw.randrange(1, 900), draw.randrange(1, 80)))
    rates = rates_of(case(room=room), 2e-4)
    found, expected = serve(rates, arrivals), step_by_step(rates, arrivals)
    # A request that comes within a step waits for its end, so each one before may cost a step.
    longest = rates.step_seconds(8, 8 * 980)
    for at, (served, (first, last)) in enumerate(zip(found, expected, strict=True)):
        begun = served.first_token + arrivals[at].seconds
        ended = begun + served.per_token * max(1, arrivals[at].generated - 1)
        assert begun == pytest.approx(first, abs=4 * longest, rel=0.01)
        assert ended == pytest.approx(last, abs=4 * longest, rel=0.01)


def test_requests_of_one_token_wait_as_in_the_queue_of_pollaczek_and_khinchine() -> None:
    draw, now, arrivals = random.Random(3), 0.0, []
    service, load = 0.1, 0.6
    for _ in range(60_000):
        now += draw.expovariate(load / service)
        arrivals.append(Arrival(now, 100, 1))
    served = serve(rates_of(case(), service / 100), arrivals)
    mean_wait = sum(each.first_token - service for each in served) / len(served)
    assert mean_wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_a_server_that_is_never_idle_makes_the_tokens_of_the_plan() -> None:
    prompt, generated, seconds = 500, 200, 1e-4
    one = case(most=16, mean=prompt + generated / 2)
    arrivals = [Arrival(0.0, prompt, generated) for _ in range(2000)]
    rates = rates_of(one, seconds)
    served = serve(rates, arrivals)
    ends = max(each.first_token + each.per_token * (generated - 1) for each in served)
    made = 2000 * generated / ends
    decode = tokens_per_s(one, 2 * GB)  # without prompts, which the server computes in between
    assert made == pytest.approx(1 / (1 / decode + prompt * seconds / generated), rel=0.02)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(
        MemoryError, match=r"5000 \+ 10 tokens: the GPU has room for the KV of 3000"
    ):
        serve(rates_of(case(room=1.5 - 2), 1e-4), [Arrival(0.0, 5000, 10)])
