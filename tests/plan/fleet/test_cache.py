"""The curve of a host KV cache against a cache that is simulated block by block."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.cache import (
    CachedRequest,
    PromptCosts,
    TierSize,
    hit_rate,
    load_requests,
    mean_ttft_s,
)
from cxl_offload.plan.gpu import LAYER_S, PREFILL_EFFICIENCY, REQUEST_S
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm, planned_server
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB


def written(path: Path, prompts: list[list[int]], *, tokens: int = 4) -> Path:
    """A trace whose blocks have so many tokens."""
    lines = [json.dumps({"hash_ids": each, "input_length": tokens * len(each)}) for each in prompts]
    path.write_text("\n".join(lines) + "\n")
    return path


def prompts_with_shared_beginnings(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    made = []
    for number in range(60):
        family, shared = draw.randrange(6), draw.randrange(1, 9)
        own = [1000 + 20 * number + at for at in range(draw.randrange(3))]
        made.append([100 * family + at for at in range(shared)] + own)
    return made


def simulated_hits(prompts: list[list[int]], blocks: int) -> int:
    """Leading blocks found in a least recently used cache of so many."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        leading = True
        for block in prompt:
            leading = leading and block in cache
            hits += leading
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > blocks:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_one_pass_finds_the_hits_of_every_size(seed: int, tmp_path: Path) -> None:
    prompts = prompts_with_shared_beginnings(seed)
    requests = load_requests(written(tmp_path / "trace", prompts))
    total = sum(map(len, prompts))
    rates = [hit_rate(requests, blocks) for blocks in range(1, 80)]
    assert rates == [simulated_hits(prompts, blocks) / total for blocks in range(1, 80)]
    assert rates == sorted(rates)
    assert hit_rate(requests, 12.7) == rates[11]


def ttft(
    requests: Sequence[CachedRequest], *tiers: TierSize, model: str = "llama-3-8b", block: int = 512
) -> float:
    """On the machine with the A10, as vLLM is planned there."""
    request = VllmRequest(
        model=load_model(model), machine=load_machine("epyc9354-cxl-a"), prompt=300, generated=100,
        model_name=model,
    )  # fmt: skip
    steps, hardware = planned_server(request)
    return mean_ttft_s(
        requests, tiers, costs=PromptCosts(request.model, hardware, block), steps=steps
    )


def test_first_token_is_what_is_loaded_and_what_is_computed_once_weights_were_read(
    tmp_path: Path,
) -> None:
    model, hardware = load_model("llama-3-8b"), hardware_of(load_machine("epyc9354-cxl-a"))
    requests = load_requests(written(tmp_path / "trace", [[1, 2, 3], [1, 2, 4]]))
    tokens, block = (4 * 3, 4)  # as written; blocks of 4
    seconds = ttft(requests, TierSize(1e9, 5e9), block=block)
    peak = hardware.gpu.flops_per_s * PREFILL_EFFICIENCY
    weights = model.checkpoint_bytes - 2 * model.vocab * model.hidden
    reads = weights / hardware.gpu.memory_bytes_per_s
    first = model.forward_flops(tokens=tokens, context=6) / peak
    loads = 8 * model.kv_bytes_per_token() / 5e9
    second = model.forward_flops(tokens=4, context=8 + 2) / peak
    beside = model.layers * LAYER_S + REQUEST_S
    assert seconds == pytest.approx((max(first, reads) + max(second, reads) + loads) / 2 + beside)


def test_first_token_waits_for_the_weights_that_are_off_the_gpu() -> None:
    """LLaMA-65B on an A10: every prompt copies 100 GiB and more."""
    short = [CachedRequest(100, ())]
    request = VllmRequest(
        model=load_model("llama-65b"), machine=load_machine("epyc9354-cxl-a"), prompt=300,
        generated=100, model_name="llama-65b",
    )  # fmt: skip
    plan = plan_vllm(request)
    copied = sum(plan.node_bytes.values())
    assert copied > 100 * GIB
    link = request.hardware().link_bytes_per_s
    assert ttft(short, model="llama-65b") > copied / link


def test_what_falls_out_of_the_first_tier_is_read_from_the_second(tmp_path: Path) -> None:
    requests = load_requests(
        written(tmp_path / "trace", [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]], tokens=512)
    )
    fast, slow = TierSize(2, 20e9), TierSize(2, 5e9)
    one, both = ttft(requests, TierSize(4, 20e9)), ttft(requests, fast, slow)
    assert one < both <= ttft(requests, TierSize(4, 5e9))
    assert ttft(requests, fast) == ttft(requests)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"hash_ids": [1.5], "input_length": 4}',
        '{"hash_ids": [true], "input_length": 4}',
        '{"hash_ids": [1], "input_length": true}',
        '{"hash_ids": [1], "input_length": 99999999999999999999999}',
    ],
)
def test_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", [[1]])
    trace.write_text(trace.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="trace:2: "):
        load_requests(trace)


def test_command_answers_for_every_size_and_tier(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", prompts_with_shared_beginnings(1), tokens=512)
    arguments = ["plan", "cache", "--trace", str(trace), "--model", "llama-3-8b"]
    arguments += ["--machine", "epyc9354-cxl-a", "--sizes", "0GiB,1GiB,8GiB"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["sizes"]
    assert [row["hit_rate"] for row in rows] == sorted(row["hit_rate"] for row in rows)
    assert rows[0]["hit_rate"] == 0 < rows[-1]["hit_rate"]
    assert set(rows[-1]["ttft_s"]) == {"ldram", "rdram", "cxl"}
    assert "blocks found" in CliRunner().invoke(app, arguments).output


def test_command_answers_for_two_tiers_together_and_for_what_is_not_there(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", prompts_with_shared_beginnings(1), tokens=512)
    words = ["plan", "cache", "--trace", str(trace), "--model", "llama-3-8b"]
    words += ["--machine", "epyc9354-cxl-a", "--sizes", "0GiB,4GiB", "--json"]

    def rows(*more: str) -> list[dict[str, Any]]:
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        found: list[dict[str, Any]] = json.loads(done.stdout)["sizes"]
        return found

    alone, below = rows(), rows("--first", "ldram=1GiB")
    assert set(below[1]["ttft_s"]) == {"rdram", "cxl"}
    assert below[0]["hit_rate"] > alone[0]["hit_rate"] == 0
    assert below[1]["hit_rate"] > alone[1]["hit_rate"]
    assert below[1]["ttft_s"]["cxl"] < alone[1]["ttft_s"]["cxl"]
    faster = rows("--gpu", "h100")
    assert faster[0]["ttft_s"]["ldram"] < alone[0]["ttft_s"]["ldram"] / 2
    wrong = CliRunner().invoke(app, [*words, "--first", "hbm=1GiB"])
    assert "--first hbm: the machine has ldram, rdram, cxl" in str(wrong.exception) + wrong.output
