"""An executor whose speed is a formula of its hardware: every answer is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cxl_offload.plan.executor import Candidate, Executor, KindBytes
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Batch, PhaseEstimate
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.request import PlanRequest
from cxl_offload.topology import load_machine

GIB = 1 << 30
MACHINE = load_machine("epyc9354-cxl-a")

Speed = Callable[[Hardware], float | None]
"""Tokens/s on some hardware; None: nothing fits."""


def has(hardware: Hardware, tier: str) -> bool:
    if tier == "nvme":
        return hardware.drive_usable_bytes > 0
    return any(node.tier == tier for node in hardware.nodes)


class Toy(Executor[str]):
    """Puts 1 GiB on every node and on the drive, and is as fast as it is told."""

    name = "flexgen"

    def __init__(self, speed: Speed, **asked: Any) -> None:
        self._request = PlanRequest(model=load_model("opt-125m"), machine=MACHINE, **asked)
        self._speed = speed
        self.seen: list[Hardware] = []
        self.like: list[Candidate[str] | None] = []
        self.replays = 0

    @property
    def request(self) -> PlanRequest:
        return self._request

    def hardware(self) -> Hardware:
        return hardware_of(MACHINE)

    def search(
        self, hardware: Hardware, *, like: Candidate[str] | None = None
    ) -> Candidate[str] | None:
        self.seen.append(hardware)
        self.like.append(like)
        rate = self._speed(hardware)
        if rate is None:
            return None
        return Candidate(
            hardware=hardware,
            choice="toy",
            tokens_per_s=rate,
            sequences=4,
            host=(GIB,) * len(hardware.nodes),
            gpu_bytes=3 * GIB,
            drive_bytes=GIB if has(hardware, "nvme") else 0,
        )

    def why_nothing_fits(self, hardware: Hardware) -> str:
        return f"toy on {hardware.machine}: nothing fits"

    def batch(self, found: Candidate[str]) -> Batch:
        return Batch(size=4, count=1, prompt=16, tokens=8)

    def kinds(self, found: Candidate[str]) -> Iterable[KindBytes]:
        policies = [f"bind:{name}" for name in found.hardware.names]
        yield KindBytes("weights", found.gpu_bytes, found.host, found.drive_bytes, policies)

    def command(self, found: Candidate[str]) -> tuple[str, ...]:
        return ("toy", found.choice)

    def phases(self, found: Candidate[str]) -> tuple[PhaseEstimate, ...]:
        return (PhaseEstimate(name="decode, one token", seconds=1.0, bottleneck="toy work"),)

    def equation_seconds(self, found: Candidate[str]) -> Mapping[str, float]:
        return {"decode": 1.0}

    def replayed_seconds(self, found: Candidate[str], replay: Replay) -> Mapping[str, float]:
        self.replays += 1
        return {"decode": 2.0}

    def notes(self, found: Candidate[str]) -> list[str]:
        return ["a note of the toy's"]
