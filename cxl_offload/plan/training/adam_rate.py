"""What the CPU's optimizer draws from memory: as it was said, measured, or assumed."""

from __future__ import annotations

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.training.request import TrainingRequest
from cxl_offload.topology import Machine
from cxl_offload.units import format_bandwidth

ADAM_SHARE = 0.79
"""Share of the memory's rate that DeepSpeedCPUAdam reaches on torch's memory: measured with fp32
states, 50 M parameters and AVX-512 on a machine of two cores; the bound was the same traffic."""

ADAM_SHARE_OF_UPPER_BOUND = 0.48
"""The same where a machine file gives only an upper bound of its rate: 31 % of a step of GPT-2 8B
with batch 3 is the optimizer (Wang et al., Performance Characterization of CXL Memory, IV-A),
beside the GPU's work at the training efficiency that is planned with and sequences of 1024."""


def optimizer_rate(request: TrainingRequest, hardware: Hardware) -> float:
    """Bytes/s of the optimizer's states, whatever they are kept as, on local memory.

    It is the CPUs' own, and the same where they are to keep nothing in local memory: the nodes that
    hold the states bound the optimizer beside it.
    """
    if request.optimizer_bytes_per_s is not None:
        return request.optimizer_bytes_per_s
    if request.operators is not None and request.operators.adam is not None:
        return request.operators.adam.bytes_per_s
    return _adam_share(request.machine) * request.local_bytes_per_s(hardware)


def _adam_share(machine: Machine) -> float:
    what = f"access {machine.initiator}->{machine.initiator} read bandwidth"
    bounds = [each.bound for each in machine.citations if each.what == what]
    return ADAM_SHARE_OF_UPPER_BOUND if "upper" in bounds else ADAM_SHARE


def about_optimizer(request: TrainingRequest, hardware: Hardware) -> list[str]:
    """Whose rate it is, for the notes of a plan."""
    if request.optimizer_bytes_per_s is not None:
        return []
    rate, operators = format_bandwidth(optimizer_rate(request, hardware)), request.operators
    if operators is not None and operators.adam is not None:
        return [
            f"optimizer at {rate}, measured with this package's Adam on {operators.threads} threads"
        ]
    return [
        f"optimizer assumed at {rate}, {_adam_share(request.machine):.0%} of what local memory "
        "gives; cxl-offload profile --operators cpu measures it, --optimizer-gb-s says it",
        *_about_local(request.machine, hardware),
    ]


def _about_local(machine: Machine, hardware: Hardware) -> list[str]:
    """What was assumed of local memory, where the plan has none of it and so does not say so."""
    rates = MachineRates(machine)
    rates.local_bytes_per_s()
    return [note for note in rates.notes if note not in hardware.notes]
