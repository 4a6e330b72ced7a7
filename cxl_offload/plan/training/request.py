"""What is to be planned of a training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.adam_bytes import STATE_TYPES
from cxl_offload.plan.hardware import NVME
from cxl_offload.plan.request import PlanRequest
from cxl_offload.plan.training.job import Stage
from cxl_offload.plan.training.ranks import ONE_GPU, Ranks
from cxl_offload.plan.training.state_choice import AUTO
from cxl_offload.plan.usable import GPU_USABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(PlanRequest):
    """What is to be planned for DeepSpeed.

    Attributes
    ----------
    batch
        Sequences of one optimizer step; GPUs times micro-batch times accumulation.
    tokens
        Tokens of a sequence.
    stage
        1, 2, 3, or None: the fastest one.
    optimizer_bytes_per_s
        What the CPU optimizer draws from local memory; None: what this package's Adam was measured
        to draw (``operators``), else an assumed share of the memory's rate.
    script
        The training script of the printed command.
    ranks
        GPUs, and what crosses between them.
    flash_attention
        Whether the script's attention keeps no scores for the backward.
    nvme_path
        A folder on the drive, which stage 3 may then keep optimizer states and parameters on; None:
        the drive is left alone.
    state_dtypes
        What momentum and variance may also be kept as, of ``STATE_TYPES``; the fastest is taken.
        ``("auto",)``: any of them, and fewer bits only where they bring more than ``cxl_margin``,
        or where float32 does not fit.
    offload_checkpoints
        Whether checkpoints of activations may lie on the host between forward and backward, where
        that brings more than ``cxl_margin`` or nothing else fits.
    bind_cores
        Whether the launcher binds every rank to cores of the socket that is planned with.
    """

    batch: int
    tokens: int
    stage: Stage | None = None
    optimizer_bytes_per_s: float | None = None
    script: str = "train.py"
    ranks: Ranks = ONE_GPU
    flash_attention: bool = False
    nvme_path: str | None = None
    state_dtypes: Sequence[str] = ()
    offload_checkpoints: bool = False
    bind_cores: bool = False
    gpu_usable: float = GPU_USABLE

    def __post_init__(self) -> None:
        super(TrainingRequest, self).__post_init__()
        rate = self.optimizer_bytes_per_s
        if rate is not None and not 1e3 <= rate <= 1e15:
            raise ConfigError(f"optimizer rate {rate / 1e9:g} GB/s: from 1e-6 to 1e6")
        self._check_states()
        if self.batch % self.ranks.count:
            raise ConfigError(
                f"batch {self.batch} over {self.ranks.count} GPUs: a multiple of them is needed"
            )
        if self.nvme_path is not None:
            self._check_drive(self.nvme_path)
        else:
            self._check_no_drive()
        self._check_binding()

    def _check_no_drive(self) -> None:
        """Nothing lies on a drive of which no folder is named."""
        asked = {"tier": self.tiers or (), "limit of": self.limits}
        for what, names in asked.items():
            if NVME in names:
                raise ConfigError(
                    f"{what} nvme: without a folder of the drive nothing lies there; name one by "
                    "--nvme-path, or leave it out"
                )

    def _check_binding(self) -> None:
        machine = self.machine
        if self.bind_cores and not machine.node(machine.initiator).cpus:
            raise ConfigError(
                f"--bind-cores: {machine.name} names no CPUs of node {machine.initiator}; give "
                "them in its file (cpus), or leave it out"
            )

    def _check_states(self) -> None:
        if AUTO in self.state_dtypes and len(self.state_dtypes) > 1:
            raise ConfigError(
                f"state dtypes {', '.join(self.state_dtypes)}: {AUTO} compares all of them; give "
                "it alone, or name types without it"
            )
        for name in self.state_dtypes:
            if name not in (AUTO, *STATE_TYPES):
                raise ConfigError(
                    f"state dtype {name!r}: it is {AUTO}, or of {', '.join(STATE_TYPES)}; "
                    "float32 is always tried"
                )

    def _check_drive(self, path: str) -> None:
        """The plan may be for another machine, so its folder need not be on this one."""
        if not (os.path.isabs(path) and path.isprintable()):
            raise ConfigError(f"--nvme-path {path!r}: give a whole path, such as /mnt/nvme")
        if os.path.exists(path) and not os.path.isdir(path):
            raise ConfigError(f"--nvme-path {path}: not a folder")
        if self.stage not in (None, 3):
            raise ConfigError(
                f"--nvme-path {path}: ZeRO stage {self.stage} keeps nothing on a drive; leave it "
                "out, or take stage 3"
            )
