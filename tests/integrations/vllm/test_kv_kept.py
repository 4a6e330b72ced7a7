"""A cold tier whose chunks outlive it, by vLLM's interfaces but without an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.kept import find_kept, kept_path
from cxl_offload.memory import survive_memory_errors
from tests.integrations.vllm.test_kv_books import ROW, Tier, keys_of
from tests.kept.devices import device_file, fill_device, stand_in

pytestmark = pytest.mark.usefixtures("vllm")

SLOTS = 8


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test-{uuid4().hex}"
    yield found
    kept_path(found).unlink(missing_ok=True)


@pytest.fixture
def early(tmp_path: Path) -> dict[str, str]:
    """Facts of an engine whose model is a folder with one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    names = ("dtype", "hash", "hash seed", "revision")
    return dict.fromkeys(names, "None") | {"model": str(folder), "download_dir": ""}


def offloading_config(**parallel: int) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            **(sizes | parallel),
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


def make_tier(name: str, early: dict[str, str], config: Any = None, **options: Any) -> Tier:
    spec = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        extra_config={"kept_facts": early},
        config=offloading_config() if config is None else config,
    )
    cold = Tier(spec=spec, persist=name, **({"bytes": SLOTS * ROW} | options))
    cold.hot[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    return cold


def test_chunks_are_there_for_the_next_tier(name: str, early: dict[str, str]) -> None:
    first = make_tier(name, early)
    first.store([10, 11, 12], [0, 3, 7])
    first.tier.shutdown()
    again = make_tier(name, early)
    assert again.finds(10, 11, 12, 13) == "HIT HIT HIT MISS"
    again.hot[:] = 0
    assert again.load([12, 10], [1, 2]).success
    assert again.hot[:, 0].tolist() == [0, 8, 1, 0, 0, 0, 0, 0]
    assert again.counted()["damaged"] == 0
    again.tier.shutdown()


def test_chunks_on_a_device_are_there_for_the_next_tier(
    tmp_path: Path, early: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(stand_in(monkeypatch, tmp_path / "machine"))
    first = make_tier(path, early, policy=None)
    first.store([10, 11, 12], [0, 3, 7])
    reading = make_tier(path, early, policy=None)
    assert reading.finds(10, 11, 12, 13) == "HIT HIT HIT MISS"
    reading.tier.shutdown()
    first.tier.shutdown()
    again = make_tier(path, early, policy=None)
    assert again.load([12, 10], [1, 2]).success
    assert again.hot[1:3, 0].tolist() == [8, 1]
    again.tier.shutdown()
    with pytest.raises(ConfigError, match=r"cold.bytes is too much: keep .* in /dev/dax0.0"):
        make_tier(path, early, policy=None, bytes=64 << 20)
    fill_device(tmp_path / "machine", b"something else")
    with pytest.raises(ConfigError, match=r"cold.persist /dev/dax0.0: it holds something"):
        make_tier(path, early, policy=None)


def test_tier_whose_device_leaves_finds_nothing_takes_nothing_and_says_so_once(
    tmp_path: Path,
    early: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = str(stand_in(monkeypatch, tmp_path / "machine"))
    tier = make_tier(path, early, policy=None)
    tier.store([10, 11, 12], [0, 3, 7])
    with survive_memory_errors(interrupt=False), caplog.at_level(logging.ERROR):
        os.truncate(device_file(tmp_path / "machine"), 0)
        assert not tier.load([10], [1]).success
        assert tier.finds(10, 11, 12) == "MISS MISS MISS"
        assert not tier.load([11], [1]).success
        assert tier.store([13], [2]).success, "a tier that is full is no error either"
        assert tier.finds(13) == "MISS"
        counted = tier.counted()
        assert (counted["damaged"], counted["refused"]) == (1, 1)
        tier.tier.shutdown()
    gone = [record.message for record in caplog.records if "is gone" in record.message]
    assert gone == [
        "cold KV tier: /dev/dax0.0 is gone; no chunk is found or kept there until the engine has "
        "started again"
    ]


@pytest.mark.parametrize("eviction", ["lru", "arc", "cost"])
def test_oldest_of_the_chunks_that_were_left_go_first(
    eviction: str, name: str, early: dict[str, str]
) -> None:
    first = make_tier(name, early)
    for number in range(SLOTS):
        first.store([number], [number % 8])
    first.tier.shutdown()
    again = make_tier(name, early, eviction_policy=eviction)
    again.store([20, 21], [0, 1])
    assert again.finds(0, 1, 2, 7, 20, 21) == "MISS MISS HIT HIT HIT HIT"
    again.tier.shutdown()
    last = make_tier(name, early)
    assert last.finds(0, 1, 2, 7, 20, 21) == "MISS MISS HIT HIT HIT HIT"
    last.tier.shutdown()


def test_damaged_chunk_is_not_loaded_and_the_others_of_its_job_are(
    name: str, early: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    first = make_tier(name, early)
    first.store([1, 2, 3], [0, 1, 2])
    first.tier.shutdown()
    raw = bytearray(kept_path(name).read_bytes())
    raw[raw.index(b"\2" * ROW) + 77] ^= 1
    kept_path(name).write_bytes(raw)
    again = make_tier(name, early)
    with caplog.at_level(logging.WARNING):
        result = again.load([1, 2, 3], [5, 6, 7])
    assert not result.success
    assert [int.from_bytes(key[:8], "big") for key in result.successful_keys] == [1, 3]
    assert again.finds(1, 2, 3) == "HIT MISS HIT"
    assert again.counted()["damaged"] == 1
    assert again.store([2], [1]).success
    assert again.load([2], [4]).success
    again.tier.shutdown()
    (file,) = (each for each in find_kept() if each.name == name)
    assert file.blocks == 3


def test_reset_forgets_and_keeps_nothing_more(name: str, early: dict[str, str]) -> None:
    first = make_tier(name, early)
    first.store([1, 2], [0, 1])
    first.tier.forget()
    assert first.finds(1, 2) == "MISS MISS"
    assert first.store([1, 3], [0, 1]).success
    assert first.load([3], [5]).success, "it is a tier as others until the engine ends"
    first.tier.shutdown()
    again = make_tier(name, early)
    assert again.finds(1, 2, 3) == "MISS MISS MISS"
    again.tier.shutdown()


def other_model(early: dict[str, str]) -> None:
    Path(early["model"], "model.safetensors").write_bytes(b"WEIGHTS")


def other_dtype(early: dict[str, str]) -> None:
    early["dtype"] = "float32"


def other_seed(early: dict[str, str]) -> None:
    early["hash seed"] = "7"


@pytest.mark.parametrize("change", [other_model, other_dtype, other_seed])
def test_chunks_of_another_engine_are_dropped(
    change: Callable[[dict[str, str]], None],
    name: str,
    early: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = make_tier(name, early)
    first.store([1], [0])
    first.tier.shutdown()
    change(early)
    again = make_tier(name, early)
    assert again.finds(1) == "MISS"
    again.tier.shutdown()
    assert "dropped the kept blocks" in caplog.text


def test_chunks_of_other_shapes_and_ranks_are_dropped(name: str, early: dict[str, str]) -> None:
    from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingGroupConfig

    base = offloading_config()
    others = [
        offloading_config(tp_size=2, world_size=2),
        replace(base, cache=OffloadingCacheConfig(32, 1)),
        replace(base, cache=OffloadingCacheConfig(16, 2)),
        replace(base, groups=(OffloadingGroupConfig(16, ("layer.0",), 0),)),
        replace(base, kv_cache_layout="HND"),
        replace(base, model=replace(base.model, dtype="fp8")),
    ]
    for other in others:
        first = make_tier(name, early)
        assert first.store([1], [0]).success
        first.tier.shutdown()
        again = make_tier(name, early, other)
        assert again.finds(1) == "MISS"
        again.tier.shutdown()


def test_second_engine_reads_what_the_first_writes(name: str, early: dict[str, str]) -> None:
    first = make_tier(name, early)
    first.store([1], [0])
    second = make_tier(name, early)
    assert second.finds(1, 2) == "HIT MISS"
    assert second.store([5], [5]).success
    assert second.finds(5) == "MISS", "it stores nothing"
    assert second.counted()["refused"] == 1
    first.store([2], [1])
    second.tier.kept._looked -= 10  # the next look is due
    second.tier.on_new_request(second.context)
    second.hot[:] = 0
    assert second.load([1, 2], [6, 7]).success
    assert second.hot[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    # Replaced between the lookup and the copy: the copy is not believed.
    assert second.finds(1) == "HIT"
    (key,) = keys_of(1)
    row = first.tier.kept._store.block(second.tier.kept.find(key).slot)
    row[:] = b"\x63" * ROW
    row.release()
    result = second.load([1], [3])
    assert not result.success
    assert list(result.successful_keys) == []
    assert second.finds(1) == "MISS"
    second.tier.forget()
    assert second.finds(2) == "MISS", "its weights may be others by now"
    second.tier.shutdown()
    assert first.finds(1, 2) == "HIT HIT"
    first.tier.shutdown()


def test_second_engine_of_another_model_is_refused_in_one_line(
    name: str, early: dict[str, str]
) -> None:
    first = make_tier(name, early)
    with pytest.raises(ValueError, match=r"written by another engine .*dtype was 'None'") as error:
        make_tier(name, early | {"dtype": "float32"})
    assert "\n" not in str(error.value)
    first.tier.shutdown()


def test_what_cannot_be_kept_is_one_line(name: str, early: dict[str, str]) -> None:
    Path(early["model"], "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cold\.persist cannot be kept: .* has no weights"):
        make_tier(name, early)
    with pytest.raises(ValueError, match=r"cannot be kept: the files of no/model are not"):
        make_tier(name, early | {"model": "no/model"})
    kept_path(name).symlink_to("/dev/zero")
    Path(early["model"], "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"cold\.persist .*it is a symbolic link"):
        make_tier(name, early)


def test_tier_of_vllms_own_spec_cannot_keep(name: str) -> None:
    spec = SimpleNamespace(extra_config={})
    with pytest.raises(ValueError, match="needs spec_name 'cxl'"):
        Tier(spec=spec, bytes=SLOTS * ROW, persist=name)


def test_store_of_a_folder_on_a_disk_is_placed_by_its_file_system(
    early: dict[str, str], tmp_path: Path
) -> None:
    from cxl_offload.memory.shared import file_system_of

    if file_system_of(tmp_path) == "tmpfs":
        pytest.skip("temporary files are in memory here")
    options = {"policy": None, "persist_folder": str(tmp_path)}
    first = make_tier("disk", early, **options)
    first.store([1], [0])
    first.tier.shutdown()
    again = make_tier("disk", early, **options)
    assert again.finds(1) == "HIT"
    again.tier.shutdown()
    assert kept_path("disk", tmp_path).exists()
