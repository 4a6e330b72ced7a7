"""What one more GiB or GB/s of a tier would bring, from the duals of the relaxed program.

The relaxation leaves the number of GPU batches open and lets tensors and sequences be cut, so the
price of room includes the larger batch that it allows. It is the slope at the optimum: right for a
small change, an upper bound for a large one of room (more of it brings less and less).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.planner import Found
from cxl_offload.plan.flexgen.program import PlacementProgram
from cxl_offload.plan.hardware import Hardware

__all__ = ["Knob", "Price", "knobs", "prices", "relaxed_tokens_per_s"]

_STEP = 1e-6
GIB = float(2**30)
GB = 1e9


@dataclass(frozen=True, slots=True)
class Knob:
    """A number of the hardware that can be turned, and the unit it is priced in."""

    what: str
    unit: str
    unit_size: float
    value: float
    with_value: Callable[[float], Hardware]


@dataclass(frozen=True, slots=True)
class Price:
    """Tokens a second that one more ``unit`` of ``what`` would bring."""

    what: str
    unit: str
    tokens_per_s: float


def _tier(hardware: Hardware, at: int, **changes: float) -> Hardware:
    tiers = list(hardware.nodes)
    tiers[at] = replace(tiers[at], **changes)  # type: ignore[arg-type]
    return replace(hardware, nodes=tuple(tiers))


def knobs(hardware: Hardware) -> Iterator[Knob]:
    """Every room and every known rate."""
    for at, tier in enumerate(hardware.nodes):
        rooms = {"usable_bytes": tier.usable_bytes}
        reads = {
            "read_bytes_per_s": tier.read_bytes_per_s,
            "copy_bytes_per_s": tier.copy_bytes_per_s,
        }
        labels = {
            "usable_bytes": f"{tier.name} capacity",
            "read_bytes_per_s": f"{tier.name} bandwidth (CPU)",
            "copy_bytes_per_s": f"{tier.name} bandwidth (GPU copies)",
        }
        for key, value in {**rooms, **reads}.items():
            if value == float("inf"):
                continue
            unit, size = ("GiB", GIB) if key == "usable_bytes" else ("GB/s", GB)

            def turned(new: float, at: int = at, key: str = key) -> Hardware:
                return _tier(hardware, at, **{key: new})

            yield Knob(labels[key], unit, size, value, turned)
    fields = [
        ("gpu_usable_bytes", "GPU memory", "GiB", GIB),
        ("link_bytes_per_s", "link", "GB/s", GB),
    ]
    if hardware.drive_usable_bytes:
        fields.append(("drive_usable_bytes", "nvme capacity", "GiB", GIB))
        fields.append(("drive_read_bytes_per_s", "nvme reads", "GB/s", GB))
    for field, label, unit, size in fields:

        def turned_field(new: float, field: str = field) -> Hardware:
            return replace(hardware, **{field: new})  # type: ignore[arg-type]

        yield Knob(label, unit, size, float(getattr(hardware, field)), turned_field)


def _program(job: FlexGenJob, hardware: Hardware, found: Found) -> PlacementProgram:
    return PlacementProgram(
        job,
        hardware,
        found.mode,
        batches=None,
        levels=job.levels(),
        unit_s=found.phases.total_s / found.choice.batches,
        like=found.choice,
    )


def relaxed_tokens_per_s(job: FlexGenJob, hardware: Hardware, found: Found) -> float | None:
    """The most tokens a second of the relaxation of a plan; None where nothing fits."""
    program = _program(job, hardware, found)
    relaxed = program.relaxed()
    if relaxed is None:
        return None
    return found.choice.gpu_batch * job.generated / (relaxed.objective * program.unit_s)


def prices(job: FlexGenJob, hardware: Hardware, found: Found) -> tuple[Price, ...]:
    """Prices of everything that could be more, at the optimum of the relaxation.

    By the envelope theorem: where a coefficient of row r grows by ``d`` times the columns' values,
    the objective grows by minus the row's dual times that. The changed coefficients are those of
    the same program built for the changed hardware.
    """
    base = _program(job, hardware, found)
    relaxed = base.relaxed()
    if relaxed is None:
        return ()
    seconds = relaxed.objective
    rate = found.choice.gpu_batch * job.generated / (seconds * base.unit_s)
    at_rest = base.program.products(relaxed.values)
    made = []
    for knob in knobs(hardware):
        step = knob.value * _STEP
        changed = _program(job, knob.with_value(knob.value + step), found)
        grown = changed.program.products(relaxed.values) - at_rest
        slope = -float(np.dot(relaxed.duals, grown)) / step
        made.append(Price(knob.what, knob.unit, -rate * slope / seconds * knob.unit_size))
    return tuple(made)
