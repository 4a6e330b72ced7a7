"""One rank of test_checkpoint_ranks.py: trains sharded weights, saves, goes on, and resumes."""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import re
import resource
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
from tests.memory.dax_devices import write_device

MIB = 1 << 20
WEIGHTS = 4
DEVICE_BYTES = 128 * MIB


class AsItIs(AsyncStager):
    """What a stager must not be: it hands on the tensors that training writes to."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class Halfway(dcp.DefaultSavePlanner):
    """Waits, or fails, after half of a rank's tensors are written."""

    def __init__(self, goes_on: threading.Event, fails: bool = False) -> None:
        super().__init__()
        self.goes_on, self.fails = goes_on, fails
        self.reached = threading.Event()
        self._written = 0

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._written += 1
        if self._written == WEIGHTS * 3 // 2:
            self.reached.set()
            assert self.goes_on.wait(60)
            if self.fails:
                raise OSError("no space left")
        return super().resolve_data(write_item)


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


def near_bytes_left(nbytes: int) -> None:
    """Lets this process have only so much more ordinary memory, as a full near node would.

    Negative: as much as there is.
    """
    if nbytes < 0:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    text = Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", text)
    assert found
    most = int(found[1]) * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def session_of(tier: str, folder: Path, rank: int) -> Session:
    """A rank's share of simulated nodes, or a device of its own whose memory is a shared file."""
    if tier == "cxl":
        return share_machine(load_machine("spr-1"), limits={2: 32 * MIB}).session()
    root = folder / f"device-of-{rank}"
    write_device(root, "dax0.0", size=DEVICE_BYTES)
    device = DaxDevice("dax0.0", "devdax", DEVICE_BYTES, 3, 2 * MIB)
    return Session(_C.linux_kernel(str(root)), replace(discover(), dax=(device,)))


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
    if args.near_mib_left is not None:
        near_bytes_left(args.near_mib_left * MIB)
    answer: dict[str, Any] = {"state": nbytes}
    if args.fail_first:
        assert isinstance(stager, TierStager)
        answer |= failed_save(training, folder, stager)
    goes_on = threading.Event()
    planner = Halfway(goes_on)
    answer["saved"] = training.digest()
    try:
        saved = dcp.async_save(
            training.state(), checkpoint_id=folder / "saved", async_stager=stager, planner=planner
        )
    except (RuntimeError, MemoryError) as error:
        answer["error"] = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        return
    assert planner.reached.wait(60)
    training.step()  # half of the save is written
    goes_on.set()
    saved.result()
    near_bytes_left(-1)
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
