"""One rank of test_checkpoint_ranks.py: trains sharded weights, saves, goes on, and resumes."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cxl_offload import _C, load_machine
from cxl_offload.memory import Session
from cxl_offload.ops.checkpoint_stager import TierStager
from cxl_offload.ranks import share_machine
from cxl_offload.topology import DaxDevice, discover
from tests.placement.kernel_calls import mapped_file
from tests.placement.memory_group import MemoryGroup

MIB = 1 << 20
WEIGHTS = 4
DEVICE_BYTES = 128 * MIB


class AsItIs(AsyncStager):
    """What a stager must not be: it hands on the tensors that training writes to."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class Halfway(dcp.DefaultSavePlanner):
    """Waits, or fails, after half of a rank's tensors are written; knows the files they lie in."""

    def __init__(self, goes_on: threading.Event, fails: bool = False) -> None:
        super().__init__()
        self.goes_on, self.fails = goes_on, fails
        self.reached = threading.Event()
        self.files: set[str] = set()
        self._written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._written += 1
        if self._written == WEIGHTS * 3 // 2:
            self.reached.set()
            assert self.goes_on.wait(60)
            if self.fails:
                raise OSError("no space left")
        found = super().resolve_data(write_item)
        if isinstance(found, torch.Tensor):
            self.files.add(Path(mapped_file(found.data_ptr())).name)
        return found


class Training:
    """Weights sharded over the ranks and their optimizer; every step changes all of them."""

    def __init__(self, mesh: DeviceMesh, rows: int) -> None:
        torch.manual_seed(0)
        self.weights = [
            torch.nn.Parameter(distribute_tensor(torch.randn(rows, 512), mesh, [Shard(0)]))
            for _ in range(WEIGHTS)
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.1, foreach=False)
        self.step()

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = weight.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        states = self.optimizer.state_dict()["state"]
        return {
            f"{name}.{at}": tensor
            for at, weight in enumerate(self.weights)
            for name, tensor in {"weight": weight, **states[at]}.items()
        }

    def read(self, saved: dict[str, Any]) -> None:
        groups = self.optimizer.state_dict()["param_groups"]
        states: dict[int, Any] = {at: {} for at in range(WEIGHTS)}
        for key, tensor in saved.items():
            name, at = key.split(".")
            if name == "weight":
                with torch.no_grad():
                    self.weights[int(at)].copy_(tensor)
            else:
                states[int(at)][name] = tensor
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def digest(self) -> str:
        made = hashlib.sha256()
        for _, tensor in sorted(self.state().items()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            made.update(local.detach().contiguous().numpy().tobytes())
        return made.hexdigest()


def device_root(folder: Path, rank: int) -> Path:
    """Where a test put the files of a rank's device."""
    return folder / f"device-of-{rank}"


def session_of(tier: str, folder: Path, rank: int) -> Session:
    """A rank's share of simulated nodes, or a device of its own whose memory is a shared file."""
    if tier == "cxl":
        return share_machine(load_machine("spr-1"), limits={2: 32 * MIB}).session()
    device = DaxDevice("dax0.0", "devdax", DEVICE_BYTES, 3, 2 * MIB)
    return Session(
        _C.linux_kernel(str(device_root(folder, rank))), replace(discover(), dax=(device,))
    )


def limit_all(group: MemoryGroup, rank: int, nbytes: int) -> None:
    """Lets all ranks have only so much more memory than they hold, as a full near node would."""
    dist.barrier()
    if rank == 0:
        group.leave_bytes(nbytes)
    dist.barrier()


def stager_of(kind: str, tier: str, session: Session, limit: int | None) -> AsyncStager | None:
    if kind == "stock":
        return None
    return AsItIs() if kind == "as-it-is" else TierStager(tier, limit_bytes=limit, session=session)


def failed_save(training: Training, folder: Path, stager: TierStager) -> dict[str, Any]:
    """What is held after a save that fails midway, and whether the next one is written."""
    goes_on = threading.Event()
    goes_on.set()
    saved = dcp.async_save(
        training.state(),
        checkpoint_id=folder / "failed",
        async_stager=stager,
        planner=Halfway(goes_on, fails=True),
    )
    error = saved.exception()
    held = stager.held_bytes
    try:
        stager.stage(training.state())
        refused = ""
    except MemoryError as refusal:
        refused = str(refusal)
    del saved, error
    gc.collect()
    return {"failed_held": held, "refused": refused, "failed_then": stager.held_bytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stager", choices=["tier", "stock", "as-it-is"], required=True)
    parser.add_argument("--tier", default="cxl")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=Path)
    parser.add_argument("--near-mib-left", type=int)
    parser.add_argument("--fail-first", action="store_true")
    args = parser.parse_args()
    folder = args.folder
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=args.rank, world_size=args.size
    )
    mesh = init_device_mesh("cpu", (args.size,))
    training = Training(mesh, args.rows)
    session = session_of(args.tier, folder, args.rank)
    nbytes = sum(
        each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes
        for each in training.state().values()
    )
    stager = stager_of(args.stager, args.tier, session, nbytes)
    if args.group is not None:
        limit_all(MemoryGroup(args.group), args.rank, args.near_mib_left * MIB)
    answer: dict[str, Any] = {"state": nbytes}
    if args.fail_first:
        assert isinstance(stager, TierStager)
        answer |= failed_save(training, folder, stager)
    goes_on = threading.Event()
    planner = Halfway(goes_on)
    answer["saved"] = training.digest()
    saved = dcp.async_save(
        training.state(), checkpoint_id=folder / "saved", async_stager=stager, planner=planner
    )
    reached = planner.reached
    saved.add_done_callback(lambda _: reached.set())  # one that failed is not waited for
    assert reached.wait(60)
    training.step()  # half of the save is written
    goes_on.set()
    saved.result()
    answer["files"] = sorted(planner.files)
    training.step()
    answer["went_on"] = training.digest()
    del saved, planner  # a planner keeps what it planned
    gc.collect()
    if isinstance(stager, TierStager):
        answer["held"] = stager.held_bytes
        answer["peak"] = session.stats().asked_bytes.peak
    del training
    resumed = Training(mesh, args.rows)
    found = resumed.state()
    dcp.load(found, checkpoint_id=folder / "saved")
    resumed.read(found)
    answer["resumed"] = resumed.digest()
    resumed.step()
    resumed.step()
    answer["resumed_went_on"] = resumed.digest()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
