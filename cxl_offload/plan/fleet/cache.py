"""A cache of KV blocks on the host: hit rate and time to the first token against its size.

One pass over a trace of requests answers for all sizes. A least recently used cache of ``C`` blocks
has a block exactly when fewer than ``C`` others were asked for since (Mattson et al., Evaluation
Techniques for Storage Hierarchies, 1970), and a block of a prompt saves work only when all before
it are there too: so it counts from the largest of their distances on. With a second tier below the
first, what falls out of the first is in the second.

The trace has one request a line, as JSON: ``hash_ids``, the hashes of its prompt's blocks in order,
and ``input_length``, its tokens (the format of the Mooncake traces: Qin et al., FAST 2025).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_json_lines
from cxl_offload.plan.gpu import REQUEST_S
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.vllm.steps import PromptWork, ServerSteps

MOST_TOKENS = 1 << 30
"""Of one request of a trace; no model has such a context."""


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request: its tokens, and for each block of its prompt from which size on it is a hit.

    ``needs[i]`` is the smallest number of blocks of a cache that holds blocks ``0..i``; infinite
    where one of them was never asked for before.
    """

    tokens: int
    needs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TierSize:
    """A part of the cache: how many blocks, and what the GPU's copies read from it."""

    blocks: float
    bytes_per_s: float


def reuse_distances(prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each block of each prompt, how many distinct others were asked for since it last was.

    Infinite the first time. ``O(n log n)`` in the number of blocks: a Fenwick tree counts the last
    accesses that lie between.
    """
    total = sum(map(len, prompts))
    tree = [0] * (total + 1)

    def add(at: int, count: int) -> None:
        while at <= total:
            tree[at] += count
            at += at & -at

    def before(at: int) -> int:
        count = 0
        while at:
            count += tree[at]
            at &= at - 1
        return count

    last: dict[int, int] = {}
    found, now = [], 0
    for prompt in prompts:
        distances = []
        for block in prompt:
            now += 1
            seen = last.get(block)
            if seen is None:
                distances.append(float("inf"))
            else:
                distances.append(float(before(now - 1) - before(seen)))
                add(seen, -1)
            add(now, 1)
            last[block] = now
        found.append(distances)
    return found


def load_requests(path: str | Path, *, block_tokens: int = 1) -> list[CachedRequest]:
    """The requests of a trace.

    Parameters
    ----------
    block_tokens
        Tokens of a block, of which a prompt has no more than its tokens fill.

    Raises
    ------
    ConfigError
        With file and line: no JSON, a key that is missing, more blocks than the prompt has, or no
        requests.
    """

    def made(entry: dict[str, Any]) -> tuple[int, list[int]]:
        tokens, blocks = _lengths_and_blocks(entry)
        refuse_more_blocks(len(blocks), tokens, block_tokens)
        return tokens, blocks

    found = read_json_lines(path, made, "hash_ids and input_length")
    if not found:
        raise ConfigError("no request in it", file=str(path))
    needs = block_needs([blocks for _, blocks in found])
    return [CachedRequest(tokens, need) for (tokens, _), need in zip(found, needs, strict=True)]


def _lengths_and_blocks(entry: dict[str, Any]) -> tuple[int, list[int]]:
    blocks, tokens = entry["hash_ids"], entry["input_length"]
    whole = isinstance(blocks, list) and all(type(each) is int for each in blocks)
    if not whole or type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"hash_ids is a list of whole numbers, input_length one from 1 to {MOST_TOKENS:,}"
        )
    return tokens, blocks


def refuse_more_blocks(blocks: int, tokens: int, block_tokens: int) -> None:
    """Refuses a prompt with more hashes than it has blocks (ValueError): its blocks are smaller."""
    if blocks > -(-tokens // block_tokens):
        raise ValueError(
            f"{blocks} hash_ids are more than {tokens} tokens have blocks of {block_tokens}; say "
            "how many tokens a block of the trace has (--block-tokens)"
        )


def block_needs(prompts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """``needs`` of every prompt, of the hashes of its blocks; prompts in the order of arrival."""
    made = []
    for distances in reuse_distances(prompts):
        needs, most = [], 0.0
        for distance in distances:
            most = max(most, distance + 1)
            needs.append(most)
        made.append(tuple(needs))
    return made


def hit_rate(requests: Sequence[CachedRequest], blocks: float) -> float:
    """Share of the prompts' blocks that a cache of so many blocks has."""
    total = sum(len(each.needs) for each in requests)
    hits = sum(bisect_right(each.needs, blocks) for each in requests)
    return hits / total if total else 0.0


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """What prompts take on one server.

    Attributes
    ----------
    model, hardware
        Of the plan; the links and the copies of its nodes are those of all ``gpus`` together.
    block_tokens
        Tokens of a block of the cache.
    """

    model: ModelConfig
    hardware: Hardware
    block_tokens: int
    gpus: int = 1

    @property
    def block_bytes(self) -> float:
        """KV of a block."""
        return self.block_tokens * self.model.kv_bytes_per_token()

    def work(self, tokens: int, found: Sequence[int], tiers: Sequence[TierSize]) -> PromptWork:
        """A prompt of which tiers have ``found`` blocks.

        What a tier has crosses the link at the lower of both rates, then the rest of the prompt is
        computed at the GPU's share of its peak.
        """
        total = 0.0
        for hits, tier in zip(found, tiers, strict=True):
            total += hits * self.block_bytes / min(tier.bytes_per_s, self.hardware.link_bytes_per_s)
        known = min(sum(found) * self.block_tokens, tokens - 1)
        rest = tokens - known
        flops = self.model.forward_flops(tokens=rest, context=known + rest / 2) / self.gpus
        gpu = self.hardware.gpu
        return PromptWork(flops / gpu.products_flops_per_s, rest, total + REQUEST_S)


def mean_ttft_s(
    requests: Sequence[CachedRequest],
    tiers: Sequence[TierSize],
    *,
    costs: PromptCosts,
    steps: ServerSteps,
) -> float:
    """Mean seconds to the first token of requests that do not wait for each other."""
    total = sum(
        steps.alone(costs.work(each.tokens, blocks_found(each.needs, tiers), tiers))
        for each in requests
    )
    return total / len(requests)


def blocks_found(needs: Sequence[float], tiers: Sequence[TierSize]) -> tuple[int, ...]:
    """Leading blocks of a prompt that each tier has; a tier has what fell out of those before."""
    found, reached, cached = [], 0.0, 0
    for tier in tiers:
        reached += tier.blocks
        hits = bisect_right(needs, reached)
        found.append(hits - cached)
        cached = hits
    return tuple(found)
