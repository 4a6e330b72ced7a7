"""What a Device-DAX device cannot give: each refusal says why, and leaves nothing behind.

The Linux code is given a folder with the files of a device, whose memory is an ordinary file: what
a real device adds is tested in a virtual machine that has one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload import _C
from cxl_offload.memory import Bind, Dax, Pages, Session
from cxl_offload.topology import DaxDevice

from .dax_devices import (
    ALIGN,
    DEVICE,
    SIZE,
    Place,
    machine_with,
    make_place,
    write_device,
)
from .machines import MIB, simulated_machine


@pytest.fixture(params=["linux", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return make_place(request.param, tmp_path)


@pytest.fixture
def session(place: Place) -> Iterator[Session]:
    session = place.session()
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert all(use.current_bytes == 0 for use in session.stats().devices.values())


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Dax("dax7.0"), r"no such Device-DAX device; there are dax0\.0, dax1\.0, dax2\.0"),
        (Dax("dax1.0"), r"mode system-ram, so its memory is node 3"),
        (Dax("dax2.0"), r"not in mode devdax"),
    ],
    ids=str,
)
def test_device_that_cannot_be_mapped_is_refused(session: Session, policy: Dax, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        session.allocate(4 * MIB, policy)
    assert session.stats().devices == {}
    assert session.allocate(4 * MIB, DEVICE).device == "dax0.0"


def test_second_session_is_refused_until_the_first_is_gone(place: Place) -> None:
    first = place.session()
    block = first.allocate(4 * MIB, DEVICE)
    second = place.session()
    with pytest.raises(OSError, match="holds it") as caught:
        second.allocate(4 * MIB, DEVICE)
    assert caught.value.errno == errno.EBUSY
    del first
    with pytest.raises(OSError, match="holds it"):
        second.allocate(4 * MIB, DEVICE)
    del block
    assert second.allocate(4 * MIB, DEVICE).device == "dax0.0"


CHILD = """
import sys
from cxl_offload import _C
from cxl_offload.memory import Dax, Session
from tests.memory.machines import simulated_machine
session = Session(_C.linux_kernel(sys.argv[1]), simulated_machine())
try:
    session.allocate(1 << 20, Dax("dax0.0"))
except OSError as error:
    sys.exit(error.errno)
"""


def in_another_process(root: Path) -> int:
    command = [sys.executable, "-c", CHILD, str(root)]
    return subprocess.run(command, check=False, cwd=Path(__file__).parents[2]).returncode


def test_other_process_is_refused_while_the_device_is_held(tmp_path: Path) -> None:
    write_device(tmp_path, "dax0.0")
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    block = session.allocate(4 * MIB, DEVICE)
    assert in_another_process(tmp_path) == errno.EBUSY
    del block, session
    assert in_another_process(tmp_path) == 0


def test_missing_and_forbidden_files_say_what_to_do(tmp_path: Path) -> None:
    write_device(tmp_path, "dax0.0")
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    (tmp_path / "dev/dax0.0").unlink()
    with pytest.raises(OSError, match=r"--device .*dev/dax0\.0") as caught:
        session.allocate(1, DEVICE)
    assert caught.value.errno == errno.ENOENT


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Root may open every file: be nobody for a while."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_forbidden_file_says_what_to_grant() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)  # pytest's own folders are closed to others
        write_device(root, "dax0.0")
        (root / "dev/dax0.0").chmod(0)
        session = Session(_C.linux_kernel(folder), simulated_machine())
        with without_root(), pytest.raises(OSError, match="setfacl") as caught:
            session.allocate(1, DEVICE)
        assert caught.value.errno == errno.EACCES
        assert session.stats().devices == {}


@pytest.mark.parametrize(("size", "align"), [(0, ALIGN), (MIB, ALIGN), (SIZE, 0), (SIZE, 3 * MIB)])
def test_device_of_a_wrong_size_is_refused(tmp_path: Path, size: int, align: int) -> None:
    write_device(tmp_path, "dax0.0", size=size, align=align)
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    with pytest.raises(ValueError, match="leave nothing to map"):
        session.allocate(1, DEVICE)


def test_device_smaller_than_it_says_is_refused_without_a_crash(tmp_path: Path) -> None:
    write_device(tmp_path, "dax0.0")
    os.truncate(tmp_path / "dev/dax0.0", MIB)
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    with pytest.raises(OSError, match=r"map 4 MiB of dax0\.0"):
        session.allocate(4 * MIB, DEVICE)
    assert session.stats().devices["dax0.0"].current_bytes == 0
    assert session.stats().mapped_bytes.current == 0


@pytest.mark.parametrize("operation", ["open_dax", "map_dax"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOMEM], ids=["EACCES", "ENOMEM"])
def test_refused_call_leaves_nothing_behind(operation: str, code: int) -> None:
    kernel = Session.simulated(machine_with(DaxDevice("dax0.0", "devdax", SIZE))).kernel
    assert isinstance(kernel, _C.SimulatedKernel)
    session = Session(kernel, simulated_machine())
    # A lack of memory is answered by emptying the pools and trying again, up to three times more.
    for call in range(1, 2 if code == errno.EACCES else 9):
        kernel.fail(operation, call=call, code=code)
    with pytest.raises((OSError, MemoryError)):
        session.allocate(4 * MIB, DEVICE)
    kernel.clear_faults()
    assert session.stats().mapped_bytes.current == 0
    assert kernel.dax_mapped_bytes("dax0.0") == 0
    assert session.allocate(SIZE, DEVICE).nbytes == SIZE


def test_memory_of_a_device_does_not_move(session: Session) -> None:
    block = session.allocate(4 * MIB, DEVICE)
    with pytest.raises(ValueError, match=r"on device dax0\.0, whose memory does not move"):
        session.move(block, Bind((0,)))
    assert block.device == "dax0.0"


def test_pages_of_nodes_do_not_move_onto_a_device() -> None:
    session = Session.simulated(machine_with(DaxDevice("dax0.0", "devdax", SIZE)))
    block = session.allocate(4 * MIB, Bind((0,)))
    with pytest.raises(ValueError, match="cannot move onto a device"):
        session.move(block, DEVICE)
    assert block.bytes_per_node() == {0: 4 * MIB}


@pytest.mark.parametrize("pages", ["thp", "2MiB", "1GiB"])
def test_page_kinds_mean_nothing_on_a_device(session: Session, pages: Pages) -> None:
    with pytest.raises(ValueError, match="pages of its own"):
        session.allocate(4 * MIB, DEVICE, pages=pages)


@pytest.mark.parametrize(
    "name", ["", "dax0", "dax0.", "0.0", "dax0.0/../x", "/dev/dax0.0", "dax0.0 "]
)
def test_names_that_are_no_device_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no Device-DAX device"):
        Dax(name)
