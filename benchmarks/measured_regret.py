"""What bench_plan measures: plans against every configuration of a grid, with limited memory.

A case is a model with lengths and the most memory that it may have. Its plan runs, and so does
every point of a grid: of transformers rows x passes x type of the cache x threads, of FlexGen GPU
batch x batches x shares of weights and KV on the accelerator x threads. FlexGen's accelerator is
the CPUs, planned for as a GPU on paper that has the rates that the profile measured.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.request import planned_options
from cxl_offload.integrations.flexgen.shares import ACCELERATOR, home_shares, realised_weights
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.room import kept_as
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.flexgen.layout import opt_groups
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest, plan_inference
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.transformers.layout import layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.topology import Gpu, Link, Machine

NEAR = 0.85
"""Points slower than this share of the fastest after one run are not run again."""

_FIRST, _TURNS = 0.5, 0.8
"""Shares of a case's time after which no new point, and no new turn of the near ones, begins."""

_NO_LIMIT = 1e15
"""Bytes/s of a link that nothing crosses: the CPUs' memory is the accelerator's."""

_FLEXGEN_BATCHES = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration: how it is called, and a run of it that gives tokens/s."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A plan among the points of its grid; ``planned`` is one of them."""

    name: str
    planned: Point
    predicted: float
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share; ``now`` is the clock of runs."""

    machine: Machine
    operators: OperatorProfile
    folder: Path
    quick: bool
    now: Callable[[], float]

    @property
    def hidden(self) -> int:
        """Width of both models."""
        return 512 if self.quick else 1024

    @property
    def layers(self) -> int:
        """Layers of both models."""
        return 2 if self.quick else 4


def regret_of(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Runs a case for about so many seconds; a row of the table.

    Every point runs once, those that are near the fastest in turns after that. Then the plan and
    the fastest point run in turns again: of many points one is fastest by chance, which runs made
    after the choice do not repeat. The regret is their median ratio. Points for which the time is
    too short are not run; they are drawn, and the row says how many ran.
    """
    begun = time.monotonic()
    case.planned.run()  # the first of a case makes threads, kernels and pages
    rates = {case.planned.name: [case.planned.run()]}
    others = [point for point in case.points if point is not case.planned]
    random.Random(0).shuffle(others)
    for point in others:
        if time.monotonic() - begun > seconds * _FIRST:
            break
        rates[point.name] = [point.run()]
    ran = [point for point in case.points if point.name in rates]
    best = max(each[0] for each in rates.values())
    near = [p for p in ran if p is case.planned or rates[p.name][0] >= NEAR * best]
    for _ in range(rounds - 1):
        if time.monotonic() - begun > seconds * _TURNS:
            break
        for point in near:
            rates[point.name].append(point.run())
    fastest = max(near, key=lambda point: statistics.median(rates[point.name]))
    pairs = [(1.0, 1.0)]
    if fastest is not case.planned:
        pairs = [_pair(case.planned, fastest, 0)]
        for turn in range(1, rounds):
            if time.monotonic() - begun < seconds:
                pairs.append(_pair(case.planned, fastest, turn))
    return {
        "case": case.name,
        "planned": case.planned.name,
        "best": fastest.name,
        "points": len(ran),
        "predicted_tokens_per_s": case.predicted,
        "measured_tokens_per_s": statistics.median(rates[case.planned.name]),
        "regret": max(0.0, statistics.median(best / plan for plan, best in pairs) - 1),
        "rates": rates,
    }


def _pair(planned: Point, other: Point, turn: int) -> tuple[float, float]:
    """Tokens/s of both, who is first by turns."""
    if turn % 2:
        second = other.run()
        return planned.run(), second
    return planned.run(), other.run()


def _threads() -> tuple[int, ...]:
    """One and all."""
    return tuple(dict.fromkeys((torch.get_num_threads(), 1)))


def _with_threads(threads: int, run: Callable[[], float]) -> float:
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(usual)


# ---- transformers --------------------------------------------------------------------------


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
        return Point(self.name, lambda: _with_threads(self.threads, self._run))

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
    usual, one = _threads()[0], _threads()[-1]

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


# ---- FlexGen -------------------------------------------------------------------------------


def cpus_as_gpu(setting: Setting, memory_bytes: int) -> Machine:
    """The machine with a GPU on paper that is as fast as its CPUs were measured to be.

    Products of the model's own width take the time of their bytes, then that of their arithmetic.
    """
    machine, operators, size = setting.machine, setting.operators, 2 * setting.hidden**2
    rows = max(point.rows for point in operators.linears)
    once, many = operators.linear_s(1, size), operators.linear_s(rows, size)
    arithmetic = (rows - 1) * size / max(many - once, many / 2)
    gpu = Gpu(
        name="gpu0",
        node=machine.initiator,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=size / once,
        peak_flops_per_s=arithmetic / PREFILL_EFFICIENCY,
        link=Link(h2d_bandwidth_bytes_per_s=_NO_LIMIT, d2h_bandwidth_bytes_per_s=_NO_LIMIT),
    )
    return replace(machine, gpus=(gpu,))


def flexgen_cases(setting: Setting) -> Iterator[Case]:
    """Lengths and rooms on accelerator and host."""
    size = OptShape(
        layers=setting.layers, hidden=setting.hidden, heads=setting.hidden // 64, vocab=2048
    )
    model, session = make_opt(setting.folder / "opt", size, seed=1), Session.linux()
    read = load_model(str(model))
    weights = 2 * read.parameters
    lengths = ((16, 8),) if setting.quick else ((32, 32), (96, 16), (16, 64))
    for (prompt, generated), (device, host) in itertools.product(lengths, ((0.5, 1.0), (1.3, 0.4))):
        asked = InferenceRequest(
            model=read,
            machine=cpus_as_gpu(setting, int(device * weights)),
            prompt=prompt,
            generated=generated,
            model_name="opt",
            replay=None,
            operators=setting.operators,
            limits={"ldram": int(host * weights)},
            gpu_usable=1.0,
            cxl_margin=0.0,
            accelerator="host",
        )
        rooms = f"{int(device * weights) >> 20} + {int(host * weights) >> 20} MiB"
        run = FlexGenRuns(str(model), session, setting.now)
        made = _flexgen_case(f"FlexGen {prompt}+{generated}, {rooms}", asked, run)
        if made is not None:
            yield made


@dataclass(frozen=True, slots=True)
class FlexGenRuns:
    """How points of FlexGen run."""

    model: str
    session: Session
    now: Callable[[], float]

    def request(self, plan: Plan) -> FlexGenRun:
        """What a plan says."""
        rows = plan.batch.size * plan.batch.count
        draw = torch.randint(16, 2000, (rows, plan.batch.prompt)).tolist()
        return FlexGenRun(
            model=self.model,
            token_ids=tuple(tuple(row) for row in draw),
            plan=plan,
            record=False,
            accelerator="host",
            **planned_options(plan),
        )

    def point(self, request: FlexGenRun, homes: str, threads: int) -> Point:
        """As a point of a grid."""
        sizes = f"{request.gpu_batch_size} x {request.num_gpu_batches}"
        name = f"{sizes}, {homes}, {threads} thr."
        return Point(name, lambda: _with_threads(threads, lambda: self._generated(request)))

    def _generated(self, request: FlexGenRun) -> float:
        with LoadedModel(request, session=self.session) as loaded:
            loaded.generate()
            began = self.now()
            loaded.generate()
            return request.rows * request.gen_len / (self.now() - began)


def _flexgen_case(name: str, asked: InferenceRequest, runs: FlexGenRuns) -> Case | None:
    try:
        plan = plan_inference(asked)
    except MemoryError:
        return None
    usual, one = _threads()[0], _threads()[-1]
    base = runs.request(plan)
    planned = runs.point(base, "planned homes", usual)
    made = [planned, runs.point(base, "planned homes", one)]
    for batch, count in _other_batches(asked, plan):
        other = plan_inference(replace(asked, gpu_batches=(batch,), most_batches=count))
        made.append(runs.point(runs.request(other), "planned homes", usual))
    for weights, kv in itertools.product((100, 75, 40, 20, 0), (100, 50, 0)):
        if plan.batch.size * kv % 100 or not keeps_to_limits(asked, plan, weights, kv):
            continue
        shares = (weights, 100 - weights, kv, 100 - kv, 100, 0)
        placed = replace(
            base, plan=None, prompt_len=None, percent=shares, cpu_cache_compute=kv < 100
        )
        homes = f"{weights} % weights and {kv} % KV on the accelerator"
        made.append(runs.point(placed, homes, usual))
    points = {planned.name: planned}
    for point in made:
        points.setdefault(point.name, point)
    return Case(name, planned, plan.tokens_per_s, list(points.values()))


def keeps_to_limits(asked: InferenceRequest, plan: Plan, weights: int, kv: int) -> bool:
    """Whether such percentages on the accelerator keep to the limits that the plan kept to.

    What the plan needs beside weights and KV is taken for what the others need.
    """
    model, gpu, host = asked.model, plan.gpu_bytes, sum(plan.node_bytes.values())
    groups = opt_groups(
        layers=model.layers, hidden=model.hidden, vocab=model.vocab, positions=model.positions
    )
    whole = realised_weights(groups, home_shares(weights, 100 - weights, None))
    of_weights = sum(row.realised_percent for row in whole if row.home == ACCELERATOR)
    for kind, percent in (("weights", of_weights), ("kv", kv)):
        parts = [home for home in plan.homes if home.kind == kind]
        wanted = round(sum(home.bytes for home in parts) * percent / 100)
        more = wanted - sum(home.bytes for home in parts if home.where == "gpu")
        gpu, host = gpu + more, host - more
    room = asked.machine.gpus[0].memory_bytes
    return room is not None and gpu <= room and host <= asked.limits["ldram"]


def _other_batches(asked: InferenceRequest, plan: Plan) -> set[tuple[int, int]]:
    """GPU batches with all, half and a quarter of the number of them that fits."""
    found = set()
    for batch in _FLEXGEN_BATCHES:
        executor = FlexGen(replace(asked, gpu_batches=(batch,)))
        best = executor.search(executor.hardware())
        if best is not None:
            count = best.choice.choice.batches
            found |= {(batch, max(1, count // part)) for part in (1, 2, 4)}
    return found - {(plan.batch.size, plan.batch.count)}
