"""Copies in host memory, each by the way that is quickest for its size on this machine.

Ways are ``memcpy`` or stores that go past the caches, by one thread or several. Which way from
which size on is a table of :class:`CopyRule`, measured by :func:`measure_rules` or by
``cxl-offload profile --copy-rules FILE``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.files import decode_json, encode, read_text, write_text
from cxl_offload.memory.bounds import quoted, whole_number
from cxl_offload.memory.copies import has_copies
from cxl_offload.topology import Machine
from cxl_offload.topology.model import NO_PATH_DISTANCE
from cxl_offload.transfer.blocks import Addresses
from cxl_offload.transfer.strided import StridedTensor, check_bytes, may_share_memory

RULES_VARIABLE = "CXL_OFFLOAD_COPY_RULES"
"""Environment variable with the file of rules that copiers take by default."""

MemcpyWay = tuple[bool, int]
"""(past the caches, threads)"""

_PLAIN: MemcpyWay = (False, 1)
_LONGEST_SAMPLE_S = 10.0
# What another rule must gain, summed over the sizes it is for (0.08 is 8 % at one size, or 2 % at
# each of four): less is noise, and a single noisy size must not make a rule.
_LEAST_GAIN = 0.08


@dataclass(frozen=True, slots=True)
class CopyRule:
    """How copies of ``from_bytes`` and more are made, up to the next rule."""

    from_bytes: int
    non_temporal: bool
    threads: int

    @property
    def way(self) -> MemcpyWay:
        return self.non_temporal, self.threads


@dataclass(frozen=True, slots=True)
class _RulesFile:
    copy_rules: tuple[CopyRule, ...]

    def __post_init__(self) -> None:
        ascend = all(a.from_bytes < b.from_bytes for a, b in itertools.pairwise(self.copy_rules))
        if not self.copy_rules or self.copy_rules[0].from_bytes != 0 or not ascend:
            raise ValueError("copy rules must begin at 0 bytes and ascend")


def cpus_near(machine: Machine, node: int) -> list[int]:
    """CPUs of this process to copy from or to ``node`` with: its own, else of the nearest node.

    A node without CPUs (CXL) is served by the node at the least distance that has some.
    """
    allowed = set(_C.allowed_cpus())
    distances = machine.distances.get(node, {})

    def distance(other: int) -> int:
        return 0 if other == node else distances.get(other, NO_PATH_DISTANCE)

    for each in sorted(machine.nodes, key=lambda candidate: distance(candidate.id)):
        near = sorted(allowed.intersection(each.cpus))
        if near:
            return near
    return sorted(allowed)


class HostCopier:
    """Copies in host memory; thread-safe, and without Python's lock while it copies.

    Parameters
    ----------
    cpus
        CPUs to copy with, the calling thread counted as one of them; None takes all of this
        process. See :func:`cpus_near`.
    rules
        From 0 bytes on, ascending; None takes those of the file that ``CXL_OFFLOAD_COPY_RULES``
        names (with no more threads than CPUs), else rules for a machine that was not measured.

    Raises
    ------
    ValueError
        Rules that do not begin at 0 and ascend, or with more threads than CPUs; a CPU that this
        process may not use.
    """

    def __init__(
        self, *, cpus: Sequence[int] | None = None, rules: Sequence[CopyRule] | None = None
    ) -> None:
        chosen = _C.allowed_cpus()
        if cpus is not None:
            allowed = set(chosen)
            chosen = [whole_number(cpu, "a CPU of cpus") for cpu in cpus]
            refused = [cpu for cpu in chosen if cpu not in allowed]
            if refused:
                raise ValueError(f"copy with CPU {quoted(refused[0])}: this process may not use it")
        if not chosen:
            raise ValueError("copy with no CPUs: name at least one")
        if rules is None:
            rules = _measured_rules(len(chosen))
        if rules is None:
            rows = _C.HostCopier.default_rules(len(chosen))
        else:
            rows = [(rule.from_bytes, rule.non_temporal, rule.threads) for rule in rules]
        self._core = _C.HostCopier(chosen[1:], rows)

    @property
    def core(self) -> _C.HostCopier:
        """The C++ object, for parts of this package that copy by it."""
        return self._core

    @property
    def rules(self) -> tuple[CopyRule, ...]:
        return tuple(CopyRule(*row) for row in self._core.rules)

    @property
    def threads(self) -> int:
        """Threads at most, the caller's included."""
        return self._core.threads

    def copy(self, *, target: int, source: int, nbytes: int) -> None:
        """``nbytes`` from address to address; the ranges must not overlap."""
        if nbytes < 0:
            raise ValueError(f"copy {nbytes} bytes")
        self._core.copy(target=target, source=source, nbytes=nbytes)

    def copy_blocks(
        self,
        *,
        targets: Addresses,
        sources: Addresses,
        sizes: int | Sequence[int] | NDArray[np.int64],
    ) -> None:
        """Gathers and scatters: ``targets[i][:size] = sources[i][:size]`` for every i.

        Parameters
        ----------
        targets, sources
            Addresses; no target may overlap another or any source.
        sizes
            Bytes of every block, or one number for all.

        Raises
        ------
        ValueError
            Lists of different lengths, or a negative size.
        """
        to, origin, nbytes = _lists(targets, sources, sizes)
        self._core.copy_blocks(
            targets=to.ctypes.data,
            sources=origin.ctypes.data,
            sizes=nbytes.ctypes.data,
            count=to.size,
        )

    def time_blocks(
        self,
        *,
        targets: Addresses,
        sources: Addresses,
        sizes: int | Sequence[int] | NDArray[np.int64],
        job: int,
        rounds: int,
    ) -> tuple[list[float], list[float]]:
        """Seconds of :meth:`copy_blocks`, and of a ``memcpy`` of each block by this thread.

        Timed inside C++, ``rounds`` samples of each, taking turns. A sample copies the next ``job``
        blocks of the lists, from their beginning again after their end.
        """
        to, origin, nbytes = _lists(targets, sources, sizes)
        return self._core.time_blocks(
            targets=to.ctypes.data,
            sources=origin.ctypes.data,
            sizes=nbytes.ctypes.data,
            count=to.size,
            job=job,
            rounds=rounds,
        )

    def copy_strided(self, *, target: StridedTensor, source: StridedTensor) -> None:
        """``target[...] = source`` for tensors of one shape and dtype, any strides; no overlap.

        Raises
        ------
        ValueError
            Shapes or types differ, elements of the target share memory, or a tensor is not in host
            memory, is larger than its storage, or is a view that torch negates or conjugates when
            it is read; the target has copies (``replicate:0,1``).
        """
        size = target.element_size()
        if tuple(target.shape) != tuple(source.shape) or size != source.element_size():
            raise ValueError(
                f"copy {tuple(source.shape)} of {source.element_size()} B to "
                f"{tuple(target.shape)} of {size} B"
            )
        if may_share_memory(target):
            raise ValueError("copy to a tensor whose elements share memory (its strides overlap)")
        for name, tensor in (("target", target), ("source", source)):
            check_bytes(tensor, name)
        if getattr(target, "dtype", None) != getattr(source, "dtype", None):
            raise ValueError(f"copy {source.dtype} to {target.dtype}: bytes are copied as they are")
        if has_copies(target.data_ptr()):
            raise ValueError("copy to a tensor with copies: cxl_offload.tensor.write_copies does")
        self._core.copy_strided(
            target=target.data_ptr(),
            source=source.data_ptr(),
            shape=list(target.shape),
            target_strides=[stride * size for stride in target.stride()],
            source_strides=[stride * size for stride in source.stride()],
            element_bytes=size,
        )

    def time(
        self,
        *,
        target: int,
        source: int,
        room_bytes: int,
        nbytes: int,
        ways: Sequence[MemcpyWay | None],
        rounds: int,
        sample_s: float = 0.0003,
    ) -> list[list[float]]:
        """Seconds a copy, ``rounds`` samples for every way; None is this copier's own choice.

        Timed inside C++ and interleaved, walking through ``room_bytes`` at both addresses.
        """
        if not 0 < sample_s <= _LONGEST_SAMPLE_S:
            raise ValueError(
                f"samples of {sample_s:g} s: above 0 and at most {_LONGEST_SAMPLE_S:g}"
            )
        return self._core.time_copies(
            target=target,
            source=source,
            room=room_bytes,
            nbytes=nbytes,
            contenders=list(ways),
            rounds=rounds,
            sample_s=sample_s,
        )


def _lists(
    targets: Addresses, sources: Addresses, sizes: int | Sequence[int] | NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
    """Lists of blocks as C++ reads them, of one length."""
    to = np.ascontiguousarray(targets, dtype=np.uint64)
    origin = np.ascontiguousarray(sources, dtype=np.uint64)
    given = np.asarray(sizes, dtype=np.int64)
    if (given < 0).any():
        raise ValueError(f"copy blocks of {given.min()} bytes")
    nbytes = np.full(to.shape, given) if given.ndim == 0 else np.ascontiguousarray(given)
    if to.shape != origin.shape or to.shape != nbytes.shape:
        raise ValueError(f"copy {origin.size} sources of {nbytes.size} sizes to {to.size} targets")
    return to, origin, nbytes


def _measured_rules(threads: int) -> tuple[CopyRule, ...] | None:
    """Those of the file that ``CXL_OFFLOAD_COPY_RULES`` names, with so many threads at most."""
    file = os.environ.get(RULES_VARIABLE)
    if not file:
        return None
    return tuple(replace(rule, threads=min(rule.threads, threads)) for rule in load_rules(file))


def measure_rules(
    *,
    target: int,
    source: int,
    room_bytes: int,
    cpus: Sequence[int] | None = None,
    rounds: int = 41,
) -> tuple[CopyRule, ...]:
    """Times every way at sizes from 4 KiB to ``room_bytes`` and keeps the quickest.

    Parameters
    ----------
    target, source
        Addresses of ``room_bytes`` each, faulted in on the nodes to measure; several times the
        last-level cache, or copies of cached bytes are measured.
    cpus
        As of :class:`HostCopier`.

    Returns
    -------
    tuple of CopyRule
        As few as explain the medians, beginning with ``memcpy`` by one thread.
    """
    chosen = list(cpus) if cpus is not None else _C.allowed_cpus()
    copier = HostCopier(cpus=chosen)
    ways = [_PLAIN, (True, 1)]
    if len(chosen) > 1:
        ways += [(False, len(chosen)), (True, len(chosen))]
    doublings = max(1, (room_bytes // BASE_PAGE_BYTES).bit_length())
    sizes = [BASE_PAGE_BYTES << step for step in range(doublings)]
    sizes = [size for size in sizes if size <= room_bytes]
    medians = []
    for size in sizes:
        turns = max(11, min(rounds, (2 << 30) // size))
        samples = copier.time(
            target=target,
            source=source,
            room_bytes=room_bytes,
            nbytes=size,
            ways=ways,
            rounds=turns,
        )
        medians.append([statistics.median(each) for each in samples])
    return fewest_rules(sizes, ways, medians)


def fewest_rules(
    sizes: Sequence[int], ways: Sequence[MemcpyWay], seconds: Sequence[Sequence[float]]
) -> tuple[CopyRule, ...]:
    """The rules with the least sum of lost time (log of seconds over the best way's) and changes.

    Parameters
    ----------
    sizes
        Ascending bytes.
    ways
        The first is that of copies smaller than any size.
    seconds
        One list a size, one number a way.
    """
    cost = [0.0] + [_LEAST_GAIN] * (len(ways) - 1)
    came_from: list[list[int]] = []
    for row in seconds:
        quickest = min(range(len(ways)), key=cost.__getitem__)
        origins = [
            way if cost[way] <= cost[quickest] + _LEAST_GAIN else quickest
            for way in range(len(ways))
        ]
        cost = [
            cost[origin] + (0 if origin == way else _LEAST_GAIN) + math.log(row[way] / min(row))
            for way, origin in enumerate(origins)
        ]
        came_from.append(origins)
    way = min(range(len(ways)), key=cost.__getitem__)
    chosen = []
    for origins in reversed(came_from):
        chosen.append(way)
        way = origins[way]
    rules = [CopyRule(0, *ways[0])]
    for size, way in zip(sizes, reversed(chosen), strict=True):
        if ways[way] != rules[-1].way:
            rules.append(CopyRule(size, *ways[way]))
    return tuple(rules)


def save_rules(path: str | Path, rules: Sequence[CopyRule]) -> None:
    """Writes rules as JSON."""
    write_text(path, json.dumps(encode(_RulesFile(tuple(rules))), indent=1) + "\n")


def load_rules(path: str | Path) -> tuple[CopyRule, ...]:
    """The way back of :func:`save_rules`.

    Raises
    ------
    ConfigError
        The file cannot be read, or is not what :func:`save_rules` writes.
    """
    return decode_json(_RulesFile, read_text(path), file=str(path)).copy_rules
