"""What the plugin does for the KV cache: registers our spec, tier and eviction policy."""

from __future__ import annotations

import os

SPEC_NAME = "cxl"
TIER_TYPE = "cxl"
COST_POLICY = "cost"
_HERE = "cxl_offload.integrations.vllm"

_cpus: frozenset[int] = frozenset()


def process_cpus() -> frozenset[int]:
    """The CPUs that this process was started on.

    vLLM binds its own threads to single CPUs later, and threads started by those would inherit it.
    """
    return _cpus or frozenset(os.sched_getaffinity(0))


def register_names() -> None:
    """The names that options may use; any number of times."""
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, f"{_HERE}.kv_spec", "CxlOffloadingSpec")
    if TIER_TYPE not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER_TYPE, f"{_HERE}.kv_tier", "ColdTierManager")
    if COST_POLICY not in CachePolicyFactory._registry:
        CachePolicyFactory.register_cache_policy(COST_POLICY, f"{_HERE}.kv_eviction", "CostPolicy")


def install_kv() -> None:
    """Registers the names, and has options checked early; any number of times."""
    global _cpus
    _cpus = _cpus or frozenset(os.sched_getaffinity(0))
    from cxl_offload.integrations.vllm.kv_check import install_check

    register_names()
    install_check()
