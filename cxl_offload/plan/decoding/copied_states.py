"""Hidden states of all rows of a block that lie in host memory while a GPU computes some of them.

Every layer reads those of a few rows from the host and returns its own, once a pass, in the prefill
and at every decoded token. The copy engine has a stream for every node in each direction: what
comes from several nodes comes at once, until the link is full, and what goes back does not wait for
what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedStates:
    """What a pass copies of them.

    Attributes
    ----------
    shares
        Of the nodes that they lie on.
    token_in, token_out
        Bytes of one token of every sequence that go to the GPU, and come back, in all layers.
    pass_in
        Bytes that go to the GPU besides, whatever the tokens of the pass: what the head reads.
    """

    shares: Sequence[float]
    token_in: float
    token_out: float
    pass_in: float

    def bytes_in(self, tokens: float) -> float:
        """To the GPU, in a pass of so many tokens of every sequence."""
        return tokens * self.token_in + self.pass_in

    def bytes_out(self, tokens: float) -> float:
        """Back from it."""
        return tokens * self.token_out


def loaded_seconds(
    hardware: Hardware, weights: Sequence[float], states: CopiedStates, tokens: float
) -> float:
    """Weights of a pass, striped, and hidden states go to the GPU; bytes by node."""
    came = states.bytes_in(tokens)
    nbytes = [each + share * came for each, share in zip(weights, states.shares, strict=True)]
    nodes = zip(nbytes, hardware.nodes, strict=True)
    link = sum(nbytes) / hardware.link_bytes_per_s
    return max(link, *(each / node.copy_bytes_per_s for each, node in nodes))


def store_costs(hardware: Hardware) -> list[float]:
    """Seconds of one byte that the copy engine brings back to every node."""
    link = hardware.link_bytes_per_s
    return [1 / min(link, node.copy_bytes_per_s) for node in hardware.nodes]


def stored_seconds(hardware: Hardware, states: CopiedStates, tokens: float) -> float:
    """Hidden states come back, to one node after the other, as keys and values do."""
    costs = zip(states.shares, store_costs(hardware), strict=True)
    return states.bytes_out(tokens) * sum(share * cost for share, cost in costs)


def busy_seconds(
    hardware: Hardware, nbytes: Sequence[float], states: CopiedStates | None, tokens: float
) -> float:
    """Of the node that is asked for most: these bytes, and hidden states both ways."""
    moved = 0.0 if states is None else states.bytes_in(tokens) + states.bytes_out(tokens)
    shares = [0.0] * len(nbytes) if states is None else states.shares
    return max(
        (each + share * moved) / max(node.read_bytes_per_s, node.copy_bytes_per_s)
        for each, share, node in zip(nbytes, shares, hardware.nodes, strict=True)
    )
