"""Memory for weights: never more than was asked for, and what is left of a huge page is used."""

from __future__ import annotations

import os

import torch

from cxl_offload.core import GIGANTIC_PAGE_BYTES, HUGE_PAGE_BYTES
from cxl_offload.integrations.vllm.weight_options import WeightOptions
from cxl_offload.memory import Session
from cxl_offload.memory.lost import survive_by_default
from cxl_offload.tensor import empty

_ALIGNMENT = 512
"""Of every weight, as torch's own allocators align."""

_PAGE_BYTES = {"2MiB": HUGE_PAGE_BYTES, "1GiB": GIGANTIC_PAGE_BYTES}


class _Chunk:
    """Whole pages of one policy, handed out from the front."""

    def __init__(self, room: torch.Tensor) -> None:
        self.room = room
        self.used = 0
        self.live: set[str] = set()

    def take(self, nbytes: int) -> torch.Tensor | None:
        begin = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if begin + nbytes > self.room.numel():
            return None
        self.used = begin + nbytes
        return self.room[begin : self.used]


class WeightMemory:
    """Host memory of offloaded weights, at most ``asked_bytes`` of whole pages.

    Parameters
    ----------
    session
        The session that allocates.
    options
        Pages, and whether to refuse rather than to spill.
    asked_bytes
        The most that is ever held at once; a weight that would need more is not taken.
    pin
        Register with the GPU driver.
    """

    def __init__(
        self, session: Session, options: WeightOptions, *, asked_bytes: int, pin: bool
    ) -> None:
        survive_by_default()
        self.session = session
        self.asked_bytes = asked_bytes
        self.pin = pin
        self._options = options
        self._chunks: dict[str, list[_Chunk]] = {}
        self._page_bytes = _PAGE_BYTES.get(options.pages, os.sysconf("SC_PAGESIZE"))

    @property
    def held_bytes(self) -> int:
        """Bytes of whole pages held now."""
        return sum(chunk.room.numel() for chunks in self._chunks.values() for chunk in chunks)

    def place(self, name: str, like: torch.Tensor, policy: str) -> torch.Tensor | None:
        """A tensor of the size, strides and type of ``like``, uninitialised, or None.

        Parameters
        ----------
        name
            Whose it is, for :meth:`drop`; once at a time.
        like
            On any device; dense.
        policy
            As text.

        Returns
        -------
        torch.Tensor or None
            None: it would hold more than was asked for.
        """
        nbytes = like.numel() * like.element_size()
        if nbytes == 0:
            return None
        room = self._room(name, nbytes, policy)
        if room is None:
            return None
        strides = torch.empty_like(like, device="meta").stride()
        return room.view(like.dtype).as_strided(like.shape, strides)

    def drop(self, name: str) -> None:
        """Gives back the memory of a weight, once all in its pages is dropped."""
        for chunks in self._chunks.values():
            for chunk in list(chunks):
                if name in chunk.live:
                    chunk.live.discard(name)
                    if not chunk.live:
                        chunks.remove(chunk)

    def bytes_per_node(self) -> dict[str, dict[int, int]]:
        """Placement to node id to bytes, asked from the pages."""
        found: dict[str, dict[int, int]] = {}
        for policy, chunks in self._chunks.items():
            nodes = found.setdefault(policy, {})
            for chunk in chunks:
                room = chunk.room
                asked = self.session.bytes_per_node(room.data_ptr(), room.numel())
                for node, nbytes in asked.items():
                    nodes[node] = nodes.get(node, 0) + nbytes
        return {policy: nodes for policy, nodes in found.items() if nodes}

    def _room(self, name: str, nbytes: int, policy: str) -> torch.Tensor | None:
        chunks = self._chunks.setdefault(policy, [])
        for chunk in chunks:
            room = chunk.take(nbytes)
            if room is not None:
                chunk.live.add(name)
                return room
        whole = -(-nbytes // self._page_bytes) * self._page_bytes
        if self.held_bytes + whole > self.asked_bytes:
            return None
        made = _Chunk(
            empty(
                whole,
                dtype=torch.uint8,
                policy=policy,
                pages=self._options.pages,
                pin=self.pin,
                strict=self._options.strict,
                session=self.session,
            )
        )
        chunks.append(made)
        made.live.add(name)
        return made.take(nbytes)
