"""``cxl-offload topology``, in this process and in one that has no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.topology import discover, load_machine, machine_from_json, machine_names
from tests.fixtures.sysfs import GOLDEN, TREES, tree


def run(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``cxl-offload topology``."""
    wide = {"COLUMNS": "140", **(env or {})}
    result = CliRunner().invoke(app, ["topology", *arguments], env=wide)
    return result.exit_code, result.stdout, result.stderr


def run_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, runpy\n"
        "sys.modules['torch'] = None\n"  # import torch now raises ModuleNotFoundError
        "sys.argv = ['cxl-offload', *sys.argv[1:]]\n"
        "runpy.run_module('cxl_offload.cli.main', run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "140"},
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("name", TREES)
def test_json_of_a_tree_is_the_golden_text(name: str) -> None:
    status, out, _ = run("--json", "--sysfs", str(tree(name)))
    assert status == 0
    assert out == (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", ["60", "100", "140"])
@pytest.mark.parametrize("name", TREES)
def test_tables_fit_the_terminal(name: str, columns: str) -> None:
    status, out, _ = run("--sysfs", str(tree(name)), env={"COLUMNS": columns})
    assert status == 0
    assert max(map(len, out.splitlines())) <= int(columns)


def test_tables_show_what_the_cxl_tree_has() -> None:
    _, out, _ = run("--sysfs", str(tree("two_sockets_cxl")))
    for shown in (
        "two-sockets-cxl", "region0 (2 ways)", "mem1", "0000:0d:00.0", "dax1.0", "devdax",
        "Movable 4 GiB", "NVIDIA 10de:2236", "≤31.5 GB/s each way", "HMAT access1", "250",
        "ldram 0 | rdram 1 | cxl 2", "ZONE_MOVABLE",
    ):  # fmt: skip
        assert shown in out, shown


def test_tables_say_what_may_not_be_used_and_why() -> None:
    assert "cpuset forbids" in run("--sysfs", str(tree("cpuset_hides_node")))[1]
    assert "4 GiB, throttled above 3 GiB" in run("--sysfs", str(tree("cpuset_hides_node")))[1]
    assert "when asked" in run("--sysfs", str(tree("gh200")))[1]
    assert "memory offline" in run("--sysfs", str(tree("offline_node")))[1]


def test_this_machine_is_the_default() -> None:
    status, out, _ = run("--json")
    assert status == 0
    shown, found = machine_from_json(out), discover()
    assert [node.id for node in shown.nodes] == [node.id for node in found.nodes]
    assert shown.source == "sysfs"


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_file_can_be_shown(name: str) -> None:
    status, out, _ = run("--machine", name)
    assert status == 0
    assert "simulated" in out
    status, out, _ = run("--machine", name, "--json")
    assert machine_from_json(out) == load_machine(name)


def test_marks_and_sources_tell_bounds_and_assumptions() -> None:
    _, out, _ = run("--machine", "epyc9354-cxl-a", "--sources")
    assert "≤392" in out
    assert "*392" in out
    assert "* assumed" in out
    assert "153 ns / 1.1" in out
    assert "the paper does not name it" in out


def test_choices_and_list() -> None:
    _, out, _ = run("--machine", "xeon8468:snc=4,prefetch=off")
    assert "choices: snc=4, prefetch=off, throughput=sysbench" in out
    _, out, _ = run("--list")
    assert all(name in out for name in machine_names())
    assert "snc, prefetch, throughput" in out


def test_names_from_the_machine_are_not_markup(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "proc/sys/kernel").mkdir(parents=True)
    (tree / "proc/sys/kernel/hostname").write_text("[red]host[/red] :smile:")
    (tree / "proc/meminfo").write_text("MemTotal: 1024 kB\n")
    (tree / "sys").mkdir()
    assert "[red]host[/red] :smile:" in run("--sysfs", str(tree))[1]


WRONG = {
    "folder is no capture": (["--sysfs", "/nonexistent"], "neither sys nor proc"),
    "unknown machine": (["--machine", "nope"], "no machine file is called 'nope'"),
    "two machines": (["--machine", "gh200", "--sysfs", "/"], "exclude each other"),
    "list and a machine": (["--list", "--machine", "gh200"], "--machine: --list prints names"),
    "list and a capture": (["--list", "--sysfs", "/"], "--sysfs: --list prints names"),
    "list and sources": (["--list", "--sources"], "--sources: --list prints names"),
    "list as JSON": (["--list", "--json"], "--json: --list prints names"),
    "sources of nothing": (["--sources"], "add --machine"),
    "unknown option": (["--bogus"], "No such option: --bogus. Try"),
    "option without its value": (["--machine"], "--machine"),
    "unexpected argument": (["extra"], "extra"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_on_stderr_and_status_2(name: str) -> None:
    arguments, words = WRONG[name]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("cxl-offload: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_wrong_machine_file_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: m\ncolour: red\n")
    status, _, err = run("--machine", str(path))
    assert status == 2
    assert err.startswith(f"cxl-offload: error: {path}:2: ")


def test_unknown_subcommand_is_one_line() -> None:
    result = CliRunner().invoke(app, ["topologie"])
    assert result.exit_code == 2
    assert result.stderr.startswith("cxl-offload: error: No such command 'topologie'")
    assert result.stderr.count("\n") == 1


def test_debug_setting_shows_the_traceback() -> None:
    result = CliRunner().invoke(
        app, ["topology", "--machine", "nope"], env={"CXL_OFFLOAD_DEBUG": "1"}
    )
    assert type(result.exception).__name__ == "ConfigError"


def test_no_arguments_print_the_help() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert "topology" in result.stdout


def test_topology_works_where_torch_is_not_installed() -> None:
    done = run_without_torch("topology", "--json", "--sysfs", str(tree("two_sockets_cxl")))
    assert done.returncode == 0, done.stderr
    golden = GOLDEN / "two_sockets_cxl.json"
    assert json.loads(done.stdout) == json.loads(golden.read_text(encoding="utf-8"))


def test_errors_are_one_line_in_a_process_of_its_own() -> None:
    done = run_without_torch("topology", "--machine", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_discovery_loads_no_torch_and_no_driver() -> None:
    code = (
        "import sys; from cxl_offload.topology import discover; discover()\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'torch' not in sys.modules and 'libcuda' not in maps and '_C.' not in maps\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
