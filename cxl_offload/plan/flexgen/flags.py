"""A choice in FlexGen's own words: percentages and policies that realise it exactly.

FlexGen takes percentages and places whole tensors and whole sequences; the numbers here are chosen
so that its rounding gives the planned homes, and are checked against its rule before they leave.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.flexgen.choice import (
    Choice,
    Stripe,
    kv_granule,
    scratch_bytes,
    weight_granule,
)
from cxl_offload.plan.flexgen.job import FlexGenJob, WeightLevel, weight_homes
from cxl_offload.plan.hardware import Hardware
from cxl_offload.renamed import old_names

__all__ = ["Spelled", "flags_of", "kv_sequences", "spell"]


@dataclass(frozen=True, slots=True)
class Spelled:
    """FlexGen's six percentages and the policies of the roles that have bytes on the host."""

    percent: tuple[float, float, float, float, float, float]
    place: dict[str, str]


def kv_sequences(
    gpu_batch: int, accelerator: float, host: float, parts: Sequence[float]
) -> list[int]:
    """Sequences on the drive, on every host part and on the GPU, by FlexGen's rounding.

    Down for the GPU, and for the host when there is a drive's share; largest remainder among the
    parts of the host.
    """
    on_gpu = math.floor(gpu_batch * accelerator / 100 + 1e-9)
    shares = [host * part / 100 for part in parts]
    if 100 - accelerator - host == 0:
        on_host = gpu_batch - on_gpu
    else:
        on_host = math.floor(gpu_batch * sum(shares) / 100 + 1e-9)
    total = sum(shares)
    exact = [on_host * share / total if total else 0.0 for share in shares]
    given = [math.floor(share + 1e-9) for share in exact]
    order = sorted(range(len(shares)), key=lambda at: given[at] - exact[at])
    for at in order[: on_host - sum(given) if total else 0]:
        given[at] += 1
    return [gpu_batch - on_gpu - on_host, *given, on_gpu]


def spell(
    job: FlexGenJob, hardware: Hardware, choice: Choice, levels: tuple[WeightLevel, ...]
) -> Spelled:
    """Percentages and policies of a choice.

    Raises
    ------
    RuntimeError
        No percentages realise it: a mistake in the planner.
    """
    weights, weight_policy = _spell_weights(job, hardware, choice, levels)
    kv, kv_policy = _spell_kv(job, hardware, choice)
    act = (100.0, 0.0) if choice.activations_on_gpu else (0.0, 100.0)
    place = {}
    if weight_policy:
        place["weights"] = weight_policy
    if kv_policy:
        place["kv"] = kv_policy
    scratch = f"bind:{hardware.names[choice.scratch]}"
    if scratch_bytes(job, choice):
        place["act"] = scratch
    if choice.cpu_attention:
        place["workspace"] = scratch
    return Spelled((*weights, *kv, *act), place)


def _policy(hardware: Hardware, names: list[str], parts: list[float]) -> str:
    if len(names) == 1:
        return f"bind:{names[0]}"
    shares = ",".join(f"{n}={_number(share)}" for n, share in zip(names, parts, strict=True))
    return f"split:{shares}"


def _stripe_policy(hardware: Hardware, stripe: Stripe, granule: int) -> str:
    common = math.gcd(*stripe)
    shares = ",".join(
        f"{name}={weight // common}"
        for name, weight in zip(hardware.names, stripe, strict=True)
        if weight
    )
    return f"weighted:{shares}@{granule // 1024}KiB"


def _number(value: float) -> str:
    text = f"{value:.9f}".rstrip("0")
    return text.rstrip(".")


def _parts(shares: Sequence[float], decimals: int) -> list[float]:
    """Shares in percent that sum to 100, rounded."""
    total = sum(shares)
    made = [round(100 * share / total, decimals) for share in shares]
    made[-1] = round(100 - sum(made[:-1]), decimals)
    return made


def _spell_weights(
    job: FlexGenJob, hardware: Hardware, choice: Choice, levels: tuple[WeightLevel, ...]
) -> tuple[tuple[float, float], str | None]:
    cuts = [levels[cut].percent for cut in choice.cuts]
    drive, gpu = cuts[0], round(100 - cuts[-1], 9)
    host = round(100 - gpu - drive, 9)
    if choice.cuts[0] == choice.cuts[-1]:
        return (gpu, host), None
    wanted = _bytes_of(levels, choice.cuts, job.weight_bytes)
    if choice.weight_stripe is not None:
        granule = weight_granule(job, choice.weight_stripe) or 4096
        policy = _stripe_policy(hardware, choice.weight_stripe, granule)
        if _weight_bytes(job, gpu, host, [100.0]) == wanted:
            return (gpu, host), policy
    else:
        widths = [high - low for low, high in itertools.pairwise(cuts)]
        used = [at for at, width in enumerate(widths) if width > 0]
        names = [hardware.names[at] for at in used]
        kept = [wanted[0], *(wanted[1 + at] for at in used), wanted[-1]]
        for decimals in range(10):
            parts = _parts([widths[at] for at in used], decimals)
            if min(parts) > 0 and _weight_bytes(job, gpu, host, parts) == kept:
                return (gpu, host), _policy(hardware, names, parts)
    raise RuntimeError(f"no percentages realise the weights of {choice}")


def _bytes_of(levels: tuple[WeightLevel, ...], cuts: tuple[int, ...], total: int) -> list[int]:
    edges = [0, *(levels[cut].bytes_below for cut in cuts), total]
    return [high - low for low, high in itertools.pairwise(edges)]


def _weight_bytes(job: FlexGenJob, gpu: float, host: float, parts: Sequence[float]) -> list[int]:
    """Bytes of every home, by FlexGen's rule, with these percentages."""
    percents = (100 - gpu - host, *(host * part / 100 for part in parts), gpu)
    placed: Counter[int] = Counter()
    for group in job.groups:
        for size, home in zip(group.sizes, weight_homes(group.sizes, percents), strict=True):
            placed[home] += 2 * size * group.count
    return [placed[at] for at in range(len(percents))]


def _spell_kv(
    job: FlexGenJob, hardware: Hardware, choice: Choice
) -> tuple[tuple[float, float], str | None]:
    size = choice.gpu_batch
    drive, *host_counts, on_gpu = choice.kv
    used = [at for at, count in enumerate(host_counts) if count]
    on_host = sum(host_counts)
    wanted = [drive, *(host_counts[at] for at in used), on_gpu]
    for decimals in range(10):
        gpu = _up(100 * on_gpu / size, decimals)
        host = _up(100 * on_host / size, decimals) if drive else round(100 - gpu, decimals)
        parts = [100.0]
        if len(used) > 1:
            parts = _parts([float(host_counts[at]) for at in used], decimals)
        sums = gpu + host <= 100 and (drive > 0 or 100 - gpu - host == 0)
        if not used:
            if sums and kv_sequences(size, gpu, host, [])[-1] == on_gpu and host * size < 100:
                return (gpu, host), None
            continue
        if sums and min(parts) > 0 and kv_sequences(size, gpu, host, parts) == wanted:
            if choice.kv_stripe is not None:
                granule = kv_granule(job, choice.kv_stripe) or 4096
                return (gpu, host), _stripe_policy(hardware, choice.kv_stripe, granule)
            return (gpu, host), _policy(hardware, [hardware.names[at] for at in used], parts)
    raise RuntimeError(f"no percentages realise the KV cache of {choice}")


def _up(value: float, decimals: int) -> float:
    scale = float(10**decimals)
    return round(math.ceil(value * scale - 1e-6) / scale, decimals)


def flags_of(
    job: FlexGenJob,
    choice: Choice,
    spelled: Spelled,
    *,
    model: str,
    machine: str | None = None,
    path: str | None = None,
) -> tuple[str, ...]:
    """Arguments of ``cxl-offload flexgen``."""
    made = ["--model", model]
    if path is not None:
        made += ["--path", path]
    made += ["--prompt-len", str(job.prompt), "--gen-len", str(job.generated)]
    made += ["--gpu-batch-size", str(choice.gpu_batch)]
    made += ["--num-gpu-batches", str(choice.batches), "--percent"]
    made += [_number(share) for share in spelled.percent]
    if choice.cpu_attention:
        # The plan's times and bytes are those of FlexGen's own way.
        made += ["--cpu-cache-compute", "--cpu-attention", "workspace"]
    for role, policy in spelled.place.items():
        made += ["--place", f"{role}={policy}"]
    if machine is not None:
        made += ["--machine", machine]
    return tuple(made)


__getattr__ = old_names(__name__)
