"""Plans for transformers, and the grid they are compared with.

Rows x passes x type of the cache x threads; all of the memory is in the first tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measured_regret import Case, Point, Setting, thread_counts, with_threads
from cxl_offload import Session
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.room import kept_as
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.layout import layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation of transformers, all of its memory in the first tier."""

    model: LlamaForCausalLM
    now: Callable[[], float]
    lengths: tuple[int, int]
    rows: int
    passes: int
    kept: str
    threads: int

    @property
    def name(self) -> str:
        """Rows, passes, type of the cache and threads."""
        return f"{self.rows} rows / {self.passes}, {self.kept or 'bfloat16'}, {self.threads} thr."

    def point(self) -> Point:
        """As a point of a grid."""
        return Point(self.name, lambda: with_threads(self.threads, self._run))

    def _run(self) -> float:
        prompt, generated = self.lengths
        ids = torch.randint(3, 1000, (self.rows, prompt))
        at_once = None if self.passes == 1 else -(-self.rows // self.passes)
        with offload(
            self.model,
            {"kv": "first-touch"},
            kv_dtype=kept_as(self.kept or None),
            rows_at_once=at_once,
            session=Session.linux(),
        ):
            began = self.now()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=generated,
                do_sample=False,
            )
            return self.rows * generated / (self.now() - began)


def transformers_cases(setting: Setting) -> Iterator[Case]:
    """Lengths, rooms, and whether the cache may lose precision."""
    config = LlamaConfig(
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 11 // 4,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // 64,
        num_key_value_heads=setting.hidden // 64,
        vocab_size=8192,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    config.save_pretrained(setting.folder / "llama")
    read, weights = load_model(str(setting.folder / "llama")), 2 * model.num_parameters()
    lengths = ((16, 8),) if setting.quick else ((32, 32), (128, 16), (16, 96))
    for (prompt, generated), room, smaller in itertools.product(
        lengths, (1.25,) if setting.quick else (1.25, 1.6), ((), ("float8_e5m2", "int4"))
    ):
        limit = int(room * weights)
        asked = TransformersRequest(
            model=read,
            machine=setting.machine,
            prompt=prompt,
            generated=generated,
            model_name="llama",
            replay=None,
            prices=False,
            operators=setting.operators,
            limits={"ldram": limit},
            kv_dtypes=smaller,
        )
        words = f"transformers {prompt}+{generated}, {limit >> 20} MiB"
        name = f"{words}, {'any' if smaller else 'own'} type"
        made = _transformers_case(name, asked, model, setting.now)
        if made is not None:
            yield made


def _transformers_case(
    name: str, asked: TransformersRequest, model: LlamaForCausalLM, now: Callable[[], float]
) -> Case | None:
    kinds = (None, *asked.kv_dtypes)
    found = {kept: _searched(asked, kept) for kept in kinds}
    fits = {kept: best for kept, (best, _) in found.items() if best is not None}
    if not fits:
        return None
    chosen = max(fits, key=lambda kept: fits[kept].tokens_per_s)
    usual, one = thread_counts()[0], thread_counts()[-1]

    def generation(rows: int, passes: int, kept: str | None, threads: int) -> Generation:
        lengths = (asked.prompt, asked.generated)
        return Generation(model, now, lengths, rows, passes, kept or "", threads)

    plan = generation(fits[chosen].sequences, 1, chosen, usual)
    grid = [plan]
    for kept, (_, most) in found.items():
        counts = {max(1, most // part) for part in (1, 2, 4)} | {1, min(8, most)}
        grid += [generation(rows, 1, kept, usual) for rows in counts if most]
        if most >= 2:
            grid += [generation(most, passes, kept, usual) for passes in (2, 4)]
            grid.append(generation(most, 1, kept, one))
    points = {each.name: each.point() for each in grid}
    return Case(name, points[plan.name], fits[chosen].tokens_per_s, list(points.values()))


def _searched(asked: TransformersRequest, kept: str | None) -> tuple[Candidate[Any] | None, int]:
    """The best with a type of cache, and the most rows that fit with it."""
    executor = Transformers(asked, kept)
    hardware = executor.hardware()
    layout = next(iter(layouts(executor.job, hardware)))
    return executor.search(hardware), most_batches(executor.job, hardware, layout)
