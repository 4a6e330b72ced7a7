"""What the equations of decoding need of a model and its lengths."""

from __future__ import annotations

from typing import Protocol

from cxl_offload.plan.decoding.engine import EngineRates, RowCosts

MOST_SEQUENCES = 8192
"""Largest block that is searched; all of its rows are prepared before the first token."""

CYCLES = 8
"""Cycles of a stripe in the tensor that a granule is chosen for: so many stripe it well."""


class Sizes(Protocol):
    """What the equations need of a model and its lengths; ``params`` are those a token meets."""

    @property
    def params(self) -> float:
        """Numbers in the weights that one token meets."""

    @property
    def last_params(self) -> float:
        """Of those the ones that only the last token of a prompt meets."""

    @property
    def layers(self) -> int:
        """Layers."""

    @property
    def width(self) -> int:
        """Elements of a token between layers."""

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, over all heads."""

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""

    @property
    def generated(self) -> int:
        """Tokens generated after it."""

    @property
    def mean_kv_tokens(self) -> float:
        """Length of a sequence at a decode step, in the mean."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token over all layers."""

    @property
    def kv_elements_per_token(self) -> float:
        """Numbers in them."""

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element between layers."""

    @property
    def engine(self) -> EngineRates:
        """Rates of what runs it."""

    def row_s(self, costs: RowCosts) -> float:
        """Seconds of one token's row between the products of all layers."""
