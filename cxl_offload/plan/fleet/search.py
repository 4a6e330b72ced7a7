"""How many servers meet a target, with how much memory each, and what their tokens cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from cxl_offload.errors import ConfigError
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.fleet.cache import PromptCosts, TierSize, blocks_found
from cxl_offload.plan.fleet.prices import Prices, ServerMemory, break_even_card, cost_per_hour
from cxl_offload.plan.fleet.server import Served, ServerRates, serve
from cxl_offload.plan.fleet.streams import RequestStream, TraceStream
from cxl_offload.plan.vllm.plan import LayersOffGpu, Vllm, VllmRequest
from cxl_offload.plan.vllm.serving import TokenTargets
from cxl_offload.plan.vllm.steps import PromptWork, ServerSteps
from cxl_offload.plan.what_if import with_sizes

MOST_SERVERS = 10_000
_GROWTH = 1.3
FULL = 0.98
"""Load beyond which no fleet is planned: queues would grow for hours before it showed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Median and 95th percentile of what requests see, in seconds."""

    first_token: tuple[float, float]
    per_token: tuple[float, float]

    def meets(self, target: TokenTargets) -> bool:
        """Whether the 95th percentiles of both are as fast as asked for."""
        return self.first_token[1] <= target.first_token and self.per_token[1] <= target.per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOption:
    """Servers of one kind of memory.

    Attributes
    ----------
    servers
        0: no number of them meets the target, ``reason`` says why.
    load
        Share of the time in which servers are busy: at most ``FULL``, unless so many are asked for.
    hit_rate
        Share of the prompts' blocks found in the caches on the hosts.
    tokens_per_s
        Of one server that is never idle.
    cost_per_hour, cost_per_million
        Of all servers, and of a million generated tokens at the asked rate.
    break_even_card
        Price of a CXL card at which the cheapest option without CXL costs the same; None where
        there is nothing to compare.
    """

    memory: ServerMemory
    servers: int
    reason: str = ""
    load: float = 0.0
    hit_rate: float = 0.0
    tokens_per_s: float = 0.0
    seen: Seen | None = None
    cost_per_hour: float = 0.0
    cost_per_million: float = 0.0
    break_even_card: float | None = None


class FleetPlanner:
    """Answers for one model, one kind of server and one stream of requests.

    Parameters
    ----------
    request
        Its prompt and answer are the mean lengths of the stream.
    target
        What 95 of 100 requests shall see.
    block_tokens
        Tokens of a block of the trace, where its reuse is known.

    Notes
    -----
    Requests are dealt in turn. Those whose beginning some server keeps are taken to find it there:
    hits are those of one cache as large as all servers' together, read at the speed of the server's
    own tiers. What waits for nobody else is exact; what lengthens a wait is simulated.
    """

    def __init__(
        self,
        request: VllmRequest,
        stream: RequestStream,
        target: TokenTargets,
        *,
        block_tokens: int = 512,
    ) -> None:
        self._request = request
        self._stream = stream
        self._target = target
        self._block_tokens = block_tokens

    def option(
        self, dram_bytes: int, cxl_bytes: int, prices: Prices, *, servers: int | None = None
    ) -> FleetOption:
        """The fewest servers with so much memory each that meet the target, or those given.

        Raises
        ------
        ConfigError
            A machine without such memory, or without what the equations need.
        """
        machine = with_sizes(self._request.machine, {"dram": dram_bytes, "cxl": cxl_bytes})
        cards = sum(node.kind.value == "cxl" for node in machine.usable_nodes())
        memory = ServerMemory(dram_bytes, cxl_bytes, cards)
        executor = Vllm(replace(self._request, machine=machine))
        found = executor.search(executor.hardware())
        if found is None:
            return FleetOption(
                memory=memory, servers=0, reason=executor.why_nothing_fits(executor.hardware())
            )
        try:
            count, seen = self._fewest(found) if servers is None else self._see(found, servers)
        except MemoryError as error:
            return FleetOption(memory=memory, servers=0, reason=str(error))
        if count == 0:
            return FleetOption(
                memory=memory,
                servers=0,
                reason=self._why_none(found),
            )
        return self._costed(found, memory, prices, count, seen)

    def _costed(
        self,
        found: Candidate[LayersOffGpu],
        memory: ServerMemory,
        prices: Prices,
        count: int,
        seen: Seen,
    ) -> FleetOption:
        load = self._load(found, count)
        if load >= 1:
            reason = (
                f"{count} servers get {load:.1%} of what they can do: requests wait ever longer"
            )
            return FleetOption(memory=memory, servers=0, load=load, reason=reason)
        cost = count * cost_per_hour(prices, memory)
        tokens = self._stream.rate * self._stream.lengths()[1]
        return FleetOption(
            memory=memory,
            servers=count,
            load=load,
            hit_rate=self._hit_rate(found, count),
            tokens_per_s=tokens / count / load,
            seen=seen,
            cost_per_hour=cost,
            cost_per_million=cost / 3600 / tokens * 1e6,
        )

    def _tiers(self, found: Candidate[LayersOffGpu], servers: int) -> list[TierSize]:
        """What the weights leave of the hosts' memory, the fastest first, of all servers."""
        block, gpus = self._costs(found).block_bytes, self._request.gpus
        rooms = [
            (node.copy_bytes_per_s_of(gpus), servers * (node.usable_bytes - held) / block)
            for node, held in zip(found.hardware.nodes, found.host, strict=True)
        ]
        return [TierSize(blocks, rate) for rate, blocks in sorted(rooms, reverse=True)]

    def _costs(self, found: Candidate[LayersOffGpu]) -> PromptCosts:
        request = self._request
        return PromptCosts(request.model, found.hardware, self._block_tokens, request.gpus)

    def _rates(self, found: Candidate[LayersOffGpu], servers: int) -> ServerRates:
        tiers = self._tiers(found, servers)

        costs = self._costs(found)

        @cache
        def work(prompt: int, blocks: tuple[int, ...]) -> PromptWork:
            return costs.work(prompt, blocks, tiers)

        def of(arrival: Arrival) -> PromptWork:
            return work(arrival.prompt, blocks_found(arrival.needs, tiers))

        steps = ServerSteps(found.choice.case, float(found.choice.offload_bytes))
        return ServerRates(steps, of)

    def _see(self, found: Candidate[LayersOffGpu], servers: int) -> tuple[int, Seen]:
        if not 1 <= servers <= MOST_SERVERS:
            raise ConfigError(f"{servers} servers: 1 to {MOST_SERVERS}")
        rates = self._rates(found, servers)
        served: list[Served] = []
        for arrivals in self._stream.dealt(servers):
            seen = serve(rates, arrivals)
            served += seen[int(len(seen) * self._stream.warm_up) :]
        first = np.percentile([each.first_token for each in served], [50, 95])
        later = np.percentile([each.per_token for each in served], [50, 95])
        return servers, Seen((float(first[0]), float(first[1])), (float(later[0]), float(later[1])))

    def _fewest(self, found: Candidate[LayersOffGpu]) -> tuple[int, Seen]:
        """The fewest servers that meet the target, by bisection; 0 where none do."""
        if not self._alone(found).meets(self._target):
            return 0, self._alone(found)
        high = min(MOST_SERVERS, self._by_load(found))
        low = high - 1 if self._stream.warm_up else 0  # so many do not
        seen = self._see(found, high)[1]
        while not self._suffices(found, high, seen):
            if high == MOST_SERVERS:
                return 0, seen
            low, high = high, min(MOST_SERVERS, max(high + 1, int(high * _GROWTH)))
            seen = self._see(found, high)[1]
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._see(found, middle)[1]
            if self._suffices(found, middle, tried):
                high, seen = middle, tried
            else:
                low = middle
        return high, seen

    def _alone(self, found: Candidate[LayersOffGpu]) -> Seen:
        """What requests would see if none waited for another: no fleet is faster."""
        rates = self._rates(found, MOST_SERVERS)
        some = [each for arrivals in self._stream.dealt(MOST_SERVERS) for each in arrivals]
        first = np.percentile([rates.alone(each) for each in some], [50, 95])
        step = rates.steps.seconds(1, sum(self._stream.lengths()))
        return Seen((float(first[0]), float(first[1])), (step, step))

    def _by_load(self, found: Candidate[LayersOffGpu]) -> int:
        """Servers that are busy for at most ``FULL`` of the time, with the caches of one."""
        return max(1, math.ceil(self._stream.rate * self._work_seconds(found, 1) / FULL))

    def _suffices(self, found: Candidate[LayersOffGpu], servers: int, seen: Seen) -> bool:
        """Whether so many meet the target, and would if the stream went on."""
        return seen.meets(self._target) and self._load(found, servers) <= FULL

    def _load(self, found: Candidate[LayersOffGpu], servers: int) -> float:
        """The share of the time in which servers are busy; above 1 is more than they can do."""
        return self._stream.rate * self._work_seconds(found, servers) / servers

    def _work_seconds(self, found: Candidate[LayersOffGpu], servers: int) -> float:
        """What a request takes in the mean of a server that is never idle.

        It is one of many in all its steps, or, where answers are short, what is computed of its
        prompt takes its part of a step's tokens.
        """
        prompt, generated = self._stream.lengths()
        rates = self._rates(found, servers)
        steps = rates.steps
        held = prompt + generated / 2
        fit = steps.kv_room_tokens // held
        most = max(1, int(min(steps.case.max_running_sequences, fit)))
        full_step = steps.seconds(most, most * held)

        @cache
        def of(work: PromptWork) -> float:
            part = max((generated - 1 + steps.passes(work)) / most, work.tokens / steps.most_tokens)
            exchange = work.tokens * steps.case.exchange_seconds_per_token
            return work.compute_s + work.load_s + exchange + part * full_step

        asked = self._stream.requests()
        return sum(of(rates.prompt(each)) for each in asked) / len(asked)

    def _hit_rate(self, found: Candidate[LayersOffGpu], servers: int) -> float:
        if not isinstance(self._stream, TraceStream):
            return 0.0
        tiers = self._tiers(found, servers)
        hits = sum(sum(blocks_found(each.needs, tiers)) for each in self._stream.arrivals)
        asked = sum(len(each.needs) for each in self._stream.arrivals)
        return hits / asked if asked else 0.0

    def _why_none(self, found: Candidate[LayersOffGpu]) -> str:
        alone = self._alone(found)
        return (
            f"alone on a server 95 of 100 first tokens take up to {alone.first_token[1]:.3g} s "
            f"and later ones {alone.per_token[1]:.3g} s each; not even {MOST_SERVERS} servers "
            "meet the target"
        )


def options(
    planner: FleetPlanner,
    sizes: Sequence[tuple[int, int]],
    prices: Prices,
    *,
    servers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[FleetOption]:
    """One for each (DRAM, CXL) of ``sizes``, the cheapest first; those without servers last."""
    found = []
    for done, (dram, cxl) in enumerate(sizes):
        progress(done)
        found.append(planner.option(dram, cxl, prices, servers=servers))
    plain = [each for each in found if each.servers and not each.memory.cxl_bytes]
    if plain:
        base = min(plain, key=lambda each: each.cost_per_hour)
        found = [replace(each, break_even_card=_break_even(prices, base, each)) for each in found]
    return sorted(found, key=lambda each: (not each.servers, each.cost_per_hour))


def _break_even(prices: Prices, base: FleetOption, option: FleetOption) -> float | None:
    pair = (base.servers, base.memory), (option.servers, option.memory)
    return break_even_card(prices, *pair)


def as_document(option: FleetOption) -> Mapping[str, object]:
    """For JSON: bytes, seconds, and the currency of the prices."""
    seen = option.seen
    return {
        "dram_bytes": option.memory.dram_bytes,
        "cxl_bytes": option.memory.cxl_bytes,
        "cards": option.memory.cards,
        "servers": option.servers,
        "reason": option.reason,
        "load": option.load,
        "hit_rate": option.hit_rate,
        "tokens_per_s_of_a_server": option.tokens_per_s,
        "first_token_s": None
        if seen is None
        else {"p50": seen.first_token[0], "p95": seen.first_token[1]},
        "per_token_s": None
        if seen is None
        else {"p50": seen.per_token[0], "p95": seen.per_token[1]},
        "cost_per_hour": option.cost_per_hour,
        "cost_per_million_tokens": option.cost_per_million,
        "break_even_card": option.break_even_card,
    }
