"""Percentages, as people give them, turned into whole tensors and whole sequences.

FlexGen cannot split a weight or a sequence, so what it realises differs from what it was asked,
sometimes down to nothing. Both are computed here before anything is loaded, and a share that would
silently be nothing is refused with the nearest request that works. A plan has no percentages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.places import Split
from cxl_offload.plan.flexgen.layout import LEAST_SHARE, WeightGroup, weight_homes

ACCELERATOR = "accelerator"
HOST = "host"
DISK = "disk"

_LEAST_PERCENT = 100 * LEAST_SHARE


@dataclass(frozen=True, slots=True)
class ShareRow:
    """Requested against realised share of one home."""

    kind: Literal["weights", "kv"]
    home: str
    requested_percent: float
    realised_percent: float


@dataclass(frozen=True, slots=True)
class HomeShares:
    """Homes in FlexGen's order (disk, host parts, accelerator) and their percentages."""

    homes: tuple[str, ...]
    percents: tuple[float, ...]

    @property
    def cuts(self) -> tuple[float, ...]:
        """Where a group of weights is cut: between every two homes."""
        return _cuts(self.percents)


def home_shares(accelerator: float, host: float, split: Split | None) -> HomeShares:
    """Percentages of every home, the host's share divided as ``split`` says."""
    parts = [(HOST, 100.0)] if split is None else [(p.place, p.percent) for p in split.parts]
    disk = 100 - accelerator - host
    homes = [(DISK, disk), *((name, host * share / 100) for name, share in parts)]
    homes.append((ACCELERATOR, accelerator))
    return HomeShares(tuple(name for name, _ in homes), tuple(float(share) for _, share in homes))


def _cuts(percents: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(percents))[:-1]


def _weight_percents(groups: Sequence[WeightGroup], percents: Sequence[float]) -> list[float]:
    placed = [0] * len(percents)
    for group in groups:
        homes = weight_homes(group.sizes, _cuts(percents))
        for size, home in zip(group.sizes, homes, strict=True):
            placed[home] += size * group.count
    total = sum(placed)
    return [100 * elements / total for elements in placed]


def realised_weights(groups: Sequence[WeightGroup], shares: HomeShares) -> list[ShareRow]:
    """Share of the parameters that every home gets.

    Raises
    ------
    ConfigError
        A home was asked for and gets no weight matrix.
    """
    realised = _weight_percents(groups, shares.percents)

    def works(percents: Sequence[float], home: int) -> bool:
        return _weight_percents(groups, percents)[home] >= _LEAST_PERCENT

    for home, (asked, got) in enumerate(zip(shares.percents, realised, strict=True)):
        if asked > 0 and got < _LEAST_PERCENT:
            remedy = _smallest_that_works(shares.percents, home, works)
            raise ConfigError(
                f"weights: {asked:g} % on {shares.homes[home]} would be {got:.2g} %, because "
                f"FlexGen places whole tensors; {remedy}"
            )
    return [
        ShareRow("weights", home, asked, got)
        for home, asked, got in zip(shares.homes, shares.percents, realised, strict=True)
        if asked > 0
    ]


def kv_sequences(gpu_batch_size: int, shares: HomeShares) -> list[int]:
    """Sequences of one accelerator batch in every home, in the order of ``shares``.

    FlexGen's rounding between accelerator, host and disk (down for the accelerator, and for the
    host when there is a disk share), then largest remainder among the parts of the host.
    """
    disk, accelerator = shares.percents[0], shares.percents[-1]
    host_parts = shares.percents[1:-1]
    on_accelerator = _whole(gpu_batch_size, accelerator)
    if disk == 0:
        on_host = gpu_batch_size - on_accelerator
    else:
        on_host = _whole(gpu_batch_size, sum(host_parts))
    on_disk = gpu_batch_size - on_accelerator - on_host
    return [on_disk, *_largest_remainder(on_host, host_parts), on_accelerator]


def realised_kv(gpu_batch_size: int, shares: HomeShares) -> list[ShareRow]:
    """Share of the sequences whose KV cache every home gets.

    Raises
    ------
    ConfigError
        A home was asked for and gets no sequence.
    """
    sequences = kv_sequences(gpu_batch_size, shares)

    def works(percents: Sequence[float], home: int) -> bool:
        return kv_sequences(gpu_batch_size, HomeShares(shares.homes, tuple(percents)))[home] > 0

    rows: list[ShareRow] = []
    for home, (asked, got) in enumerate(zip(shares.percents, sequences, strict=True)):
        if asked > 0 and got == 0:
            remedy = _smallest_that_works(shares.percents, home, works)
            raise ConfigError(
                f"KV cache: {asked:g} % on {shares.homes[home]} of {gpu_batch_size} sequences a "
                f"batch would be 0 %, because FlexGen places whole sequences; {remedy}, or "
                f"--gpu-batch-size {_smallest_batch(gpu_batch_size, shares, home)}"
            )
        if asked > 0 or got > 0:
            realised = 100 * got / gpu_batch_size
            rows.append(ShareRow("kv", shares.homes[home], asked, realised))
    return rows


def _smallest_batch(gpu_batch_size: int, shares: HomeShares, home: int) -> int:
    larger = gpu_batch_size + 1
    while kv_sequences(larger, shares)[home] == 0:
        larger += 1
    return larger


def _whole(sequences: int, percent: float) -> int:
    """FlexGen's ``int(b * n_head * percent / 100) // n_head``, free of float noise below 1e-9."""
    return math.floor(sequences * percent / 100 + 1e-9)


def _largest_remainder(count: int, weights: Sequence[float]) -> list[int]:
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    exact = [count * weight / total for weight in weights]
    given = [math.floor(share + 1e-9) for share in exact]
    order = sorted(range(len(weights)), key=lambda at: given[at] - exact[at])
    for at in order[: count - sum(given)]:
        given[at] += 1
    return given


def _smallest_that_works(
    percents: Sequence[float],
    home: int,
    works: Callable[[Sequence[float], int], bool],
) -> str:
    """The smallest whole percentage of ``home`` that gets something, taken from the largest."""
    donor = max((at for at in range(len(percents)) if at != home), key=lambda at: percents[at])
    for asked in range(math.floor(percents[home]) + 1, 101):
        trial = list(percents)
        trial[donor] -= asked - percents[home]
        trial[home] = float(asked)
        if trial[donor] < 0:
            break
        if works(trial, home):
            return f"the least that works is {asked} %"
    return "no share of it works here"
