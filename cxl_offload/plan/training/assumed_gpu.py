"""The GPU that a training is planned with where its machine has none."""

from __future__ import annotations

from cxl_offload.plan.what_if import with_gpu
from cxl_offload.topology import Machine

ASSUMED_GPU = "h100"
"""A name of ``--gpu``: the card of the same years as the hosts that lack one. Nearly all of them in
the machine files are servers with PCIe 5.0 and CXL memory, and the H100 of a machine file has that
link. What trainings reach of its peak is published (``plan.gpu.TRAINING_SHARES``), and 80 GiB hold
a sequence of most models, so that a plan says what the host brings and not what its GPU lacks."""


def with_assumed_gpu(machine: Machine) -> tuple[Machine, str]:
    """The machine with ``ASSUMED_GPU`` where it has no GPU to train on, and a sentence about that.

    A GPU in whose memory the CPUs compute is none, as plans of training count on two memories. One
    whose rates are not known is its owner's to describe: no other is put in its place.

    Returns
    -------
    tuple
        The machine as it is, and nothing to say, where it has a GPU.
    """
    if not machine.gpus:
        lacks = f"{machine.name} has none, and no training is planned for CPUs alone"
    elif machine.gpus[0].memory_node == machine.initiator:
        lacks = f"GPU {machine.gpus[0].name} of {machine.name} and its CPUs share one memory"
    else:
        return machine, ""
    said = f"GPU {ASSUMED_GPU} assumed: {lacks}; --gpu NAME takes another"
    return with_gpu(machine, ASSUMED_GPU), said
