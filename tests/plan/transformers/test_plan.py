"""Plans for transformers: what runs where, against the equations and against random placements."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.memory.policy import Weighted, parse_policy
from cxl_offload.plan.decoding.engine import OWN
from cxl_offload.plan.decoding.phases import Block, Phases, phases_of_block
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.transformers import layout as layout_room
from cxl_offload.plan.transformers.homes import block_of, percents, whole_layers
from cxl_offload.plan.transformers.job import DecoderJob, decoder_job
from cxl_offload.plan.transformers.layout import Layout, layouts, most_batches
from cxl_offload.plan.transformers.on_gpu import is_shared, parse_shared
from cxl_offload.plan.transformers.plan import (
    Transformers,
    TransformersRequest,
    plan_transformers,
)
from cxl_offload.plan.transformers.program import KV, ON_CPU, STREAMED, Fixed, SharesProgram
from cxl_offload.plan.transformers.search import least_seconds
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.sim import Engines, Trace
from cxl_offload.topology import Machine, load_machine, machine_names

MODELS = ("opt-6.7b", "llama-65b", "llama-3-70b", "mixtral-8x7b", "mistral-7b", "gpt2-xl")


def request(model: str = "llama-65b", machine: str = "epyc9354-cxl-a", **extra: Any) -> Any:
    given: dict[str, Any] = {"prompt": 512, "generated": 32, "model_name": model, **extra}
    return TransformersRequest(
        model=load_model(model), machine=load_machine(machine), replay=None, prices=False, **given
    )


def job_of(executor: Transformers) -> DecoderJob:
    return executor._job


def test_llama_65b_keeps_its_cache_on_the_host_and_is_faster_for_it() -> None:
    plan = plan_transformers(request())
    asked = request()
    served = plan_vllm(
        VllmRequest(
            model=asked.model,
            machine=asked.machine,
            prompt=512,
            generated=32,
            model_name="llama-65b",
            replay=None,
            prices=False,
        )
    )
    assert plan.policies["kv"] != "gpu"
    assert "gpu" not in plan.of("kv")
    assert plan.tokens_per_s > 4 * served.tokens_per_s
    assert plan_transformers(replace(asked, cxl_margin=0.01)).cxl.used


def test_hidden_states_of_all_rows_count_in_the_room_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control has none of them there; docs/plan.md says what that would bring at most."""
    executor = Transformers(request("mixtral-8x7b"))
    hardware, job = executor.hardware(), job_of(executor)
    found = executor.search(hardware)
    assert found is not None
    homes, rows = found.choice.homes, found.sequences
    assert homes.batches > 1
    held = job.inputs_bytes(rows) + job.between_bytes(rows)
    assert held > 8 << 30
    assert homes.layout.gpu_bytes(job) + held <= found.gpu_bytes <= hardware.gpu_usable_bytes
    monkeypatch.setattr(Layout, "held_bytes", lambda layout, job, rows: rows)
    without = executor.search(hardware)
    assert without is not None
    assert without.sequences > 2 * found.sequences
    assert 1.5 < without.tokens_per_s / found.tokens_per_s < 1.6


def test_plan_has_a_policy_for_every_kind_that_its_bytes_follow() -> None:
    machine = load_machine("epyc9354-cxl-a")
    plan = plan_transformers(request())
    for kind, text in plan.policies.items():
        homes = dict(plan.of(kind))
        if text == "gpu":
            assert set(homes) == {"gpu"}
            continue
        if is_shared(text):
            text = parse_shared(text)[1]
            assert homes.pop("gpu") > 0
        policy = parse_policy(text, machine)
        tiers = [machine.tier_of(node) for node in getattr(policy, "nodes", ())]
        assert {tier.name for tier in tiers if tier is not None} == set(homes)
        if isinstance(policy, Weighted):
            total = sum(policy.weights.values())
            for (node, weight), nbytes in zip(policy.weights.items(), homes.values(), strict=True):
                assert nbytes / sum(homes.values()) == pytest.approx(weight / total, abs=0.01), node


def test_plan_file_keeps_the_policies() -> None:
    plan = plan_transformers(request("mixtral-8x7b"))
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan
    assert set(plan.policies) >= {"kv", "attention", "experts", "head", "embedding"}


@pytest.mark.parametrize("model", MODELS)
def test_program_takes_as_long_as_the_equations(model: str) -> None:
    executor = Transformers(request(model))
    job, hardware = job_of(executor), executor.hardware()
    draw = random.Random(model)
    every = list(layouts(job, hardware))
    compared = 0
    for layout in draw.sample(every, min(25, len(every))):
        most = most_batches(job, hardware, layout)
        if not most:
            continue
        count = draw.randint(1, most)
        program = SharesProgram(job, hardware, layout, batches=(count, count), unit_s=10.0)
        found = program.solve()
        if found is None:
            continue
        none = (0.0,) * len(hardware.nodes)

        def spread(kinds: frozenset[str], name: str, of: Any = found, none: Any = none) -> Any:
            total = sum(job.kinds[kind].bytes for kind in kinds)
            if name == STREAMED:
                total -= of.resident * sum(job.kinds[kind].bytes for kind in kinds - {"head"})
            return tuple(total * share for share in of.of.get(name, none))

        block = Block(
            sequences=count * layout.rows,
            batches=count,
            gpu_batch=layout.rows,
            weights_drive=0,
            weights_host=spread(layout.streamed, STREAMED),
            weight_shares=found.of.get(STREAMED),
            kv_drive=0,
            kv_host=tuple(each * (1 - found.kv_gpu) for each in found.of.get(KV, none)),
            kv_gpu=found.kv_gpu,
            kv_shares=found.of.get(KV),
            activations_gpu=1.0,
            weights_cpu=spread(layout.on_cpu, ON_CPU),
            cpu_shares=found.of.get(ON_CPU),
            params_cpu=sum(job.kinds[kind].met for kind in layout.on_cpu),
            cpu_read_share=layout.cpu_read_share(job, layout.rows),
            unread=layout.unread_bytes(job, layout.rows),
        )
        phases = phases_of_block(job, hardware, block)
        assert found.seconds * count == pytest.approx(phases.total_s, rel=1e-5)
        compared += 1
        fixed = Fixed(resident=whole_layers(job, found.resident) / job.layers)
        program = SharesProgram(
            job, hardware, layout, batches=(count, count), unit_s=10.0, fixed=fixed
        )
        found = program.solve()
        bound = least_seconds(job, hardware, layout, most)
        assert found is None or bound <= found.seconds / layout.rows * (1 + 1e-9)
    assert compared >= 5


def random_block(
    job: DecoderJob, hardware: Hardware, layout: Layout, draw: random.Random
) -> tuple[Block, float]:
    """Anything that fits, and its tokens/s; 0 where it does not."""
    count = draw.randint(1, max(1, most_batches(job, hardware, layout)))
    parts = {
        name: percents(shares)
        for name in (STREAMED, ON_CPU, KV)
        for raw in [[draw.random() ** 2 for _ in hardware.nodes]]
        for shares in [[each / sum(raw) for each in raw]]
    }
    there = {"gpu": 1.0, "both": draw.uniform(0.01, 0.99), "host": 0.0}[layout.kv]
    kv = count * layout.rows * job.kv_sequence_bytes
    resident = draw.choice((0.0, draw.random())) * layout.layered_bytes(job)
    nbytes = {
        STREAMED: layout.bytes_of(job, layout.streamed) - resident,
        ON_CPU: layout.bytes_of(job, layout.on_cpu),
        KV: kv * (1 - there),
    }
    placed = {name: [nbytes[name] * part / 100 for part in parts[name]] for name in parts}
    used = [sum(column) for column in zip(*placed.values(), strict=True)]
    fits = all(have <= n.usable_bytes for have, n in zip(used, hardware.nodes, strict=True))
    gpu = float(layout.gpu_bytes(job) + count * layout.held_bytes(job, layout.rows))
    gpu += kv * there + resident
    shares = {name: [part / 100 for part in each] for name, each in parts.items()}
    block = Block(
        sequences=count * layout.rows,
        batches=count,
        gpu_batch=layout.rows,
        weights_drive=0,
        weights_host=placed[STREAMED],
        weight_shares=shares[STREAMED] if nbytes[STREAMED] else None,
        kv_drive=0,
        kv_host=[each * (1 - there) for each in shares[KV]],
        kv_gpu=there,
        kv_shares=None if layout.kv == "gpu" else shares[KV],
        activations_gpu=1.0,
        weights_cpu=placed[ON_CPU],
        cpu_shares=shares[ON_CPU] if nbytes[ON_CPU] else None,
        params_cpu=sum(job.kinds[kind].met for kind in layout.on_cpu),
        cpu_read_share=layout.cpu_read_share(job, layout.rows),
        unread=layout.unread_bytes(job, layout.rows),
    )
    fits = fits and gpu <= hardware.gpu_usable_bytes
    return block, phases_of_block(job, hardware, block).tokens_per_s if fits else 0.0


@pytest.mark.parametrize("model", ["opt-6.7b", "llama-65b", "mixtral-8x7b"])
def test_no_random_placement_is_faster_than_the_plan(model: str) -> None:
    executor = Transformers(request(model, limits={"ldram": 64 << 30}))
    job, hardware = job_of(executor), executor.hardware()
    best = executor.search(hardware)
    assert best is not None
    draw = random.Random(model)
    every = list(layouts(job, hardware))
    rates = [random_block(job, hardware, draw.choice(every), draw)[1] for _ in range(3000)]
    assert max(rates) <= best.tokens_per_s * (1 + 1e-9)
    assert max(rates) > best.tokens_per_s / 4  # the draws are not all poor


def test_percents_hold_what_the_shares_promised() -> None:
    for model in MODELS:
        executor = Transformers(request(model))
        found = executor.search(executor.hardware())
        assert found is not None
        phases = found.choice.phases
        assert phases.tokens_per_s == pytest.approx(found.tokens_per_s, rel=0.02)
        again = phases_of_block(
            job_of(executor),
            found.hardware,
            block_of(job_of(executor), found.hardware, found.choice.homes),
        )
        assert again == phases
        for have, node in zip(found.host, found.hardware.nodes, strict=True):
            assert have <= node.usable_bytes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("machine", ["epyc9354-cxl-a", "spr3-h100", "gh200"])
def test_plan_for_a_gpu_offers_what_the_integration_carries_out(model: str, machine: str) -> None:
    """Whole kinds, or shares of the layers of what is streamed; the command computes there."""
    plan = plan_transformers(request(model, machine))
    assert plan.runs
    assert plan.accelerator == "cuda"
    assert plan.on_cpu == ()
    for kind, text in plan.policies.items():
        if is_shared(text):
            share, rest = parse_shared(text)
            assert kind not in ("activations", "embedding", "head")
            homes, layers = plan.of(kind), load_model(model).layers
            whole = 100 if kind == "kv" else layers
            assert share * whole == pytest.approx(round(share * whole), abs=1e-3)
            assert homes["gpu"] / sum(homes.values()) == pytest.approx(share, abs=1e-6)
            text = rest
        if text != "gpu":
            parse_policy(text, load_machine(machine))
    if plan.policies["kv"] == "gpu":
        assert plan.batch.count == 1


def test_layers_stay_on_the_gpu_as_room_allows() -> None:
    shares = []
    for usable in (0.5, 0.7, 0.9):
        plan = plan_transformers(
            request("llama-65b", "spr3-h100", gpu_usable=usable, batches=(16,))
        )
        homes = [plan.of(kind) for kind in ("attention", "mlp")]
        shares.append(sum(home.get("gpu", 0) for home in homes))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_cache_in_two_places_is_charged_for_both_and_for_joining_them() -> None:
    """By hand, against the equations; the GPU writes and reads its part as float32."""
    executor = Transformers(request("llama-65b", "gh200"))
    job, hardware = job_of(executor), executor.hardware()
    found = executor.search(hardware)
    assert found is not None
    block = executor.block(found)
    share = block.kv_gpu
    assert 0 < share < 1
    host, there, whole = (
        work_seconds(phases_of_block(job, hardware, block_with_kv(block, part)))
        for part in (0.0, share, 1.0)
    )
    kv = block.sequences * job.mean_kv_tokens * job.kv_bytes_per_token
    rate = hardware.gpu.memory_bytes_per_s
    assert whole - host == pytest.approx(kv / rate - cpu_seconds(kv, hardware, block))
    calls = block.batches * job.layers * job.engine.joined_calls * job.engine.call_s
    read = share * kv * (2 + 8) / 2 / rate
    assert there - host == pytest.approx(calls + read - share * cpu_seconds(kv, hardware, block))


MEMORY = "GPU work + CPU attention (memory)"


def work_seconds(phases: Phases) -> float:
    """Of the GPU and of attention that reads; where the GPU has all of the cache, of it alone."""
    terms = phases.decode_terms
    names = (MEMORY, "GPU work + CPU products", "GPU work")
    return next(terms[name] for name in names if name in terms)


def block_with_kv(block: Block, there: float) -> Block:
    """The same with another share of the cache on the GPU."""
    shares = block.kv_shares
    assert shares is not None
    return replace(block, kv_gpu=there, kv_host=[share * (1 - there) for share in shares])


def cpu_seconds(nbytes: float, hardware: Hardware, block: Block) -> float:
    """CPUs read what is striped as the cache is."""
    assert block.kv_shares is not None
    rates = [node.read_bytes_per_s for node in hardware.nodes]
    slowest = max(share / rate for share, rate in zip(block.kv_shares, rates, strict=True))
    return nbytes * slowest / OWN.attention_share


def test_cache_is_in_two_places_only_where_that_brings_a_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def best(machine: str, *homes: str) -> Any:
        monkeypatch.setattr(layout_room, "_KV_HOMES", homes)
        executor = Transformers(request("llama-65b", machine, tiers=("ldram",)))
        found = executor.search(executor.hardware())
        assert found is not None
        return found

    gains = {}
    for machine in ("epyc9354-cxl-a", "gh200"):
        one, two = best(machine, "gpu", "host"), best(machine, "both")
        chosen = best(machine, "gpu", "both", "host").choice.homes.layout.kv
        gains[machine] = two.tokens_per_s / one.tokens_per_s - 1
        assert (chosen == "both") is (gains[machine] > 0.01)
    assert gains["gh200"] > 0.01
    assert gains["epyc9354-cxl-a"] < 0.01


def test_cache_of_several_batches_on_the_gpu_is_one_that_layers_compute_parts_of() -> None:
    plan = plan_transformers(request("mistral-7b", "gh200"))
    assert plan.batch.count > 1
    assert set(plan.of("kv")) == {"gpu"}
    assert plan.policies["kv"] == "gpu:1,bind:ldram"


def test_layers_on_the_gpu_make_room_for_sequences_on_the_host() -> None:
    """Of the host alone, with all that is streamed on it, one batch less would be the most."""
    executor = Transformers(request("llama-65b", tiers=("ldram",), batches=(4,)))
    job, hardware = job_of(executor), executor.hardware()
    found = executor.search(hardware)
    assert found is not None
    homes = found.choice.homes
    assert homes.resident
    weights = homes.layout.host_bytes(job, hardware)
    kv = homes.rows * homes.batches * job.kv_sequence_bytes
    assert weights + kv > hardware.nodes[0].usable_bytes


def test_plan_without_the_gpu_has_no_accelerator() -> None:
    plan = plan_transformers(
        replace(request("opt-6.7b"), machine=with_gpu(load_machine("epyc9354-cxl-a"), "none"))
    )
    assert plan.accelerator is None
    assert "mlp" in plan.on_cpu


def test_what_does_not_fit_is_refused_with_what_there_is() -> None:
    lacks = r"weights alone need 32[0-9] GiB, 18[0-9] GiB are missing; usable are cxl .*, gpu "
    with pytest.raises(MemoryError, match=lacks):
        plan_transformers(request("opt-175b", tiers=("cxl",)))
    alone = {"tiers": ("ldram",), "limits": {"ldram": int(12.6 * 2**30)}}
    without_gpu = with_gpu(load_machine("epyc9354-cxl-a"), "none")
    with pytest.raises(MemoryError, match=r"of KV a sequence do not fit in any way; usable are"):
        plan_transformers(replace(request("opt-6.7b", **alone), machine=without_gpu))


def test_what_the_integration_does_not_place_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder"):
        plan_transformers(request("bert-base-uncased"))


@pytest.mark.parametrize("machine", machine_names())
def test_every_shipped_machine_is_planned_and_replayed(machine: str) -> None:
    asked = request("opt-6.7b", machine)
    seen: list[Trace] = []

    def replayed(trace: Trace, there: Machine, engines: Engines) -> Any:
        seen.append(trace)
        return simulated_seconds(trace, there, engines)

    plan = plan_transformers(replace(asked, replay=replayed))
    assert seen, "the replay was asked"
    assert not [note for note in plan.notes if "not replayed" in note]
    if not asked.machine.gpus:
        assert plan.runs
        assert plan.gpu_bytes == 0
        assert "gpu" not in plan.policies.values()
        assert [note for note in plan.notes if "CPUs compute" in note]


def test_replay_agrees_with_the_equations() -> None:
    """They differ only where copies and attention want the same node for a part of a layer."""
    differences = []
    for machine in ("epyc9354-cxl-a", "gh200", "xeon8470-cxl-b", "zen4-2-mi300a"):
        for model in ("opt-30b", "opt-66b", "llama-3-8b", "llama-65b"):
            executor = Transformers(request(model, machine))
            found = executor.search(executor.hardware())
            assert found is not None
            equations = executor.equation_seconds(found)
            replayed = executor.replayed_seconds(found, simulated_seconds)
            differences += [replayed[phase] / equations[phase] - 1 for phase in equations]
    assert statistics.quantiles(map(abs, differences), n=10)[-1] < 0.1
    assert max(differences) < 0.3
    assert min(differences) > -0.05


@pytest.mark.parametrize("machine", ["epyc9354-cxl-a", "emr-3", "xeon8470-cxl-b"])
@pytest.mark.parametrize("model", ["opt-66b", "llama-65b"])
def test_one_more_tier_never_makes_a_plan_impossible_or_much_slower(
    model: str, machine: str
) -> None:
    rates = []
    for tiers in (("ldram",), ("ldram", "rdram"), ("ldram", "rdram", "cxl")):
        try:
            rates.append(plan_transformers(request(model, machine, tiers=tiers)).tokens_per_s)
        except MemoryError:
            assert not rates, f"fits without {tiers[-1]}"
    assert rates
    for fewer, more in itertools.pairwise(rates):
        assert more >= 0.98 * fewer  # whole percents cost up to a hundredth


@pytest.mark.parametrize("kept", [None, *KV_TYPES])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_cache_has_the_bytes_of_its_type(kept: str | None, dim: int) -> None:
    model = replace(load_model("llama-3-8b"), head_dim=dim)
    job = decoder_job(model, prompt=100, generated=28, kv_dtype=kept)
    each = {None: 2 * dim, "int4": -(-dim // 64) * 36}.get(kept, dim)
    assert job.kv_sequence_bytes == 2 * model.layers * model.kv_heads * 128 * each
    assert job.kv_bytes_per_token == 2 * model.layers * model.kv_heads * each
    assert job.mean_kv_tokens == 114


def test_types_that_lose_precision_are_only_taken_where_they_are_allowed() -> None:
    machine = with_gpu(load_machine("epyc9354-cxl-a"), "none")
    asked = replace(request("opt-6.7b"), machine=machine)
    own = plan_transformers(asked)
    assert own.kv_dtype == ""
    small = plan_transformers(replace(asked, kv_dtypes=("int4",)))
    assert small.tokens_per_s > own.tokens_per_s
    assert small.kv_dtype == "int4"
    assert parse_plan(plan_text(small), file="plan.yaml") == small
    assert any("kept as int4, which loses precision" in note for note in small.notes)
    both = plan_transformers(replace(asked, kv_dtypes=("float8_e5m2", "int4", "int4")))
    assert both.tokens_per_s >= small.tokens_per_s


def test_smaller_cache_is_attended_to_by_cpus() -> None:
    job = decoder_job(load_model("opt-1.3b"), prompt=64, generated=8, kv_dtype="int4")
    hardware = Transformers(request("opt-1.3b")).hardware()
    assert {layout.kv for layout in layouts(job, hardware)} == {"host"}


def test_cache_of_a_type_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv dtype 'fp8': .* float8_e4m3fn .* or float8_e5m2"):
        request(kv_dtypes=("fp8",))
    with pytest.raises(ConfigError, match="kv dtype 'int3': it is one of float8_e4m3fn"):
        request(kv_dtypes=("int3",))


@pytest.mark.parametrize("kept", KV_TYPES)
def test_replay_of_a_smaller_cache_agrees_with_the_equations(kept: str) -> None:
    executor = Transformers(request(), kept)
    found = executor.search(executor.hardware())
    assert found is not None
    equations = executor.equation_seconds(found)
    replayed = executor.replayed_seconds(found, simulated_seconds)
    for phase, seconds in equations.items():
        assert replayed[phase] == pytest.approx(seconds, rel=0.1)
