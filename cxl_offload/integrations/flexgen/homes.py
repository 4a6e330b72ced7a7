"""Where the tensors of a run shall live: what people ask for in percent, or what a plan says.

Homes are in FlexGen's order: the disk, the parts of the host, the accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.places import KINDS, FlexGenKind, parse_split
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import (
    ACCELERATOR,
    DISK,
    HOST,
    ShareRow,
    home_shares,
    kv_sequences,
    realised_kv,
    realised_weights,
)
from cxl_offload.plan.flexgen.layout import TensorSizes, cuts_at
from cxl_offload.plan.hardware import GPU, NVME
from cxl_offload.plan.plan_file import Plan


@dataclass(frozen=True, slots=True)
class HostPart:
    """A part of the host and the policy of its memory; None where none was given."""

    name: str
    policy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexGenHomes:
    """Homes of weights and KV cache, and the parts of the host that every kind of tensor has.

    Attributes
    ----------
    weights, kv
        Names of the homes.
    cuts
        Percent at which every group of weights is cut, one cut between every two homes.
    sequences
        Sequences of one batch in every home of the KV cache.
    hidden_on_accelerator
        Hidden states live there, else on the host.
    host
        Parts of the host, of every kind.
    """

    weights: tuple[str, ...]
    cuts: tuple[float, ...]
    kv: tuple[str, ...]
    sequences: tuple[int, ...]
    hidden_on_accelerator: bool
    host: Mapping[FlexGenKind, tuple[HostPart, ...]]

    @property
    def weights_off_accelerator(self) -> bool:
        """Whether weights are loaded for every layer."""
        return self.cuts[-1] > 0

    @property
    def kv_on_accelerator(self) -> bool:
        """Whether the whole KV cache lives there."""
        return not any(self.sequences[:-1])

    @property
    def percent(self) -> tuple[float, float, float, float, float, float]:
        """What FlexGen's own code is told, which only asks whether a share is all or nothing."""
        edges = [0.0, *self.cuts, 100.0]
        batch = sum(self.sequences)
        on_host = sum(self.sequences[1:-1])
        hidden = (100.0, 0.0) if self.hidden_on_accelerator else (0.0, 100.0)
        return (
            edges[-1] - edges[-2],
            edges[-2] - edges[1],
            100 * self.sequences[-1] / batch,
            100 * on_host / batch,
            *hidden,
        )


def asked_homes(run: FlexGenRun, sizes: TensorSizes) -> tuple[FlexGenHomes, tuple[ShareRow, ...]]:
    """Homes of a request in percent, and what of it FlexGen's whole tensors leave.

    Raises
    ------
    ConfigError
        A share that would silently be nothing, or a policy for a share of nothing.
    """
    shares = {
        "weights": home_shares(*run.percent[0:2], parse_split(run.place.get("weights", ""))),
        "kv": home_shares(*run.percent[2:4], parse_split(run.place.get("kv", ""))),
    }
    rows = (
        *realised_weights(sizes.groups, shares["weights"]),
        *realised_kv(run.gpu_batch_size, shares["kv"]),
    )
    for kind, asked in shares.items():
        if kind in run.place and sum(asked.percents[1:-1]) == 0:
            raise ConfigError(
                f"--place {kind}={run.place[kind]}: --percent leaves 0 % of the {kind} on the "
                f"host, so nothing would be placed; give the host a share or drop the policy"
            )
    homes = FlexGenHomes(
        weights=shares["weights"].homes,
        cuts=shares["weights"].cuts,
        kv=shares["kv"].homes,
        sequences=tuple(kv_sequences(run.gpu_batch_size, shares["kv"])),
        hidden_on_accelerator=run.percent[4] == 100,
        host={kind: _asked_parts(run.place.get(kind)) for kind in KINDS},
    )
    return homes, rows


def _asked_parts(policy: str | None) -> tuple[HostPart, ...]:
    split = None if policy is None else parse_split(policy)
    if split is None:
        return (HostPart(HOST, policy),)
    return tuple(HostPart(part.place, f"bind:{part.place}") for part in split.parts)


def planned_homes(plan: Plan, sizes: TensorSizes) -> tuple[FlexGenHomes, tuple[ShareRow, ...]]:
    """Homes of a plan: its bytes are cuts between tensors and between sequences.

    Raises
    ------
    ConfigError
        The bytes are no such cuts, so the plan is of another model.
    """
    planned = {kind: _planned_parts(plan, kind) for kind in KINDS}
    weights, kv = (_bytes_by_home(plan, kind, planned[kind]) for kind in ("weights", "kv"))
    sequence_bytes = sizes.kv_sequence_bytes * plan.batch.count
    sequences = tuple(nbytes // sequence_bytes for nbytes in kv)
    try:
        cuts = cuts_at(sizes.groups, tuple(accumulate(weights))[:-1])
        if sum(weights) != sizes.weight_bytes:
            raise ValueError(f"it has {sum(weights)} bytes of weights, not {sizes.weight_bytes}")
        if any(nbytes % sequence_bytes for nbytes in kv) or sum(sequences) != plan.batch.size:
            raise ValueError(f"its KV cache is not cut between sequences of {sequence_bytes} bytes")
    except ValueError as error:
        raise ConfigError(
            f"--plan: made for {plan.model} and not for this model: {error}"
        ) from None
    homes = FlexGenHomes(
        weights=_names(planned["weights"]),
        cuts=cuts,
        kv=_names(planned["kv"]),
        sequences=sequences,
        hidden_on_accelerator=GPU in plan.of("act"),
        host={kind: tuple(part for part, _ in parts) for kind, parts in planned.items()},
    )
    rows = (*_rows("weights", homes.weights, weights), *_rows("kv", homes.kv, kv))
    return homes, rows


def _rows(
    kind: Literal["weights", "kv"], names: tuple[str, ...], held: tuple[int, ...]
) -> Iterator[ShareRow]:
    for name, nbytes in zip(names, held, strict=True):
        share = 100 * nbytes / sum(held)
        if nbytes:
            yield ShareRow(kind, name, share, share)


Planned = tuple[tuple[HostPart, int], ...]


def _planned_parts(plan: Plan, kind: FlexGenKind) -> Planned:
    """Parts of the host and their bytes; the homes of one stripe are one part."""
    on_host = [home for home in plan.homes if home.kind == kind and home.where not in (GPU, NVME)]
    stripes = [(policy, list(homes)) for policy, homes in groupby(on_host, lambda h: h.policy)]
    if not stripes:
        return ((HostPart(HOST, None), 0),)
    return tuple(
        (
            HostPart(HOST if len(stripes) == 1 else homes[0].where, policy),
            sum(home.bytes for home in homes),
        )
        for policy, homes in stripes
    )


def _bytes_by_home(plan: Plan, kind: FlexGenKind, parts: Planned) -> tuple[int, ...]:
    elsewhere = plan.of(kind)
    return (elsewhere.get(NVME, 0), *(nbytes for _, nbytes in parts), elsewhere.get(GPU, 0))


def _names(parts: Planned) -> tuple[str, ...]:
    return (DISK, *(part.name for part, _ in parts), ACCELERATOR)
