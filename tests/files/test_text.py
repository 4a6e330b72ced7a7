"""Files are read with their name and line in every error, and replaced as a whole."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from cxl_offload.errors import ConfigError
from cxl_offload.files import (
    decode_document,
    decode_json,
    encode,
    read_document,
    read_text,
    save_figure,
    shipped_file,
    shipped_names,
    write_text,
)
from cxl_offload.files.text import _line_of
from tests.house.sources import PACKAGE, parse


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Wheel:
    spokes: int
    colour: Colour = Colour.RED
    choice: str | int | bool = "none"


@dataclass(frozen=True, slots=True)
class Cart:
    wheels: tuple[Wheel, ...]
    loads: dict[int, float]


CART = Cart((Wheel(8), Wheel(6, Colour.BLUE, choice=True)), {0: 1.5, 12: 2.0})


def test_decoding_gives_back_what_was_encoded_in_json_and_in_yaml() -> None:
    text = json.dumps(encode(CART), indent=1)
    assert decode_json(Cart, text) == CART
    assert decode_document(Cart, read_document(text, file="cart.yaml")) == CART


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"spokes": 6', '"spokes": "six"', "cart.json:9: wheels[1].spokes: must be a whole number"),
        ('"colour": "blue"', '"colour": "green"', "cart.json:10: wheels[1].colour: must be one of"),
        ('"spokes": 8', '"spoke": 8', "cart.json:4: wheels[0].spoke: unknown key 'spoke'; did you"),
        ('"12": 2.0', '"twelve": 2.0', "loads: key 'twelve' must be a whole number"),
        ('"12": 2.0', '"0": 2.0', "cart.json: key '0' appears twice"),
        ("2.0", "NaN", "cart.json: NaN is not a number that JSON knows"),
        ('"loads"', '"loads', "cart.json:14: not JSON"),
    ],
)
def test_json_that_is_wrong_names_file_line_and_key(old: str, new: str, message: str) -> None:
    text = json.dumps(encode(CART), indent=1)
    assert text.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        decode_json(Cart, text.replace(old, new), file="cart.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_line_of_a_place_in_json_is_what_the_reader_of_yaml_says(indent: int | None) -> None:
    value = {
        "empty": [{}, [], "]},:"],
        'quoted "key":\n': {"0": [1, {"deep": [None, True, -1.5e-3]}], "1": {"0": 2}},
        "last": [[1, 2], [3, [4]]],
    }
    text = "\n\n " + json.dumps(value, indent=indent)
    root = read_document(text, file="")

    def places(of: Any, where: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
        yield from (where, (*where, "absent"), (*where, 99), (*where, 0, "x"))
        entries = of.items() if isinstance(of, dict) else enumerate(of if type(of) is list else ())
        for key, each in entries:
            yield from places(each, (*where, key))

    all_places = list(places(value, ()))
    assert len(all_places) > 80
    wrong = [at for at in all_places if _line_of(text, at) != root.nearest(at).line]
    assert not wrong


def test_yaml_that_is_wrong_names_file_line_and_key() -> None:
    text = "wheels:\n- spokes: 8\n- spokes: many\nloads: {}\n"
    with pytest.raises(ConfigError) as caught:
        decode_document(Cart, read_document(text, file="cart.yaml"))
    assert str(caught.value) == (
        "cart.yaml:3: wheels[1].spokes: must be a whole number, not 'many'"
    )


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot read: No such file"):
        read_text(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8 text"):
        read_text(tmp_path / "latin.yaml")


@pytest.mark.timeout(600)
def test_pipes_and_devices_do_not_hang(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_text(pipe) == ""  # nobody writes
    reader, writer = os.pipe()  # as the shell's <(command)
    os.write(writer, b"some text")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}") == "some text"
    os.close(reader)
    for name in ("/dev/zero", "/dev/null"):
        with pytest.raises(ConfigError, match=f"^{name}: is a device, not a file$"):
            read_text(name)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)


def test_names_that_no_file_can_have_are_refused() -> None:
    for name in ("a\0b", "\0", "configs/\0.yaml"):
        with pytest.raises(ConfigError, match="no name of a file"):
            read_text(name)


def test_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    write_text(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "new \ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_shipped_files_are_found_in_one_place() -> None:
    assert "epyc9354-cxl-a" in shipped_names("machines")
    for shelf in ("machines", "models"):
        names = shipped_names(shelf)  # type: ignore[arg-type]
        assert names == tuple(sorted(names))
        assert all(shipped_file(shelf, name).is_file() for name in names)  # type: ignore[arg-type]


def test_only_files_knows_yaml_codecs_and_where_configs_are() -> None:
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "files"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                text = f"{node.value.id}.{node.attr}"
                if text in ("yaml.compose", "yaml.safe_load", "yaml.load", "typing.get_type_hints"):
                    offenders.append(f"{path.relative_to(PACKAGE)}: {text}")
            if isinstance(node, ast.Constant) and node.value in ("cxl_offload.configs", ".part"):
                offenders.append(f"{path.relative_to(PACKAGE)}: {node.value!r}")
    assert not offenders, "\n".join(offenders)


@pytest.mark.parametrize("target", ["/dev/full", "missing/plot.png"])
def test_the_file_that_cannot_be_written_is_the_one_that_was_asked_for(
    tmp_path: Path, target: str
) -> None:
    path = tmp_path / target
    for write in (lambda: write_text(path, "x" * 100), lambda: save_figure(Figure(), path)):
        with pytest.raises(OSError, match=r"No space left|No such file") as caught:
            write()
        assert caught.value.filename == str(path)
        assert not list(tmp_path.iterdir())


def test_pictures_are_replaced_as_a_whole_and_have_the_format_of_their_name(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    save_figure(Figure(), path)
    drawn = path.read_text()
    assert drawn.startswith("<?xml")
    with pytest.raises(ValueError, match="not supported"):
        save_figure(Figure(), tmp_path / "plot.xyz")
    assert [each.name for each in tmp_path.iterdir()] == ["plot.svg"]


def test_link_stays_one_and_its_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to("file")
    write_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(OSError, match="No such file") as refused:
        write_text(dangling, "new")
    assert refused.value.filename == str(dangling)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "link"]


def test_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="nobody reads this pipe"):
        write_text(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_standard_output_is_written_to_wherever_it_leads(tmp_path: Path) -> None:
    program = "from cxl_offload.files import write_text; write_text('/dev/stdout', 'text')"
    before = os.readlink("/dev/stdout")
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "text"
    assert os.readlink("/dev/stdout") == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write to any file")
def test_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o400)
    with pytest.raises(PermissionError, match="may not be written"):
        write_text(file, "new")
    assert file.read_text() == "old"


@pytest.mark.parametrize("escaped", ["\\e[31m", "\\x07", "\\x9b"])
def test_documents_cannot_write_to_a_terminal(escaped: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        read_document(f'name: "red{escaped}"', file="f.yaml").mapping(["name"], ["name"])[
            "name"
        ].text()
    with pytest.raises(ConfigError, match="text that can be written"):
        decode_document(Named, read_document(f'name: "red{escaped}"', file="f.yaml"))


@dataclass(frozen=True)
class Named:
    name: str
