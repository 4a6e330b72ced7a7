"""Profiles: what is measured here, what is kept in a file, and what a machine gets from it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.profile import (
    QUICK,
    BandwidthCurve,
    BandwidthPoint,
    Fingerprint,
    NodeFacts,
    PathProfile,
    Profile,
    load_profile,
    measure_copies,
    measure_machine,
    quick,
    saturation_threads,
    save_profile,
)
from cxl_offload.profile.curves import Estimate
from cxl_offload.profile.schedule import Schedule
from cxl_offload.transfer import host, load_rules

from ..memory.machines import simulated_memory

MIB = 1 << 20


@pytest.fixture(scope="module")
def measured() -> Profile:
    """A real profile in little time: few numbers, and poor ones."""
    session = Session.linux()
    return measure_machine(session, mode=QUICK, seconds_per_path=2.0, working_set_bytes=8 * MIB)


def point(threads: int, rate: float) -> BandwidthPoint:
    return BandwidthPoint(threads, Estimate(median=rate, low=rate, high=rate, samples=1))


def profile_of(paths: tuple[PathProfile, ...]) -> Profile:
    fingerprint = Fingerprint(
        cpu_model="a processor",
        cpus=2,
        nodes=(NodeFacts(id=0, kind="dram", cpus=2, capacity_bytes=64 << 30),),
        kernel="6.12",
        page_bytes=4096,
        transparent_huge_pages="madvise",
        isa="scalar",
    )
    return Profile(
        machine=fingerprint,
        date="2026-01-02T03:04:05Z",
        measured=True,
        mode="quick",
        seconds=1.0,
        paths=paths,
    )


def test_measured_numbers_are_of_this_machine(measured: Profile) -> None:
    session = Session.linux()
    assert measured.measured
    assert {path.node for path in measured.paths} == {n.id for n in session.machine.usable_nodes()}
    for path in measured.paths:
        loads = path.peak_bytes_per_s("load")
        # What a busy machine leaves no time for is left out and named, never made up.
        assert loads is not None or any("load" in note for note in path.notes)
        assert loads is None or 1e6 < loads < 1e13
        latency_ns = path.latency_ns()
        if latency_ns is not None:
            assert 1 < latency_ns < 1e6
    assert measured.seconds < 60


def test_measuring_gives_its_memory_back() -> None:
    session = Session.linux()
    measure_machine(session, mode=QUICK, seconds_per_path=0.2, working_set_bytes=8 * MIB)
    assert session.stats().mapped_bytes.current == 0


def test_quick_gives_the_rates_of_every_usable_node_and_nothing_else() -> None:
    session = Session.linux()
    found = quick(session)
    assert found.mode == "rates"
    assert [rates.node for rates in found.rates()] == [
        node.id for node in session.machine.usable_nodes()
    ]
    for rates, path in zip(found.rates(), found.paths, strict=True):
        assert path.loaded == path.mixes == ()
        assert {curve.kind for curve in path.curves} <= {"load", "store"}
        assert rates.load_bytes_per_s == path.peak_bytes_per_s("load")
        assert rates.store_bytes_per_s == path.peak_bytes_per_s("store")
        assert rates.latency_ns == path.latency_ns()
        # An idle machine has time for all of it; a busy one says what is missing.
        complete = None not in (rates.load_bytes_per_s, rates.store_bytes_per_s, rates.latency_ns)
        assert complete or any("the time was over" in note for note in path.notes)
    assert session.stats().mapped_bytes.current == 0


def test_rates_are_those_of_one_initiator() -> None:
    paths = tuple(PathProfile(i, n, (0,), MIB) for i in (0, 1) for n in (0, 1, 2))
    found = profile_of(paths)
    assert [rates.node for rates in found.rates(1)] == [0, 1, 2]
    assert found.rates() == found.rates(0)
    assert found.rates(7) == ()
    assert profile_of(()).rates() == ()


@pytest.mark.parametrize("measure", [measure_machine, quick])
def test_simulated_memory_is_not_measured(measure: Callable[[Session], Profile]) -> None:
    with pytest.raises(ValueError, match="simulated"):
        measure(simulated_memory())


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_time_that_means_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        measure_machine(Session.linux(), seconds_per_path=seconds)


def test_unknown_node_is_refused() -> None:
    with pytest.raises(ValueError, match="77"):
        measure_machine(Session.linux(), nodes=[77])


def test_file_gives_the_profile_back(measured: Profile, tmp_path: Path) -> None:
    save_profile(measured, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == measured
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _other_version(text: str) -> str:
    return text.replace('"version": 1', '"version": 99', 1)


def _misspelt(text: str) -> str:
    return text.replace('"seconds"', '"secnds"', 1)


def _wrong_type(text: str) -> str:
    return text.replace('"measured": true', '"measured": "yes"', 1)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_cut, "not JSON"),
        (_other_version, "version 99"),
        (_misspelt, "secnds"),
        (_wrong_type, "measured"),
        (lambda _: "[]", "not a profile"),
    ],
)
def test_spoilt_file_is_named_with_what_is_wrong(
    spoil: Callable[[str], str], named: str, measured: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    save_profile(measured, path)
    text = path.read_text()
    assert spoil(text) != text
    path.write_text(spoil(text))
    with pytest.raises(ConfigError) as refusal:
        load_profile(path)
    assert str(path) in str(refusal.value)
    assert named in str(refusal.value)


def test_other_machine_is_told_apart(measured: Profile) -> None:
    other = dataclasses.replace(measured.machine, cpu_model="another", cpus=999)
    assert measured.machine.mismatches(measured.machine) == ()
    lines = measured.machine.mismatches(other)
    assert [line.partition(":")[0] for line in lines] == ["cpu_model", "cpus"]


def test_machine_gets_what_was_measured(measured: Profile) -> None:
    machine = measured.applied_to(Session.linux().machine)
    for path in measured.paths:
        access = machine.access(path.initiator, path.node)
        assert access is not None
        assert access.read_bandwidth_bytes_per_s == path.peak_bytes_per_s("load")
        assert access.source.startswith("measured on")


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([10.0], 1),
        ([10.0, 20.0, 30.0], 3),
        ([10.0, 20.0, 20.5, 20.4], 2),
        ([20.0, 15.0, 10.0], 1),
        ([10.0, 19.0, 20.0], 2),
        ([10.0, 18.9, 20.0], 3),
    ],
)
def test_saturation_is_the_fewest_threads_near_the_best(rates: list[float], expected: int) -> None:
    points = tuple(point(at + 1, rate) for at, rate in enumerate(rates))
    assert saturation_threads(points) == expected
    assert BandwidthCurve("load", "base", points).saturation_threads == expected


def test_curve_needs_ascending_threads() -> None:
    with pytest.raises(ValueError, match="ascending"):
        BandwidthCurve("load", "base", (point(2, 1.0), point(1, 1.0)))


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_schedule_shares_its_time_and_keeps_to_it() -> None:
    clock = Clock()
    schedule = Schedule(budget_s=10.0, longest_s=100.0, clock=clock)
    given: list[float] = []

    def work(seconds: float) -> None:
        given.append(seconds)
        clock.now += seconds

    for at in range(4):
        schedule.add(str(at), work)
    assert schedule.run() == ()
    assert given == pytest.approx([2.5] * 4)
    assert clock.now == pytest.approx(10.0)


def test_schedule_skips_what_there_is_no_time_for() -> None:
    clock = Clock()
    schedule = Schedule(budget_s=1.0, longest_s=1.0, shortest_s=0.2, clock=clock)

    def slow(_: float) -> None:
        clock.now += 0.9

    for at in range(3):
        schedule.add(str(at), slow)
    assert schedule.run() == ("1", "2")


def test_gpu_copies_are_timed_by_the_caller_s_call() -> None:
    """10 GB/s to the GPU, 5 back, 2 us a call: on a clock that the copies themselves advance."""
    clock = Clock()
    calls = itertools.count()

    def copy(direction: str, nbytes: int) -> None:
        next(calls)
        clock.now += 2e-6 + nbytes / (10e9 if direction == "h2d" else 5e9)

    found = measure_copies(copy, gpu="g", node=1, pinned=True, seconds=1.0, clock=clock)
    assert found.h2d_bandwidth_bytes_per_s.median == pytest.approx(10e9, rel=0.01)
    assert found.d2h_bandwidth_bytes_per_s.median == pytest.approx(5e9, rel=0.01)
    assert found.h2d_latency_ns.median == pytest.approx(2006, rel=0.01)
    assert next(calls) >= 4 * 5


def test_command_writes_file_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # no path is broken at it
    arguments = ["profile", "--quick", "--seconds", "3", "--working-set", "8MiB"]
    arguments += ["--output", str(tmp_path / "p.json"), "--plot", str(tmp_path / "plots")]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert json.loads((tmp_path / "p.json").read_text())["mode"] == "quick"
    printed = capsys.readouterr().out
    assert "(measured)" in printed
    pictures = sorted((tmp_path / "plots").glob("*.png"))
    assert f"written: {tmp_path / 'p.json'}\n" in printed
    assert all(str(picture) in printed for picture in pictures)
    assert pictures or "the time was over" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--output", "/no/such/folder/p.json"], "no folder"),
        (["--nodes", "77"], "77"),
        (["--nodes", "moon"], "moon"),
        (["--seconds", "0"], "seconds"),
        (["--working-set", "8"], "'8'"),
    ],
)
def test_wrong_argument_is_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["profile", "--quick", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert named in error
    assert error.count("\n") == 1


def test_the_command_writes_the_table_of_host_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small copies: those that no cache holds take twenty seconds, and are timed the same."""
    measure = host.measure_rules

    def small(*, target: int, source: int, room_bytes: int) -> list[host.CopyRule]:
        assert room_bytes > 4 * MIB
        return measure(target=target, source=source, room_bytes=4 * MIB)

    monkeypatch.setattr(host, "measure_rules", small)
    file = tmp_path / "rules.json"
    arguments = ["profile", "--quick", "--seconds", "0.05", "--working-set", "8MiB"]
    done = CliRunner().invoke(app, [*arguments, "--copy-rules", str(file)])
    assert done.exit_code == 0, done.output
    assert load_rules(file)[0].from_bytes == 0
    astray = CliRunner().invoke(app, [*arguments, "--copy-rules", str(tmp_path / "no" / "r.json")])
    assert astray.exit_code != 0
    assert "there is no folder" in " ".join(astray.output.split())
