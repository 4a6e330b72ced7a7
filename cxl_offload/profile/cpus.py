"""On which CPUs threads go, and how many threads are worth trying."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.topology.cpulist import parse_cpulist


@dataclass(frozen=True, slots=True)
class CpuOrder:
    """CPUs in the order in which threads are put on them: one of every core, then the siblings."""

    cpus: tuple[int, ...]
    cores: int


def order_cpus(cpus: Iterable[int], *, root: str | Path = "/") -> CpuOrder:
    """Puts hardware siblings behind all first CPUs of their cores.

    Parameters
    ----------
    cpus
        CPU numbers; siblings that are not among them do not count.
    root
        Where ``sys`` is, for captured trees. A CPU without topology there is a core of its own.
    """
    first: list[int] = []
    siblings: list[int] = []
    seen: set[int] = set()
    for cpu in sorted(set(cpus)):
        (siblings if cpu in seen else first).append(cpu)
        seen |= _siblings(cpu, Path(root))
    return CpuOrder(cpus=(*first, *siblings), cores=len(first))


def _siblings(cpu: int, root: Path) -> set[int]:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return set(parse_cpulist((folder / name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return {cpu}


def thread_counts(order: CpuOrder, *, few: bool) -> tuple[int, ...]:
    """Thread counts of a curve: dense where curves bend, then ever wider apart.

    Always with 1, all cores, and all CPUs when cores have siblings. ``few``: only those and half
    of the cores.
    """
    if few:
        wanted = {1, max(1, order.cores // 2)}
    else:
        wanted = {1, 2, 3}
        step = 4
        while step < order.cores:
            wanted |= {step, step * 3 // 2}
            step *= 2
    wanted |= {order.cores, len(order.cpus)}
    return tuple(sorted(count for count in wanted if 1 <= count <= len(order.cpus)))
