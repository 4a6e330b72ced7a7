"""Bytes of hidden states in a tier, and beside it on an accelerator, before they exist."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from cxl_offload.integrations.fit import Need
from cxl_offload.integrations.transformers.beside_layers import beside_layers
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.memory import Policy
from cxl_offload.plan.equations.row_states import BUFFERS, STATES, states_bytes, tier_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """What decides how large hidden states of rows that are computed in turn become.

    Attributes
    ----------
    rows
        Of the batch.
    tokens
        Of each row, in the longest pass.
    rows_at_once
        Rows that a layer computes at once; None: all, whose hidden states lie in no tier.
    streamed
        Whether an accelerator computes.
    """

    rows: int
    tokens: int
    rows_at_once: int | None
    streamed: bool

    def needs(self, model: PreTrainedModel, policy: Policy) -> list[Need]:
        """What they will allocate in their tier."""
        if self.rows_at_once is None or self.rows <= self.rows_at_once:
            return []
        tables = sum(isinstance(each, nn.Embedding) for each in beside_layers(model))
        count = tier_copies(tables, streamed=self.streamed)
        return [Need(STATES, "host", policy, self._one(model, self.rows), count)]

    def buffers_bytes(self, model: PreTrainedModel, kinds: Collection[str]) -> int:
        """What they will take on the accelerator, where the kinds that have a tier are these."""
        at_once = self.rows_at_once
        if at_once is None or self.rows <= at_once or not self.streamed or STATES not in kinds:
            return 0
        return BUFFERS * self._one(model, at_once)

    def _one(self, model: PreTrainedModel, rows: int) -> int:
        width = int(text_config(model).hidden_size)
        return states_bytes(rows, self.tokens, width, model.dtype.itemsize)


def least_states(rows_at_once: int | None) -> StateSizes:
    """Of the shortest pass of a batch that is computed in parts on an accelerator."""
    return StateSizes(
        rows=(rows_at_once or 0) + 1, tokens=1, rows_at_once=rows_at_once, streamed=True
    )
