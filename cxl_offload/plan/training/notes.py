"""What a plan of training tells its reader: what the script does, and what is not known."""

from __future__ import annotations

from cxl_offload.plan.gpu import assumed_training_share, training_share
from cxl_offload.units import format_bytes

FLASH_NOTE = (
    "planned for attention that keeps no scores, which the script has to use (in transformers "
    'attn_implementation="flash_attention_2", or "sdpa" where torch takes its flash kernel)'
)


def about_gpu(name: str) -> str:
    """Which share of its peak the GPU is planned with."""
    known = training_share(name) is not None
    whose = "published for its kind" if known else "the lowest published one, none of its kind"
    return f"GPU {name} planned at {assumed_training_share(name):.0%} of its peak, {whose}"


def about_states(dtype: str) -> str:
    """Whose optimizer the script gives, and what it keeps its states as."""
    if not dtype:
        return "the script gives the optimizer: DeepSpeedCPUAdam, or this package's CPUAdam"
    return (
        f"momentum and variance are kept as {dtype}, rounded at random, which loses precision: the "
        "script gives this package's CPUAdam, and the hook of `cxl-offload run` makes its states so"
    )


def about_checkpoints(checkpointing: bool, offloaded_bytes: int) -> str:
    """Whether activations are computed again, and how many bytes of them lie on the host."""
    if not checkpointing:
        return "without activation checkpointing"
    if offloaded_bytes:
        return (
            f"with activation checkpointing, and {format_bytes(offloaded_bytes)} of checkpoints on "
            "the host between forward and backward: the hook of `cxl-offload run` does both in "
            "models of transformers; others train as the plan counts on only where their script "
            "uses cxl_offload.offload_activations around its checkpoints"
        )
    return (
        "with activation checkpointing, as the micro-batch fits only so: the hook of `cxl-offload "
        "run` switches it on in models of transformers, in others the script has to"
    )


def about_drive(nbytes: int, path: str | None) -> list[str]:
    """Whose files are there, and what is not known of it."""
    if not nbytes:
        return []
    return [
        f"DeepSpeed keeps {format_bytes(nbytes)} in files in {path} and writes most of them in "
        "every step, which wears a drive",
        "not replayed: the simulator's training step has no drive",
    ]
