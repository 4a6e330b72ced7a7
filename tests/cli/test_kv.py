"""``cxl-offload kv``: what is kept, whether it is right, and its end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.kept import KeptBlocks, KeptStore, kept_path
from tests.kept.ground import LAYOUT, block_of, key_of


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kv", *arguments])


def make(folder: Path, name: str, blocks: int) -> Path:
    path = kept_path(name, folder)
    store = KeptBlocks(KeptStore(path, LAYOUT, {"model": "tiny", "dtype": "bfloat16"}))
    for number in range(blocks):
        store.put(key_of(number), block_of(key_of(number)))
    store.close()
    return path


def damage(path: Path, number: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(block_of(key_of(number))) + 9] ^= 1
    path.write_bytes(raw)


def test_list_says_what_is_kept_and_what_is_wrong(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run("list", "--folder", folder).stdout == "No kept KV blocks.\n"
    make(tmp_path, "chat", 3)
    os.mkfifo(kept_path("bad", tmp_path))
    done = run("list", "--folder", folder)
    assert done.exit_code == 0
    assert "chat" in done.stdout
    assert "tiny bfloat16" in done.stdout
    bad, chat = json.loads(run("list", "--folder", folder, "--json").stdout)["kept"]
    assert bad["problem"]
    assert (chat["name"], chat["blocks"], chat["slots"]) == ("chat", 3, 8)
    assert chat["facts"] == {"model": "tiny", "dtype": "bfloat16"}
    assert not chat["in_use"]


def test_verify_names_damaged_blocks_and_ends_with_status_1(tmp_path: Path) -> None:
    folder = str(tmp_path)
    path = make(tmp_path, "chat", 3)
    done = run("verify", "--folder", folder)
    assert (done.exit_code, done.stdout) == (0, "chat: 3 right, 0 damaged\n")
    damage(path, 1)
    done = run("verify", "chat", "--folder", folder)
    assert done.exit_code == 1
    assert f"block {key_of(1).hex()} is damaged" in done.stdout
    done = run("verify", "--folder", folder, "--json")
    (row,) = json.loads(done.stdout)["verified"]
    assert (row["right"], list(row["damaged"].values())) == (2, [key_of(1).hex()])
    path.write_bytes(b"nothing")
    done = run("verify", "--folder", folder)
    assert (done.exit_code, "no store" in done.stdout) == (1, True)


def test_drop_takes_names_only_and_leaves_what_an_engine_writes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    path = make(tmp_path, "chat", 1)
    assert run("drop", "--folder", folder).exit_code == 2, "names are needed"
    writer = KeptStore(path, LAYOUT, {"model": "tiny", "dtype": "bfloat16"})
    done = run("drop", "chat", "--folder", folder)
    assert (done.exit_code, path.exists()) == (2, True)
    assert "stop that one first" in done.stderr
    writer.close()
    done = run("drop", "chat", "--folder", folder, "--json")
    (row,) = json.loads(done.stdout)["dropped"]
    assert row["freed_bytes"] >= LAYOUT.file_bytes
    assert not path.exists()
    done = run("drop", "chat", "--folder", folder)
    assert done.stderr.startswith("cxl-offload: error: no kept blocks of the name 'chat'")
    done = run("list", "--folder", folder + "/nothing")
    assert (done.exit_code, "no such folder" in done.stderr) == (2, True)


def test_option_of_a_device_is_refused_for_a_file_and_the_other_way_round(tmp_path: Path) -> None:
    """The device need not be there: what it holds is not looked at."""
    kept = make(tmp_path, "chat", 1)
    done = run("drop", "chat", "--force", "--folder", str(tmp_path))
    assert (done.exit_code, kept.exists()) == (2, True)
    assert "--force: chat is no device; leave it out" in done.stderr
    for command in ("verify", "drop"):
        done = run(command, "/dev/dax99.9", "--folder", str(tmp_path))
        assert done.exit_code == 2
        assert f"--folder {tmp_path}: /dev/dax99.9 is a device" in done.stderr


@pytest.mark.parametrize("command", [["list"], ["verify"], ["drop", "chat"]], ids=" ".join)
def test_folder_without_a_name_is_not_the_working_directory(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "chat", 1)
    monkeypatch.chdir(tmp_path)
    done = run(*command, "--folder", "")
    assert done.exit_code == 2
    assert "--folder '': an empty text is no folder" in done.stderr
    assert path.exists()
    assert run("list", "--folder", ".").stdout.count("chat") == 1
