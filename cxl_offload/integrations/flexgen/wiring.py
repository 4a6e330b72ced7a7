"""FlexGen's devices of one run, put together as its layout says."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flexgen.flex_opt import Policy

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.accelerator import Accelerator, HostAccelerator
from cxl_offload.integrations.flexgen.copies import (
    Copier,
    CudaCopies,
    EngineCopies,
    HostCopies,
)
from cxl_offload.integrations.flexgen.devices import HostDevice, SplitCache, TierDisk
from cxl_offload.integrations.flexgen.layout import FlexGenLayout
from cxl_offload.integrations.flexgen.places import FlexGenKind
from cxl_offload.integrations.flexgen.recorder import Recorder
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.sizes import COMPRESS_KV, COMPRESS_WEIGHTS
from cxl_offload.memory import Session
from cxl_offload.objects.kind_store import MemorySource, TierStore
from cxl_offload.transfer import CopyEngine
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Devices:
    """What FlexGen computes on and keeps tensors in.

    Attributes
    ----------
    weight_homes
        In FlexGen's order: disk, host parts, accelerator.
    """

    accelerator: Accelerator
    host: HostDevice
    disk: TierDisk
    cache: SplitCache
    weight_homes: tuple[Any, ...]


def flexgen_policy(run: FlexGenRun, percent: Sequence[float]) -> Policy:
    """FlexGen's own policy object, with these six percentages."""
    return Policy(
        run.gpu_batch_size,
        run.num_gpu_batches,
        *percent,
        run.overlap,
        run.sep_layer,
        run.pin_weight,
        run.cpu_cache_compute,
        run.attn_sparsity,
        run.compress_weight,
        COMPRESS_WEIGHTS,
        run.compress_cache,
        COMPRESS_KV,
    )


def make_copier(
    run: FlexGenRun, session: Session, source: MemorySource, recorder: Recorder
) -> Copier:
    """Copies for the run's accelerator; to be closed.

    Raises
    ------
    MemoryError, OSError
        The copy engine does not get what it needs of the driver.
    """
    if run.accelerator == "host":
        return Copier(HostCopies(), recorder)
    copies = CudaCopies(source.record_stream)
    if run.copies == "stream":
        return Copier(copies, recorder)
    engine = CopyEngine(session, staging_bytes=0)
    return Copier(EngineCopies(engine, copies, CudaCopies.stream_in_order), recorder)


def build_devices(
    run: FlexGenRun,
    layout: FlexGenLayout,
    store: TierStore,
    copies: Copier,
    recorder: Recorder,
    *,
    activation: str,
    disk_folder: Path,
) -> Devices:
    """Make every device; the caller closes the disk."""
    accelerator: Accelerator
    if run.accelerator == "host":
        accelerator = HostAccelerator(
            recorder, activation=activation, loads_nothing=copies.stays_in_host_memory
        )
    else:
        accelerator = Accelerator("cuda:0", recorder, activation=activation)
        torch.empty(1, device=accelerator.dev)  # host memory is pinned in this thread's context
    disk = TierDisk(str(disk_folder), copies.from_disk_thread)
    kv_parts = _part_devices(store, "kv")
    weight_parts = _part_devices(store, "weights")
    # The last CPU device made is the one FlexGen compresses on while it loads weights.
    host = HostDevice(
        store,
        has_workspace=not layout.attends_in_place,
        keeps_activations=run.accelerator == "host",
    )
    on_disk, *on_host, on_accelerator = layout.homes.sequences
    cache = SplitCache(
        [accelerator, *(kv_parts or [host]), disk], [on_accelerator, *on_host, on_disk]
    )
    if kv_parts:
        host.cache = cache
    homes = (disk, *(weight_parts or [host]), accelerator)
    return Devices(accelerator, host, disk, cache, homes)


def _part_devices(store: TierStore, kind: FlexGenKind) -> list[HostDevice]:
    """One device for every part of a split kind; none when it is not split."""
    parts: Sequence[Any] = store.parts[kind]
    if len(parts) == 1:
        return []
    return [HostDevice(store, part=at, kind=kind) for at in range(len(parts))]


def check_accelerator(run: FlexGenRun, layout: FlexGenLayout, session: Session) -> None:
    """Refuse what does not fit the accelerator, before the OOM killer has to choose.

    Raises
    ------
    ConfigError
        CUDA is asked for and there is none.
    MemoryError
        The accelerator, or the memory that stands in for it, is too small.
    """
    need = layout.accelerator_bytes
    for gpu in session.machine.gpus[:1]:
        if gpu.memory_bytes is not None and need > gpu.memory_bytes:
            raise MemoryError(
                f"accelerator {gpu.name} of {session.machine.name}: at least {format_bytes(need)} "
                f"needed, it has {format_bytes(gpu.memory_bytes)}; lower its percentages or the "
                f"batch"
            )
    if run.accelerator == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--accelerator cuda: PyTorch finds no CUDA device; use --accelerator host"
            )
        free = torch.cuda.mem_get_info()[0]
        who = "accelerator cuda:0"
    else:
        # Simulated nodes are backed by ordinary memory too.
        need += sum(each.nbytes * each.count for each in layout.needs)
        free = Session.linux(session.machine).kernel.process_headroom().free_bytes
        who = "host tiers and the memory standing in for an accelerator"
    if need > free:
        raise MemoryError(
            f"{who}: at least {format_bytes(need)} needed, {format_bytes(free)} free; lower the "
            f"percentages or the batch"
        )


@contextlib.contextmanager
def scratch_folder(offload_dir: str | None) -> Iterator[Path]:
    """A folder of this run alone, removed with all its files.

    FlexGen numbers its files from zero in every process, so two runs in one folder would overwrite
    each other's.
    """
    with contextlib.ExitStack() as stack:
        parent: Path | None = None
        if offload_dir is not None:
            parent = Path(offload_dir).expanduser()
            if not parent.exists():
                parent.mkdir(parents=True)
                stack.callback(_remove_if_empty, parent)
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="cxl_offload-flexgen-", dir=parent)
        )
        yield Path(name)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
