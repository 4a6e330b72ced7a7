"""Inside a machine with persistent memory: stores that are opened, looked at and written on.

``/dev/pmem0`` is mounted with DAX: what is written is on the medium. ``/dev/pmem1`` is not: what is
written is there when the kernel has written its pages back. ``/dev/dax2.0`` is a Device-DAX device,
without a file system. Each step is said on the console, once it is done. Runs until the power goes.
"""

from __future__ import annotations

import argparse
import mmap
import random
import subprocess
import sys
import termios
from pathlib import Path
from uuid import uuid4

from cxl_offload.kept import KeptBlocks, KeptStore, blocks, layout
from cxl_offload.memory import watched_mapping
from tests.kept.ground import FACTS, LAYOUT, block_of, keys_of, wrong_blocks
from tests.vm.harness.power import SAID

MEDIA = {
    "dax": ("/dev/pmem0", "dax=always,commit=300"),
    "pages": ("/dev/pmem1", "dax=never,commit=300"),
}
DEVICE = Path("/dev/dax2.0")
INDEX_END = layout.HEADER_BYTES + mmap.PAGESIZE
"""Of the header and the index, which takes less than a page."""


def say(*words: object) -> None:
    """On the console, and waits until it is out: the next step begins after that."""
    sys.stdout.write(f"{SAID}{' '.join(map(str, words))}\n")
    sys.stdout.flush()
    termios.tcdrain(sys.stdout.fileno())


def allow_dax(number: int) -> None:
    """Gives a persistent memory its struct pages, by sysfs alone: no ndctl. Stays on the medium."""
    if int(Path(f"/sys/block/pmem{number}/queue/dax").read_text()):
        return
    namespace, pfn, bus = f"namespace{number}.0", f"pfn{number}.0", Path("/sys/bus/nd")
    (bus / "drivers/nd_pmem/unbind").write_text(namespace)
    settings = {"mode": "ram", "uuid": str(uuid4()), "namespace": namespace}
    for name, value in settings.items():
        (bus / "devices" / pfn / name).write_text(value)
    (bus / "drivers/nd_pmem/bind").write_text(pfn)


def make_device(number: int) -> None:
    """Makes a persistent memory a Device-DAX device, if it is none; stays on the medium."""
    if DEVICE.exists():
        return
    namespace, dax, bus = f"namespace{number}.0", f"dax{number}.0", Path("/sys/bus/nd")
    (bus / "drivers/nd_pmem/unbind").write_text(namespace)
    settings = {"mode": "ram", "uuid": str(uuid4()), "namespace": namespace}
    for name, value in settings.items():
        (bus / "devices" / dax / name).write_text(value)
    (bus / "drivers/dax_pmem/bind").write_text(dax)


def is_formatted(device: str) -> bool:
    with open(device, "rb") as file:
        file.seek(1080)
        return file.read(2) == b"\x53\xef"


def mounted(name: str) -> Path:
    """A folder on a medium."""
    device, options = MEDIA[name]
    folder = Path("/run/tmp") / name
    folder.mkdir()
    if name == "dax":
        allow_dax(0)
    if not is_formatted(device):
        subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", device], check=True)
    subprocess.run(["mount", "-t", "ext4", "-o", options, device, folder], check=True)
    (how,) = (line for line in Path("/proc/mounts").read_text().splitlines() if device in line)
    say("mounted", name, how.split()[3])
    return folder


def opened(name: str) -> KeptBlocks:
    if name == "device":
        make_device(2)
    path = DEVICE if name == "device" else mounted(name) / "store"
    made = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    found = made.keys
    wrong = wrong_blocks(made)
    say("found", name, *(int.from_bytes(key[-4:], "big") for key in found if key in made))
    say("wrong", name, len(wrong))
    say("damaged", name, made.damaged)
    return made


def write_on(stores: dict[str, KeptBlocks], seed: int, *, index_first: bool) -> None:
    """More blocks than the power lasts for; pages reach the medium by chance, and at times all."""
    numbers = random.Random(f"power {seed}")
    for key in keys_of(seed, 300):
        for name, each in stores.items():
            each.put(key, block_of(key))
            say("written", name, int.from_bytes(key[-4:], "big"))
            mapping = each.store.mapping
            if name == "device":
                continue  # the kernel has nothing to write back
            if index_first:
                if name == "pages":
                    mapping.flush(0, INDEX_END)
                continue
            if numbers.random() < 0.3:
                page = numbers.randrange(len(mapping) // mmap.PAGESIZE)
                mapping.flush(page * mmap.PAGESIZE, mmap.PAGESIZE)
            if numbers.random() < 0.08:
                each.store.flush()
                say("flushed", name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--unprotected", action="store_true")
    parser.add_argument("--unordered", action="store_true")
    given = parser.parse_args()
    if given.unordered:  # without MAP_SYNC, and the index before the blocks
        watched_mapping._SYNC = 0
    if given.unprotected:
        for module in (blocks, layout):
            module.is_right = lambda data, expected: True  # type: ignore[attr-defined]
    stores = {name: opened(name) for name in (*MEDIA, "device")}
    say("opened")
    write_on(stores, given.seed, index_first=given.unordered)


if __name__ == "__main__":
    main()
