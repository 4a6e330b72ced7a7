"""DeepSpeed's own configuration of a training plan."""

from __future__ import annotations

import json

from cxl_offload.plan.training.drive import (
    GROUP_ELEMENTS,
    PARAM_BUFFERS,
    STATE_BUFFERS,
    OnDrive,
    buffer_elements,
)
from cxl_offload.plan.training.job import GRADIENT_BUCKET_ELEMENTS, Stage

CONFIG = "ds_config.json"
"""DeepSpeed's configuration among a plan's settings, and as its command names it;
``cxl-offload run`` writes it."""


def config_text(
    *,
    stage: Stage,
    micro: int,
    accumulation: int,
    checkpointing: bool,
    on_drive: OnDrive,
    nvme_path: str | None,
    largest: int,
) -> str:
    """The JSON of a plan.

    Parameters
    ----------
    nvme_path
        Folder on the drive, where something is there.
    largest
        Elements of the largest parameter.
    """
    zero: dict[str, object] = {
        "stage": stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": GRADIENT_BUCKET_ELEMENTS,
    }
    if stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    drive = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True}
    if on_drive.optimizer:
        zero["offload_optimizer"] = {**drive, "buffer_count": STATE_BUFFERS}
        zero["sub_group_size"] = GROUP_ELEMENTS
    if on_drive.params:
        size = buffer_elements(largest)
        more = {"buffer_count": PARAM_BUFFERS, "buffer_size": size, "max_in_cpu": 0}
        zero["offload_param"] = {**drive, **more}
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        # Without them DeepSpeed refuses optimizers of others, such as this package's CPUAdam.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if checkpointing:
        config["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(config, indent=1)
