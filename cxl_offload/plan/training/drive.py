"""ZeRO-Infinity: what of a training step is on a drive, and what reading and writing it takes.

DeepSpeed's stage 3 keeps all optimizer states of a rank on the drive or none, and its parameters in
half precision besides or not. The states of one group of parameters after the other are read,
updated and written, without overlap (``pipeline_read`` and ``pipeline_write`` off, its default);
parameters are read for every forward and backward, and written after the update.
Source: Rajbhandari et al., ZeRO-Infinity (SC 2021), sections 5 and 6; DeepSpeed,
partitioned_optimizer_swapper.py and partitioned_param_swapper.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.training.job import LOW_BYTES, HostKind, Stage

GROUP_ELEMENTS = 100_000_000
"""Parameters whose states are read together; the plan sets DeepSpeed's ``sub_group_size`` to it.
The parameter that fills a group belongs to it as a whole."""

STATE_BUFFERS = 4
"""DeepSpeed's ``buffer_count`` of the optimizer: weight, gradient, momentum and variance."""

PARAM_BUFFERS = 5
"""Its ``buffer_count`` of parameters, each of a whole group; its default."""

BUFFERS = "swap_buffers"
"""Host memory that DeepSpeed reads states into; its own, which no policy places."""

_ALIGNED = 4096
_STATE_BYTES = 4
_STATES = ("fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class OnDrive:
    """Which kinds are on the drive; parameters only together with the optimizer's states."""

    optimizer: bool = False
    params: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their names."""
        return (*(_STATES if self.optimizer else ()), *(("params",) if self.params else ()))

    def nbytes(self, kinds: Sequence[HostKind]) -> int:
        """Bytes there, of all kinds of a step without a drive."""
        return sum(kind.bytes for kind in kinds if kind.name in self.kinds)

    def seconds(self, kinds: Sequence[HostKind], hardware: Hardware) -> DriveSeconds:
        """What the drive takes of a step."""
        if not self.optimizer:
            return IN_MEMORY
        read, write = hardware.drive_read_bytes_per_s, hardware.drive_write_bytes_per_s
        states = sum(kind.bytes for kind in kinds if kind.name in _STATES)
        low = sum(kind.bytes for kind in kinds if kind.name == "params")
        # The backward writes gradients; the update reads all four states, and writes three.
        return DriveSeconds(
            optimizer=states / read + states / write,
            fetch=low / read if self.params else 0.0,
            back=low / write if self.params else 0.0,
        )


@dataclass(frozen=True, slots=True)
class DriveSeconds:
    """Of a step: for the states, for parameters of one pass, and for those that were updated."""

    optimizer: float = 0.0
    fetch: float = 0.0
    back: float = 0.0


NOWHERE = OnDrive()
IN_MEMORY = DriveSeconds()


def choices(stage: Stage, hardware: Hardware) -> tuple[OnDrive, ...]:
    """What may be on the drive; only stage 3 has one."""
    if stage != 3 or not hardware.drive_usable_bytes:
        return (NOWHERE,)
    return (NOWHERE, OnDrive(optimizer=True), OnDrive(optimizer=True, params=True))


def kinds_in_memory(
    kinds: Sequence[HostKind], on_drive: OnDrive, *, gpus: int, largest: int
) -> tuple[HostKind, ...]:
    """Kinds of host tensors that are left, with the buffers of what is on the drive.

    Parameters
    ----------
    gpus
        Of the host; each has buffers of its own.
    largest
        Elements of the largest parameter.
    """
    if not on_drive.optimizer:
        return tuple(kinds)
    held = sum(kind.bytes for kind in kinds if kind.name == "exp_avg") // _STATE_BYTES
    group = min(buffer_elements(largest), -(-held // gpus))
    states = STATE_BUFFERS * _STATE_BYTES * gpus * group
    traffic = sum(kind.traffic for kind in kinds if kind.name in _STATES)
    left = [kind for kind in kinds if kind.name not in on_drive.kinds]
    if on_drive.params:
        nbytes = PARAM_BUFFERS * LOW_BYTES * gpus * buffer_elements(largest)
        cast = sum(kind.traffic for kind in kinds if kind.name == "params")
        left.append(HostKind("params", nbytes, cast, copied=True))
    return (HostKind(BUFFERS, states, traffic), *left)


def buffer_elements(largest: int) -> int:
    """Of a buffer that holds any group, in whole pages of the drive."""
    return -(-(GROUP_ELEMENTS + largest) // _ALIGNED) * _ALIGNED
