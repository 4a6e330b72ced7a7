"""Plans for FlexGen, and the grid they are compared with.

GPU batch x batches x shares of weights and KV on the accelerator x threads. The accelerator is the
CPUs, planned for as a GPU on paper that has the rates that the profile measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.measured_regret import Case, Point, Setting, thread_counts, with_threads
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.request import planned_options
from cxl_offload.integrations.flexgen.shares import ACCELERATOR, home_shares, realised_weights
from cxl_offload.plan.flexgen.layout import opt_groups
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest, plan_inference
from cxl_offload.plan.gpu import MEMORY_SHARE, PREFILL_EFFICIENCY
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.topology import Gpu, Link, Machine

_NO_LIMIT = 1e15
"""Bytes/s of a link that nothing crosses: the CPUs' memory is the accelerator's."""

_BATCHES = (1, 4, 16, 64)


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
        memory_bandwidth_bytes_per_s=size / once / MEMORY_SHARE,
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
            prices=False,
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
        return Point(name, lambda: with_threads(threads, lambda: self._generated(request)))

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
    usual, one = thread_counts()[0], thread_counts()[-1]
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
    for batch in _BATCHES:
        executor = FlexGen(replace(asked, gpu_batches=(batch,)))
        best = executor.search(executor.hardware())
        if best is not None:
            count = best.choice.choice.batches
            found |= {(batch, max(1, count // part)) for part in (1, 2, 4)}
    return found - {(plan.batch.size, plan.batch.count)}
