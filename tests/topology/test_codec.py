"""JSON keeps every machine, and refuses what is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine, load_machine, machine_from_json, machine_to_json
from tests.topology.machines import machines


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(machines())
def test_json_round_trip_keeps_every_machine(machine: Machine) -> None:
    assert machine_from_json(machine_to_json(machine)) == machine


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(machines())
def test_json_is_stable(machine: Machine) -> None:
    text = machine_to_json(machine)
    assert machine_to_json(machine_from_json(text)) == text


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"nodes": []}, "machine"),
        ({"nodes": 3}, "nodes"),
        ({"simulated": 1}, "simulated"),
        ({"initiator": True}, "initiator"),
        ({"initiator": 77}, "node 77"),
        ({"colour": "red"}, "'colour'"),
        ({"distances": {"zero": {}}}, "'zero'"),
        ({"tiers": [{"name": "l4", "nodes": []}]}, "l4"),
        ({"accesses": [{"initiator": 0, "target": 0, "source": 5}]}, "accesses[0].source"),
    ],
)
def test_from_json_names_the_wrong_field(change: dict[str, object], where: str) -> None:
    value = {**json.loads(machine_to_json(load_machine("gh200"))), **change}
    with pytest.raises(ConfigError) as caught:
        machine_from_json(json.dumps(value))
    assert where in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "3", "[]", '"machine"'])
def test_from_json_refuses_what_is_no_machine(text: str) -> None:
    with pytest.raises(ConfigError):
        machine_from_json(text)
