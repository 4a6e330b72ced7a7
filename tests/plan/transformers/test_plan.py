"""Plans for transformers: what runs where, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.memory.policy import Weighted, parse_policy
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.transformers import layout as layout_room
from cxl_offload.plan.transformers.job import decoder_job
from cxl_offload.plan.transformers.layout import layouts
from cxl_offload.plan.transformers.on_gpu import is_shared, parse_shared
from cxl_offload.plan.transformers.plan import Transformers, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.sim import Engines, Trace
from cxl_offload.topology import Machine, load_machine, machine_names

from .requests import MODELS, request


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
        if is_shared(plan.policies[kind]) or kind == STATES:  # those that layers compute
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


@pytest.mark.sampled(7)
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
    job, hardware = executor.job, executor.hardware()
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


@pytest.mark.sampled(8)
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
