"""What plans of FlexGen and of transformers share: one generation, decoded block by block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cxl_offload.errors import ConfigError
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.phases import Phases
from cxl_offload.plan.decoding.sizes import Sizes
from cxl_offload.plan.decoding.trace import cpu_engines, planned_trace
from cxl_offload.plan.executor import Candidate, Executor, OwnFields
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.lack_of_room import rooms_in_words, weights_lack_room
from cxl_offload.plan.plan_file import PhaseEstimate, phase_estimate
from cxl_offload.plan.planned_machine import at_decoding_rates
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.request import PlanRequest
from cxl_offload.plan.thread_counts import threads_by_node
from cxl_offload.plan.usable import GPU_USABLE
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRequest(PlanRequest):
    """Prompts and answers of one length for an engine that generates in blocks.

    Attributes
    ----------
    prompt, generated
        Tokens of every prompt and of every answer.
    model_name, machine_name
        As the printed command shall name them; ``machine_name`` None: the machine it runs on.
    most_batches
        Most GPU batches in a block; without a GPU most rows. None: any number.
    """

    prompt: int
    generated: int
    model_name: str
    machine_name: str | None = None
    most_batches: int | None = None
    gpu_usable: float = GPU_USABLE

    def __post_init__(self) -> None:
        super(DecodingRequest, self).__post_init__()
        if self.most_batches is not None and self.most_batches < 1:
            raise ConfigError(f"at most {self.most_batches} batches: at least 1 is needed")


class DecodingJob(Sizes, Protocol):
    """Sizes and lengths of one generation."""

    @property
    def kv_sequence_bytes(self) -> float:
        """KV of one sequence at its end."""


class HasPhases(Protocol):
    """What a search found, with the seconds that the equations give it."""

    @property
    def phases(self) -> Phases:
        """Prefill and decode."""


T = TypeVar("T", bound=HasPhases)


class DecodingExecutor(Executor[T]):
    """An executor whose time is that of :func:`~cxl_offload.plan.decoding.phases_of_block`."""

    @property
    @abstractmethod
    def request(self) -> DecodingRequest:
        """What is asked for."""

    @property
    @abstractmethod
    def job(self) -> DecodingJob:
        """What is generated."""

    @abstractmethod
    def block(self, found: Candidate[T]) -> Block:
        """Bytes of what was found."""

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        job, what = self.job, f"plan {self.request.model.name} on {hardware.machine}"
        lack = weights_lack_room(what, job.weight_bytes, hardware.rooms())
        return lack or (
            f"{what}: weights {format_bytes(job.weight_bytes)} + "
            f"{format_bytes(int(job.kv_sequence_bytes))} of KV a sequence do not fit in any way; "
            f"usable are {rooms_in_words(hardware.rooms())}; give more room or shorter sequences"
        )

    def phases(self, found: Candidate[T]) -> tuple[PhaseEstimate, ...]:
        """The prefill of a block, and a token of every sequence."""
        phases = found.choice.phases
        decode = "decode, one token of every sequence"
        return (
            phase_estimate("prefill", phases.prefill_s, phases.prefill_terms),
            phase_estimate(decode, phases.decode_token_s, phases.decode_terms),
        )

    def equation_seconds(self, found: Candidate[T]) -> Mapping[str, float]:
        """Predicted seconds by phase."""
        phases = found.choice.phases
        return {"prefill": phases.prefill_s, "decode": phases.decode_token_s}

    def replayed_seconds(self, found: Candidate[T], replay: Replay) -> Mapping[str, float]:
        """A prefill and one token."""
        machine, job = at_decoding_rates(self.machine(found)), self.job
        trace = planned_trace(job, found.hardware, self.block(found))
        return replay(trace, machine, cpu_engines(machine, job.engine))

    def own_fields(self, found: Candidate[T]) -> OwnFields:
        """The threads."""
        return OwnFields(threads=self.threads(found))

    def threads(self, found: Candidate[T]) -> dict[int, int]:
        """Cores that compute by the node that they read; empty where CPUs read nothing."""
        return self._threads(found)[0]

    def about_threads(self, found: Candidate[T]) -> list[str]:
        """What was assumed for them."""
        return self._threads(found)[1]

    def _threads(self, found: Candidate[T]) -> tuple[dict[int, int], list[str]]:
        block, job = self.block(found), self.job
        if job.engine.workspace_bytes_per_element:  # FlexGen as published has torch's threads
            return {}, []
        kv = block.sequences * job.mean_kv_tokens * job.kv_bytes_per_token
        read = [kv * share for share in block.kv_host]
        for at, nbytes in enumerate(block.weights_cpu):
            read[at] += block.batches * nbytes * block.cpu_read_share
        near = found.hardware.copy_nodes if block.weights_copied else ()
        for at in near:
            rate = found.hardware.nodes[at].read_bytes_per_s
            read[at] += block.weights_copied * rate / found.hardware.near_bytes_per_s
        return threads_by_node(self.request.machine, found.hardware, read)

    def memory_shares(self, hardware: Hardware) -> str:
        """What was planned with, in words."""
        request = self.request
        if not hardware.has_gpu:
            return f"planned without a GPU, with {request.host_usable:.0%} of host memory"
        return (
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory"
        )

    def source_of_rates(self, hardware: Hardware) -> list[str]:
        """That the rates of a machine file were not measured here."""
        if not self.request.machine.simulated:
            return []
        return [f"{hardware.machine} is a machine file: its rates are published or assumed"]
