"""What this package relies on in the installed vLLM: where a new version differs, this says it."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("vllm")

TESTED = "0.32.0"


def parameters(function: Any) -> str:
    return " ".join(name for name in inspect.signature(function).parameters if name != "self")


def test_version_is_the_one_that_was_tested() -> None:
    import vllm

    assert vllm.__version__.split("+")[0] == TESTED


def test_interfaces_that_are_implemented_have_these_methods() -> None:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    abstract = {
        OffloadingSpec: {"get_manager", "get_worker"},
        OffloadingWorker: {"submit_store", "submit_load", "get_finished", "wait"},
        CachePolicy: {"get", "insert", "remove", "touch", "evict", "clear"},
        SecondaryTierManager: {
            "lookup",
            "submit_store",
            "submit_load",
            "get_finished_jobs",
            "on_new_request",
            "drain_jobs",
        },
    }
    for each, names in abstract.items():
        assert set(each.__abstractmethods__) == names, each
    assert parameters(OffloadingSpec.__init__) == "config"
    assert parameters(OffloadingSpec.get_worker) == "kv_caches"
    assert parameters(OffloadingWorker.submit_store) == "job_id src_spec dst_spec"
    assert parameters(OffloadingWorker.submit_load) == "job_id src_spec dst_spec"
    assert parameters(SecondaryTierManager.__init__) == (
        "offloading_spec primary_kv_view tier_type backpressure_detector"
    )


def test_parts_that_are_reused_are_made_as_before() -> None:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    made = {
        CPUOffloadingManager: (
            "num_chunks cache_policy cache_policy_module_path enable_events store_threshold "
            "max_tracker_size"
        ),
        CPUPrimaryTierOffloadingManager: (
            "num_chunks mmap_region cache_policy cache_policy_module_path enable_events"
        ),
        TieringOffloadingManager: "primary_tier secondary_tiers",
        CPUOffloadingWorker: (
            "kv_caches blocks_per_chunk num_cpu_chunks mmap_region canonical_layout"
        ),
        LRUCachePolicy: "cache_capacity",
    }
    for each, names in made.items():
        assert parameters(each.__init__) == names, each
    assert parameters(SecondaryTierFactory.create_secondary_tier) == (
        "tier_config primary_kv_view offloading_spec"
    )
    assert set(vars(LRUCachePolicy(1))) == {
        "cache_capacity",
        "chunks",
        "_ranks",
        "_evictable",
        "_heap",
        "_next_rank",
    }
    assert parameters(inspect.unwrap(VllmConfig._post_init_kv_transfer_config)) == ""


def test_calls_that_admission_stands_before_are_as_before() -> None:
    from vllm.v1.kv_offload.base import OffloadPolicy, PrepareStoreOutput, ReqContext
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    for manager in (CPUOffloadingManager, TieringOffloadingManager):
        where = " exclude_tier_idx" if manager is TieringOffloadingManager else ""
        assert parameters(manager.lookup) == f"key req_context{where}"
        assert parameters(manager.on_new_request) == f"req_context{where}"
        assert parameters(manager.prepare_load) == "keys req_context"
        assert parameters(manager.prepare_store) == "keys req_context"
    assert [each.name for each in OffloadPolicy] == ["CHUNK_LEVEL", "REQUEST_LEVEL"]
    made = " ".join(field.name for field in fields(PrepareStoreOutput))
    assert made == "keys_to_store store_spec evicted_keys"
    context = ReqContext("r")
    context.set_offload_key_position(b"key", 32)
    context.set_state("state")
    assert context.get_offload_key_position(b"key") == 32
    assert context.get_offload_key_position(b"other") is None
    assert (context.get_state(str), context.get_state(int)) == ("state", None)


def test_messages_between_the_parts_have_these_fields() -> None:
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, TransferResult
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

    has = {
        TransferResult: "job_id success transfer_size transfer_time",
        JobResult: "job_id success successful_keys transfer_time transfer_bytes",
        TransferJob: "job_id keys chunk_ids is_promotion req_context submit_time",
        CanonicalKVCaches: "tensors group_data_refs",
        CanonicalKVCacheRef: "tensor_idx page_size_bytes mapping",
    }
    for each, names in has.items():
        assert " ".join(field.name for field in fields(each)) == names
    assert {"extra_config", "engine_id", "parallel", "canonical_layout"} <= {
        field.name for field in fields(OffloadingConfig)
    }


def test_plugin_registers_our_names_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from cxl_offload.integrations.vllm.kv_eviction import CostPolicy
    from cxl_offload.integrations.vllm.kv_plugin import install_kv
    from cxl_offload.integrations.vllm.kv_spec import CxlOffloadingSpec
    from cxl_offload.integrations.vllm.kv_tier import ColdTierManager
    from cxl_offload.integrations.vllm.plugin import register

    # So that the patch is taken off again at the end.
    method = "_post_init_kv_transfer_config"
    monkeypatch.setattr(VllmConfig, method, getattr(VllmConfig, method))
    install_kv()
    patched = getattr(VllmConfig, method)
    install_kv()
    assert getattr(VllmConfig, method) is patched
    by_path = {
        "spec_name": "CxlOffloadingSpec",
        "spec_module_path": "cxl_offload.integrations.vllm.kv_spec",
    }
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "cxl"}) is CxlOffloadingSpec
    assert OffloadingSpecFactory.get_spec_cls(by_path) is CxlOffloadingSpec
    assert SecondaryTierFactory.get_tier_class({"type": "cxl"}) is ColdTierManager
    assert CachePolicyFactory.get_cache_policy_cls("cost") is CostPolicy
    found = [each for each in entry_points(group="vllm.general_plugins") if "cxl" in each.value]
    assert {each.load() for each in found} == {register}


def test_metrics_of_vllms_managers_are_defined_beside_ours() -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from cxl_offload.integrations.vllm.kv_metrics import metric_definitions
    from cxl_offload.integrations.vllm.kv_spec import CxlOffloadingSpec

    ours = set(metric_definitions())
    assert len(ours) == 10
    one = CxlOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1})
    assert set(one) == ours | set(CPUOffloadingSpec.build_metric_definitions({}))
    config = {"cpu_bytes_to_use": 1, "cold": {"bytes": 1, "policy": "bind:0"}}
    two = CxlOffloadingSpec.build_metric_definitions(config)
    assert set(two) == ours | set(TieringOffloadingSpec.build_metric_definitions({}))
