"""The accelerator that a model computes on while its weights lie in tiers of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.kinds import named_experts
from cxl_offload.memory import PolicyLike, Session
from cxl_offload.objects.weight_kinds import KINDS as WEIGHT_KINDS
from cxl_offload.plan.hardware import GPU
from cxl_offload.plan.plan_file import Plan
from cxl_offload.transfer import CopyEngine, CopyHandle

_LEAST_UNFINISHED = 1 << 30


def chosen_device(name: str | torch.device, plan: Plan | None = None) -> torch.device:
    """The accelerator of a name such as ``"cuda"`` or ``"cuda:0"``, with its number.

    Parameters
    ----------
    plan
        What is run; CPUs take another one where it is for an accelerator.

    Raises
    ------
    ConfigError
        In one line: no name of a CUDA device, or there is none of that number.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"accelerator {name!r}: give cuda, or cuda:0") from None
    on_cpus = (
        "the plan is for one; for CPUs plan again, with cxl-offload plan inference --gpu none"
        if plan is not None and plan.accelerator is not None
        else "leave accelerator out to compute on the CPU"
    )
    if device.type != "cuda":
        raise ConfigError(
            f"accelerator {name}: weights are streamed to CUDA devices, such as cuda or cuda:0; "
            f"{on_cpus}"
        )
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            f"accelerator {name}: torch {torch.__version__} finds no CUDA device; {on_cpus}"
        )
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= count:
        raise ConfigError(f"accelerator {name}: torch finds {count}; give cuda:{count - 1} or less")
    return torch.device("cuda", number)


def host_policies(policies: Mapping[str, PolicyLike]) -> dict[str, PolicyLike]:
    """The kinds that lie on the host; those of policy ``"gpu"`` are left out.

    Raises
    ------
    ConfigError
        Some experts of a stack are to be on the accelerator and the others not.
    """
    away = {kind for kind, policy in policies.items() if policy == GPU}
    for kind in sorted(away):
        if named_experts(kind) is not None:
            raise ConfigError(
                f"policy of {kind}: experts of a layer go to the accelerator together; give "
                f"{GPU} for experts"
            )
    kept = {kind: policy for kind, policy in policies.items() if kind not in away}
    if away and "weights" in kept:
        of_weights = kept.pop("weights")
        others = dict.fromkeys((kind for kind in WEIGHT_KINDS if kind not in away), of_weights)
        kept = {**others, **kept}
    return kept


class CudaModelCopies:
    """A CUDA device, and the engine that copies weights and hidden states to it, and these back.

    Parameters
    ----------
    device
        With its number.
    session
        Has what is copied, pinned.
    most_unfinished
        Bytes that may be under way at a time.

    Raises
    ------
    ValueError
        The device has no context that can be used.
    """

    def __init__(self, device: torch.device, session: Session, *, most_unfinished: int) -> None:
        self.device = device
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # the context that the engine copies in
            self._engine = CopyEngine(
                session, staging_bytes=0, limit_bytes=max(_LEAST_UNFINISHED, most_unfinished)
            )
            self._order = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def stream(self) -> int:
        """What layers are queued on now."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        """Queue a copy of as many bytes behind what these streams have queued now."""
        handle = self._engine.to_device(target=target, source=source, after=after)
        assert handle is not None  # None is the answer of one that does not wait for room
        return handle

    def copy_back(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]
    ) -> CopyHandle:
        """Queue a copy to the host behind what these streams have queued now."""
        handle = self._engine.to_host(target=target, source=source, after=after)
        assert handle is not None  # as above
        return handle

    def behind(self, handle: CopyHandle) -> int:
        """A stream of no work that waits for a copy: what is put behind it comes after the copy.

        Raises
        ------
        OSError
            The driver refused the copy.
        """
        stream = int(self._order.cuda_stream)
        handle.stream_wait(stream)
        return stream

    def finish(self, handles: Sequence[CopyHandle]) -> None:
        """Wait until these copies are over, refused ones too, and hold nothing of them."""
        self._engine.finish(handles)

    def wait_for(self, handle: CopyHandle) -> None:
        """Layers that are queued from now on run behind a copy.

        Raises
        ------
        OSError
            The driver refused the copy.
        """
        handle.stream_wait(self.stream())

    def close(self) -> None:
        """Wait for all copies, and give their threads back."""
        self._engine.close()


def free_bytes(device: torch.device) -> int:
    """What the device has left for this process, with what torch holds there and does not use.

    Makes the context that host memory is pinned in.
    """
    torch.empty(1, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + unused)


def moved(given: Any, device: torch.device) -> Any:
    """Arguments of a module with their tensors on a device; others, as caches, as they are."""
    if isinstance(given, torch.Tensor):
        return given if given.device == device else given.to(device)
    if type(given) in (tuple, list):
        return type(given)(moved(each, device) for each in given)
    if type(given) is dict:
        return {name: moved(each, device) for name, each in given.items()}
    return given
