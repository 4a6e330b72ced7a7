"""What bench_prediction runs: generations whose speed is predicted from a profile of operators."""

from __future__ import annotations

import itertools
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.skipped_prompt import skipped_prompt
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.expected import decode_shape
from cxl_offload.integrations.transformers import offload
from cxl_offload.plan.flexgen.decode_time import decode_time
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.profile.operators.measure import LayerEngine
from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.topology import Machine

Now = Callable[[], float]
_HEAD_DIM = 64
_ALONE = 5


@dataclass(frozen=True, slots=True)
class Predicted:
    """Tokens/s, and the seconds that they are made of."""

    tokens_per_s: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Operators:
    """What a prediction needs measured: as ``measure_operators`` takes it."""

    only: LayerEngine
    rows: Sequence[int]


class PredictedRun(Protocol):
    """One configuration."""

    name: str
    operators: Operators

    def measured(self, now: Now) -> float:
        """Tokens/s of one run."""

    def predicted(self, operators: OperatorProfile) -> Predicted:
        """The same without running it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of both models: a LLaMA of transformers, an OPT of FlexGen."""

    layers: int
    hidden: int


class TokenTimes(StoppingCriteria):  # type: ignore[misc]
    """The time after every token, and how often others had the CPU until then."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self.marks = [self._mark()]

    def _mark(self) -> tuple[float, int]:
        return self._now(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.marks.append(self._mark())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def undisturbed(marks: list[tuple[float, int]]) -> float:
    """Median seconds between marks without an interruption; of all where those are too few."""
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    alone = [seconds for seconds, interruptions in spans if not interruptions]
    return statistics.median(alone if len(alone) >= _ALONE else [each for each, _ in spans])


class OfTransformers:
    """A prompt and its answer by generate(), the KV cache in a tier; predicted by the planner."""

    def __init__(self, model: LlamaForCausalLM, request: TransformersRequest, rows: int) -> None:
        self._model, self._request, self._rows = model, request, rows
        self.name = f"transformers, {rows} x {request.prompt}+{request.generated}"
        self.operators = Operators("transformers", (1,))

    def measured(self, now: Now) -> float:
        """Of a whole generation."""
        asked, times = self._request, TokenTimes(now)
        ids = torch.randint(3, 1000, (self._rows, asked.prompt))
        with offload(self._model, {"kv": "first-touch"}, session=Session.linux()):
            times = TokenTimes(now)
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked.generated,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([times]),
            )
        prefill = times.marks[1][0] - times.marks[0][0]
        seconds = prefill + (asked.generated - 1) * undisturbed(times.marks[1:])
        return self._rows * asked.generated / seconds

    def predicted(self, operators: OperatorProfile) -> Predicted:
        """What a plan of this many rows says."""
        asked = self._request
        executor = Transformers(
            TransformersRequest(
                model=asked.model,
                machine=asked.machine,
                prompt=asked.prompt,
                generated=asked.generated,
                model_name=asked.model_name,
                replay=None,
                prices=False,
                operators=operators,
                most_batches=self._rows,
            )
        )
        found = executor.search(executor.hardware())
        if found is None or found.sequences != self._rows:
            raise SystemExit(f"{self.name}: memory has no room for it")
        phases = found.choice.phases
        terms = {
            "prompt": phases.prefill_s,
            "decode": (asked.generated - 1) * phases.decode_token_s,
        }
        return Predicted(phases.tokens_per_s, terms)


class OfFlexGen:
    """Decoding after a prompt that is not computed, the CPUs in a GPU's place."""

    def __init__(self, request: FlexGenRun, prompt: int, session: Session) -> None:
        self._request, self._prompt, self._session = request, prompt, session
        self.name = f"FlexGen, {request.gpu_batch_size} x {request.num_gpu_batches}, KV {prompt}"
        self.operators = Operators("flexgen", (request.gpu_batch_size,))
        with LoadedModel(request, session=session) as loaded:
            self._shape = decode_shape(
                request, loaded.source.config, prompt_len=prompt, shares=loaded.layout.rows
            )

    def measured(self, now: Now) -> float:
        """Of decoding."""
        marks: list[tuple[float, int]] = []

        def begins(_: int) -> None:
            marks.append((now(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw))

        with LoadedModel(self._request, session=self._session) as loaded, skipped_prompt():
            loaded.generate()
            loaded.generate(token_begins=begins)
        return self._request.rows / undisturbed(marks[1:])

    def predicted(self, operators: OperatorProfile) -> Predicted:
        """What the operators add up to."""
        found = decode_time(self._shape, operators)
        return Predicted(found.tokens_per_s, found.terms)


def transformers_runs(
    folder: Path, machine: Machine, sizes: Sizes, *, quick: bool
) -> list[OfTransformers]:
    """Rows and prompts of a LLaMA with random weights in bfloat16."""
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // _HEAD_DIM,
        num_key_value_heads=sizes.hidden // _HEAD_DIM,
        vocab_size=8192,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    config.save_pretrained(folder)
    read = load_model(str(folder))
    return [
        OfTransformers(
            model,
            TransformersRequest(
                model=read,
                machine=machine,
                prompt=prompt,
                generated=9 if quick else 17,
                model_name="llama",
                replay=None,
                prices=False,
            ),
            rows,
        )
        for rows in (1, 8, 32)
        for prompt in ((16, 64) if quick else (32, 256))
    ]


def flexgen_runs(folder: Path, sizes: Sizes, *, quick: bool) -> list[OfFlexGen]:
    """Batches and lengths of caches of an OPT with random weights."""
    size = OptShape(layers=sizes.layers, hidden=sizes.hidden, heads=sizes.hidden // _HEAD_DIM)
    model, session = make_opt(folder, size, seed=1), Session.linux()
    made = []
    for (batch, count), prompt in itertools.product(
        ((1, 1), (8, 1), (16, 2)), (64, 128) if quick else (64, 256)
    ):
        random = np.random.default_rng(0)
        tokens = random.integers(16, size.vocab, size=(batch * count, prompt)).tolist()
        request = FlexGenRun(
            model=str(model),
            token_ids=tuple(tuple(row) for row in tokens),
            gen_len=9 if quick else 17,
            gpu_batch_size=batch,
            num_gpu_batches=count,
            record=False,
            accelerator="host",
            percent=(100, 0, 0, 100, 100, 0),
            cpu_cache_compute=True,
        )
        made.append(OfFlexGen(request, prompt, session))
    return made
