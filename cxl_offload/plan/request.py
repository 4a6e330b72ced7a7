"""What every request for a plan says, for any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxl_offload.errors import ConfigError
from cxl_offload.plan.decoding.engine import EngineRates
from cxl_offload.plan.decoding.measured import measured_engine
from cxl_offload.plan.gpu_kinds import check_alike
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.replay_check import Replay, simulated_seconds
from cxl_offload.plan.usable import CXL_MARGIN, HOST_USABLE
from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.topology import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A model on a machine.

    Attributes
    ----------
    tiers
        Tiers that may be used, all by default; ``limits`` are the most bytes of a tier.
    host_usable, gpu_usable
        Shares of host and GPU memory to plan with.
    cxl_margin
        Gain (a fraction) below which CXL memory, and the drive, are left alone; 0 uses them
        wherever they are faster.
    replay
        Charges time for the plan's bytes apart from the equations, the simulator by default;
        where it differs by more than 10 % the plan's notes say so. None: no replay.
    operators
        Measured operators of the CPUs, whose rates replace those of the engine.
    why
        Whether to say what the next best placements would have cost.
    prices
        Whether to say what a little more of each resource would bring: a search for each of them,
        which takes more than half of the time. It changes nothing else of a plan.
    """

    model: ModelConfig
    machine: Machine
    tiers: Sequence[str] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    host_usable: float = HOST_USABLE
    gpu_usable: float = 1.0
    cxl_margin: float = CXL_MARGIN
    replay: Replay | None = simulated_seconds
    operators: OperatorProfile | None = None
    why: bool = False
    prices: bool = True

    def __post_init__(self) -> None:
        if not self.cxl_margin >= 0:
            raise ConfigError(f"margin {self.cxl_margin:g}: a fraction of 0 or more")

    def with_measured(self, engine: EngineRates, *, sockets: int = 1) -> EngineRates:
        """An engine with what was measured on this machine.

        Rates are taken to be those of one socket where as many threads as it has cores reached
        them, and else those of all ``sockets`` that compute.
        """
        if self.operators is None:
            return engine
        hardware, times = self.hardware(needs_gpu=False), 1.0
        if sockets > 1 and self.operators.threads > hardware.cores:
            times = self.hardware(needs_gpu=False, sockets=sockets).cores / hardware.cores
        return measured_engine(
            engine,
            self.operators,
            read_bytes_per_s=self.local_bytes_per_s(hardware) * times,
            cores=round(hardware.cores * times),
            width=self.model.hidden,
            matrices=_matrices(self.model),
        )

    def local_bytes_per_s(self, hardware: Hardware) -> float:
        """What the initiator's CPUs read of their own memory, which rates of their work refer to.

        As the hardware has it, where that memory is planned with. The first node that is may be
        another (``tiers``), of which nothing follows for the CPUs.
        """
        for node in hardware.nodes:
            if node.node == self.machine.initiator:
                return node.read_bytes_per_s
        return MachineRates(self.machine).local_bytes_per_s()

    def hardware(self, *, needs_gpu: bool = True, sockets: int = 1, gpus: int = 1) -> Hardware:
        """What may be planned with; without ``needs_gpu`` CPUs compute where there is none.

        ``sockets`` are those whose cores compute; links and copies are those of ``gpus`` together.

        Raises
        ------
        ConfigError
            As :func:`hardware_of`, or GPUs of different kinds (:func:`check_alike`).
        """
        check_alike(self.machine, gpus)
        found = hardware_of(
            self.machine,
            tiers=self.tiers,
            limits=self.limits,
            host_usable=self.host_usable,
            gpu_usable=self.gpu_usable,
            needs_gpu=needs_gpu,
            sockets=sockets,
        )
        return found.of_gpus(gpus)


def _matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Bytes in half precision and number of the weights that a token is multiplied by."""
    return [
        (2 * tensor.elements // tensor.count, tensor.count)
        for tensor in model.tensors()
        if tensor.kind != "embedding" and len(tensor.shape) > 1
    ]


def check_lengths(model: ModelConfig, prompt: int, generated: int, *, least: int = 1) -> None:
    """Refuses what a model cannot generate.

    Raises
    ------
    ValueError
        An encoder, a prompt below 1 or an answer below ``least`` tokens, or more tokens than the
        model has positions.
    """
    if prompt < 1 or generated < least:
        raise ValueError(
            f"prompt {prompt} and {generated} generated tokens: at least 1 and {least} are needed"
        )
    if not model.generates:
        raise ValueError(f"{model.name} is an encoder ({model.family}): it generates nothing")
    if prompt + generated > model.positions:
        raise ValueError(
            f"prompt of {prompt} and answer of {generated} tokens are longer than the "
            f"{model.positions} positions of {model.name}; shorten one of them"
        )
