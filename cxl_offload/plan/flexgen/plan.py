"""Plans of inference with FlexGen: batch, placement and the flags that realise it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.plan.decoding.engine import OWN, STOCK, EngineRates
from cxl_offload.plan.decoding.trace import cpu_engines, planned_trace
from cxl_offload.plan.executor import Candidate, Executor, KindBytes
from cxl_offload.plan.flexgen.choice import block_of
from cxl_offload.plan.flexgen.flags import command_of, policies_of
from cxl_offload.plan.flexgen.job import flexgen_job, runs_in_flexgen
from cxl_offload.plan.flexgen.planner import GPU_BATCHES, Interleave, Optimum, plan_flexgen
from cxl_offload.plan.hardware import GPU_USABLE, NVME, Hardware
from cxl_offload.plan.known_errors import FLEXGEN_ERROR
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, ErrorEstimate, PhaseEstimate, Plan, phase_estimate
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.request import PlanRequest
from cxl_offload.renamed import old_names
from cxl_offload.units import format_bytes

Engine = Literal["own", "stock"]
ENGINES: Mapping[Engine, EngineRates] = {"own": OWN, "stock": STOCK}

_DECODE = "decode, one token of every sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest(PlanRequest):
    """What is to be planned for FlexGen.

    Attributes
    ----------
    model_name, machine_name, path
        As the printed flags shall name them; ``machine_name`` None: the machine it runs on.
    interleave
        ``weights``, ``kv``: stripes over nodes where they are faster, ``always``, or ``never``.
    engine
        ``own``: attention in place and copies beside it, as ``cxl-offload flexgen`` runs by
        default; ``stock``: FlexGen's own way, as published.
    """

    prompt: int
    generated: int
    model_name: str
    machine_name: str | None = None
    path: str | None = None
    gpu_batches: Sequence[int] = GPU_BATCHES
    most_batches: int | None = None
    interleave: Mapping[str, Interleave] = field(default_factory=dict)
    gpu_usable: float = GPU_USABLE
    engine: Engine = "own"

    @property
    def rates(self) -> EngineRates:
        """Rates of what runs; stock FlexGen keeps its own calibration."""
        engine = ENGINES[self.engine]
        return engine if self.engine == "stock" else self.with_measured(engine)

    def __post_init__(self) -> None:
        super(InferenceRequest, self).__post_init__()
        if self.most_batches is not None and self.most_batches < 1:
            raise ConfigError(f"at most {self.most_batches} GPU batches: at least 1 is needed")


def plan_inference(request: InferenceRequest) -> Plan:
    """The plan for FlexGen with the most tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need, or a limit is impossible.
    MemoryError
        Not one sequence fits; says what is needed and what there is.
    ValueError
        Lengths the model cannot have.
    """
    return make_plan(FlexGen(request))


class FlexGen(Executor[Optimum]):
    """FlexGen's search and homes."""

    name = "flexgen"

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._job = flexgen_job(
            request.model,
            prompt=request.prompt,
            generated=request.generated,
            engine=request.rates,
        )

    @property
    def request(self) -> InferenceRequest:
        """What is asked for."""
        return self._request

    def error(self) -> ErrorEstimate | None:
        """Of stock FlexGen's batches; nothing is published of this package's engine."""
        return FLEXGEN_ERROR if self._request.engine == "stock" else None

    def refusal(self) -> str | None:
        """Why FlexGen does not run this model."""
        return runs_in_flexgen(self._request.model)

    def search(
        self, hardware: Hardware, *, like: Candidate[Optimum] | None = None
    ) -> Candidate[Optimum] | None:
        """The best batch and placement."""
        request = self._request
        best = plan_flexgen(
            self._job,
            hardware,
            gpu_batches=request.gpu_batches,
            most_batches=request.most_batches,
            interleave=request.interleave,
            like=None if like is None else like.choice.choice,
        )
        if best is None:
            return None
        loads = best.loads
        return Candidate(
            hardware=hardware,
            choice=best,
            tokens_per_s=best.phases.tokens_per_s,
            sequences=best.choice.sequences,
            host=loads.host,
            gpu_bytes=loads.gpu_bytes,
            drive_bytes=loads.weights_drive + loads.kv_drive,
        )

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        job, request = self._job, self._request
        rooms = {node.name: node.usable_bytes for node in hardware.nodes}
        rooms |= {"gpu": hardware.gpu_usable_bytes}
        if hardware.drive_usable_bytes:
            rooms[NVME] = hardware.drive_usable_bytes
        shown = ", ".join(f"{name} {format_bytes(room)}" for name, room in rooms.items())
        return (
            f"plan {request.model.name} on {request.machine.name}: weights "
            f"{format_bytes(job.weight_bytes)} + {format_bytes(job.kv_sequence_bytes)} of KV a "
            f"sequence do not fit in any way; usable are {shown}; give more room or shorter "
            "sequences"
        )

    def batch(self, found: Candidate[Optimum]) -> Batch:
        """GPU batch and number of them."""
        choice, job = found.choice.choice, self._job
        return Batch(
            size=choice.gpu_batch, count=choice.batches, prompt=job.prompt, tokens=job.generated
        )

    def kinds(self, found: Candidate[Optimum]) -> Iterable[KindBytes]:
        """Weights, KV, activations and the workspace of CPU attention."""
        loads, choice = found.choice.loads, found.choice.choice
        policies = policies_of(self._job, found.hardware, choice)
        workspace, held = 0, 0
        if choice.cpu_attention:
            workspace = self._job.workspace_bytes(choice.batches, choice.gpu_batch)
        if choice.activations_on_gpu:
            held = choice.batches * self._job.hidden_bytes(choice.gpu_batch)
        nodes = range(len(found.hardware.nodes))
        work = [workspace if at == choice.scratch else 0 for at in nodes]
        act = [loads.scratch[at] - work[at] for at in nodes]
        for kind, gpu, host, drive in (
            ("weights", loads.weights_gpu, loads.weights_host, loads.weights_drive),
            ("kv", loads.kv_gpu, loads.kv_host, loads.kv_drive),
            ("act", held, act, 0),
            ("workspace", 0, work, 0),
        ):
            yield KindBytes(kind, gpu, host, drive, policies[kind])

    def command(self, found: Candidate[Optimum]) -> tuple[str, ...]:
        """Of this package's own command line."""
        request = self._request
        return command_of(request.model_name, machine=request.machine_name, path=request.path)

    def phases(self, found: Candidate[Optimum]) -> tuple[PhaseEstimate, ...]:
        """The prefill of a block, and a token of every sequence."""
        phases = found.choice.phases
        return (
            phase_estimate("prefill", phases.prefill_s, phases.prefill_terms),
            phase_estimate(
                "decode, one token of every sequence", phases.decode_token_s, phases.decode_terms
            ),
        )

    def equation_seconds(self, found: Candidate[Optimum]) -> Mapping[str, float]:
        """Predicted seconds by phase."""
        phases = found.choice.phases
        return {"prefill": phases.prefill_s, "decode": phases.decode_token_s}

    def replayed_seconds(self, found: Candidate[Optimum], replay: Replay) -> Mapping[str, float]:
        """A prefill and one token."""
        machine = self.machine(found)
        block = block_of(found.choice.choice, found.choice.loads)
        trace = planned_trace(self._job, found.hardware, block)
        return replay(trace, machine, cpu_engines(machine, self._job.engine))

    def other_homes(
        self, found: Candidate[Optimum]
    ) -> Iterable[tuple[str, Candidate[Optimum] | None]]:
        """Host weights and KV striped where they are whole, and whole where they are striped."""
        request, choice = self._request, found.choice.choice
        stripes = {"weights": choice.weight_stripe, "kv": choice.kv_stripe}
        for kind, stripe in stripes.items():
            wish: Interleave = "always" if stripe is None else "never"
            asked = replace(request, interleave={**request.interleave, kind: wish})
            what = f"{kind} of the host striped" if stripe is None else f"{kind} not striped"
            yield what, FlexGen(asked).search(found.hardware)

    def notes(self, found: Candidate[Optimum]) -> list[str]:
        """Usable shares, stripes, and where rates are from."""
        request, choice = self._request, found.choice.choice
        notes = [
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory"
        ]
        if request.engine == "own":
            notes.append("no speed of this engine is published, so no error is known")
        if choice.kv_stripe or choice.weight_stripe:
            notes.append("striped tensors are static: the kernel must not migrate them")
        if request.machine.simulated:
            notes.append(
                f"{found.hardware.machine} is a machine file: its rates are published or assumed"
            )
        return notes


__getattr__ = old_names(__name__)
