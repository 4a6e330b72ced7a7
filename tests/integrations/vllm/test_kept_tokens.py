"""Chunks that outlive an engine of the real vLLM: its tokens are those without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cxl_offload.kept import find_kept, kept_path, verify_kept
from tests.integrations.vllm.conftest import RunEngine, kv_offload, start_engine
from tests.integrations.vllm.test_kv_tokens import cached, tokens
from tests.integrations.vllm.tiny_model import CHUNK, DTYPE


@pytest.fixture
def name() -> Iterator[str]:
    """Of a store in the shared memory of this machine."""
    found = f"test-{uuid4().hex}"
    yield found
    kept_path(found).unlink(missing_ok=True)


def options(name: str, **cold: Any) -> dict[str, Any]:
    """Twenty chunks hot, 256 behind them; six prompts have 54."""
    return kv_offload(
        cpu_bytes_to_use=20 * CHUNK,
        policy="bind:0",
        cold={"bytes": 256 * CHUNK, "policy": "bind:0", "persist": name} | cold,
    )


@pytest.mark.timeout(300)
def test_killed_engine_leaves_its_chunks_to_the_next(
    name: str, model: str, run_engine: RunEngine, plain_six: list[list[int]]
) -> None:
    done = start_engine(model, "kept", options(name) | {"killed": True}, {}, 240)
    assert done.returncode == -9, done.stderr[-3000:]
    before = json.loads(done.stdout.splitlines()[-1])
    assert tokens(before["first"]) == plain_six
    assert cached(before["first"]) == [0] * 6
    (file,) = (each for each in find_kept() if each.name == name)
    assert (file.blocks, file.in_use, file.problem) == (54, False, "")
    assert file.facts["dtype"] == f"torch.{DTYPE}"
    assert verify_kept(file.path).right == 54

    after = run_engine("kept", options(name))
    assert tokens(after["first"]) == plain_six
    assert cached(after["first"]) == [288] * 6, "from the engine that was killed"
    assert after["counters"]["loaded cold"] >= 54
    assert after["counters"]["stored cold"] == 0
    assert "54 chunks of an earlier engine" in after["log"]

    # The control: blocks that changed since are named, dropped and computed again.
    raw = bytearray(file.path.read_bytes())
    data = len(raw) - 256 * CHUNK
    for slot in range(0, 256, 3):
        raw[data + slot * CHUNK + 100] ^= 1
    file.path.write_bytes(raw)
    damaged = run_engine("kept", options(name))
    assert tokens(damaged["first"]) == plain_six
    assert damaged["counters"]["damaged cold"] > 0
    assert "is damaged and was dropped" in damaged["log"]
    assert sum(cached(damaged["first"])) < 6 * 288
    assert cached(damaged["second"]) == [288] * 6, "computed again and kept"
    assert tokens(damaged["second"]) == plain_six


@pytest.mark.timeout(300)
def test_engine_gives_other_tokens_where_damaged_chunks_are_believed(
    name: str, run_engine: RunEngine, plain_six: list[list[int]], tmp_path: Path
) -> None:
    """The protection taken out: an engine that does not compare."""
    run_engine("kept", options(name))
    path = kept_path(name)
    raw = bytearray(path.read_bytes())
    data = len(raw) - 256 * CHUNK
    rows = [raw[data + slot * CHUNK : data + (slot + 1) * CHUNK] for slot in range(54)]
    raw[data : data + 54 * CHUNK] = b"".join([rows[-1], *rows[:-1]])
    path.write_bytes(raw)
    (tmp_path / "sitecustomize.py").write_text(
        "import cxl_offload.integrations.vllm.kv_kept as kept\n"
        "kept.is_right = lambda data, expected: True\n"
    )
    seen = run_engine("kept", options(name), {"PYTHONPATH": str(tmp_path)})
    assert any(a != b for a, b in zip(tokens(seen["first"]), plain_six, strict=True))


@pytest.mark.timeout(300)
def test_reset_drops_the_chunks_and_what_is_stored_after_it(
    name: str, run_engine: RunEngine, plain_six: list[list[int]]
) -> None:
    seen = run_engine("kept and reset", options(name))
    assert tokens(seen["first"]) == plain_six
    (file,) = (each for each in find_kept() if each.name == name)
    assert (file.blocks, file.problem) == (0, "")
    assert "kept again after the next start" in seen["log"]


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "bfloat16"}, "dtype"),
    "hash": ({"prefix_caching_hash_algo": "sha256_cbor"}, "hash"),
    "seed": ({"environment": {"PYTHONHASHSEED": "7"}}, "hash seed"),
    "tokenizer": ({"tokenizer_mode": "slow"}, "tokenizer"),
    "length": ({"max_model_len": 256}, "options of the model"),
    "revision": ({"revision": "main"}, "revision"),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "random seed": ({"prefix_caching_hash_algo": "xxhash"}, "whose seed is random"),
    "dummy": ({"load_format": "dummy"}, "load_format is dummy"),
    "LoRA": ({"enable_lora": True}, "LoRA is on"),
}


@pytest.mark.timeout(240)
def test_facts_differ_where_chunks_would_and_engines_that_cannot_keep_are_refused(
    name: str, run_engine: RunEngine
) -> None:
    base = {"max_model_len": 512, "dtype": DTYPE} | options(name)
    changes = [change for change, _ in (*DIFFERENT.values(), *REFUSED.values())]
    changes.append({"prefix_caching_hash_algo": "xxhash", "environment": {"PYTHONHASHSEED": "7"}})
    each = [base, base, *(base | change for change in changes)]
    said = run_engine("facts", {"each": each})["facts"]
    first, again, rest = said[0], said[1], said[2:]
    assert first == again
    assert first["hash"].startswith("sha256, Python 3.")
    for facts, (_, fact) in zip(rest, DIFFERENT.values(), strict=False):
        assert isinstance(facts, dict), facts
        assert facts[fact] != first[fact], fact
    for line, (_, why) in zip(rest[len(DIFFERENT) :], REFUSED.values(), strict=False):
        assert isinstance(line, str), line
        assert why in line
        assert line.startswith("kv_connector_extra_config: cold.persist cannot be kept: ")
        assert "\n" not in line
    assert rest[-1]["hash"].startswith("xxhash"), "with a seed it can be kept"


@pytest.mark.timeout(300)
def test_engine_with_another_block_size_drops_the_chunks(
    name: str, run_engine: RunEngine, plain_six: list[list[int]]
) -> None:
    run_engine("kept", options(name))
    seen = run_engine("kept", options(name) | {"block_size": 64})
    assert cached(seen["first"])[0] == 0
    assert tokens(seen["first"]) == plain_six
    assert "dropped the kept blocks" in seen["log"]
