"""Plans of inference with FlexGen: batch, placement and the flags that realise it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.engine import OWN, STOCK, EngineRates
from cxl_offload.plan.decoding.executor import DecodingExecutor, DecodingRequest
from cxl_offload.plan.executor import Candidate, KindBytes
from cxl_offload.plan.flexgen.choice import block_of
from cxl_offload.plan.flexgen.decode_time import CALLS
from cxl_offload.plan.flexgen.flags import command_of, policies_of
from cxl_offload.plan.flexgen.job import FlexGenJob, flexgen_job, runs_in_flexgen
from cxl_offload.plan.flexgen.mode import ratios_of
from cxl_offload.plan.flexgen.planner import (
    GPU_BATCHES,
    Optimum,
    StripeWish,
    plan_flexgen,
)
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.known_errors import FLEXGEN_ERROR, UNKNOWN_ERROR
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, ErrorEstimate, Plan
from cxl_offload.renamed import old_names

FlexGenEngine = Literal["own", "stock"]
ENGINES: Mapping[FlexGenEngine, EngineRates] = {"own": OWN, "stock": STOCK}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest(DecodingRequest):
    """What is to be planned for FlexGen.

    Attributes
    ----------
    path
        Of the weights, as the printed flags shall name it.
    gpu_batches
        Sequences of a GPU batch to try.
    interleave
        ``weights``, ``kv``: stripes over nodes where they are faster, ``always``, or ``never``.
    engine
        ``own``: attention in place and copies beside it, as ``cxl-offload flexgen`` runs by
        default; ``stock``: FlexGen's own way, as published.
    accelerator
        ``host``: the machine's GPU stands for its CPUs, whose work takes its time in turn
        (``cxl-offload flexgen --accelerator host``).
    """

    path: str | None = None
    gpu_batches: Sequence[int] = GPU_BATCHES
    interleave: Mapping[str, StripeWish] = field(default_factory=dict)
    engine: FlexGenEngine = "own"
    accelerator: Literal["cuda", "host"] = "cuda"

    @property
    def rates(self) -> EngineRates:
        """Rates of what runs; stock FlexGen keeps its own calibration."""
        engine = ENGINES[self.engine]
        if self.engine == "stock":
            return engine
        measured = self.with_measured(engine)
        if self.accelerator == "cuda":
            return measured
        calls, instructions = CALLS["host, in place"]
        return replace(measured, in_turn=True, layer_calls=calls, layer_instructions=instructions)


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


class FlexGen(DecodingExecutor[Optimum]):
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

    @property
    def job(self) -> FlexGenJob:
        """What is generated."""
        return self._job

    def error(self) -> ErrorEstimate | None:
        """Of stock FlexGen's batches; nothing is published of this package's engine."""
        return FLEXGEN_ERROR if self._request.engine == "stock" else None

    def refusal(self) -> str | None:
        """Why FlexGen does not run this model."""
        return runs_in_flexgen(self._request.model)

    def hardware(self) -> Hardware:
        """What may be planned with: stripes that are asked for need nodes to lie on."""
        found = self._request.hardware()
        for kind, wish in self._request.interleave.items():
            if wish != "always" or ratios_of(self._job, found, kind):
                continue
            names, why = ", ".join(found.names), "tensors are too small for a page on each"
            if len(found.nodes) < 2:
                why = "stripes lie on two nodes and more; allow another tier (--tiers)"
            raise ConfigError(
                f"--interleave {kind}=always: {found.machine} is planned with {names}, and {why}, "
                "or leave it out"
            )
        return found

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
            like=None if like is None else like.choice,
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
        """The command of this package that runs the plan."""
        request = self._request
        return command_of(request.model_name, machine=request.machine_name, path=request.path)

    def block(self, found: Candidate[Optimum]) -> Block:
        """Bytes of the choice."""
        return block_of(found.choice.choice, found.choice.loads)

    def other_homes(
        self, found: Candidate[Optimum]
    ) -> Iterable[tuple[str, Candidate[Optimum] | None]]:
        """Host weights and KV striped where they are whole, and whole where they are striped."""
        request, choice = self._request, found.choice.choice
        stripes = {"weights": choice.weight_stripe, "kv": choice.kv_stripe}
        for kind, stripe in stripes.items():
            wish: StripeWish = "always" if stripe is None else "never"
            asked = replace(request, interleave={**request.interleave, kind: wish})
            what = f"{kind} of the host striped" if stripe is None else f"{kind} not striped"
            yield what, FlexGen(asked).search(found.hardware)

    def notes(self, found: Candidate[Optimum]) -> list[str]:
        """Usable shares, stripes, and where rates are from."""
        request, choice = self._request, found.choice.choice
        notes = [self.memory_shares(found.hardware)]
        if request.engine == "own":
            notes.append(UNKNOWN_ERROR)
        if choice.kv_stripe or choice.weight_stripe:
            notes.append("striped tensors are static: the kernel must not migrate them")
        return notes + self.about_threads(found) + self.source_of_rates(found.hardware)


__getattr__ = old_names(__name__)
