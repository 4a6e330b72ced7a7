"""The group of processes that torchrun started, for programs that do not begin with one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist


def is_rank_of_job() -> bool:
    """Whether torchrun, or what sets the same variables, started several processes."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def joined_group() -> Iterator[None]:
    """Inside of the block this process is in torch's default group; one that it joins is of gloo.

    A group that the block made is left at its end.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
