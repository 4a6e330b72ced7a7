"""Options of plans that would change nothing are refused in one line, with what is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.training.plan import TrainingRequest
from cxl_offload.topology import Machine, load_machine

GIB = 1 << 30
MACHINE = ["--machine", "epyc9354-cxl-a"]
INFERENCE = ["plan", "inference", "--model", "opt-1.3b", "--max-batches", "1"]
VLLM = ["plan", "inference", "--model", "opt-1.3b", "--executor", "vllm"]
TRAINING = ["plan", "training", "--model", "gpt2", "--batch", "2"]
FLEET = ["plan", "fleet", "--model", "llama-2-7b", *MACHINE, "--rate", "5", "--ttft", "1s"]
PRICES = ["--price", "server=1", "--price", "dram=1"]

DRIVE = ["--limit", "nvme=16GiB"]
REFUSED = {
    "a limit of a drive that the tiers leave out": (
        [*INFERENCE, *MACHINE, "--executor", "flexgen", "--tiers", "ldram", *DRIVE],
        "limit of nvme: the tiers leave the drive out; name it among them (--tiers)",
    ),
    "a limit of a drive that is not there": (
        [*INFERENCE, "--machine", "spr3-h100", "--executor", "flexgen", *DRIVE],
        "limit of nvme: spr3-h100 has no drive whose read rate is known; leave it out, or add it",
    ),
    "a drive that is not there": (
        [*INFERENCE, "--machine", "spr3-h100", "--executor", "flexgen", "--tiers", "ldram,nvme"],
        "tier nvme: spr3-h100 has no drive whose read rate is known; leave it out, or add it",
    ),
    "a limit of a drive that is not there, whoever runs the plan": (
        [*INFERENCE, "--machine", "spr3-h100", *DRIVE],
        "limit of nvme: spr3-h100 has no drive whose read rate is known; leave it out, or add it",
    ),
    "a limit of the drive where FlexGen has no GPU": (
        [*INFERENCE, *MACHINE, "--gpu", "none", *DRIVE],
        "limit of nvme: FlexGen alone uses a drive, and plans for none without a GPU, which",
    ),
    "a limit of the drive for transformers": (
        [*INFERENCE, *MACHINE, "--executor", "transformers", *DRIVE],
        "limit of nvme: transformers keeps nothing on a drive; leave it out",
    ),
    "a limit of the drive for vLLM": (
        [*VLLM, *MACHINE, *DRIVE],
        "limit of nvme: vLLM's weight offload has no drive; leave it out",
    ),
    "a limit of the drive where none of those that run the model has one": (
        ["plan", "inference", "--model", "llama-3-8b", *MACHINE, *DRIVE],
        "limit of nvme: transformers keeps nothing on a drive; leave it out",
    ),
    "a limit of the drive for a training without a folder of it": (
        [*TRAINING, *MACHINE, *DRIVE],
        "limit of nvme: without a folder of the drive nothing lies there; name one by --nvme-path",
    ),
    "the drive for a training without a folder of it": (
        [*TRAINING, *MACHINE, "--tiers", "ldram,nvme"],
        "tier nvme: without a folder of the drive nothing lies there; name one by --nvme-path",
    ),
    "stripes of weights over one node": (
        [*INFERENCE, *MACHINE, "--tiers", "ldram", "--interleave", "weights=always"],
        "--interleave weights=always: epyc9354-cxl-a is planned with ldram, and stripes lie on two",
    ),
    "stripes of KV over one node": (
        [*INFERENCE, "--machine", "gcp-l4", "--interleave", "kv=always"],
        "--interleave kv=always: gcp-l4 is planned with ldram, and stripes lie on two nodes and",
    ),
    "prices of cards that no server has": (
        [*FLEET, *PRICES, "--cxl", "0GiB", "--price", "card=1500", "--price", "cxl=3"],
        "price cxl, card: no server has CXL memory; name sizes of it (--cxl), or leave it out",
    ),
    "watts without a price of power": (
        [*FLEET, *PRICES, "--price", "cxl=3", "--price", "watts=900"],
        "price watts: power costs nothing without a price of it; give kwh too",
    ),
    "a price of power that nothing draws": (
        [*FLEET, *PRICES, "--price", "cxl=3", "--price", "kwh=0.2"],
        "price kwh: nothing draws power without watts; give them, or leave it out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_option_that_would_change_nothing_is_refused_in_one_line(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = REFUSED[what]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert said.count("\n") == 1


def planned(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        [*INFERENCE, *MACHINE, "--executor", "flexgen", *DRIVE],
        [*INFERENCE, *MACHINE, "--executor", "flexgen", "--tiers", "ldram,nvme", *DRIVE],
        [*TRAINING, *MACHINE, "--nvme-path", "/mnt/none-such", *DRIVE],
        [*INFERENCE, *MACHINE, "--tiers", "ldram,cxl", "--interleave", "kv=always"],
        [*INFERENCE, *MACHINE, "--tiers", "ldram", "--interleave", "kv=never"],
        [*FLEET, *PRICES, "--price", "card=0", "--price", "watts=900", "--price", "kwh=0.2"],
        [*FLEET, *PRICES, "--cxl", "0GiB,64GiB", "--price", "card=1500"],
    ],
    ids=" ".join,
)
def test_the_same_option_where_it_means_something_is_taken(words: list[str]) -> None:
    assert planned(*words)


def test_limit_of_the_drive_takes_no_executor_out_of_the_comparison() -> None:
    """Those that use none keep to it; FlexGen has it."""
    notes = planned(*INFERENCE, *MACHINE, *DRIVE)["notes"]
    assert not any("limit of nvme" in note for note in notes), notes
    assert any(note.startswith(("transformers: ", "flexgen: ")) for note in notes), notes


def test_why_says_what_stripes_would_bring_where_there_can_be_none() -> None:
    """A wish of the planner's own is no wish of the user's: nothing is refused."""
    why = planned(*INFERENCE, *MACHINE, "--executor", "flexgen", "--tiers", "ldram", "--why")["why"]
    assert why


def of_unknown_rate(machine: Machine) -> Machine:
    (drive,) = machine.drives
    return replace(machine, drives=(replace(drive, read_bandwidth_bytes_per_s=None),))


def test_drive_of_unknown_rate_is_none() -> None:
    machine = of_unknown_rate(load_machine("epyc9354-cxl-a"))
    for asked in ({"limits": {"nvme": GIB}}, {"tiers": ("ldram", "nvme")}):
        with pytest.raises(ConfigError, match="nvme: epyc9354-cxl-a has no drive whose read rate"):
            hardware_of(machine, **asked)  # type: ignore[arg-type]
    assert not hardware_of(machine).drive_usable_bytes


def test_stripes_that_no_tensor_is_large_enough_for_are_refused() -> None:
    request = InferenceRequest(
        model=load_model("opt-125m"), machine=load_machine("epyc9354-cxl-a"), prompt=1,
        generated=2, model_name="opt-125m", interleave={"kv": "always"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"kv=always: .* too small for a page on each"):
        FlexGen(request).hardware()


def test_binding_to_cores_that_no_file_names_is_refused() -> None:
    machine = load_machine("epyc9354-cxl-a")
    nodes = tuple(replace(node, cpus=()) for node in machine.nodes)
    without = replace(machine, nodes=nodes)
    asked: dict[str, Any] = {"model": load_model("gpt2"), "batch": 2, "tokens": 64}
    assert TrainingRequest(machine=without, **asked)
    with pytest.raises(ConfigError, match="--bind-cores: epyc9354-cxl-a names no CPUs of node 0"):
        TrainingRequest(machine=without, bind_cores=True, **asked)
