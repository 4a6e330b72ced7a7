"""Object-level interleaving: what policy to ask for each tensor, by its size and its accesses.

Large tensors with many accesses are interleaved over the tiers, by their bandwidths; all others
stay on the local tier and spill only when it is full. Accesses are recorded around a step
(:func:`cxl_offload.objects.record`), taken from a trace, or assumed from the kind of tensor.

An object of the paper is a tensor here, or several under one name.

Source: Wang et al., Performance Characterization of CXL Memory, V-B (object-level interleaving).
The paper leaves the cut-off of "the largest number of accesses" open: here it is ``top_k``, or the
fewest tensors that cover ``coverage`` of the large ones' accesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, inf

from cxl_offload.core import LINE_BYTES
from cxl_offload.plan.equations.interleave import best_weights
from cxl_offload.plan.equations.oli import select_objects
from cxl_offload.plan.exact import exact
from cxl_offload.renamed import renamed_keywords
from cxl_offload.sim.trace import Trace

MIN_SHARE = 0.10
"""Share of the footprint from which a tensor counts as large (the paper's)."""

COVERAGE = 0.9
"""Share of the large tensors' accesses that the interleaved ones cover. Assumed."""

_GRID = 16

_OPTIMIZER = "kept local for its kind: optimizer states ran 2-18 % slower interleaved"
_WRITTEN = "kept local for its kind: it is written all the time"

KEPT_LOCAL = {
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "fp32_master", "fp32_grad"), _OPTIMIZER),
    **dict.fromkeys(("act", "workspace"), _WRITTEN),
}
"""Kinds that are not interleaved by their kind alone, and why: Wang et al., IV-A, for optimizer
states; activations and workspaces are written all the time."""


@dataclass(frozen=True, slots=True)
class TensorUse:
    """What is under one name: its bytes, and those read and written while it was watched.

    ``kept_local`` is why one is not interleaved whose accesses were not counted.
    """

    name: str
    footprint_bytes: int
    read_bytes: int = 0
    written_bytes: int = 0
    kept_local: str = ""

    def __post_init__(self) -> None:
        if min(self.footprint_bytes, self.read_bytes, self.written_bytes) < 0:
            raise ValueError(f"{self.name}: bytes are not negative")

    @property
    def accesses(self) -> float:
        """Accesses in cache lines."""
        return (self.read_bytes + self.written_bytes) / LINE_BYTES


@dataclass(frozen=True, slots=True)
class TierRate:
    """A tier that tensors may be spread over, by the name policies have for it."""

    name: str
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TensorPolicy:
    """What to ask for a tensor, in the grammar of ``memory.policy.parse_policy``, and why."""

    name: str
    policy: str
    reason: str


@renamed_keywords(objects="uses")
def tensor_policies(
    uses: Sequence[TensorUse],
    tiers: Sequence[TierRate],
    *,
    min_share: float = MIN_SHARE,
    top_k: int | None = None,
    coverage: float = COVERAGE,
    demand_bytes_per_s: float | None = None,
) -> tuple[TensorPolicy, ...]:
    """Policies in the order in which the tensors should be allocated: preferred ones first.

    Allocated late, latency-sensitive tensors would find the local tier full.

    Parameters
    ----------
    uses
        With accesses; their order is that of allocation among equals.
    tiers
        The local tier, then those to spread over; at least one.
    top_k, coverage
        How many of the large tensors are interleaved; ``top_k`` wins.
    demand_bytes_per_s
        What the threads ask of memory, where it is known: below the local tier's rate nothing is
        interleaved, because spreading helps only a saturated tier.

    Raises
    ------
    ValueError
        No tier, twice the same name, numbers out of range.
    """
    if not tiers:
        raise ValueError("tiers: at least the local one is needed")
    names = Counter(each.name for each in uses)
    if any(count > 1 for count in names.values()):
        raise ValueError(f"{names.most_common(1)[0][0]!r} is named twice")
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage {coverage}: above 0 and at most 1")
    reason = _why_local(uses, tiers, min_share, demand_bytes_per_s)
    chosen: frozenset[int] = frozenset()
    if reason is None:
        chosen = frozenset(_chosen(uses, min_share, top_k, coverage))
    stripe = _stripe(tiers)
    spill = "preferred:" + ",".join(tier.name for tier in tiers)
    total = sum(each.footprint_bytes for each in uses)
    local, spread = [], []
    for at, each in enumerate(uses):
        if at in chosen:
            why = f"large and among the most accessed ({each.accesses:.3g} lines)"
            spread.append(TensorPolicy(each.name, stripe, why))
        else:
            why = reason or _why_kept(each, total, min_share)
            local.append(TensorPolicy(each.name, spill, why))
    return (*local, *spread)


def _why_kept(use: TensorUse, total_bytes: int, min_share: float) -> str:
    """What kept one tensor local while others are interleaved."""
    if use.kept_local:
        return use.kept_local
    if exact(use.footprint_bytes) < exact(min_share) * total_bytes:
        share = use.footprint_bytes / total_bytes
        return f"small: {share:.2g} of all bytes, and from {min_share:g} a tensor is large"
    if not use.accesses:
        return "large, but never accessed"
    return f"large, but less accessed ({use.accesses:.3g} lines) than what is interleaved"


def _why_local(
    uses: Sequence[TensorUse],
    tiers: Sequence[TierRate],
    min_share: float,
    demand_bytes_per_s: float | None,
) -> str | None:
    """Why nothing is interleaved, or None."""
    if len(tiers) < 2:
        return "there is no second tier"
    if any(tier.read_bytes_per_s in (0.0, inf) for tier in tiers):
        return "the rate of a tier is not known, so a stripe has no best weights"
    if demand_bytes_per_s is not None and demand_bytes_per_s < tiers[0].read_bytes_per_s:
        return f"{tiers[0].name} is not saturated"
    total = sum(each.footprint_bytes for each in uses)
    accesses = sum(each.accesses for each in uses)
    small = [each for each in uses if each.footprint_bytes < min_share * total]
    if 2 * sum(each.accesses for each in small) > accesses:
        return "most accesses go to small tensors, which are best kept local"
    return None


def _chosen(
    uses: Sequence[TensorUse], min_share: float, top_k: int | None, coverage: float
) -> tuple[int, ...]:
    footprint = [float(each.footprint_bytes) for each in uses]
    accesses = [each.accesses for each in uses]
    if top_k is not None:
        return select_objects(footprint, accesses, min_share=min_share, top_k=top_k)
    large = select_objects(footprint, accesses, min_share=min_share, top_k=len(uses))
    wanted = coverage * sum(accesses[at] for at in large)
    for count in range(len(large) + 1):
        picked = select_objects(footprint, accesses, min_share=min_share, top_k=count)
        if sum(accesses[at] for at in picked) >= wanted:
            return tuple(at for at in picked if accesses[at] > 0)
    return large


def _stripe(tiers: Sequence[TierRate]) -> str:
    rates = [tier.read_bytes_per_s for tier in tiers]
    if len(tiers) < 2 or any(rate in (0.0, inf) for rate in rates):
        return f"preferred:{tiers[0].name}"
    weights = best_weights(rates, total=_GRID)
    common = gcd(*weights)
    parts = [f"{t.name}={w // common}" for t, w in zip(tiers, weights, strict=True) if w]
    return "weighted:" + ",".join(parts) if len(parts) > 1 else f"preferred:{tiers[0].name}"


def uses_of_trace(trace: Trace, footprint_bytes: Mapping[str, int]) -> tuple[TensorUse, ...]:
    """Uses by kind of tensor, as a run recorded them, on host memory.

    Parameters
    ----------
    footprint_bytes
        Bytes of every kind (``Plan.of`` and the report of a run have them).
    """
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for event in trace:
        if event.tensor_kind in footprint_bytes:
            read[event.tensor_kind] += sum(event.read_bytes.values())
            written[event.tensor_kind] += sum(event.write_bytes.values())
    return tuple(
        TensorUse(kind, nbytes, read[kind], written[kind])
        for kind, nbytes in footprint_bytes.items()
    )


def uses_by_kind(footprint_bytes: Mapping[str, int]) -> tuple[TensorUse, ...]:
    """Uses assumed from kinds alone: one pass a step over all but what is better kept local."""
    return tuple(
        TensorUse(
            kind,
            nbytes,
            0 if kind in KEPT_LOCAL else nbytes,
            kept_local=KEPT_LOCAL.get(kind, ""),
        )
        for kind, nbytes in footprint_bytes.items()
    )
