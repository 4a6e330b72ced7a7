"""Which node and which CPUs are near the device of a rank."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from cxl_offload.integrations.vllm.kv_plugin import process_cpus
from cxl_offload.memory import Session


def device_node(session: Session) -> int:
    """The node nearest to this rank's device: its GPU's, else that of the CPUs it runs on."""
    if current_platform.is_cuda_alike():
        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        for gpu in session.machine.gpus:
            if gpu.pci_address == address and gpu.node is not None:
                return gpu.node
    return session.kernel.local_node


def copy_cpus(session: Session, threads: int | None) -> list[int]:
    """CPUs of this process on the node where the calling thread runs, as many as may copy."""
    allowed, here = process_cpus(), session.kernel.local_node
    for node in session.machine.nodes:
        near = sorted(allowed & set(node.cpus))
        if node.id == here and near:
            return near[:threads]
    return sorted(allowed)[:threads]
