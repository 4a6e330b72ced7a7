"""Batch and placement of FlexGen with the most tokens a second.

Outside: GPU batch sizes of FlexGen's list, every number of them, and the modes (host KV and weights
by whole tensors or striped). For each a bound, and in the order of the bounds a mixed-integer
program, until the best found is above all bounds left. The answer is the optimum over all choices
that ``flexgen.choice`` can express.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.plan.better_hardware import better_everywhere
from cxl_offload.plan.decoding.phases import Phases
from cxl_offload.plan.decoding.sizes import MOST_SEQUENCES
from cxl_offload.plan.flexgen.bound import most_sequences, rough_seconds
from cxl_offload.plan.flexgen.choice import (
    Choice,
    Loads,
    Stripe,
    loads_of,
    phases_of,
)
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.known_bounds import KnownBounds
from cxl_offload.plan.flexgen.mode import Mode, Ratios, apart, narrower, ratios_of, stripes_like
from cxl_offload.plan.flexgen.program import PlacementProgram
from cxl_offload.plan.flexgen.turns import Turns
from cxl_offload.plan.hardware import Hardware
from cxl_offload.renamed import old_names

GPU_BATCHES = (1, 2, 3, 4, 8, 16, 32, 64)
"""GPU batch sizes that FlexGen's own search walks."""

_TIE = 1e-9
_ROUNDING = 1e-12
"""Share of seconds by which sums in another order may differ."""

_LIKE_PROGRAMS = 48
"""Programs times nodes after which a search from a known choice ends."""
_LIKE_TIE = 5e-4
"""Gain over a choice that is known that is not looked for further: prices are not told closer."""

StripeWish = Literal["auto", "always", "never"]

TIE_LOSS = 1e-6
"""Share of the throughput that is given up for fewer bytes on slow homes."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best choice, what it holds and what the equations say of it.

    ``programs`` counts the mixed-integer programs that were solved; ``bounds`` are those of the
    hardware that was searched. ``least`` keeps seconds a sequence that no homes of a mode and
    number of batches undercut on hardware that is better everywhere, by what it has more.
    """

    choice: Choice
    loads: Loads
    phases: Phases
    programs: int
    bounds: KnownBounds
    least: dict[tuple[tuple[float, ...], Mode, int], float] = field(default_factory=dict)


def modes(
    job: FlexGenJob,
    hardware: Hardware,
    *,
    gpu_batches: Sequence[int] = GPU_BATCHES,
    interleave: Mapping[str, StripeWish] | None = None,
    like: Choice | None = None,
) -> list[Mode]:
    """What the programs are told: stripes are offered where they can bring something.

    Striped KV adds the bandwidth of the tiers for attention; striped weights help only where a
    tier alone is slower towards the GPU than the link. ``interleave`` (``weights``, ``kv``) takes
    them away, or leaves nothing else of what is on the host. ``like`` leaves its stripes and those
    of the bandwidths.
    """

    def offered(kind: str) -> list[Ratios | Stripe]:
        if like is None:
            return ratios_of(job, hardware, kind)
        known = like.weight_stripe if kind == "weights" else like.kv_stripe
        return stripes_like(job, hardware, kind, known)

    wanted = {"weights": "auto", "kv": "auto", **(interleave or {})}
    dma = [tier.copy_bytes_per_s for tier in hardware.nodes]
    weights: list[Ratios | Stripe | None] = [None]
    if min(dma) < hardware.link_bytes_per_s or wanted["weights"] == "always":
        weights += offered("weights")
    kv: list[Ratios | Stripe | None] = [None, *offered("kv")]
    weights = _kept(weights, wanted["weights"])
    kv = _kept(kv, wanted["kv"])
    return [
        Mode(size, weight_stripe, kv_stripe, on_gpu)
        for size in gpu_batches
        for weight_stripe in weights
        for kv_stripe, on_gpu in [(None, True), *((each, False) for each in kv)]
    ]


def _kept(stripes: list[Ratios | Stripe | None], wanted: str) -> list[Ratios | Stripe | None]:
    """What is left of the stripes (None: no stripe) by the user's wish."""
    if wanted == "auto":
        return stripes
    return [each for each in stripes if (each is not None) == (wanted == "always")]


# Long: one search, whose bounds and best belong together.
def plan_flexgen(
    job: FlexGenJob,
    hardware: Hardware,
    *,
    gpu_batches: Sequence[int] = GPU_BATCHES,
    interleave: Mapping[str, StripeWish] | None = None,
    most_batches: int | None = None,
    like: Optimum | None = None,
) -> Optimum | None:
    """The choice with the most tokens a second, or None where not one sequence fits.

    Parameters
    ----------
    gpu_batches
        GPU batch sizes to try.
    interleave
        ``weights`` and ``kv``: striped over tiers where it is faster (``auto``), ``never``, or
        ``always`` as far as they are on the host.
    most_batches
        Most GPU batches in a block, as far as memory holds them; by default up to
        ``MOST_SEQUENCES`` rows.
    like
        An optimum of hardware that is no better; the search begins with its choice, ends after
        ``_LIKE_PROGRAMS`` programs by the number of nodes, or where less than ``_LIKE_TIE`` could
        still be gained, and leaves equally fast homes as they are. Of stripes it tries those of
        the choice and of the bandwidths.
    """
    levels, tie = job.levels(), _TIE if like is None else _LIKE_TIE

    def bound_of(offered: Hardware, mode: Mode) -> Floats:
        batches = _batches(job, offered, mode, most_batches)
        return rough_seconds(job, offered, mode, levels, batches)

    known = KnownBounds(hardware, bound_of)
    best = None if like is None else _known(job, hardware, like.choice)
    known_bounds = None if like is None or best is None else like.bounds.on(hardware)
    turns = Turns(job, hardware, levels)
    choice = None if like is None else like.choice
    for mode in modes(job, hardware, gpu_batches=gpu_batches, interleave=interleave, like=choice):
        batches = _batches(job, hardware, mode, most_batches)
        if known_bounds is not None and best is not None:
            worth = best[0] * (1 - tie) * batches * mode.gpu_batch
            batches = batches[known_bounds.may_be_below(mode, worth)]
        if len(batches):
            turns.offer(mode, batches)
    programs, parted = 0, set[Mode]()
    if like is not None:
        if best is None or _may_gain(job, hardware, turns, like, best[0] * (1 - _ROUNDING)):
            turns.put_first(_mode_of(like.choice), like.choice.batches)  # placed again
        else:
            programs += 1  # no homes are faster: solved without a program
    enough = max(2, _LIKE_PROGRAMS // max(1, len(hardware.nodes)))
    while (like is None or programs < enough) and (turn := turns.next()):
        bound, count, mode = turn
        if best is not None and bound >= best[0] * (1 - tie):
            break
        rows = count * mode.gpu_batch
        if mode in parted:
            continue  # its parts wait for their own turns
        if (parts := apart(mode)) != [mode]:
            parted.add(mode)
            for part in parts:
                turns.offer(part, _batches(job, hardware, mode, most_batches))
            continue
        if like is not None and best is not None and bound >= 0:
            if count == like.choice.batches and mode == _mode_of(like.choice):
                continue  # placed again before, or no homes are faster
            if _no_homes_undercut(job, hardware, like, (mode, count), best[0] * (1 - tie)):
                programs += 1
                continue
        if bound < 0:
            bound = best[0] if best is not None else 1.0
        program = PlacementProgram(
            job,
            hardware,
            mode,
            batches=count,
            levels=levels,
            most_seconds=None if best is None else best[0] * rows,
            unit_s=bound * rows,
        )
        programs += 1
        if best is None and not program.has_room():
            turns.leave_out(mode, _fewest_without_room(job, hardware, mode, count))
            continue
        if not mode.is_one:
            told = program.solve_ratios()
            if told is not None and (best is None or told[0] < best[0] * (1 - tie) * rows):
                for part in narrower(mode, told[1]):
                    turns.put(told[0] / rows, part, count)
            continue
        found = program.solve()
        if found is None or not _holds(hardware, loads_of(job, hardware, found[0], levels)):
            continue
        if best is None or found[1] / rows < best[0]:
            best = (found[1] / rows, found[0])
    if best is None:
        return None
    choice = best[1]
    if like is None:
        choice = _on_fastest_homes(job, hardware, choice, best[0] * choice.sequences)
    loads = loads_of(job, hardware, choice, levels)
    return Optimum(choice, loads, phases_of(job, hardware, choice, loads), programs + 1, known)


def _fewest_without_room(job: FlexGenJob, hardware: Hardware, mode: Mode, count: int) -> int:
    """Of a mode that has no room for so many batches: 1 where it has none for one, or so many."""
    one = PlacementProgram(
        job, hardware, mode, batches=1, levels=job.levels(), most_seconds=None, unit_s=1.0
    )
    return count if count == 1 or one.has_room() else 1


def _batches(job: FlexGenJob, hardware: Hardware, mode: Mode, most: int | None) -> Floats:
    """Float64 ``(B,)``: 1, 2, ... GPU batches of a block, as many as memory holds."""
    held = most_sequences(job, hardware)
    top = min(held, MOST_SEQUENCES) // mode.gpu_batch
    if most is not None:
        top = min(held // mode.gpu_batch, most)
    return np.arange(1, top + 1, dtype=np.float64)


def _known(job: FlexGenJob, hardware: Hardware, choice: Choice) -> tuple[float, Choice] | None:
    """Seconds a sequence of a choice, where it fits."""
    loads = loads_of(job, hardware, choice, job.levels())
    if not _holds(hardware, loads):
        return None
    return phases_of(job, hardware, choice, loads).total_s / choice.sequences, choice


def _may_gain(
    job: FlexGenJob, hardware: Hardware, turns: Turns, like: Optimum, seconds: float
) -> bool:
    """Whether other homes of a known batch may take less than so many seconds a sequence."""
    mode, count = _mode_of(like.choice), like.choice.batches
    if turns.bound(mode, count) >= seconds:
        return False
    return not _no_homes_undercut(job, hardware, like, (mode, count), seconds)


def _no_homes_undercut(
    job: FlexGenJob, hardware: Hardware, like: Optimum, batch: tuple[Mode, int], seconds: float
) -> bool:
    """Whether no homes of a mode and number of batches take less than so many seconds a sequence.

    By hardware that has as much more everywhere, which is asked once for all that are no better.
    """
    shared = better_everywhere(like.bounds.hardware, hardware)
    if shared is None:
        return False
    mode, count = batch
    key = (shared.more, mode, count)
    if key not in like.least:
        most = like.phases.total_s / like.choice.sequences * (1 + _TIE)
        rows = count * mode.gpu_batch
        program = PlacementProgram(
            job,
            shared.hardware,
            mode,
            batches=count,
            levels=job.levels(),
            most_seconds=most * rows,
            unit_s=like.phases.total_s,
        )
        found = program.solve()
        least = 0.0 if mode == _mode_of(like.choice) and count == like.choice.batches else most
        like.least[key] = least if found is None else found[1] / rows
    return like.least[key] >= seconds


def _mode_of(choice: Choice) -> Mode:
    """What a choice decided outside of its program."""
    return Mode(choice.gpu_batch, choice.weight_stripe, choice.kv_stripe, not choice.cpu_attention)


def _on_fastest_homes(
    job: FlexGenJob, hardware: Hardware, choice: Choice, seconds: float
) -> Choice:
    """Of the choices of this batch that are as fast, the one with least on slow homes."""
    program = PlacementProgram(
        job,
        hardware,
        _mode_of(choice),
        batches=choice.batches,
        levels=job.levels(),
        most_seconds=seconds * (1 + TIE_LOSS),
        unit_s=seconds,
        on_fastest_homes=True,
    )
    found = program.solve()
    if found is None or not _holds(hardware, loads_of(job, hardware, found[0], job.levels())):
        return choice
    return found[0]


def _holds(hardware: Hardware, loads: Loads) -> bool:
    """Whether every home has room, to the byte: the solver is exact only to its tolerance."""
    on_drive = loads.weights_drive + loads.kv_drive
    return (
        loads.gpu_bytes <= hardware.gpu_usable_bytes
        and on_drive <= hardware.drive_usable_bytes
        and all(
            have <= tier.usable_bytes for have, tier in zip(loads.host, hardware.nodes, strict=True)
        )
    )


__getattr__ = old_names(__name__)
