"""What hidden states in a tier move, of a layout."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.decoding.copied_states import CopiedStates
from cxl_offload.plan.equations.row_states import copies_in, copies_out
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout


def copied_states(
    job: DecoderJob, layout: Layout, rows: int, shares: Sequence[float] = ()
) -> CopiedStates:
    """Bytes that a pass copies of the hidden states of so many rows.

    Parameters
    ----------
    shares
        Of the nodes that they lie on.
    """
    one = rows * job.width * job.activation_bytes
    there = sum(layout.home_of(kind) == "gpu" for kind in job.tables)
    return CopiedStates(
        shares=shares,
        token_in=copies_in(job.layers) * one,
        token_out=copies_out(job.layers, there) * one,
        pass_in=one,
    )
