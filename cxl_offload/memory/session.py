"""A session: one kernel (real or simulated), one machine, and the pools that keep policies.

Most programs never make one: :func:`current_session` gives that of the real machine, made at its
first use. :func:`use` puts another in its place for a while.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TypeAlias

from cxl_offload import _C
from cxl_offload.core import MOST_BYTES
from cxl_offload.memory.asked_pages import AskedPages
from cxl_offload.memory.bounds import whole_number
from cxl_offload.memory.limits import RoomLimits, checked_limits
from cxl_offload.memory.move_events import moving
from cxl_offload.memory.placement import Placement
from cxl_offload.memory.policy import Bind, PolicyLike, as_policy
from cxl_offload.memory.rules import PAGE_KINDS, rule_of
from cxl_offload.memory.shared import warn_of_leftovers
from cxl_offload.memory.simulated_kernel import simulated_kernel
from cxl_offload.memory.stats import Count, NodeUse, Stats, tier_use
from cxl_offload.renamed import old_names, renamed_keywords
from cxl_offload.topology import Machine, discover
from cxl_offload.topology.node import Pages
from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)

Allocation: TypeAlias = _C.Allocation
"""Owns bytes of a session; see :meth:`Session.allocate`."""


def _check_machine(machine: object) -> None:
    if not isinstance(machine, Machine):
        raise TypeError(f"{machine!r} is no machine; load_machine(name) and discover() make one")


class Session(AskedPages):
    """Allocates host memory by policy and answers where it is.

    Parameters
    ----------
    kernel
        The kernel seam: the real one, or a simulated one.
    machine
        The nodes and tiers that policies may name.
    limits
        Node id, name of a tier that has one node, or name of a Device-DAX device, to the most that
        this session may hold there: bytes, or a text such as ``"4GiB"``. None means no limit but
        the node's or device's own memory.
    driver
        The GPU driver used for ``pin=True``; None opens the CUDA driver at the first use.
    """

    @renamed_keywords(capacities="limits")
    def __init__(
        self,
        kernel: _C.Kernel,
        machine: Machine,
        *,
        limits: RoomLimits | None = None,
        driver: _C.GpuDriver | None = None,
        max_threads: int | None = None,
    ) -> None:
        _check_machine(machine)
        self.machine = machine
        self.kernel = kernel
        self._driver = driver
        self._driver_lock = threading.Lock()
        self._guard = _C.ForkGuard()
        threads = max_threads or len(os.sched_getaffinity(0))
        nodes, devices = checked_limits(machine, limits or {})
        self._session = _C.Session(kernel, nodes, threads, devices)

    @classmethod
    @renamed_keywords(capacities="limits")
    def linux(
        cls,
        machine: Machine | None = None,
        *,
        limits: RoomLimits | None = None,
        driver: _C.GpuDriver | None = None,
    ) -> Session:
        """The memory of this machine.

        Warns of shared memory that processes which were killed left behind.
        """
        warn_of_leftovers()
        return cls(_C.linux_kernel(), machine or discover(), limits=limits, driver=driver)

    @classmethod
    @renamed_keywords(capacities="limits")
    def simulated(
        cls,
        machine: Machine,
        *,
        initiator: int | None = None,
        limits: RoomLimits | None = None,
        process_limit_bytes: int | None = None,
        driver: _C.GpuDriver | None = None,
        max_threads: int | None = None,
    ) -> Session:
        """The memory of a machine that is not here.

        Placement is real in the simulated page maps: capacities, spilling and full nodes behave
        as on the machine. The bytes are ordinary memory of this machine, and only what is written
        takes room, so speed measured on them is this machine's.

        Parameters
        ----------
        machine
            From :func:`cxl_offload.load_machine`, or built by hand.
        initiator
            The node whose CPUs the process runs on; None takes the machine's own.
        process_limit_bytes
            As a cgroup's memory.max.
        max_threads
            The most threads that fault one allocation in; None takes the process's CPUs. One makes
            the order of calls to the kernel, and so of injected faults, the same in every run.
        """
        _check_machine(machine)
        kernel = simulated_kernel(
            machine, initiator=initiator, process_limit_bytes=process_limit_bytes
        )
        return cls(kernel, machine, limits=limits, driver=driver, max_threads=max_threads)

    def __repr__(self) -> str:
        found = self.stats().nodes
        held = [f"node {at}: {format_bytes(use.current_bytes)}" for at, use in found.items()]
        kind = "simulated " if self.is_simulated else ""
        return f"<Session of {kind}{self.machine.name}, holds {', '.join(held) or 'nothing'}>"

    @property
    def is_simulated(self) -> bool:
        """Whether nodes and placements are those of a simulated machine."""
        return self.kernel.name == "simulated"

    @renamed_keywords(placement="policy")
    def allocate(
        self,
        nbytes: int,
        policy: PolicyLike,
        *,
        pages: Pages = "base",
        pin: bool = False,
        strict: bool = True,
    ) -> _C.Allocation:
        """Bytes on the nodes that ``policy`` names, faulted in and checked.

        Parameters
        ----------
        nbytes
            At least 1. Allocations of a page or more own whole pages; smaller ones share pages
            with others of the same policy.
        policy
            A policy, ``{node: weight}``, a text such as ``"bind:2"``, or the name of a tier.
        pages
            ``"base"`` (4 KiB on most machines), ``"thp"`` (transparent huge pages where the
            kernel finds them), ``"2MiB"`` or ``"1GiB"`` (from the huge-page pools, or refused).
        pin
            Register with the GPU driver in the calling thread's current context.
        strict
            Refuse when a node of an interleave is full, or when pinning moves pages; otherwise
            take the nearest node with room and say so in the placement's notes.

        Returns
        -------
        Allocation
            Owns the bytes until it and every view of it (DLPack) is gone. Contents are zero for
            fresh pages and unspecified for reused ones.

        Raises
        ------
        MemoryError
            A node, a capacity, a cgroup or a huge-page pool has no room; nothing is left behind.
        OSError
            The kernel or the driver refused a call.
        ValueError
            The policy names nodes that do not exist, or cannot be combined with the pages.
        PlacementError
            Strict, and the pages are not where they should be after pinning.
        """
        nbytes = whole_number(nbytes, "nbytes")
        rule = rule_of(as_policy(policy, self.machine), pages, bool(strict))
        if nbytes < 1:
            raise ValueError(f"allocate {nbytes} bytes; ask for at least one")
        if nbytes > MOST_BYTES:
            raise MemoryError(f"allocate {nbytes} bytes: more than an address space holds")
        return self._session.allocate(nbytes, rule, self.gpu_driver() if pin else None)

    @renamed_keywords(placement="policy")
    def place(
        self,
        address: int,
        nbytes: int,
        policy: PolicyLike,
        *,
        part_bytes: int,
        stride_bytes: int,
        count: int,
        pages: Pages = "base",
        strict: bool = True,
    ) -> tuple[str, ...]:
        """Faults pages in that others mapped (shared memory), and checks where they are.

        They are not counted in :meth:`stats`, and belong to the owner of the mapping.

        Parameters
        ----------
        address, nbytes
            A mapping, or a part of one.
        part_bytes, stride_bytes, count
            The parts of it to place, laid out as if they were one range.
        pages, strict
            As of :meth:`allocate`; ``"thp"`` only keeps granules whole, to ask for huge pages is
            up to who mapped.

        Returns
        -------
        tuple of str
            Where the places differ from the policy, and why.

        Raises
        ------
        MemoryError, OSError, ValueError
            As :meth:`allocate`; ValueError also in a simulated session, which knows its own
            memory only.
        """
        if self.is_simulated:
            raise ValueError("place memory of others: a simulated machine has none")
        rule = rule_of(as_policy(policy, self.machine), pages, strict)
        for name, size in (
            ("address", address),
            ("nbytes", nbytes),
            ("part_bytes", part_bytes),
            ("stride_bytes", stride_bytes),
            ("count", count),
        ):
            if not 0 <= size < 1 << 64:
                raise ValueError(f"place memory with {name}={size}: outside 0..2**64-1")
        return tuple(
            self._session.place(
                address,
                nbytes,
                rule,
                part_bytes=part_bytes,
                stride_bytes=stride_bytes,
                count=count,
            )
        )

    def placement(self, address: int, nbytes: int) -> Placement:
        """Where the pages of any range of host memory are, by asking them; of all its copies."""
        owner = self._session.find(address)
        page_bytes = self.kernel.page_bytes(_C.PageKind.base) if owner is None else owner.page_bytes
        return Placement(
            requested=None if owner is None else owner.requested,
            granted=self._granted(owner, address, nbytes),
            page_bytes=page_bytes,
            pinned=owner is not None and owner.pinned,
            simulated=self.is_simulated and owner is not None,
            devices={owner.device: nbytes} if owner is not None and owner.device else {},
            notes=() if owner is None else tuple(owner.notes),
        )

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        """Node id to bytes of any range of host memory, asked from its pages.

        Bytes not faulted in are under :data:`~cxl_offload.memory.placement.NOT_FAULTED_IN`; memory
        of a Device-DAX device is on no node.
        """
        return self._session.bytes_per_node(address, nbytes)

    def free_bytes(self, node: int, pages: Pages = "base") -> int:
        """Bytes of such pages that a node can still give.

        Raises
        ------
        ValueError
            The node is none that a kernel can have.
        """
        Bind((node,))  # checks the number
        return self.kernel.node_headroom(node, PAGE_KINDS[pages]).free_bytes

    def find(self, address: int) -> _C.Allocation | None:
        """The live allocation of this session that holds ``address``."""
        return self._session.find(address)

    @renamed_keywords(placement="policy")
    def move(self, allocation: _C.Allocation, policy: PolicyLike, *, strict: bool = True) -> None:
        """Moves the pages of an allocation; its address, contents and views stay.

        Pages move one by one, so that nothing is held twice. Pinned memory is first left alone by
        the GPU: the work queued on its recorded streams is waited for, or, where no stream was
        recorded, all work of the context. It is then unpinned, moved, pinned again, and its
        placement read again. Work that uses it must not be queued before ``move`` returns.

        Parameters
        ----------
        strict
            As in :meth:`allocate`.

        Raises
        ------
        ValueError
            The allocation shares its pages (smaller than a page), or is pinned together with
            other small ones.
        MemoryError
            A target node is full; the pages are back where they were.
        PlacementError
            Pinned memory only: strict, and pinning moved pages away again (they are back where
            they were); or the driver refused to pin again. The message and the placement's notes
            say where the memory is and whether it is pinned; it is valid whatever happened.
        """
        with moving(allocation, allocation.nbytes, policy):
            allocation.move(rule_of(as_policy(policy, self.machine), "base", strict))

    def move_part(
        self,
        allocation: _C.Allocation,
        policy: PolicyLike,
        *,
        offset: int,
        nbytes: int,
        strict: bool = True,
    ) -> None:
        """Moves some pages of an allocation, such as those of one expert; the others stay.

        Address, contents and views stay. What the allocation asked for stays too, with a note that
        parts of it are elsewhere; a later :meth:`move` of all of it makes them one again.

        Parameters
        ----------
        offset, nbytes
            The part. It begins and ends with pages (``allocation.page_bytes``, whole huge pages
            with ``pages="thp"``), or ends with the allocation.
        strict
            As in :meth:`allocate`.

        Raises
        ------
        ValueError
            No such part, or the allocation is pinned, shares its pages, or is on a device.
        MemoryError
            A target node is full; the part is back where it was.
        """
        rule = rule_of(as_policy(policy, self.machine), "base", strict)
        for name, size in (("offset", offset), ("nbytes", nbytes)):
            if not 0 <= size <= MOST_BYTES:
                raise ValueError(f"move a part with {name}={size}: outside 0..2**62")
        with moving(allocation, nbytes, policy):
            allocation.move_part(offset, nbytes, rule)

    def stats(self) -> Stats:
        """What the session holds now, held at most, and has ever taken."""
        nodes = {node: NodeUse(*use) for node, use in self._session.node_use().items()}
        counters = {name: Count(*count) for name, count in self._session.statistics().items()}
        tiers = tier_use(self.machine.tiers, nodes)
        devices = {name: NodeUse(*use) for name, use in self._session.device_use().items()}
        return Stats(nodes=nodes, tiers=tiers, devices=devices, **counters)

    def trim(self) -> int:
        """Returns cached memory to the kernel; waits for the GPU where it may still use it.

        Where the GPU cannot be waited for, as after a fault, what it may still use stays, the log
        says why, and all else is returned.

        Returns
        -------
        int
            Bytes returned.
        """
        returned, kept_because = self._session.trim()
        if kept_because:
            _logger.warning("trim: what the GPU may still use stays: %s", kept_because)
        return returned

    def gpu_driver(self) -> _C.GpuDriver:
        """The driver that pins, opened at the first use.

        Raises
        ------
        ValueError
            There is none on this machine.
        """
        self._guard.refuse_in_child("pin memory")
        with self._driver_lock:
            if self._driver is None:
                self._driver = _C.open_cuda_driver()
            return self._driver


__getattr__ = old_names(__name__)
