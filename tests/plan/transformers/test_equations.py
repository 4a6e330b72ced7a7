"""Plans for transformers against the equations, random placements, and their own replay."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.copied_states import CopiedStates
from cxl_offload.plan.decoding.engine import OWN
from cxl_offload.plan.decoding.phases import Phases, phases_of_block
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.transformers.bound import closer_seconds, least_seconds
from cxl_offload.plan.transformers.homes import block_of, whole_layers, whole_parts
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout, most_batches
from cxl_offload.plan.transformers.plan import Transformers
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.plan.transformers.search import Wish
from cxl_offload.plan.transformers.shares import KV, ON_CPU, STREAMED, Fixed
from cxl_offload.plan.transformers.states import copied_states

from .requests import MODELS, all_layouts, request


@pytest.mark.parametrize("model", MODELS)
def test_program_takes_as_long_as_the_equations(model: str) -> None:
    executor = Transformers(request(model))
    job, hardware = executor.job, executor.hardware()
    draw = random.Random(model)
    every = all_layouts(job, hardware)
    compared, states = 0, set()
    for layout in draw.sample(every, min(40, len(every))):
        most, fewest = most_batches(job, hardware, layout), layout.fewest_batches
        if most < fewest:
            continue
        count = draw.randint(fewest, most)
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
            activations_gpu=float(layout.states == "gpu"),
            weights_cpu=spread(layout.on_cpu, ON_CPU),
            cpu_shares=found.of.get(ON_CPU),
            params_cpu=sum(job.kinds[kind].met for kind in layout.on_cpu),
            cpu_read_share=layout.cpu_read_share(job, layout.rows),
            unread=layout.unread_bytes(job, layout.rows),
            states=states_of(job, layout, count, found.of.get(STATES)),
        )
        phases = phases_of_block(job, hardware, block)
        assert found.seconds * count == pytest.approx(phases.total_s, rel=1e-5)
        compared += 1
        states.add(layout.states)
        fixed = Fixed(resident=whole_layers(job, found.resident) / job.layers)
        program = SharesProgram(
            job, hardware, layout, batches=(count, count), unit_s=10.0, fixed=fixed
        )
        found = program.solve()
        bound = least_seconds(job, hardware, layout, most)
        bound = max(bound, closer_seconds(job, hardware, layout, (fewest, most)))
        assert found is None or bound <= found.seconds / layout.rows * (1 + 1e-9)
    assert compared >= 5
    assert states == {"gpu", "host"}


def states_of(
    job: DecoderJob, layout: Layout, count: int, shares: Sequence[float] | None
) -> CopiedStates | None:
    """What so many batches copy; None where their hidden states are on the GPU."""
    if layout.states == "gpu":
        return None
    assert shares is not None
    return copied_states(job, layout, count * layout.rows, shares)


def random_block(
    job: DecoderJob, hardware: Hardware, layout: Layout, draw: random.Random
) -> tuple[Block, float]:
    """Anything that fits, and its tokens/s; 0 where it does not."""
    fewest = layout.fewest_batches
    count = draw.randint(fewest, max(fewest, most_batches(job, hardware, layout)))
    parts = {
        name: whole_parts(shares)
        for name in (STREAMED, ON_CPU, KV, STATES)
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
        STATES: layout.state_bytes(job, count * layout.rows),
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
        activations_gpu=float(layout.states == "gpu"),
        weights_cpu=placed[ON_CPU],
        cpu_shares=shares[ON_CPU] if nbytes[ON_CPU] else None,
        params_cpu=sum(job.kinds[kind].met for kind in layout.on_cpu),
        cpu_read_share=layout.cpu_read_share(job, layout.rows),
        unread=layout.unread_bytes(job, layout.rows),
        states=states_of(job, layout, count, shares[STATES]),
    )
    fits = fits and gpu <= hardware.gpu_usable_bytes
    return block, phases_of_block(job, hardware, block).tokens_per_s if fits else 0.0


@pytest.mark.parametrize("model", ["opt-6.7b", "llama-65b", "mixtral-8x7b"])
def test_no_random_placement_is_faster_than_the_plan(model: str) -> None:
    executor = Transformers(request(model, limits={"ldram": 64 << 30}))
    job, hardware = executor.job, executor.hardware()
    best = executor.search(hardware)
    assert best is not None
    draw = random.Random(model)
    every = all_layouts(job, hardware)
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
            executor.job,
            found.hardware,
            block_of(executor.job, found.hardware, found.choice.homes),
        )
        assert again == phases
        for have, node in zip(found.host, found.hardware.nodes, strict=True):
            assert have <= node.usable_bytes


def test_cache_in_two_places_is_charged_for_both_and_for_joining_them() -> None:
    """By hand, against the equations; the GPU writes and reads its part as float32."""
    executor = Transformers(request("llama-65b", "gh200"))
    job, hardware = executor.job, executor.hardware()
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


def test_replay_agrees_with_the_equations() -> None:
    """They differ only where copies and attention want the same node for a part of a layer.

    With hidden states on the GPU; ``test_states_on_host`` asks for those on the host.
    """
    differences, wish = [], Wish(homes={STATES: "gpu"})
    for machine in ("epyc9354-cxl-a", "gh200", "xeon8470-cxl-b", "zen4-2-mi300a"):
        for model in ("opt-30b", "opt-66b", "llama-3-8b", "llama-65b"):
            executor = Transformers(request(model, machine))
            found = executor._best(executor.hardware(), wish=wish)
            assert found is not None
            equations = executor.equation_seconds(found)
            replayed = executor.replayed_seconds(found, simulated_seconds)
            differences += [replayed[phase] / equations[phase] - 1 for phase in equations]
    assert statistics.quantiles(map(abs, differences), n=10)[-1] < 0.1
    assert max(differences) < 0.3
    assert min(differences) > -0.05


@pytest.mark.parametrize("kept", KV_TYPES)
def test_replay_of_a_smaller_cache_agrees_with_the_equations(kept: str) -> None:
    executor = Transformers(request(), kept)
    found = executor.search(executor.hardware())
    assert found is not None
    equations = executor.equation_seconds(found)
    replayed = executor.replayed_seconds(found, simulated_seconds)
    for phase, seconds in equations.items():
        assert replayed[phase] == pytest.approx(seconds, rel=0.1)
