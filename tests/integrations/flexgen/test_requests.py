"""Bad requests: one line that names what is wrong, and nothing was allocated or written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, TierLimit, parse_place, parse_tier, run
from cxl_offload.integrations.flexgen.options import parse_flags, request_from
from cxl_offload.integrations.flexgen.request import CPU_LINEAR
from cxl_offload.memory import Session
from cxl_offload.topology import Gpu

from .conftest import machine

KIB = 1 << 10

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "percentages above 100": ({"percent": (60, 60, 0, 100, 0, 100)}, "60 %.*60 %.*at most 100"),
    "a negative percentage": ({"percent": (-1, 50, 0, 100, 0, 100)}, "-1 %"),
    "not a number": ({"percent": (float("nan"), 50, 0, 100, 0, 100)}, "nan"),
    "five percentages": ({"percent": (0, 100, 0, 100, 0)}, "six numbers"),
    "activations in two places": ({"percent": (0, 100, 0, 100, 50, 50)}, "activations"),
    "activations on disk": ({"percent": (0, 100, 0, 100, 0, 0)}, "activations"),
    "weights realised as nothing": ({"percent": (0.3, 99.7, 0, 100, 0, 100)}, r"weights: 0\.3 %"),
    "KV realised as nothing": ({"percent": (0, 100, 4, 96, 0, 100)}, "--gpu-batch-size 25"),
    "a split part of nothing": (
        {"place": {"kv": "split:ldram=98,cxl=2"}},
        "KV cache: 2 % on cxl",
    ),
    "rows that do not match": ({"gpu_batch_size": 3}, "8 prompts.*3 rows"),
    "a batch of nothing": ({"gpu_batch_size": 0}, "--gpu-batch-size 0"),
    "no tokens": ({"gen_len": 0}, "--gen-len 0"),
    "more tokens than positions": ({"gen_len": 60}, "64 positions"),
    "a short cut": ({"cut_gen_len": 2}, "--cut-gen-len 2"),
    "a prompt too long": ({"prompt_len": 5}, "12 tokens"),
    "sparse attention": ({"attn_sparsity": 0.5}, "--attn-sparsity 0.5"),
    "a compressed split cache": (
        {"compress_cache": True, "percent": (0, 100, 50, 50, 0, 100)},
        "--compress-cache",
    ),
    "an unknown role": ({"place": {"gradients": "bind:0"}}, "gradients"),
    "an unknown tier": ({"place": {"kv": "bind:pmem"}}, "pmem"),
    "an unknown node": ({"place": {"kv": "bind:7"}}, "7"),
    "a weight of zero": ({"place": {"kv": "weighted:0=0,2=1"}}, "weight 0"),
    "a negative weight": ({"place": {"kv": "weighted:0=-1,2=1"}}, "-1"),
    "a weight that is no number": ({"place": {"kv": "weighted:0=x,2=1"}}, "'x'"),
    "a policy that is none": ({"place": {"kv": "somewhere"}}, "somewhere"),
    "a split that does not sum": ({"place": {"kv": "split:ldram=50,cxl=40"}}, "sum to 90"),
    "a split of workspace": ({"place": {"workspace": "split:ldram=50,cxl=50"}}, "only weights"),
    "a policy for nothing": (
        {"percent": (0, 100, 100, 0, 0, 100), "place": {"kv": "bind:cxl"}},
        "nothing would be placed",
    ),
    "an interleave that misses a node": (
        {"place": {"weights": "interleave:ldram,cxl"}},
        "node 2 empty.*@",
    ),
    "a node in two tiers": (
        {"tiers": (TierLimit("ldram", (0,)), TierLimit("cxl", (0,)))},
        "node 0 is already in tier ldram",
    ),
    "a tier on an absent node": ({"tiers": (TierLimit("cxl", (9,)),)}, "node 9"),
    "an unknown tier name": ({"tiers": (TierLimit("fast", (0,)),)}, "fast"),
    "an unknown accelerator": ({"accelerator": "tpu"}, "tpu"),
    "linear layers of the CPU with a GPU": (
        {"accelerator": "cuda", "cpu_linear": "half"},
        "--cpu-linear half: the GPU computes linear layers",
    ),
    "attention of the CPU with a GPU that computes it": (
        {"accelerator": "cuda", "cpu_attention": "workspace"},
        "--cpu-attention workspace: the GPU computes attention",
    ),
    "no such model": ({"model": "/nowhere/opt"}, "/nowhere/opt does not exist"),
    "a model nobody knows": ({"model": "gpt-7"}, "gpt-7"),
    "a model of another architecture": ({"model": "opt-350m"}, "architecture"),
    "a known model without weights": ({"model": "opt-1.3b"}, "nothing is downloaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_request_is_refused_in_one_line_before_anything_happens(
    name: str, request_tiny: FlexGenRun, session: Session, offload_dir: Path
) -> None:
    options, words = REFUSED[name]
    cached = offload_dir.parent / "weights"

    with pytest.raises(ConfigError, match=words) as refused:
        run(replace(request_tiny, path=str(cached), **options), session=session)

    assert "\n" not in str(refused.value)
    assert session.stats().asked_bytes.total == 0
    assert not cached.exists()


def test_cuda_without_a_device_is_refused(
    request_tiny: FlexGenRun, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(ConfigError, match="--accelerator host"):
        run(replace(request_tiny, accelerator="cuda"), session=session)

    assert session.stats().asked_bytes.total == 0


@pytest.mark.parametrize("linear", CPU_LINEAR)
@pytest.mark.parametrize("accelerator", ["cuda", "host"])
def test_ways_of_the_cpu_are_those_of_the_host(
    accelerator: Any, linear: Any, request_tiny: FlexGenRun
) -> None:
    """A default is never refused, and what the CPU does beside a GPU may be chosen."""
    asked = replace(request_tiny, accelerator=accelerator, cpu_linear=linear)
    for request in (asked, replace(asked, cpu_cache_compute=True, cpu_attention="workspace")):
        if accelerator == "cuda" and linear != "fastest":
            with pytest.raises(ConfigError, match=f"--cpu-linear {linear}"):
                request.check()
        else:
            request.check()


def test_accelerator_of_the_machine_that_is_too_small_is_refused(
    request_tiny: FlexGenRun,
) -> None:
    gpu = Gpu("tiny", memory_bytes=500 * KIB)
    session = Session.simulated(replace(machine(), gpus=(gpu,)))

    with pytest.raises(MemoryError, match=r"accelerator tiny of two-sockets.*500 KiB"):
        run(replace(request_tiny, percent=(100, 0, 100, 0, 100, 0)), session=session)
    run(request_tiny, session=session)  # what it must hold of this fits

    assert session.stats().asked_bytes.current == 0


def test_more_than_the_memory_of_this_machine_is_refused(
    request_tiny: FlexGenRun, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated nodes are backed by it, and the OOM killer would choose a victim."""
    real = Session.linux(session.machine)
    nothing = SimpleNamespace(process_headroom=lambda: SimpleNamespace(free_bytes=100 * KIB))
    monkeypatch.setattr(Session, "linux", lambda _: SimpleNamespace(kernel=nothing))

    with pytest.raises(MemoryError, match=r"host tiers.*100 KiB free"):
        run(request_tiny, session=session)

    assert real.kernel.process_headroom().free_bytes > 100 * KIB
    assert session.stats().asked_bytes.total == 0


@pytest.mark.parametrize(
    ("place", "tiers", "words"),
    [
        ({"weights": "bind:cxl"}, ("cxl=2:300KiB",), r"tier cxl: 369 KiB needed \(weights"),
        (
            {"weights": "bind:cxl", "kv": "bind:cxl"},
            ("cxl=2:400KiB",),
            r"tier cxl: 483 KiB needed \(weights 369 KiB \+ kv 114 KiB\), capacity 400 KiB",
        ),
        (
            {"weights": "preferred:ldram,cxl", "act": "bind:rdram"},
            ("ldram=0:100KiB", "cxl=2:100KiB", "rdram=1:100KiB"),
            "tier ldram",
        ),
    ],
)
def test_tier_too_small_is_refused_before_anything_is_allocated(
    place: dict[str, str],
    tiers: tuple[str, ...],
    words: str,
    request_tiny: FlexGenRun,
    session: Session,
    offload_dir: Path,
) -> None:
    limits = tuple(parse_tier(text) for text in tiers)

    with pytest.raises(MemoryError, match=words):
        run(replace(request_tiny, place=place, tiers=limits), session=session)

    assert session.stats().asked_bytes.total == 0
    assert not offload_dir.exists()


def test_tier_of_exactly_the_size_is_enough(request_tiny: FlexGenRun, session: Session) -> None:
    weights = 378_240  # of the tiny model, its embedding twice as FlexGen keeps it
    exact = (TierLimit("cxl", (2,), weights),)
    place = {"weights": "bind:cxl", "kv": "bind:ldram", "act": "bind:ldram"}

    report = run(replace(request_tiny, place=place, tiers=exact), session=session)

    (row,) = (row for row in report.placement if row.kind == "weights")
    assert (row.requested_bytes, row.tiers) == (weights, {"cxl": weights})
    one_less = (TierLimit("cxl", (2,), weights - 1),)
    with pytest.raises(MemoryError):
        run(replace(request_tiny, place=place, tiers=one_less), session=session)


@pytest.mark.parametrize(
    "text", ["cxl", "cxl=", "cxl=a:1GiB", "cxl=2:1", "cxl=2:0GiB", "cxl=2-1:1GiB", "=2:1GiB"]
)
def test_malformed_tier_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier"):
        parse_tier(text)


@pytest.mark.parametrize(
    ("words", "tiers"),
    [
        (["--limit", "cxl=1GiB"], [TierLimit("cxl", (2,), 1 << 30)]),
        (
            ["--tier", "cxl=2", "--limit", "cxl=1GiB", "--limit", "ldram=2MiB"],
            [TierLimit("cxl", (2,), 1 << 30), TierLimit("ldram", (0,), 2 << 20)],
        ),
    ],
)
def test_limit_is_the_most_of_a_tier_of_the_machine_or_of_one_named(
    words: list[str], tiers: list[TierLimit], tiny: Path
) -> None:
    words = ["--model", str(tiny), "--machine", "epyc9354-cxl-a", *words]
    assert request_from(parse_flags("flexgen", words)).tiers == tuple(tiers)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--limit", "cxl"], "--limit cxl: expected TIER=SIZE"),
        (["--limit", "cxl=much"], "--limit.*much"),
        (["--limit", "fast=1GiB"], "no tier 'fast'"),
        (["--tier", "cxl=2:1GiB", "--limit", "cxl=1GiB"], "--limit cxl: --tier gives it a size"),
    ],
)
def test_limit_that_means_nothing_is_refused(words: list[str], error: str, tiny: Path) -> None:
    words = ["--model", str(tiny), "--machine", "epyc9354-cxl-a", *words]
    with pytest.raises(ValueError, match=error):
        request_from(parse_flags("flexgen", words))


def test_tier_text_gives_nodes_and_bytes() -> None:
    assert parse_tier("cxl=2,4-5:1.5GiB") == TierLimit("cxl", (2, 4, 5), 3 << 29)
    assert parse_tier("ldram=0") == TierLimit("ldram", (0,), None)


@pytest.mark.parametrize("text", ["kv", "kv=", "=bind:0", "cache=bind:0"])
def test_malformed_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--place"):
        parse_place(text)
