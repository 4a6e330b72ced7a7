"""Several GPUs of one training: what they divide, and what they send each other."""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.collectives import ring_seconds
from cxl_offload.plan.gpu import MOST_GPUS
from cxl_offload.plan.replay_check import NOT_SIMULATED
from cxl_offload.units import counted

MOST_HOSTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank a GPU; hosts are alike, and so are GPUs.

    Every GPU has a link of its own to the host; nodes and CPUs are shared by those of a host.

    Attributes
    ----------
    gpus
        Of one host.
    hosts
        ZeRO divides optimizer states over the GPUs of all.
    network_bytes_per_s
        What one GPU sends to those of other hosts; None where there is one host. GPUs of one host
        are taken to reach each other at the rate of their links to it.
    """

    gpus: int = 1
    hosts: int = 1
    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not (1 <= self.gpus <= MOST_GPUS and 1 <= self.hosts <= MOST_HOSTS):
            raise ConfigError(
                f"{self.gpus} GPUs on {self.hosts} hosts: 1 to {MOST_GPUS} on 1 to {MOST_HOSTS}"
            )
        if self.hosts > 1 and self.network_bytes_per_s is None:
            raise ConfigError(f"{self.hosts} hosts: the network between them has no rate")
        rate = self.network_bytes_per_s
        if rate is not None and not 1e6 <= rate <= 1e13:
            raise ConfigError(f"network of {rate / 1e9:g} GB/s: from 0.001 to 10000")

    @property
    def count(self) -> int:
        """Of all hosts."""
        return self.gpus * self.hosts

    def exchange_seconds(self, nbytes: float, link_bytes_per_s: float) -> float:
        """A reduce-scatter, or an all-gather, of ``nbytes`` in a ring of all."""
        if self.count == 1:
            return 0.0
        rate = link_bytes_per_s
        if self.hosts > 1 and self.network_bytes_per_s is not None:
            rate = min(rate, self.network_bytes_per_s)
        return ring_seconds(nbytes, self.count, rate)

    def launcher_flags(self) -> tuple[str, ...]:
        """Of DeepSpeed's launcher; the hosts themselves are in its host file."""
        nodes = () if self.hosts == 1 else (f"--num_nodes={self.hosts}",)
        return (f"--num_gpus={self.gpus}", *nodes)

    def notes(self) -> list[str]:
        """What is assumed of them."""
        if self.count == 1:
            return []
        said = [
            "the plan assumes that GPUs of a host send each other gradients over their links to "
            "the host; with links of their own (NVLink) the machine is faster than planned"
        ]
        if self.hosts > 1:
            said.append(
                f"the machine is one host, and the plan is for {self.hosts} like it; DeepSpeed's "
                "launcher reads them from its host file (--hostfile)"
            )
        return [*said, NOT_SIMULATED]

    def __str__(self) -> str:
        if self.count == 1:
            return "one GPU"
        hosts = "" if self.hosts == 1 else f" on each of {self.hosts} hosts"
        return f"{counted(self.gpus, 'GPU')}{hosts}"


ONE_GPU = Ranks()
