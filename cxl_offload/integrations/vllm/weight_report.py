"""What became of the weights that were asked for: bytes asked and held, by kind and by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """Weights of one rank, read after the model was loaded.

    Attributes
    ----------
    asked_bytes
        ``--cpu-offload-gb``.
    held_bytes
        Whole pages held for weights; never more than asked.
    kinds
        Kind to bytes of weights in them.
    nodes
        Placement to node id to bytes, asked from the pages.
    repacked_bytes
        Of weights that vLLM took out again while loading (its CPU kernels keep packed copies of
        their own, where vLLM puts them); their memory was given back.
    left_bytes
        Of weights that were meant, but did not fit.
    """

    asked_bytes: int
    held_bytes: int
    kinds: Mapping[str, int]
    nodes: Mapping[str, Mapping[int, int]]
    pages: str
    pinned: bool
    repacked_bytes: int = 0
    left_bytes: int = 0
    simulated: bool = field(default=False)

    def lines(self) -> list[str]:
        """For the log."""
        weights = sum(self.kinds.values())
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.kinds.items())
        pinned = "pinned" if self.pinned else "not pinned"
        made = [
            f"weights: asked {format_bytes(self.asked_bytes)}, held {format_bytes(self.held_bytes)}"
            f" for {format_bytes(weights)} of weights ({kinds or 'none'}); {self.pages} pages, "
            f"{pinned}"
        ]
        where = "simulated node" if self.simulated else "node"
        for policy, nodes in self.nodes.items():
            shares = ", ".join(
                f"{where} {node}: {format_bytes(size)}" for node, size in sorted(nodes.items())
            )
            made.append(f"weights of {policy}: {shares}")
        if self.repacked_bytes:
            made.append(
                f"weights: {format_bytes(self.repacked_bytes)} were taken out again by vLLM, whose "
                "CPU kernels keep packed copies of their own; their memory was given back"
            )
        if self.left_bytes:
            made.append(
                f"weights: {format_bytes(self.left_bytes)} stayed where they were, because more "
                "than --cpu-offload-gb would have been held"
            )
        return made
