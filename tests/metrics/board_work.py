"""A process that works on simulated nodes, so that every metric has something to say.

As a program it works until it is ended, and prints the port of its endpoint first; with ``real`` it
holds a little memory of this machine instead.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

import cxl_offload
from cxl_offload import _C, Session, load_machine, tune
from cxl_offload.memory import FirstTouch, parse_policy
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore
from cxl_offload.transfer import CopyEngine

MIB = 1 << 20
MACHINE = "epyc9354-cxl-a"
NEAR, FAR = 0, 2
POLICIES = {
    "weights": "weighted:0=1,2=2@64KiB",
    "kv": "preferred:0,2",
    "optimizer": "bind:0",
}
_KV_STEPS = 24
_SLICE = 4 * MIB


class Work:
    """Decodes and trains nothing, but allocates, copies, tunes and moves as those do.

    Its GPU is a stand-in (``FakeDriver``). Step times, which the tuner goes by, are those that the
    published bandwidths of the machine give for the bytes of each tier: simulated.
    """

    def __init__(self) -> None:
        self.session = Session.simulated(load_machine(MACHINE), driver=_C.FakeDriver())
        parts = {kind: (Part("host", parse_policy(text)),) for kind, text in POLICIES.items()}
        parts["activations"] = (Part("host", FirstTouch()),)
        self.store = TierStore(MemorySource(self.session), parts, pin=True)
        self.weights = self._tensor("weights", 96 * MIB, pin=True)
        self.moments = {
            f"layer{number}": self._tensor("optimizer", 16 * MIB) for number in range(4)
        }
        self.activations = self._tensor("activations", 8 * MIB)
        self.kv: list[torch.Tensor] = []
        self.gpu = np.zeros(_SLICE, np.uint8)
        self.engine = CopyEngine(self.session, chunk_bytes=MIB, staging_bytes=4 * MIB)
        self.homes = tune.TunedHomes(self.moments, near=[NEAR], far=[FAR], session=self.session)
        ratios = tune.tier_ratios(self.session.machine, near=[NEAR], far=[FAR])
        self.tuner = tune.StepTuner(
            self.homes, tune.ModelTuner(ratios), budget_bytes_per_step=4 * MIB, steps=8
        )
        self.steps = 0

    def _tensor(self, kind: str, nbytes: int, *, pin: bool = False) -> torch.Tensor:
        made = self.store.empty(kind, 0, (nbytes,), torch.uint8, pin=pin)
        self.store.count(made, kind, 0, made)
        return made

    def step(self) -> None:
        """Streams weights, grows the KV cache or ends its sequences, and tells the tuner."""
        self.steps += 1
        if len(self.kv) == _KV_STEPS:
            self.kv.clear()
            self.tuner.restart()
        self.kv.append(self._tensor("kv", 4 * MIB))
        at = self.steps * _SLICE % self.weights.nbytes
        self.engine.to_device(target=self.gpu.ctypes.data, source=self.weights[at : at + _SLICE])
        self.engine.to_host(target=self.kv[-1], source=self.gpu.ctypes.data)
        self.engine.drain()
        self.tuner.step(self._seconds())

    def _seconds(self) -> float:
        """Of an update: both tiers are read and written at the same time."""
        times = []
        for node, share in ((NEAR, 1 - self.homes.share), (FAR, self.homes.share)):
            access = self.session.machine.access(0, node)
            assert access is not None
            assert access.read_bandwidth_bytes_per_s is not None
            times.append(share * self.homes.nbytes / access.read_bandwidth_bytes_per_s)
        return max(times) * (1 + 0.01 * (self.steps % 3))


def main(*, is_real: bool) -> None:
    if is_real:
        session = Session.linux()
        kept = cxl_offload.zeros(8 * MIB, dtype=torch.uint8, policy="bind:0", session=session)
        work = None
    else:
        work = Work()
        session, kept = work.session, work.weights
    with cxl_offload.metrics.serve(0, session=session) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        while kept.nbytes:
            if work is not None:
                work.step()
            time.sleep(0.5)


if __name__ == "__main__":
    main(is_real="real" in sys.argv[1:])
