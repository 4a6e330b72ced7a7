"""What the reader of a plan for transformers must know."""

from __future__ import annotations

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.transformers.homes import Homes
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import COPIED_ROWS, Layout
from cxl_offload.units import format_bytes


def about_states(job: DecoderJob, homes: Homes) -> str:
    """Where hidden states lie that the GPU has no room for."""
    layout = homes.layout
    nbytes = layout.state_bytes(job, homes.rows * homes.batches)
    return (
        f"hidden states of all {homes.rows * homes.batches} sequences lie on the host "
        f"({format_bytes(nbytes)} while prompts are computed); the GPU has those of "
        f"{homes.rows} at a time, which every layer copies there and back"
    )


def about_sockets(hardware: Hardware, layout: Layout, sockets: tuple[int, int]) -> list[str]:
    """Whose cores compute, and what was never measured.

    Parameters
    ----------
    sockets
        Those that compute, and the most that may.
    """
    used, most = sockets
    notes = []
    if used < most:
        notes.append(f"the cores of one socket compute: those of {most} are no faster (predicted)")
    if hardware.sockets:
        cores = " and ".join(f"{each.cores} of node {each.node}" for each in hardware.sockets)
        notes.append(f"cores that compute: {cores}; no plan for several sockets was ever measured")
    if layout.copied:
        notes.append(
            f"layers over copies are this package's kernel, for up to {COPIED_ROWS} rows, "
            "taken to be as fast as torch's; prompts read the first copy"
        )
    return notes


def about_kv_type(job: DecoderJob) -> list[str]:
    """What a smaller type of keys and values loses, and what is assumed of attention over it."""
    name, notes = job.kv_dtype, []
    if name is None:
        return []
    if name not in job.engine.kv_type_shares:
        notes.append(
            f"attention over {name} is assumed to reach {KV_TYPES[name].reached:.0%} of the "
            "bandwidth that it reaches in half precision, as measured on one machine; cxl-offload "
            "profile --operators cpu measures it"
        )
    notes.append(
        f"keys and values are kept as {name}, which loses precision; the time to convert them "
        "when they are stored is not counted"
    )
    return notes
