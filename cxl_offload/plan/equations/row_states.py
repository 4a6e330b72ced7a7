"""Hidden states of rows that layers compute in turn: how many there are, and where.

The planner and the check before a model is loaded count on what ``StateStream`` and ``take_layers``
of the integration of transformers do; all have it from here.
"""

from __future__ import annotations

STATES = "activations"
"""The kind of host tensor that hidden states are, where they lie in a tier."""

BUFFERS = 4
"""Rows on an accelerator, over those that a layer computes at once: two buffers for what comes, and
two for what goes."""


def tier_copies(embeddings: int, *, streamed: bool) -> int:
    """Hidden states of all rows that a tier has at a time, over those of one tensor.

    Parameters
    ----------
    embeddings
        Tables whose rows a model adds: of words, and of positions where these are learned.
    streamed
        Whether an accelerator computes. What models keep of the embedded prompts while their layers
        compute is in the tier then; on CPUs it is in ordinary memory.
    """
    layer_reads_and_makes = 2
    return layer_reads_and_makes + (embeddings if streamed else 0)


def states_bytes(rows: int, tokens: int, width: int, element_bytes: int) -> int:
    """One tensor of hidden states of so many rows."""
    return rows * tokens * width * element_bytes


def copies_in(layers: int) -> int:
    """How often the hidden states of a token go to the accelerator in a pass: to every layer and to
    the final norm. The head reads those of the last token beside."""
    return layers + 1


def copies_out(layers: int, embeddings_there: int) -> int:
    """How often they come back.

    Parameters
    ----------
    embeddings_there
        Tables that the accelerator looks up; what CPUs find is in the tier already.
    """
    return layers + 1 + embeddings_there
