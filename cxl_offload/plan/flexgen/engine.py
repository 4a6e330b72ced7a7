"""Rates of FlexGen's engines: what they reach beside what memory, link and GPU give."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STOCK", "EngineRates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """One engine.

    Attributes
    ----------
    attention_flops_per_core
        Arithmetic of attention on one CPU core.
    workspace_bytes_per_element
        Traffic on the workspace for every element of K and V; 0 where attention reads in place.
    kv_store_bytes_per_s
        Rate at which the KV of a prefill gets to local DRAM. It is one closed loop of few cache
        lines in flight, so on other nodes it falls with their latency.
    kv_drive_store_bytes_per_s
        Rate at which stored KV moves on to the drive.
    hidden_store_bytes_per_s
        Rate of hidden states from GPU to host.
    """

    attention_flops_per_core: float
    workspace_bytes_per_element: float
    kv_store_bytes_per_s: float
    kv_drive_store_bytes_per_s: float
    hidden_store_bytes_per_s: float


STOCK = EngineRates(
    attention_flops_per_core=0.0123e12 / 16,
    workspace_bytes_per_element=8,
    kv_store_bytes_per_s=0.97 * 2**30,
    kv_drive_store_bytes_per_s=0.746 * 2**30,
    hidden_store_bytes_per_s=4.82 * 2**30,
)
"""FlexGen as published, by its own calibration (experimental/cost_model.py): cpu_flops of its T4
machine, a Google n1-highmem-32 with 16 cores; gtoc_bdw_cache, GPU to relay buffer to pageable
memory; ctod_bdw_cache_p; gtoc_bdw_hidden. Attention copies each K and V element into an fp32
workspace and reads it, 4 B + 4 B (pytorch_backend.py, init_cpu_workspace). That prefill follows
latency is Wang et al., Performance Characterization of CXL Memory, LIO 2."""
