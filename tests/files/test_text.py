"""Files are read with their name and line in every error, and replaced as a whole."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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

PACKAGE = Path(__file__).resolve().parents[2] / "cxl_offload"


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


@pytest.mark.timeout(20)
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
        with pytest.raises(ConfigError, match="is a device, not a file"):
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
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Attribute) else ""
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
