"""The curve of a host KV cache against a cache that is simulated block by block."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.cache import TierSize, hit_rate, load_requests, mean_ttft_s
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.topology import load_machine


def written(path: Path, prompts: list[list[int]]) -> Path:
    lines = [json.dumps({"hash_ids": each, "input_length": 4 * len(each)}) for each in prompts]
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


def test_first_token_is_what_is_loaded_and_what_is_computed(tmp_path: Path) -> None:
    model, hardware = load_model("llama-3-8b"), hardware_of(load_machine("epyc9354-cxl-a"))
    requests = load_requests(written(tmp_path / "trace", [[1, 2, 3], [1, 2, 4]]))
    tiers = [TierSize(1e9, 5e9)]
    seconds = mean_ttft_s(requests, tiers, model=model, hardware=hardware, block_tokens=4)
    peak = hardware.gpu.flops_per_s * PREFILL_EFFICIENCY
    first = model.forward_flops(tokens=12, context=6) / peak
    second = 8 * model.kv_bytes_per_token() / 5e9
    second += model.forward_flops(tokens=4, context=8 + 2) / peak
    assert seconds == pytest.approx((first + second) / 2)


def test_what_falls_out_of_the_first_tier_is_read_from_the_second(tmp_path: Path) -> None:
    model, hardware = load_model("llama-3-8b"), hardware_of(load_machine("epyc9354-cxl-a"))
    requests = load_requests(written(tmp_path / "trace", [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]))
    fast, slow = TierSize(2, 20e9), TierSize(2, 5e9)

    def ttft(*tiers: TierSize) -> float:
        return mean_ttft_s(requests, tiers, model=model, hardware=hardware, block_tokens=512)

    assert ttft(TierSize(4, 20e9)) < ttft(fast, slow) <= ttft(TierSize(4, 5e9))
    assert ttft(fast) == ttft()


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
    trace = written(tmp_path / "trace", prompts_with_shared_beginnings(1))
    arguments = ["plan", "cache", "--trace", str(trace), "--model", "llama-3-8b"]
    arguments += ["--machine", "epyc9354-cxl-a", "--sizes", "0GiB,1GiB,8GiB"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["sizes"]
    assert [row["hit_rate"] for row in rows] == sorted(row["hit_rate"] for row in rows)
    assert rows[0]["hit_rate"] == 0 < rows[-1]["hit_rate"]
    assert set(rows[-1]["ttft_s"]) == {"ldram", "rdram", "cxl"}
    assert "blocks found" in CliRunner().invoke(app, arguments).output
