"""Copies between GPUs and nodes; the GPU is the only thing that is not real here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.profile import QUICK, Profile, load_profile, measure_machine, save_profile
from cxl_offload.profile.copies import CopyCall, CopyDirection
from cxl_offload.profile.fingerprint import check_same_machine
from cxl_offload.profile.measure.gpu import CudaGpus, GpuName
from cxl_offload.profile.measure.probe import Buffer
from cxl_offload.profile.plot import save_plots
from cxl_offload.topology import Gpu, Machine, discover

MIB = 1 << 20
COPIES_ONLY = dataclasses.replace(QUICK, parts=("copies",), copy_bytes=4 * MIB)


class FakeGpus:
    """Copies are real ones, into memory of the host."""

    def __init__(self, *names: GpuName, refuse: str = "") -> None:
        self.names, self.refuse = names, refuse
        self.opened: list[tuple[int, int]] = []
        self.calls: list[tuple[CopyDirection, int]] = []

    def list(self) -> tuple[tuple[GpuName, ...], str]:
        return self.names, "" if self.names else "the driver finds no GPU"

    def open(self, ordinal: int, buffer: Buffer) -> CopyCall:
        if self.refuse:
            raise OSError(self.refuse)
        self.opened.append((ordinal, buffer.nbytes))

        def copy(direction: CopyDirection, nbytes: int) -> None:
            self.calls.append((direction, nbytes))
            bytes(nbytes)

        return copy


@pytest.fixture
def machine() -> Machine:
    """This machine, said to have a GPU."""
    gpu = Gpu(name="gpu0", node=None, memory_bytes=1 << 30, pci_address="0000:3B:00.0")
    return dataclasses.replace(discover(), gpus=(gpu,))


def measured(machine: Machine, gpus: FakeGpus) -> Profile:
    session = Session.linux(machine)
    return measure_machine(session, mode=COPIES_ONLY, seconds_per_path=1.0, gpus=gpus)


def test_copies_of_every_gpu_and_node_are_measured(machine: Machine, tmp_path: Path) -> None:
    gpus = FakeGpus(GpuName("H9000", "0000:3b:00.0"), GpuName("Other", "0000:af:00.0"))
    found = measured(machine, gpus)
    nodes = [node.id for node in machine.usable_nodes()]
    assert [(copy.gpu, copy.node) for copy in found.copies] == [
        (gpu, node) for gpu in ("gpu0", "cuda1 (Other)") for node in nodes
    ]
    assert {nbytes for _, nbytes in gpus.opened} == {4 * MIB}
    assert set(gpus.calls) == {(way, size) for way in ("h2d", "d2h") for size in (64, 4 * MIB)}
    assert all(copy.pinned and copy.h2d_latency_ns.median > 0 for copy in found.copies)
    assert [picture.name for picture in save_plots(found, tmp_path)] == ["copies.png"]
    save_profile(found, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == found


def test_measured_copies_become_paths_of_the_machines_own_gpus(machine: Machine) -> None:
    found = measured(machine, FakeGpus(GpuName("H9000", "0000:3b:00.0")))
    after = found.applied_to(machine)
    for copy in found.copies:
        path = after.dma_path(after.gpus[0], copy.node)
        assert path is not None
        assert path.h2d_bandwidth_bytes_per_s == copy.h2d_bandwidth_bytes_per_s.median
        assert path.d2h_bandwidth_bytes_per_s == copy.d2h_bandwidth_bytes_per_s.median
        assert path.extra_latency_ns is not None
        assert path.extra_latency_ns >= 0


def test_profile_keeps_what_the_driver_says_of_its_gpus(machine: Machine) -> None:
    found = measured(machine, FakeGpus(GpuName("H9000", "0000:3b:00.0", 80 << 30)))
    (facts,) = found.gpus
    assert (facts.name, facts.model, facts.memory_bytes) == ("gpu0", "H9000", 80 << 30)
    (gpu,) = found.applied_to(machine).gpus
    assert (gpu.name, gpu.model, gpu.memory_bytes) == ("gpu0", "H9000", 80 << 30)
    silent = measured(machine, FakeGpus(GpuName("H9000", "0000:3b:00.0")))
    assert silent.applied_to(machine).gpus[0].memory_bytes == machine.gpus[0].memory_bytes


@pytest.mark.parametrize(
    ("gpus", "note"),
    [
        (FakeGpus(), "the driver finds no GPU"),
        (FakeGpus(GpuName("H9000", "0000:3b:00.0"), refuse="cuMemHostRegister says 999"), "999"),
    ],
)
def test_what_could_not_be_measured_is_said(machine: Machine, gpus: FakeGpus, note: str) -> None:
    found = measured(machine, gpus)
    assert found.copies == ()
    assert any(note in line for line in found.notes)


def test_a_machine_without_gpus_says_nothing_of_them() -> None:
    machine = dataclasses.replace(discover(), gpus=())
    assert measured(machine, FakeGpus()).notes == ()


def test_a_driver_that_is_not_there_is_a_reason_and_no_error() -> None:
    names, reason = CudaGpus("libcuda_that_is_not_there.so.1").list()
    assert names == ()
    assert "libcuda_that_is_not_there.so.1" in reason


def test_a_profile_of_another_machine_is_refused(machine: Machine, tmp_path: Path) -> None:
    found = measured(machine, FakeGpus())
    file = tmp_path / "profile.json"
    save_profile(found, file)
    assert load_profile(file, machine=machine) == found
    without = dataclasses.replace(machine, gpus=())
    with pytest.raises(ConfigError, match=r"gpus: gpu0 against none"):
        load_profile(file, machine=without)
    other_kernel = dataclasses.replace(found.machine, kernel="9.9")
    check_same_machine(dataclasses.replace(found, machine=other_kernel), machine, file=file)
