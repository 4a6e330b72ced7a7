"""No plan beats what the machine physically allows, and more of anything is never slower.

The bounds are worked out from the plan and the machine file alone: arithmetic over peaks, bytes
over the bandwidths that they must cross.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.plan.equations.sockets import Crossing, Socket
from cxl_offload.plan.executor import Executor
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.plan import DeepSpeed, TrainingRequest
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.plan.vllm.plan import Vllm, VllmRequest
from cxl_offload.topology import Machine, load_machine

MACHINES = ("epyc9354-cxl-a", "spr3-h100", "gh200")
LENGTHS = ((32, 8), (512, 32), (1000, 400))


def flexgen(model: str, machine: str, engine: str = "own", **extra: Any) -> FlexGen:
    prompt, generated = extra.pop("lengths", (512, 32))
    return FlexGen(
        InferenceRequest(
            model=load_model(model),
            machine=load_machine(machine),
            prompt=prompt,
            generated=generated,
            model_name=model,
            engine="own" if engine == "own" else "stock",
            gpu_batches=(4, 64),
            most_batches=8,
            replay=None,
            prices=False,
            **extra,
        )
    )


def stock(model: str, machine: str, **extra: Any) -> FlexGen:
    return flexgen(model, machine, "stock", **extra)


def vllm(model: str, machine: str, **extra: Any) -> Vllm:
    prompt, generated = extra.pop("lengths", (512, 32))
    return Vllm(
        VllmRequest(
            model=load_model(model),
            machine=load_machine(machine),
            prompt=prompt,
            generated=generated,
            model_name=model,
            replay=None,
            prices=False,
            **extra,
        )
    )


def transformers(model: str, machine: str, **extra: Any) -> Transformers:
    prompt, generated = extra.pop("lengths", (512, 32))
    return Transformers(
        TransformersRequest(
            model=load_model(model),
            machine=load_machine(machine),
            prompt=prompt,
            generated=generated,
            model_name=model,
            replay=None,
            prices=False,
            **extra,
        )
    )


def deepspeed(model: str, machine: str, **extra: Any) -> DeepSpeed:
    extra.pop("lengths", None)
    return DeepSpeed(
        TrainingRequest(
            model=load_model(model),
            machine=load_machine(machine),
            batch=8,
            tokens=512,
            optimizer_bytes_per_s=1e11,
            replay=None,
            prices=False,
            **extra,
        )
    )


CASES: list[tuple[Callable[..., Executor[Any]], str]] = [
    (flexgen, "opt-6.7b"),
    (flexgen, "opt-66b"),
    (stock, "opt-30b"),
    (vllm, "llama-3-8b"),
    (vllm, "qwen2-7b"),
    (vllm, "llama-3-70b"),
    (transformers, "opt-6.7b"),
    (transformers, "llama-65b"),
    (transformers, "llama-3-70b"),
    (transformers, "mixtral-8x7b"),
    (deepspeed, "gpt2-xl"),
    (deepspeed, "opt-6.7b"),
]


def node_rate(machine: Machine, number: int) -> float:
    """The most that is known to come out of a node; endless where nothing is."""
    rates = [a.read_bandwidth_bytes_per_s for a in machine.accesses if a.target == number]
    rates += [p.h2d_bandwidth_bytes_per_s for p in machine.dma_paths if p.node == number]
    return max((rate for rate in rates if rate is not None), default=float("inf"))


def streamed(plan: Plan) -> Counter[str]:
    """Bytes of the weights that every pass over the layers needs, by home."""
    found: Counter[str] = Counter()
    for home in plan.homes:
        read = home.kind in ("weights", "attention", "mlp", "experts", "head")
        if read and home.kind not in plan.on_cpu:
            found[home.where] += home.bytes
    return found


def least_seconds_per_token(plan: Plan, machine: Machine) -> float:
    """Of one generated (or trained) token, by arithmetic and by the bytes of the plan's homes."""
    model, gpu = load_model(plan.model), machine.gpus[0]
    peak, batch = gpu.peak_flops_per_s or 1, plan.batch
    if plan.kind == "training":
        return 3 * model.forward_flops(tokens=1, context=batch.tokens / 2) / peak
    flops = model.forward_flops(tokens=batch.prompt, context=batch.prompt / 2)
    each = model.forward_flops(tokens=1, context=batch.prompt + batch.tokens / 2)
    arithmetic = (flops / batch.tokens + each) / peak
    rows = batch.size * batch.count
    weights = streamed(plan)
    off_gpu = sum(nbytes for where, nbytes in weights.items() if where != "gpu")
    link = gpu.link.h2d_bandwidth_bytes_per_s if gpu.link else None
    steps = (batch.tokens - 1) / batch.tokens / (rows + (plan.executor == "vllm"))
    moved = [off_gpu / (link or float("inf"))]
    if machine.drives:
        drive = machine.drives[0].read_bandwidth_bytes_per_s
        moved.append(weights.get("nvme", 0) / (drive or float("inf")))
    for node in machine.nodes:
        tier = machine.tier_of(node.id)
        if tier is not None and len(tier.nodes) == 1:
            moved.append(weights.get(tier.name, 0) / node_rate(machine, node.id))
    return max(arithmetic, max(moved) * steps)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_plan_beats_a_physical_bound(machine: str) -> None:
    made = 0
    for build, model in CASES:
        for lengths in LENGTHS[: 1 if build is deepspeed else 3]:
            try:
                plan = make_plan(build(model, machine, lengths=lengths))
            except MemoryError:
                continue
            least = least_seconds_per_token(plan, load_machine(machine))
            # Policies of transformers are whole percents, its speed is that of the shares before.
            slack = 0.01 if plan.executor == "transformers" else 1e-9
            assert 1 / plan.tokens_per_s >= least * (1 - slack), (model, lengths, plan.executor)
            made += 1
    assert made >= 8


@pytest.mark.parametrize("machine", ["xeon8470-cxl-b", "xeon8468", "emr-3"])
def test_no_plan_of_cpus_beats_their_memory(machine: str) -> None:
    there = load_machine(machine)
    for model in ("opt-13b", "llama-3-8b", "mixtral-8x7b"):
        for lengths in LENGTHS:
            executor = transformers(model, machine, lengths=lengths)
            plan = make_plan(executor)
            read = streamed(plan)
            seconds = max(
                (read.get(tier.name, 0) + plan.of("kv").get(tier.name, 0) / 2)
                / node_rate(there, tier.nodes[0])
                for tier in there.tiers
                if len(tier.nodes) == 1
            )
            steps = (lengths[1] - 1) / lengths[1] / plan.batch.size
            assert 1 / plan.tokens_per_s >= seconds * steps * (1 - 0.01), (model, lengths)


def seconds_of_two_sockets(plan: Plan, near: float, link: float) -> float:
    """Of one pass: nodes give ``near`` bytes a second, and ``link`` come from the other one.

    Of weights in one copy each of the sockets that compute reads half on either node; of copies
    every node gives half.
    """
    read, crossed = Counter[str](), Counter[str]()
    for kind in ("attention", "mlp", "head"):
        is_copied = plan.policies[kind].startswith("replicate:")
        for where, nbytes in plan.of(kind).items():
            read[where] += nbytes // 2 if is_copied else nbytes
            crossed[where] += 0 if is_copied or plan.copies is None else nbytes // 2
    for where, nbytes in plan.of("kv").items():
        read[where] += nbytes // 2  # the mean length is more than half of the longest
    nodes = [read[where] / near for where in ("ldram", "rdram")]
    return max(*nodes, *(crossed[where] / link for where in ("ldram", "rdram")))


@pytest.mark.parametrize("machine", ["xeon8470-cxl-b", "spr-2", "xeon6430"])
def test_no_plan_of_two_sockets_beats_its_nodes_or_the_link(machine: str) -> None:
    there, used = load_machine(machine), []
    near, across = node_rate(there, 0), there.access(0, 1)
    link = (across and across.read_bandwidth_bytes_per_s) or near
    for model in ("opt-13b", "llama-65b", "mixtral-8x7b"):
        for lengths, rows in (((64, 200), 1), ((64, 200), 8), (LENGTHS[1], None)):
            asked = {"lengths": lengths, "sockets": 2, "most_batches": rows}
            plan = make_plan(transformers(model, machine, **asked))
            seconds = seconds_of_two_sockets(plan, near, link)
            steps = (lengths[1] - 1) / lengths[1] / plan.batch.size
            assert 1 / plan.tokens_per_s >= seconds * steps * (1 - 0.01), (model, lengths, rows)
            assert plan.copies is not None
            used.append(plan.copies.used)
    assert {True, False} == set(used)


def more(hardware: Hardware, draw: random.Random) -> tuple[str, Hardware]:
    """Hardware with more of one thing, by up to a half."""
    factor = 1 + draw.random() / 2
    field = draw.choice(
        ["usable_bytes", "read_bytes_per_s", "copy_bytes_per_s", "gpu", "link_bytes_per_s", "peak"]
        if hardware.has_gpu
        else ["usable_bytes", "read_bytes_per_s", "cores", *["links"] * bool(hardware.sockets)]
    )
    if field == "links":
        sockets = tuple(faster_across(socket, factor) for socket in hardware.sockets)
        return field, replace(hardware, sockets=sockets)
    if field == "cores":
        return field, replace(hardware, cores=hardware.cores + 1)
    if field == "gpu":
        room = hardware.gpu_usable_bytes * factor
        memory = hardware.gpu_memory_bytes * factor
        return field, replace(hardware, gpu_usable_bytes=room, gpu_memory_bytes=memory)
    if field == "peak":
        gpu = replace(hardware.gpu, flops_per_s=hardware.gpu.flops_per_s * factor)
        return field, replace(hardware, gpu=gpu)
    if field == "link_bytes_per_s":
        return field, replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s * factor)
    nodes = list(hardware.nodes)
    at = draw.randrange(len(nodes))
    nodes[at] = replace(nodes[at], **{field: getattr(nodes[at], field) * factor})
    return f"{field} of {nodes[at].name}", replace(hardware, nodes=tuple(nodes))


def faster_across(socket: Socket, factor: float) -> Socket:
    crossings = (
        Crossing(
            {node: rate * factor for node, rate in crossing.rates.items()},
            crossing.link_bytes_per_s * factor,
        )
        for crossing in socket.crossings
    )
    return replace(socket, crossings=tuple(crossings))


@pytest.mark.parametrize("rows", [1, 8, 64, None])
@pytest.mark.parametrize("machine", ["xeon8470-cxl-b", "spr-2", "xeon6430", "zen4-2-mi300a"])
def test_more_of_anything_is_never_slower_on_two_sockets(machine: str, rows: int | None) -> None:
    """With room for copies, and with little room; what is planned passes from one to the other."""
    tier = load_machine(machine).tiers[0].name
    for seed, limit in enumerate((None, 70, 120)):
        limits = {} if limit is None else {tier: limit << 30}
        asked = {"lengths": (64, 64), "sockets": 2, "most_batches": rows, "limits": limits}
        check_monotone(transformers("llama-65b", machine, **asked), seed)


def test_more_of_anything_is_never_slower_on_cpus() -> None:
    for case, machine in enumerate(("xeon8470-cxl-b", "emr-1", "zen4-1")):
        check_monotone(transformers("opt-30b", machine, lengths=(256, 16)), case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_more_of_anything_is_never_slower(case: int) -> None:
    build, model = CASES[case]
    check_monotone(build(model, "epyc9354-cxl-a", lengths=(256, 16)), case)


@pytest.mark.parametrize("model", ["galactica-30b", "llama-3-70b"])
def test_whole_percents_cost_few_sequences_where_memory_is_full(model: str) -> None:
    """A block that does not fit in whole percents is made a little smaller, not half as large."""
    machine = "epyc9354-cxl-a"
    executor = transformers(model, machine, lengths=(1000, 400))
    hardware = executor.hardware()
    best = executor.search(hardware)
    assert best is not None
    for factor in (1.05, 1.2, 1.45):
        for at in range(len(hardware.nodes)):
            nodes = list(hardware.nodes)
            rate = nodes[at].copy_bytes_per_s * factor
            nodes[at] = replace(nodes[at], copy_bytes_per_s=rate)
            again = executor.search(replace(hardware, nodes=tuple(nodes)))
            assert again is not None
            assert again.tokens_per_s >= best.tokens_per_s * 0.98, (factor, at)


def check_monotone(executor: Executor[Any], seed: int) -> None:
    draw = random.Random(seed)
    hardware = executor.hardware()
    best = executor.search(hardware)
    if best is None:
        return
    for _ in range(6):
        what, larger = more(hardware, draw)
        again = executor.search(larger)
        assert again is not None, what
        assert again.tokens_per_s >= best.tokens_per_s * (1 - 3e-6), what
