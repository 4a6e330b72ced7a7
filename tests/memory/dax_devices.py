"""Device-DAX devices for tests: of a simulated machine, and as files for the Linux code.

The memory of a device that is files is an ordinary file: what a real device adds is tested in a
virtual machine that has one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

from cxl_offload import _C
from cxl_offload.memory import Dax, Session
from cxl_offload.topology import DaxDevice, Machine

from .machines import MIB, simulated_machine

SIZE = 64 * MIB
ALIGN = 2 * MIB
DEVICE = Dax("dax0.0")


def write_device(
    root: Path,
    name: str,
    *,
    driver: str | None = "device_dax",
    size: int = SIZE,
    align: int = ALIGN,
) -> None:
    """The files of a device below ``root``: /sys/bus/dax/devices/NAME and /dev/NAME."""
    folder = root / "sys/bus/dax/devices" / name
    folder.mkdir(parents=True)
    for file, value in {"size": size, "align": align, "target_node": 3}.items():
        (folder / file).write_text(f"{value}\n")
    if driver:
        (folder / "driver").symlink_to(f"../../../../bus/dax/drivers/{driver}")
    (root / "dev").mkdir(exist_ok=True)
    with open(root / "dev" / name, "wb") as device:
        device.truncate(size)


def machine_with(*devices: DaxDevice) -> Machine:
    return replace(simulated_machine(), dax=devices)


@dataclass(frozen=True)
class Place:
    """A machine with a device, of which sessions can be made."""

    kernel: _C.Kernel
    root: Path

    def session(self, *, driver: _C.GpuDriver | None = None, limit: int | None = None) -> Session:
        limits = {} if limit is None else {"dax0.0": limit}
        return Session(self.kernel, simulated_machine(), limits=limits, driver=driver)


def make_place(kind: str, root: Path) -> Place:
    """A machine with ``dax0.0`` in mode devdax, and two devices that cannot be mapped.

    ``kind`` is ``linux``, the Linux code over files in ``root``, or ``simulated``.
    """
    if kind == "linux":
        write_device(root, "dax0.0")
        write_device(root, "dax1.0", driver="kmem")
        write_device(root, "dax2.0", driver=None)
        return Place(_C.linux_kernel(str(root)), root)
    machine = machine_with(
        DaxDevice("dax0.0", "devdax", SIZE, 3, ALIGN),
        DaxDevice("dax1.0", "system-ram", SIZE, 3, ALIGN),
        DaxDevice("dax2.0", "unbound", SIZE, 3, ALIGN),
    )
    return Place(Session.simulated(machine).kernel, root)


def fill(block: _C.Allocation, value: int) -> None:
    ctypes.memset(block.address, value, block.nbytes)


def is_filled(block: _C.Allocation, value: int) -> bool:
    return ctypes.string_at(block.address, block.nbytes) == bytes([value]) * block.nbytes
