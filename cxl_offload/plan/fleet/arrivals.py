"""Requests as they arrive, and traces of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_json_lines
from cxl_offload.plan.fleet.cache import MOST_TOKENS, block_needs, refuse_more_blocks

_LATEST = 1e15
"""Milliseconds; beyond, two moments are no longer apart as numbers."""
_KEYS = "timestamp (milliseconds), input_length and output_length"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes
    ----------
    seconds
        When it arrives, from the first one on.
    prompt, generated
        Tokens.
    needs
        For each block of the prompt, the smallest cache, in blocks, that has it and all before it
        (:class:`cxl_offload.plan.fleet.cache.CachedRequest`); empty where nothing is known of it.
    blocks
        Hashes of those blocks, in their order.
    """

    seconds: float
    prompt: int
    generated: int
    needs: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()


def load_arrivals(path: str | Path, *, block_tokens: int = 1) -> list[Arrival]:
    """The requests of a trace, in the order of their times.

    One request a line, as JSON: ``timestamp`` in milliseconds, ``input_length`` and
    ``output_length`` in tokens, and, where reuse is known, ``hash_ids``: the hashes of the prompt's
    blocks (the format of the Mooncake traces: Qin et al., FAST 2025).

    Parameters
    ----------
    block_tokens
        Tokens of a block, of which a prompt has no more than its tokens fill.

    Raises
    ------
    ConfigError
        With file and line: no JSON, a key that is missing or no number, more blocks than the prompt
        has, or fewer than two requests.
    """

    def made(entry: dict[str, Any]) -> tuple[float, int, int, list[int]]:
        request = _request(entry)
        refuse_more_blocks(len(request[3]), request[1], block_tokens)
        return request

    found = read_json_lines(path, made, _KEYS)
    found.sort(key=lambda each: each[0])
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        raise ConfigError("needs requests at two times at least", file=str(path))
    needs = block_needs([each[3] for each in found])
    begin = found[0][0]
    return [
        Arrival((time - begin) / 1e3, prompt, generated, need, tuple(blocks))
        for (time, prompt, generated, blocks), need in zip(found, needs, strict=True)
    ]


def on_their_own(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Some of a trace's requests whose servers get no others: what caches find is counted again."""
    needs = block_needs([each.blocks for each in arrivals])
    return [replace(each, needs=need) for each, need in zip(arrivals, needs, strict=True)]


def _request(entry: dict[str, Any]) -> tuple[float, int, int, list[int]]:
    time, prompt, generated = (entry[key] for key in ("timestamp", "input_length", "output_length"))
    blocks = entry.get("hash_ids", [])
    if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) <= _LATEST:
        raise TypeError("timestamp is a number")
    if type(prompt) is not int or type(generated) is not int:  # true is an int too
        raise TypeError("lengths are whole numbers")
    if not 0 < prompt <= MOST_TOKENS or not 0 <= generated <= MOST_TOKENS:
        raise ValueError(f"lengths go up to {MOST_TOKENS}, that of a prompt begins at 1")
    if not isinstance(blocks, list) or not all(type(each) is int for each in blocks):
        raise TypeError("hash_ids is a list of whole numbers")
    return float(time), prompt, max(1, generated), blocks


def arrivals_per_s(arrivals: Sequence[Arrival]) -> float:
    """Requests a second over the time that they span."""
    return (len(arrivals) - 1) / (arrivals[-1].seconds - arrivals[0].seconds)
