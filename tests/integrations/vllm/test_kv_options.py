"""Options of the KV pool: what they mean, and the one line for each that is wrong. No vLLM."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cxl_offload import Session, load_machine
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.kv_options import KvOptions, KvTier
from cxl_offload.memory import Bind, Dax, Interleave, Policy, Preferred, Weighted
from cxl_offload.tune.curves import SHARES
from tests.kept.devices import stand_in

GIB = 1 << 30
MACHINE = load_machine("epyc9354-cxl-a")
CXL = next(tier for tier in MACHINE.tiers if tier.name == "cxl").nodes
DRAM = next(tier for tier in MACHINE.tiers if tier.name == "ldram").nodes


KEPT = {"bytes": GIB, "policy": "cxl", "persist": "name"}


def read(**config: Any) -> KvOptions:
    return KvOptions.read({"spec_name": "cxl", "cpu_bytes_to_use": GIB} | config, MACHINE)


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, None),
        ({"policy": "near"}, None),
        ({"policy": "bind:0"}, Bind((0,))),
        ({"policy": "cxl"}, Bind(CXL)),
        ({"policy": {"0": 4, "2": 1}}, Weighted({0: 4, 2: 1})),
        ({"policy": {"ldram": 4, "cxl": 1}}, Weighted({DRAM[0]: 4, CXL[0]: 1})),
        ({"policy": {"cxl": 1}}, Bind(CXL)),
        ({"policy": "weighted:0=3,2=1@64KiB"}, Weighted({0: 3, 2: 1}, granule_bytes=64 << 10)),
        # 392 and 38.4 GB/s, so 10.2:1; 392 and 225, so 1.7:1
        ({"policy": "weighted:0,2"}, Weighted({0: 11, 2: 1})),
        ({"policy": "weighted:ldram,rdram"}, Weighted({0: 2, 1: 1})),
    ],
)
def test_options_mean_a_policy(config: dict[str, Any], policy: Policy | None) -> None:
    assert read(**config).hot.policy == policy


@pytest.mark.parametrize(
    ("config", "policy", "new"),
    [
        ({"nodes": [2]}, Bind((2,)), "nodes is now policy 'bind:2'"),
        ({"nodes": [0, 2]}, Interleave((0, 2)), "nodes is now policy 'interleave:0,2'"),
        ({"nodes": ["ldram", "cxl"]}, Interleave((*DRAM, *CXL)), "'interleave:ldram,cxl'"),
        ({"policy": "weighted", "nodes": [0, 2]}, Weighted({0: 11, 2: 1}), "'weighted:0,2'"),
        ({"policy": "preferred", "nodes": [2, 0]}, Preferred((2, 0)), "'preferred:2,0'"),
        (
            {"policy": "weighted", "nodes": [0, 2], "weights": [3, 1], "granule": "64KiB"},
            Weighted({0: 3, 2: 1}, granule_bytes=64 << 10),
            "nodes, weights, granule is now policy 'weighted:0=3,2=1@64KiB'",
        ),
    ],
)
def test_old_lists_mean_a_policy_and_name_it(
    config: dict[str, Any], policy: Policy, new: str
) -> None:
    with pytest.warns(FutureWarning, match="the old option goes with the next version") as said:
        assert read(**config).hot.policy == policy
    (warning,) = said
    assert new in str(warning.message)
    text = str(warning.message).split("'")[1]
    assert read(policy=text).hot.policy == policy, "what the warning says to write means the same"


@pytest.mark.parametrize(
    ("given", "nbytes"), [(5 * GIB, 5 * GIB), (0.5 * GIB, GIB // 2), ("1.5GiB", 3 * GIB // 2)]
)
def test_bytes_may_be_numbers_of_any_kind_or_text(given: Any, nbytes: int) -> None:
    assert read(cpu_bytes_to_use=given).hot.nbytes == nbytes


def test_tuned_pool_goes_where_the_state_file_says(tmp_path: Path) -> None:
    state = tmp_path / "kv.json"
    asked = {"tune": "copy_time", "tune_state": str(state)}
    fresh = read(**asked)
    assert (fresh.hot.policy, fresh.tuned_policy, fresh.tune_state) == (Bind((0,)), True, state)
    all_far = {"tuner": "model", "at": len(SHARES) - 1, "measured": {}}
    state.write_text(json.dumps({"model": all_far, "load": None}))
    assert read(**asked).hot.policy == Bind(CXL)
    for said in ({"policy": "bind:0"}, {"policy": "near"}):
        advised = read(**asked, **said)
        assert not advised.tuned_policy
        assert advised.hot.policy in (None, Bind((0,)))
    state.write_text("{}")
    with pytest.raises(ConfigError, match="saved state"):
        read(**asked, policy="near")


def test_what_vllm_reads_itself_is_left_to_it() -> None:
    options = read(blocks_per_chunk=4, offload_prompt_only=False, eviction_policy="arc")
    assert options.hot.eviction == "arc"
    assert read(eviction_policy="Mine", cache_policy_module_path="m").hot.eviction == "Mine"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"polcy": "bind:0"}, "polcy is no option; did you mean 'policy'?"),
        ({"zzz": 1}, "zzz is no option; known: policy, nodes,"),
        ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use is missing; give the bytes of the pool"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use is 0; give bytes"),
        ({"cpu_bytes_to_use": "8 GB of it"}, "cpu_bytes_to_use is '8 GB of it'; give bytes"),
        ({"cpu_bytes_to_use": float("nan")}, "cpu_bytes_to_use is nan; give bytes"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True; give bytes"),
        ({"pages": "2MiB"}, "pages is '2MiB'; known here are base, thp"),
        ({"policy": "fastest"}, "'fastest' is neither a node id nor a tier; tiers: "),
        ({"policy": 7}, "is no policy: give one of the classes"),
        ({"policy": {"0": 0.5}}, "weight 0.5 of node 0 is not an integer"),
        ({"policy": "weighted"}, "'weighted' needs nodes, such as 'weighted:0,2'"),
        (
            {"policy": "weighted", "nodes": [0, 2], "weights": [1]},
            "weighted over 2 nodes needs as many weights",
        ),
        (
            {"policy": "weighted:0,1,2"},
            "by bandwidth the weights of 0, 1, 2 are (8, 4, 0); leave those of 0 out",
        ),
        ({"policy": "bind:0", "nodes": [0]}, "'bind:0' with nodes; leave nodes out"),
        ({"nodes": 0}, "nodes is 0; give a list, such as [0, 2]"),
        ({"nodes": []}, "nodes is []; give a list"),
        ({"nodes": [0], "weights": [1]}, "weights belong to 'weighted', not to 'bind'"),
        ({"weights": [1, 2]}, "weights and granule are part of a policy"),
        ({"eviction_policy": "random"}, "eviction_policy is 'random'; known are lru, arc"),
        ({"eviction_policy": "cost"}, "prefill_tokens_per_s is missing; eviction_policy 'cost'"),
        ({"prefill_tokens_per_s": -1}, "prefill_tokens_per_s is -1; give tokens a second"),
        ({"cold": 5}, "cold is 5; give a mapping"),
        ({"cold": {"policy": "cxl"}}, "cold.bytes is missing"),
        ({"cold": {"bytes": "1GiB"}}, "cold.policy is missing; name nodes, or one of the tiers: "),
        ({"cold": {"bytes": "1GiB", "policy": "tape"}}, "cold.policy is wrong: 'tape' is neither"),
        ({"cold": {"bytes": "1GiB", "polcy": "cxl"}}, "cold.polcy is no option; did you mean"),
        ({"cold": {"bytes": 1, "policy": "cxl", "pages": "4KiB"}}, "cold.pages is '4KiB'; known"),
        (
            {"cold": {"bytes": 1, "policy": "cxl", "eviction_policy": "mine"}},
            "cold.eviction_policy is 'mine'; known are lru, arc, cost",
        ),
        ({"cold": KEPT | {"persist": 5}}, "cold.persist is 5; give a name"),
        ({"cold": KEPT | {"persist": "a/b"}}, "cold.persist is no name: name 'a/b' of kept blocks"),
        (
            {"cold": {"bytes": 1, "policy": "cxl", "persist_folder": "/"}},
            "cold.persist_folder does nothing without persist",
        ),
        (
            {"cold": KEPT | {"persist_folder": "/nothing"}},
            "cold.persist_folder is '/nothing'; give a folder that is there",
        ),
        ({"cold": KEPT | {"persist_folder": ""}}, "cold.persist_folder is ''; give a folder"),
        ({"cold": KEPT | {"persist_folder": 5}}, "cold.persist_folder is 5; give a folder"),
        ({"cold": KEPT | {"bytes": 1.5}}, "cold.bytes is 1.5; give bytes"),
        ({"cold": KEPT | {"bytes": 10**30}}, "cold.bytes is 1000000000000000000000000000000; give"),
        (
            {"cold": KEPT | {"persist_folder": "/proc"}},
            "pages of files in /proc are where its file",
        ),
        (
            {"cold": KEPT | {"policy": "dax:dax0.0"}},
            "is dax:dax0.0, which is no file to persist in; leave policy out, and give the device "
            "itself: persist '/dev/dax0.0'",
        ),
        (
            {"cold": KEPT | {"persist": "/dev/dax0.0"}},
            "what is kept on /dev/dax0.0 is where that device is; leave it out",
        ),
        (
            {"cold": {"bytes": 1, "persist": "/dev/dax0.0", "persist_folder": "/dev"}},
            "cold.persist is no name: /dev/dax0.0 is a device, which lies in no folder",
        ),
        ({"cold": KEPT | {"pages": "2MiB"}}, "cold.pages is '2MiB'; known here are base, thp"),
        (
            {"cold": {"bytes": 1, "policy": "cxl"}, "store_threshold": 2},
            "store_threshold does not go with cold",
        ),
        ({"admission": "lazy"}, "admission is 'lazy'; known are adaptive, all"),
        ({"admission": True}, "admission is True; known are adaptive, all"),
        (
            {"admission": "adaptive", "store_threshold": 2},
            "admission is 'adaptive', which store_threshold is too; leave one out",
        ),
        ({"store_threshold": "many"}, "store_threshold is 'many'; give a whole number"),
        ({"tune": "step_time"}, "tune is 'step_time'; give 'copy_time'"),
        ({"tune": "copy_time"}, "tune_state is None; give a file"),
        ({"tune_state": "x.json"}, "tune is None; give 'copy_time'"),
        ({"copy_threads": 0}, "copy_threads is 0; give a whole number from 1"),
        ({"copy_threads": 1.5}, "copy_threads is 1.5; give a whole number"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk is 0; give a whole number from 1"),
        ({"block_size": "16"}, "block_size is '16'; give a whole number from 1"),
        ({"policy": {"pmem": 1}}, "'pmem' is neither a node id nor a tier; tiers: "),
        ({"policy": {"cxl": 1, "2": 1}}, "'2' gives node 2 a second weight"),
        (
            {"cold": {"bytes": 1, "policy": "cxl"}, "store_threshold": "2"},
            "store_threshold is '2'; give a whole number",
        ),
        ({"secondary_tiers": {"type": "cxl"}}, "give a list of mappings"),
        (
            {"secondary_tiers": [{"type": "fs"}, {"type": "cxl", "bytes": 1, "policy": "pmem"}]},
            "secondary_tiers[1].policy is wrong: 'pmem' is neither",
        ),
        (
            {"secondary_tiers": [{"type": "cxl", "policy": "cxl"}]},
            "secondary_tiers[0].bytes is missing",
        ),
    ],
)
def test_wrong_options_are_named_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**config)
    line = str(caught.value)
    assert line.startswith("kv_connector_extra_config: ")
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, "adaptive"),
        ({"store_threshold": 1}, "adaptive"),
        ({"cold": {"bytes": GIB, "policy": "cxl"}}, "adaptive"),
        ({"admission": "all"}, "all"),
        # What is read by another engine, or after a restart, is not seen by the one that stores.
        ({"cold": KEPT}, "all"),
        ({"secondary_tiers": [{"type": "fs"}]}, "all"),
        ({"store_threshold": 2}, "all"),
        ({"cold": KEPT, "admission": "adaptive"}, "adaptive"),
    ],
)
def test_rule_of_admission_is_what_was_asked_or_cannot_lose(
    config: dict[str, Any], rule: str
) -> None:
    assert read(**config).admission == rule


def test_weights_of_nodes_of_unknown_bandwidth_are_asked_for() -> None:
    machine = replace(MACHINE, accesses=())
    config = {"cpu_bytes_to_use": GIB, "policy": "weighted:0,2"}
    with pytest.raises(ConfigError, match="the bandwidth of 0 is not known here; give weights"):
        KvOptions.read(config, machine)


def test_cold_tier_has_options_of_its_own() -> None:
    cold = read(
        eviction_policy="cost",
        prefill_tokens_per_s=4000,
        cold={
            "bytes": "64GiB",
            "policy": "cxl",
            "pages": "2MiB",
            "eviction_policy": "arc",
            "pending_bytes": "1GiB",
            "copy_threads": 2,
        },
    ).cold
    assert cold is not None
    assert cold.tier == KvTier(64 * GIB, Bind(CXL), "2MiB", "arc")
    assert (cold.pending_bytes, cold.copy_threads) == (GIB, 2)
    device = read(cold={"bytes": GIB, "policy": "dax:dax0.0"}).cold
    assert device is not None
    assert device.tier.policy == Dax("dax0.0")


def test_cold_tier_is_kept_in_a_file_of_its_name(tmp_path: Path) -> None:
    cold = read(cold=KEPT).cold
    assert cold is not None
    assert cold.kept == Path("/dev/shm/cxl_offload_kept_name.kv")
    assert read(cold=KEPT).keeps
    assert not read(cold={"bytes": GIB, "policy": "cxl"}).keeps
    config = {"type": "cxl", "bytes": GIB, "persist": "name", "persist_folder": "/proc"}
    (other,) = read(secondary_tiers=[config]).secondary
    assert (other.kept, other.tier.policy) == (Path("/proc/cxl_offload_kept_name.kv"), None)


def test_cold_tier_is_kept_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in(monkeypatch, tmp_path)
    session = Session.simulated(MACHINE)
    options = read(cold={"bytes": "60MiB", "persist": str(path)})
    assert options.cold is not None
    assert (options.cold.kept, options.cold.tier.policy) == (path, None)
    options.check(session, shared_free_bytes=1 << 60)
    for cold, message in (
        ({"bytes": "65MiB", "persist": str(path)}, r"cold.bytes is 65 MiB and /dev/dax0.0 has 64"),
        (
            {"bytes": "1MiB", "persist": "/dev/dax1.0"},
            r"cold.persist /dev/dax1.0: this machine has",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read(cold=cold).check(session, shared_free_bytes=1 << 60)


def test_file_of_kept_chunks_that_cannot_be_used_is_named_before_the_model_loads(
    tmp_path: Path,
) -> None:
    session = Session.simulated(MACHINE)
    folder = {"persist_folder": "/dev/shm", "bytes": 1 << 60}
    with pytest.raises(ConfigError, match=r"cold\.bytes is .* TiB and /dev/shm has"):
        read(cold=KEPT | folder).check(session, shared_free_bytes=1 << 40)
    path = Path("/dev/shm/cxl_offload_kept_test_fifo.kv")
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    try:
        options = read(cold=KEPT | {"persist": "test_fifo"})
        with pytest.raises(ConfigError, match=r"cold\.persist .*not a regular file"):
            options.check(session, shared_free_bytes=1 << 40)
    finally:
        path.unlink()


def test_missing_bytes_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use is missing"):
        KvOptions.read({"spec_name": "cxl"}, MACHINE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "bind:9"}, "node 9 has no memory that this process may use; usable nodes are "),
        (
            {"cold": {"bytes": GIB, "policy": "bind:9"}},
            "cold.policy is bind:9: node 9 has no memory",
        ),
        (
            {"secondary_tiers": [{"type": "cxl", "bytes": GIB, "policy": "bind:9"}]},
            "secondary_tiers[0].policy is bind:9: node 9 has no memory",
        ),
        (
            {"cold": {"bytes": GIB, "policy": "dax:dax9.0"}},
            "cold.policy is dax:dax9.0: no such device in mode devdax; there are: ",
        ),
        (
            {"cold": {"bytes": GIB, "policy": "replicate:0,1"}},
            "cold.policy is replicate:0,1: KV on the host cannot have copies",
        ),
        (
            {"cold": {"bytes": GIB, "policy": "cxl", "pages": "2MiB"}},
            "0 B free in its pool of 2MiB pages; reserve more (nr_hugepages of the node), or ask",
        ),
        (
            {"cold": {"bytes": 48 * GIB, "policy": "bind:1"}},
            "48 GiB would go to node 1, which has 40",
        ),
        ({"policy": "bind:1", "cpu_bytes_to_use": 48 * GIB}, "48 GiB would go to node 1, which"),
        (
            {"policy": "interleave:0,1", "cpu_bytes_to_use": 90 * GIB},
            "45 GiB would go to node 1, which has",
        ),
        (
            {"policy": {"0": 1, "1": 3}, "cpu_bytes_to_use": 60 * GIB},
            "45 GiB would go to node 1, which has 40 GiB free; ask for less, or for more nodes",
        ),
    ],
)
def test_nodes_without_memory_or_room_are_named_in_one_line(
    config: dict[str, Any], message: str
) -> None:
    session = Session.simulated(MACHINE)
    session.kernel.set_used_by_others(1, session.free_bytes(1) - 40 * GIB)  # type: ignore[attr-defined]
    options = read(**config)
    with pytest.raises(ConfigError) as caught:
        options.check(session, shared_free_bytes=1 << 40)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_room_that_is_there_is_not_refused() -> None:
    session = Session.simulated(MACHINE)
    for config in (
        {"policy": "cxl"},
        {},
        {"policy": "interleave:0,1"},
        {"policy": "preferred:0,1"},
    ):
        read(**config).check(session, shared_free_bytes=1 << 40)


def test_shared_memory_that_is_too_small_is_named_with_the_remedy() -> None:
    session = Session.simulated(MACHINE)
    with pytest.raises(ConfigError, match="is 2 GiB and /dev/shm has 1 GiB left; ask for less"):
        read(cpu_bytes_to_use=2 * GIB).check(session, shared_free_bytes=GIB)
