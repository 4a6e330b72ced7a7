"""What the plugin does for the KV cache: registers the spec under the name ``cxl``."""

from __future__ import annotations

import os

__all__ = ["SPEC_CLASS", "SPEC_MODULE", "SPEC_NAME", "install_kv", "process_cpus"]

SPEC_NAME = "cxl"
SPEC_MODULE = "cxl_offload.integrations.vllm.kv_spec"
SPEC_CLASS = "CxlOffloadingSpec"

_cpus: frozenset[int] = frozenset()


def process_cpus() -> frozenset[int]:
    """The CPUs that this process was started on.

    vLLM binds its own threads to single CPUs later, and threads started by those would inherit it.
    """
    return _cpus or frozenset(os.sched_getaffinity(0))


def install_kv() -> None:
    """Registers the spec, and has its options checked early; any number of times."""
    global _cpus
    _cpus = _cpus or frozenset(os.sched_getaffinity(0))
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    from cxl_offload.integrations.vllm.kv_check import install_check

    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_CLASS)
    install_check()
