"""Memory for the objects of one engine: each of its own storage, at the place of its kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cxl_offload import tensor
from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.integrations.deepspeed.kinds import KindPolicies
from cxl_offload.memory import Dax, Interleave, Pages, Policy, Session, Weighted
from cxl_offload.objects.kind_counts import LiveKind, count_kinds_of, known_nodes
from cxl_offload.ops.activations import OffloadedActivations, offload_activations
from cxl_offload.ranks import RankShare


def _pages_of(policy: Policy, pages: Pages) -> Pages:
    """Huge pages would destroy a stripe of smaller granules; devices have pages of their own."""
    if isinstance(policy, Dax):
        return "base"
    small = isinstance(policy, Interleave | Weighted) and policy.granule_bytes < HUGE_PAGE_BYTES
    return "base" if small else pages


class Store:
    """Allocates by kind and knows again what it allocated.

    Parameters
    ----------
    pin
        Register with the GPU driver what DeepSpeed asks to be pinned; False where there is no GPU.
    share
        The part of the machine that ``memory`` keeps within, where ranks divided it.
    """

    def __init__(
        self,
        policies: KindPolicies,
        session: Session,
        *,
        pages: Pages,
        pin: bool,
        share: RankShare | None = None,
    ) -> None:
        self.policies = policies
        self.session = session
        self.share = share
        self._pages = pages
        self._pin = pin
        # Address to kind and site. An address that was freed is only ever asked for again after
        # it was given out again, which writes it again.
        self._given: dict[int, tuple[str, str]] = {}
        count_kinds_of(self)

    def take(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool, site: str = ""
    ) -> torch.Tensor:
        """An uninitialised tensor with a storage of its own, of exactly its size.

        Raises
        ------
        MemoryError, OSError, ValueError, PlacementError
            As :func:`cxl_offload.empty`.
        """
        policy = self.policies.by_kind[kind]
        made = tensor.empty(
            shape,
            dtype=dtype,
            policy=policy,
            pages=_pages_of(policy, self._pages),
            pin=pinned and self._pin,
            session=self.session,
        )
        if made.numel():
            self._given[made.data_ptr()] = (kind, site)
        return made

    def offloaded_activations(self) -> OffloadedActivations | None:
        """What has activations go to their place; None where they stay on the GPU."""
        policy = self.policies.activations
        if policy is None:
            return None
        pages = _pages_of(policy, self._pages)
        return offload_activations(policy, pages=pages, session=self.session)

    def owns(self, value: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of this store."""
        return self.kind_of(value) is not None

    def kind_of(self, value: torch.Tensor) -> str | None:
        """The kind that a tensor's storage was allocated for; None: not by this store."""
        if value.device.type != "cpu" or not value.numel():
            return None
        storage = value.untyped_storage()
        given = self._given.get(storage.data_ptr())
        if given is None or self.session.find(storage.data_ptr()) is None:
            return None
        return given[0]

    def at_home(self, value: torch.Tensor, kind: str) -> bool:
        """Whether a tensor is where its kind belongs."""
        own = self.kind_of(value)
        by_kind = self.policies.by_kind
        return own is not None and (own == kind or by_kind[own] == by_kind[kind])

    def is_pinned(self, value: torch.Tensor) -> bool:
        """Whether a tensor of this store is registered with the GPU driver."""
        owner = self.session.find(value.untyped_storage().data_ptr())
        return owner is not None and owner.pinned

    def in_use(self) -> bool:
        """Whether anything of this store is alive."""
        return any(self.session.find(address) is not None for address in self._given)

    def add_live_kinds(self, found: dict[str, LiveKind]) -> None:
        """See :class:`~cxl_offload.objects.kind_counts.CountsKinds`."""
        for address, (kind, _) in list(self._given.items()):
            owner = self.session.find(address)
            if owner is not None:
                nodes = known_nodes(owner, address, owner.nbytes)
                found.setdefault(kind, LiveKind()).add(owner.nbytes, nodes)

    def others(self) -> Iterator[tuple[str, int, int]]:
        """Site, address and bytes of what is alive and of kind ``other``."""
        for address, (kind, site) in list(self._given.items()):
            owner = self.session.find(address) if kind == "other" else None
            if owner is not None:
                yield site, address, owner.nbytes
