"""The ``vllm.general_plugins`` entry point: runs in every process of vLLM, before its engine."""

from __future__ import annotations


def register() -> None:
    """Makes this package known to vLLM; any number of times."""
    from cxl_offload.integrations.vllm.kv_plugin import install_kv
    from cxl_offload.integrations.vllm.weight_patch import install_weights

    install_kv()
    install_weights()
