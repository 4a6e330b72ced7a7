"""A GPU that was found, not described, has the peaks that machine files have of its kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.gpu_kinds import completed, kind_of, known_gpus
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.profile.model import Fingerprint, GpuFacts, NodeFacts, Profile
from cxl_offload.topology import Gpu, Machine, discover, load_machine

from ..topology.tree_writer import GIB, TreeWriter

A100 = "NVIDIA A100-SXM4-80GB"
ADDRESSES = ("0000:17:00.0", "0000:98:00.0")


def tree_of_two_gpus(root: Path, model: str | None) -> Path:
    """Two sockets with a GPU each, and a CXL card; ``model`` is what NVIDIA's driver says."""
    writer = TreeWriter(root, hostname="found")
    writer.node_lists(online="0-2", possible="0-2", has_cpu="0-1", has_memory="0-2")
    for node, cpus in ((0, "0-15"), (1, "16-31"), (2, "")):
        distance = {0: (10, 21, 20), 1: (21, 10, 30), 2: (20, 30, 10)}[node]
        writer.node(node, cpus=cpus, total_bytes=256 * GIB, free_bytes=250 * GIB, distance=distance)
    for node, address in enumerate(ADDRESSES):
        cpus = range(16 * node, 16 * node + 16)
        link = ("16.0 GT/s PCIe", "16")
        writer.gpu(address, vendor=0x10DE, device=0x20B2, node=node, cpus=tuple(cpus), link=link)
        if model is not None:
            writer.file(f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {model}")
    writer.process(cpus="0-31", mems="0-2")
    return root


def profile_of(machine: Machine, model: str, memory_bytes: int | None) -> Profile:
    """What a profile says where the driver lists the GPUs; nothing else was measured."""
    nodes = tuple(
        NodeFacts(n.id, n.kind.value, len(n.cpus), n.capacity_bytes) for n in machine.nodes
    )
    made = Fingerprint("CPU", 32, nodes, "6.1", 4096, "never", "avx512")
    gpus = tuple(
        GpuFacts(gpu.name, model, gpu.pci_address or "", memory_bytes) for gpu in machine.gpus
    )
    return Profile(
        machine=made,
        date="2026-01-01T00:00:00Z",
        measured=True,
        mode="quick",
        seconds=1.0,
        paths=(),
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("model", "memory_gib", "machine"),
    [
        (A100, 79.3, "epyc7742-a100"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "lambda-a100-40"),
        ("NVIDIA A100 80GB PCIe", None, "epyc7742-a100"),
        ("NVIDIA H100 80GB HBM3", 79.6, "dgx-h100"),
        ("NVIDIA H100 PCIe", 79.6, "spr3-h100"),
        ("NVIDIA GeForce RTX 4090", 24.0, "desktop-4090"),
        ("Tesla T4", 15.0, "xeon-t4"),
        ("NVIDIA L4", 22.5, "gcp-l4"),
        ("NVIDIA A10G", 22.5, "aws-a10g"),
        ("NVIDIA A10", 22.5, "epyc9354-cxl-a"),
        ("NVIDIA GH200 480GB", 95.6, "gh200"),
        ("Tesla V100-SXM2-32GB", 31.7, "dgx2-v100"),
    ],
)
def test_kind_is_told_by_the_drivers_name_and_memory(
    model: str, memory_gib: float | None, machine: str
) -> None:
    nbytes = None if memory_gib is None else int(memory_gib * GIB)
    known = kind_of(Gpu("gpu0", model=model, memory_bytes=nbytes))
    assert known is not None
    assert known.machine == machine


@pytest.mark.parametrize(
    ("model", "memory_gib"),
    [
        ("NVIDIA H100 NVL", 93.6),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0),
        ("NVIDIA GeForce RTX 4090 D", 24.0),
        ("NVIDIA L40S", 45.0),
        ("Tesla V100-SXM2-16GB", 15.8),
        ("NVIDIA A100X", 79.3),
        ("NVIDIA 10de:20b2", None),
        ("", None),
    ],
)
def test_other_gpus_of_a_like_name_are_of_no_known_kind(
    model: str, memory_gib: float | None
) -> None:
    nbytes = None if memory_gib is None else int(memory_gib * GIB)
    gpu = Gpu("gpu0", model=model, memory_bytes=nbytes)
    assert kind_of(gpu) is None
    assert completed(gpu) == (gpu, "")


def test_gpu_that_lacks_nothing_stays_as_it_is() -> None:
    for known in known_gpus():
        assert completed(known.gpu) == (known.gpu, "")


def test_what_a_gpu_says_of_itself_is_never_replaced() -> None:
    gpu = Gpu("gpu0", model=A100, memory_bytes=79 * GIB, peak_flops_per_s=1.0)
    made, assumed = completed(gpu)
    assert (made.memory_bytes, made.peak_flops_per_s) == (79 * GIB, 1.0)
    assert made.memory_bandwidth_bytes_per_s == 2039e9
    assert "TFLOP/s" not in assumed
    assert "memory of" not in assumed
    assert "memory bandwidth of 2039 GB/s" in assumed
    assert A100 in assumed
    assert "epyc7742-a100" in assumed


def test_found_machine_is_planned_after_its_profile_and_says_what_was_assumed(
    tmp_path: Path,
) -> None:
    found = discover(tree_of_two_gpus(tmp_path, A100))
    assert [(gpu.pci_address, gpu.node) for gpu in found.gpus] == [
        (address, node) for node, address in enumerate(ADDRESSES)
    ]
    machine = profile_of(found, A100, 79 * GIB).applied_to(found)
    assert [gpu.memory_bytes for gpu in machine.gpus] == [79 * GIB, 79 * GIB]
    hardware = hardware_of(machine)
    own = load_machine("epyc7742-a100").gpus[0]
    assert hardware.has_gpu
    assert hardware.gpu.flops_per_s == own.peak_flops_per_s
    assert hardware.gpu_memory_bytes == 79 * GIB
    request = InferenceRequest(
        model=load_model("opt-30b"), machine=machine, prompt=256, generated=32, model_name="opt-30b"
    )
    plan = plan_inference(request)
    assert plan.gpu_bytes > 0
    assert any("312 TFLOP/s assumed" in note for note in plan.notes)
    assert any("signalling rate of its link" in note for note in plan.notes)


def test_found_gpu_without_a_profile_is_planned_by_its_model_alone(tmp_path: Path) -> None:
    machine = discover(tree_of_two_gpus(tmp_path, A100))
    assert machine.gpus[0].memory_bytes is None
    hardware = hardware_of(machine)
    assert hardware.gpu_memory_bytes == load_machine("epyc7742-a100").gpus[0].memory_bytes
    assert any("memory of 80 GiB" in note for note in hardware.notes)


@pytest.mark.parametrize("model", ["NVIDIA Z900", None])
def test_gpu_of_no_known_kind_is_refused_in_a_line_that_says_how_to_give_peaks(
    tmp_path: Path, model: str | None
) -> None:
    machine = discover(tree_of_two_gpus(tmp_path, model))
    with pytest.raises(ConfigError) as refused:
        hardware_of(machine)
    line = str(refused.value)
    assert "\n" not in line
    assert (model or "10de:20b2") in line
    assert "peak_flops in a machine file" in line
    assert "--gpu NAME" in line
    assert not hardware_of(machine, needs_gpu=False).has_gpu


def test_command_plans_a_machine_whose_gpu_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refuses it where the model says nothing: the control."""
    for model, code in ((A100, 0), ("NVIDIA Z900", 2)):
        machine = discover(tree_of_two_gpus(tmp_path / model, model))
        monkeypatch.setattr("cxl_offload.topology.discover", lambda machine=machine: machine)
        arguments = ["plan", "inference", "--executor", "flexgen", "--model", "opt-13b", "--json"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == code, done.output
        if code == 0:
            notes = json.loads(done.stdout)["notes"]
            assert any("assumed, as of the" in note for note in notes)


def test_gpus_of_a_profile_are_kept_by_name(tmp_path: Path) -> None:
    found = discover(tree_of_two_gpus(tmp_path, None))
    profile = profile_of(found, A100, None)
    other = replace(profile, gpus=(replace(profile.gpus[0], name="cuda7 (other)"),))
    assert {gpu.model for gpu in profile.applied_to(found).gpus} == {A100}
    assert other.applied_to(found).gpus == found.gpus
