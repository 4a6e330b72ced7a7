from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.errors import ConfigError
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.what_if import with_gpu, with_memory
from cxl_offload.topology import load_machine, machine_names

PLAN = ["plan", "inference", "--machine", "epyc9354-cxl-a", "--executor", "flexgen"]


def test_added_memory_is_a_node_of_its_tier() -> None:
    machine = load_machine("epyc9354-cxl-a")
    larger = hardware_of(with_memory(machine, "cxl=256GiB:40GB/s:250ns"))
    added = next(node for node in larger.nodes if node.node == 3)
    assert (added.tier, added.name, added.node) == ("cxl", "3", 3)
    assert (added.read_bytes_per_s, added.copy_bytes_per_s, added.latency_ns) == (40e9, 40e9, 250)
    assert 240 << 30 < added.usable_bytes <= 256 << 30
    assert sorted(node.node for node in larger.nodes) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("tier", ["ldram", "rdram", "hbm", "cxl"])
def test_added_memory_takes_none_away(name: str, tier: str) -> None:
    """Of machines whose own memory is HBM of accelerators too."""
    machine = load_machine(name)
    before = hardware_of(machine, needs_gpu=False)
    after = hardware_of(with_memory(machine, f"{tier}=8GiB:40GB/s:250ns"), needs_gpu=False)
    added = machine.nodes[-1].id + 1
    assert {node.node for node in after.nodes} == {node.node for node in before.nodes} | {added}


def test_fast_memory_is_planned_before_slow_memory() -> None:
    """Of equally fast plans the first nodes get most, so their order is that of their rates."""
    machine = load_machine("epyc9354-cxl-a")
    for text in ("cxl=64GiB:60GB/s:300ns", "cxl=64GiB:20GB/s:300ns", "hbm=32GiB:300GB/s:130ns"):
        machine = with_memory(machine, text)
    nodes = hardware_of(machine).nodes
    assert [node.tier for node in nodes] == ["ldram", "hbm", "rdram", "cxl", "cxl", "cxl"]
    cards = [node.read_bytes_per_s for node in nodes if node.tier == "cxl"]
    assert cards == sorted(cards, reverse=True)
    slow = with_memory(load_machine("epyc9354-cxl-a"), "hbm=32GiB:10GB/s:130ns")
    assert [node.tier for node in hardware_of(slow).nodes] == ["ldram", "rdram", "cxl", "hbm"]


def test_auto_says_what_lacks_room_and_not_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "inference", "--model", "opt-66b", "--machine", "xeon8468"]
    with pytest.raises(SystemExit):
        main([*asked, "--limit", "ldram=1GiB", "--limit", "cxl=1GiB"])
    said = capsys.readouterr().err
    assert "the weights alone need 122 GiB, " in said
    assert " GiB are missing; usable are " in said
    assert "no smaller batch helps" in said


@pytest.mark.parametrize(
    "text",
    ["cxl", "cxl=1GiB", "cxl=1GiB:1GB/s", "tape=1GiB:1GB/s:9ns", "cxl=1:1GB/s:9ns",
     "cxl=0GiB:1GB/s:9ns"],
)  # fmt: skip
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--add"):
        with_memory(load_machine("epyc9354-cxl-a"), text)


def test_plan_with_added_memory_is_advice_and_can_be_compared(tmp_path: Path) -> None:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    arguments = [*PLAN, "--model", "opt-66b", "--tiers", "ldram,cxl"]
    for file, add in zip(files, ([], ["--add", "cxl=256GiB:40GB/s:250ns"]), strict=True):
        done = CliRunner().invoke(app, [*arguments, *add, "--output", str(file)])
        assert done.exit_code == 0, done.output
    assert "planned as if cxl=256GiB:40GB/s:250ns were there" in done.output.replace("\n", "")
    compared = CliRunner().invoke(app, ["plan", "compare", *map(str, files), "--json"])
    found = json.loads(compared.stdout)
    assert found["gain"] > 0
    assert len(found["rows"]["weights"]) == 2
    assert "(predicted)" in CliRunner().invoke(app, ["plan", "compare", *map(str, files)]).output


def test_host_without_a_gpu_is_planned_with_one_of_a_machine_file() -> None:
    host = load_machine("xeon6438y-cxl-c")
    assert not host.gpus
    with_h100 = with_gpu(host, "H100")
    own = load_machine("spr3-h100").gpus[0]
    assert with_h100.gpus[0].memory_bytes == own.memory_bytes
    assert with_h100.gpus[0].link == own.link
    assert hardware_of(with_h100).gpu.flops_per_s == own.peak_flops_per_s
    plan = ["plan", "inference", "--machine", host.name, "--model", "opt-30b", "--executor", "vllm"]
    done = CliRunner().invoke(app, [*plan, "--gpu", "h100", "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert (made["runs"], made["advice"]) == (False, "planned as if GPU h100 were there")


def test_gpu_of_no_machine_file_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"--gpu tpu: no machine file has it; known are .*h100"):
        with_gpu(load_machine("epyc9354-cxl-a"), "tpu")


def test_training_is_planned_with_added_memory() -> None:
    training = ["plan", "training", "--machine", "epyc9354-cxl-a", "--model", "opt-30b", "--json"]
    assert CliRunner().invoke(app, training).exit_code == 2  # its own memory is too small
    done = CliRunner().invoke(app, [*training, "--add", "cxl=1TiB:40GB/s:250ns"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["node_bytes"]["3"] > 0


def test_machine_is_planned_without_its_gpu_and_such_a_plan_runs() -> None:
    arguments = ["plan", "inference", "--model", "llama-3-8b", "--machine", "epyc9354-cxl-a"]
    made = CliRunner().invoke(app, [*arguments, "--gpu", "none", "--json"])
    assert made.exit_code == 0, made.output
    plan = json.loads(made.stdout)
    assert plan["runs"]
    assert plan["executor"] == "transformers"
    assert "gpu" not in plan["policies"].values()
