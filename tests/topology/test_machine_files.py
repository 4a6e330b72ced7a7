"""The machine files of the package: every one loads, cites its numbers, and keeps its promises."""

from __future__ import annotations

import itertools

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.topology import (
    Citation,
    Machine,
    NodeKind,
    load_machine,
    machine_names,
    machine_to_json,
)

GIB = 1 << 30
SYSTEMS = {
    "epyc9354-cxl-a", "xeon8470-cxl-b", "xeon6438y-cxl-c", "xeon8468", "xeon6126-host", "xeon6430",
    "emr-1", "emr-2", "emr-3", "spr-1", "spr-2", "spr3-h100",
    "zen4-1", "zen4-2-mi300a", "zen4-3", "zen5-1", "gh200", "xeon-t4",
    "aws-a10g", "gcp-l4", "epyc7742-a100", "desktop-4090", "dgx-h100", "dgx2-v100",
    "lambda-a100-40",
}  # fmt: skip


def variants() -> list[tuple[str, dict[str, str | int | bool]]]:
    """Every file with every combination of its choices."""
    choices: dict[str, dict[str, list[str | int | bool]]] = {
        "xeon8468": {
            "snc": [1, 2, 4],
            "prefetch": [True, False],
            "throughput": ["sysbench", "mlc"],
        },
        "spr-1": {"device": ["asic-cxl-1", "fpga-cxl"]},
    }
    found: list[tuple[str, dict[str, str | int | bool]]] = []
    for name in machine_names():
        chosen = choices.get(name, {})
        for values in itertools.product(*chosen.values()):
            found.append((name, dict(zip(chosen, values, strict=True))))
    return found


@pytest.fixture(
    scope="module",
    params=variants(),
    ids=lambda item: "-".join(map(str, [item[0], *item[1].values()])),
)
def machine(request: pytest.FixtureRequest) -> Machine:
    name, variant = request.param
    return load_machine(name, variant=variant)


def test_every_system_has_a_file() -> None:
    assert set(machine_names()) == SYSTEMS


def test_file_is_simulated_and_named_after_itself(machine: Machine) -> None:
    assert machine.simulated
    assert machine.name in machine_names()
    assert load_machine(machine.name).name == machine.name
    assert machine.description
    assert machine.source
    if any(each.status != "assumed" for each in machine.citations):  # else no number is printed
        assert machine.source.split(",")[0].endswith("et al.")


def test_every_number_has_a_source(machine: Machine) -> None:
    for citation in machine.citations:
        assert citation.source, citation
        assert citation.status == "printed" or citation.note, citation
        if citation.status != "assumed":
            assert any(mark in citation.source for mark in ("§", "Table", "Fig.")), citation


def test_every_number_of_the_machine_is_cited(machine: Machine) -> None:
    cited = {citation.what for citation in machine.citations}
    for node in machine.nodes:
        assert not node.capacity_bytes or f"node {node.id} capacity" in cited
        assert not node.cpus or f"node {node.id} CPUs" in cited
    for access in machine.accesses:
        what = f"access {access.initiator}->{access.target}"
        assert access.source
        assert access.read_bandwidth_bytes_per_s is None or f"{what} read bandwidth" in cited
        assert access.read_latency_ns is None or f"{what} read latency" in cited
    for fact in machine.facts:
        assert fact.name in cited


def test_tiers_name_nodes_of_their_kind_and_the_initiator_is_local(machine: Machine) -> None:
    kinds = {
        "ldram": {NodeKind.DRAM},
        "rdram": {NodeKind.DRAM},
        "cxl": {NodeKind.CXL},
        "hbm": {NodeKind.GPU},
    }
    for tier in machine.tiers:
        assert {machine.node(node).kind for node in tier.nodes} <= kinds.get(tier.name, set())
    first = machine.tiers[0]
    assert machine.initiator in first.nodes
    assert machine.node(machine.initiator).cpus


def test_remote_is_never_faster_than_local(machine: Machine) -> None:
    local = machine.access(machine.initiator, machine.initiator)
    if local is None or local.read_bandwidth_bytes_per_s is None:
        return
    for access in machine.accesses:
        if access.initiator == machine.initiator and access.read_bandwidth_bytes_per_s:
            assert access.read_bandwidth_bytes_per_s <= local.read_bandwidth_bytes_per_s
        if access.read_latency_ns and local.read_latency_ns:
            assert access.read_latency_ns >= local.read_latency_ns


def test_distances_are_a_full_square(machine: Machine) -> None:
    ids = [node.id for node in machine.nodes]
    assert {row: list(columns) for row, columns in machine.distances.items()} == dict.fromkeys(
        ids, ids
    )


def citation(machine: Machine, what: str) -> Citation:
    return next(found for found in machine.citations if found.what == what)


def test_system_a_is_complete_enough_to_simulate_and_says_what_is_assumed() -> None:
    machine = load_machine("epyc9354-cxl-a")
    capacities = [node.capacity_bytes // GIB for node in machine.usable_nodes()]
    assert capacities == [196, 196, 128]
    assert machine.drives[0].capacity_bytes == 128 * GIB
    local, remote, cxl = (machine.access(0, node) for node in (0, 1, 2))
    assert local is not None
    assert remote is not None
    assert cxl is not None
    assert (local.read_latency_ns, cxl.read_latency_ns) == (139, 292)
    bandwidths = [a.read_bandwidth_bytes_per_s for a in (local, remote, cxl)]
    assert bandwidths == [392e9, 225e9, 38.4e9]
    (gpu,) = machine.gpus
    assert gpu.memory_bytes == 24 * GIB
    assert gpu.link is not None
    assert gpu.link.peak_bandwidth_bytes_per_s == 32e9
    assert gpu.link.h2d_bandwidth_bytes_per_s == 25e9
    path = machine.dma_path("A10", 2)
    assert path is not None
    assert path.extra_latency_ns == 500
    assert citation(machine, "GPU A10 link host to device").status == "assumed"
    assert citation(machine, "access 0->0 read bandwidth").bound == "upper"


@pytest.mark.parametrize(
    ("snc", "prefetch", "throughput", "dram", "cxl"),
    [
        (1, True, "sysbench", 252.9, 41.3),
        (1, False, "mlc", 194.5, 46.4),
        (2, True, "mlc", 133.3, 41.1),
        (4, False, "sysbench", 48.0, 44.4),
    ],
)
def test_xeon8468_has_its_table_by_snc_and_prefetch(
    snc: int, prefetch: bool, throughput: str, dram: float, cxl: float
) -> None:
    state = "on" if prefetch else "off"
    machine = load_machine(f"xeon8468:snc={snc},prefetch={state},throughput={throughput}")
    local, far = machine.access(0, 0), machine.access(0, 1)
    assert local is not None
    assert far is not None
    assert local.read_bandwidth_bytes_per_s == dram * 1e9
    assert far.read_bandwidth_bytes_per_s == cxl * 1e9
    assert (local.read_latency_ns, far.read_latency_ns) == {
        1: (111, 229), 2: (105, 226), 4: (96, 212)
    }[snc]  # fmt: skip
    assert machine.node(0).capacity_bytes == 256 * GIB // snc
    assert len(machine.node(0).cpus) == 48


def test_xeon8468_default_is_the_full_socket_with_prefetch_and_software_throughput() -> None:
    assert load_machine("xeon8468").variant == {
        "snc": 1, "prefetch": True, "throughput": "sysbench"
    }  # fmt: skip


def test_gpu_copies_of_spr3_are_those_of_copies_not_of_cpu_loads() -> None:
    machine = load_machine("spr3-h100")
    assert machine.dma_bandwidth("H100", 0) == 51.68 * GIB
    assert machine.dma_bandwidth("H100", 2) == 18.39 * GIB
    assert machine.dma_bandwidth("H100", 1) is None


def test_gh200_keeps_gpu_memory_apart() -> None:
    machine = load_machine("gh200")
    assert [node.id for node in machine.usable_nodes()] == [0]
    assert machine.node(1).capacity_bytes == 96 * GIB
    access = machine.access(0, 0)
    assert access is not None
    assert access.read_bandwidth_bytes_per_s == 304 * GIB
    assert machine.gpu("GH200").link is not None


def test_mi300a_has_no_node_to_use_unasked() -> None:
    machine = load_machine("zen4-2-mi300a")
    assert machine.usable_nodes() == ()
    assert len(machine.usable_nodes(include_gpu_memory=True)) == 4


def test_what_a_paper_does_not_print_is_absent() -> None:
    machine = load_machine("epyc9354-cxl-a")
    remote = machine.access(0, 1)
    assert remote is not None
    assert remote.read_latency_ns is None
    assert [node.id for node in load_machine("xeon6430").usable_nodes()] == [0, 1]
    spr = load_machine("spr-1").access(0, 2)
    assert spr is not None
    assert spr.read_bandwidth_bytes_per_s is None


def test_loading_twice_gives_the_same_machine() -> None:
    assert load_machine("gh200") == load_machine("gh200")
    assert machine_to_json(load_machine("emr-3")) == machine_to_json(load_machine("emr-3"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "no machine file is called 'nope'; known: aws-a10g, desktop-4090"),
        ("missing/machine.yaml", "missing/machine.yaml: cannot read: No such file"),
        ("xeon8468:snc=3", "snc=3: choices are 1, 2, 4"),
        ("xeon8468:prefetch=1", "prefetch=1: choices are on, off"),
        ("xeon8468:snc=4,snc=2", "snc is chosen twice"),
        ("xeon8468:smt=2", "no variant 'smt'; variants are snc, prefetch, throughput"),
        ("gh200:snc=4", "no variant 'snc'; variants are none"),
        ("xeon8468:snc=4,prefetch", "'prefetch' is not a choice like snc=4"),
    ],
)
def test_a_wrong_name_or_choice_is_refused_with_the_right_ones(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_machine(name)
    assert message in str(caught.value)
