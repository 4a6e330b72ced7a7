"""Compression loses precision, so its oracle is FlexGen itself, unchanged, in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.integrations.flexgen.checkpoint import convert_checkpoint
from cxl_offload.integrations.flexgen.model import config_of_checkpoint
from cxl_offload.integrations.flexgen.wiring import flexgen_policy
from cxl_offload.memory import Session

from .damage import generate_damaged
from .reference import Reference

# FlexGen unpads narrow heads with a list of slices; real heads are a multiple of 64 wide.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")

TIERED = {"weights": "weighted:ldram=1,cxl=1@4KiB", "kv": "bind:cxl"}
OVER_COPIES = {"cpu_attention": "workspace"}
"""Attention as FlexGen computes it: with 4-bit weights a last bit decides between two tokens."""

CASES: dict[str, dict[str, Any]] = {
    "weights": {**OVER_COPIES, "compress_weight": True, "percent": (50, 50, 100, 0, 0, 100)},
    "weights, split": {**OVER_COPIES, "compress_weight": True},
    "weights on disk": {
        **OVER_COPIES,
        "compress_weight": True,
        "percent": (20, 40, 0, 100, 100, 0),
    },
    "cache": {"compress_cache": True, "gpu_batch_size": 4, "num_gpu_batches": 2},
    "cache, CPU attention": {"compress_cache": True, "cpu_cache_compute": True},
    "cache, CPU attention over copies": {
        "compress_cache": True,
        "cpu_cache_compute": True,
        "cpu_attention": "workspace",
    },
    "both": {"compress_weight": True, "compress_cache": True, "sep_layer": False},
    "neither": {},
}
PLACES: dict[str, dict[str, str]] = {
    "weights": {"weights": "bind:cxl"},
    "weights, split": {"weights": "split:ldram=50,cxl=50"},
    "weights on disk": {"weights": "bind:rdram", "kv": "bind:cxl"},
    "cache": {"kv": "bind:cxl"},
    "cache, CPU attention": {"kv": "bind:cxl", "act": "bind:ldram"},
    "cache, CPU attention over copies": {
        "kv": "bind:cxl",
        "workspace": "bind:rdram",
        "act": "bind:ldram",
    },
    "both": {"kv": "bind:cxl"},
    "neither": TIERED,
}


def _policy_fields(request: FlexGenRun) -> list[Any]:
    fields = asdict(flexgen_policy(request, request.percent))
    kept = [value for name, value in fields.items() if not name.startswith("com")]
    return [*kept, request.compress_weight, request.compress_cache]


@pytest.fixture(scope="module")
def stock(
    tiny: Path,
    prompts: tuple[tuple[int, ...], ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens of unchanged FlexGen, without our tiers, for every case."""
    folder = tmp_path_factory.mktemp("stock")
    config = config_of_checkpoint(tiny)
    convert_checkpoint(tiny, config, folder / "tiny-np")
    plain = FlexGenRun(model=str(tiny), token_ids=prompts, gpu_batch_size=8)
    jobs = {
        "weights": str(folder),
        "config": {key: value for key, value in asdict(config).items() if key != "dtype"},
        "offload_dir": str(folder / "offload"),
        "threads": 1,
        "cases": {
            name: {
                "inputs": prompts,
                "gen_len": 8,
                "policy": _policy_fields(replace(plain, **options)),
            }
            for name, options in CASES.items()
        },
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    module = "benchmarks.stock_flexgen"
    command = [sys.executable, "-W", "ignore", "-m", module, folder / "jobs.json"]
    names = "".join(f"{name}\n" for name in CASES)
    done = subprocess.run(
        command, input=names, check=True, timeout=600, capture_output=True, text=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: np.array(one["tokens"]) for name, one in zip(CASES, results, strict=True)}


@pytest.mark.slow(reason="starts stock FlexGen in a process of its own")
@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_those_of_unchanged_flexgen(
    name: str,
    request_tiny: FlexGenRun,
    session: Session,
    stock: dict[str, np.ndarray[Any, Any]],
) -> None:
    request = replace(request_tiny, cpu_linear="half", place=PLACES[name], **CASES[name])
    report = run(request, session=session)

    np.testing.assert_array_equal(report.tokens, stock[name])


def test_unchanged_flexgen_without_compression_equals_transformers(
    stock: dict[str, np.ndarray[Any, Any]], reference: Reference
) -> None:
    np.testing.assert_array_equal(stock["neither"], reference.tokens)
    assert not (stock["cache"] == reference.tokens).all()


@pytest.mark.parametrize("name", ["cache", "cache, CPU attention"])
def test_compressed_cache_of_a_tier_matters(
    name: str,
    request_tiny: FlexGenRun,
    session: Session,
    stock: dict[str, np.ndarray[Any, Any]],
) -> None:
    request = replace(request_tiny, cpu_linear="half", place=PLACES[name], **CASES[name])

    report = generate_damaged(request, session, 2)

    assert not (report.tokens == stock[name]).all()
