"""``weight_*`` options: what they mean, and the one line that refuses them. Needs no vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cxl_offload import load_machine
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.weight_options import WeightOptions, read_weight_options
from cxl_offload.objects.weight_kinds import kind_of
from cxl_offload.topology import Machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load_machine("epyc9354-cxl-a")


def read(machine: Machine, **section: Any) -> WeightOptions:
    found = read_weight_options({"cxl_offload": section}, machine)
    assert found is not None
    return found


def test_options_of_weights_are_none_without_the_section(machine: Machine) -> None:
    assert read_weight_options(None, machine) is None
    assert read_weight_options({"gdn_prefill_backend": "auto"}, machine) is None
    assert read_weight_options({"cxl_offload": {}}, machine) is None


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("bind:2", "bind:2"),
        ("cxl", "bind:2"),
        ("interleave:0,2", "interleave:0,2"),
        ("weighted:0=4,2=1@64KiB", "weighted:0=4,2=1@64KiB"),
        ("weighted:ldram=3,cxl=1", "weighted:0=3,2=1"),
        ("weighted:ldram,cxl", "weighted:0=11,2=1"),
        ({"0": 4, "2": 1}, "weighted:0=4,2=1"),
    ],
)
def test_policy_is_said_as_everywhere(machine: Machine, given: Any, policy: str) -> None:
    found = read(machine, weight_policy=given, weight_pages="2MiB")
    assert (found.policy, found.pages, found.strict) == (policy, "2MiB", True)


OLD = [
    ({"weight_nodes": [2]}, "bind:2"),
    ({"weight_nodes": [0, 2]}, "bind:0,2"),
    ({"weight_nodes": [0, 2], "weight_policy": "interleave"}, "interleave:0,2"),
    ({"weight_placement": "weighted:ldram=3,cxl=1"}, "weighted:0=3,2=1"),
]


@pytest.mark.parametrize(("section", "policy"), OLD)
def test_old_options_of_nodes_warn_and_name_the_policy(
    machine: Machine, section: dict[str, Any], policy: str
) -> None:
    with pytest.warns(FutureWarning, match="is now weight_policy '.*'; the old option") as said:
        assert read(machine, **section).policy == policy
    text = str(said[0].message).split("'")[-2]
    assert read(machine, weight_policy=text).policy == policy


def test_weights_without_a_policy_stay_near(machine: Machine) -> None:
    assert read(machine, weight_pages="thp").policy == f"preferred:{machine.initiator}"


def test_kind_decides_where_a_parameter_goes(machine: Machine) -> None:
    found = read(
        machine,
        weight_policy="bind:0",
        weight_kinds={"*.down_proj.*": "bind:1", "mlp": "cxl", "attention": "device"},
    )
    assert found.policy_of("mlp.down_proj.weight") == "bind:1"
    assert found.policy_of("mlp.gate_up_proj.weight") == "bind:2"
    assert found.policy_of("self_attn.qkv_proj.weight") is None
    assert found.policy_of("input_layernorm.weight") == "bind:0"


def test_embeddings_and_head_leave_the_device_only_when_named(machine: Machine) -> None:
    silent = read(machine, weight_policy="bind:2")
    assert silent.policy_of("model.embed_tokens.weight") is None
    assert not silent.names_outside_layers()
    named = read(machine, weight_policy="bind:2", weight_kinds={"embedding": "bind:0"})
    assert named.policy_of("model.embed_tokens.weight") == "bind:0"
    assert named.policy_of("lm_head.weight") is None
    assert named.names_outside_layers()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("self_attn.qkv_proj.weight", "attention"),
        ("self_attn.q_norm.weight", "norm"),
        ("self_attn_layer_norm.bias", "norm"),
        ("mlp.gate_up_proj.weight", "mlp"),
        ("mlp.experts.w13_weight", "experts"),
        ("mlp.gate.weight", "mlp"),
        ("fc1.weight", "mlp"),
        ("model.decoder.layers.3.fc2.bias", "mlp"),
        ("attn.c_attn.weight", "attention"),
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("rotary.scale", "other"),
    ],
)
def test_kind_of_a_parameter_is_told_by_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"weight_polic": "cxl"}, "did you mean 'weight_policy'?"),
        (
            {"weight_policy": "bind:7"},
            "node 7 has no memory that this process may use; usable nodes",
        ),
        ({"weight_policy": "dax:dax9.0"}, "no such device in mode devdax; there are: none"),
        ({"weight_policy": "replicate:0,1"}, "a weight that the GPU reads cannot have copies"),
        ({"weight_nodes": 2}, "weight_nodes is 2; give a list"),
        ({"weight_nodes": [True]}, "give ids of nodes or names of tiers"),
        ({"weight_nodes": []}, "weight_nodes is []; give a list"),
        ({"weight_policy": "bind"}, "weight_policy 'bind' needs nodes, such as 'bind:0,2'"),
        ({"weight_nodes": [0], "weight_policy": "cxl"}, "leave weight_nodes out"),
        ({"weight_nodes": [0], "weight_placement": "cxl"}, "leave weight_nodes"),
        ({"weight_policy": "pmem"}, "neither a node id nor a tier"),
        (
            {"weight_policy": "bind:0", "weight_pages": "4MiB"},
            "must be one of base, thp, 2MiB, 1GiB",
        ),
        ({"weight_policy": "bind:0", "weight_strict": "yes"}, "must be true or false"),
        ({"weight_kinds": {"attn": "bind:0"}}, "must be one of norm, experts"),
        ({"weight_kinds": {"mlp": "bind:9"}}, "node 9 has no memory"),
        ({"weight_kinds": {"mlp": 2}}, "must be a policy as text"),
        ({"weight_kinds": ["mlp"]}, "must be an object of kind to policy"),
    ],
)
def test_wrong_option_is_refused_in_one_line(
    machine: Machine, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_weight_options({"cxl_offload": section}, machine)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert text.startswith('--additional-config "cxl_offload": ')


def test_section_that_is_no_object_is_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="must be an object, not 'bind:2'"):
        read_weight_options({"cxl_offload": "bind:2"}, machine)


def test_tuned_weights_go_where_the_state_file_says(machine: Machine, tmp_path: Path) -> None:
    state = str(tmp_path / "run.json")
    fresh = read(machine, weight_tune="step_time", weight_tune_state=state)
    assert (fresh.policy, fresh.tuned_policy) == ("bind:0", True)
    model = {"tuner": "model", "at": 5, "measured": {"0": [0.0, 1e-4], "5": [-0.3, 1e-4]}}
    Path(state).write_text(json.dumps({"model": model, "load": 4}))
    learned = read(machine, weight_tune="step_time", weight_tune_state=state)
    assert learned.policy == "weighted:0=10,2=5"
    advised = read(
        machine, weight_tune="step_time", weight_tune_state=state, weight_policy="bind:2"
    )
    assert (advised.policy, advised.tuned_policy) == ("bind:2", False)
    assert advised.tune_state == Path(state)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"weight_tune": "step_time"}, "weight_tune_state"),
        ({"weight_tune": "tokens", "weight_tune_state": "x"}, "must be 'step_time'"),
        ({"weight_tune_state": "x"}, "must be 'step_time'"),
    ],
)
def test_half_of_the_options_of_tuning_is_refused(
    machine: Machine, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(machine, **section)
