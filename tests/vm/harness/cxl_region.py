"""Makes the memory of the guest's CXL device system RAM, by sysfs alone: no cxl, no daxctl.

Runs inside the guest, before the tests.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_DEVICES = Path("/sys/bus/cxl/devices")
_DAX = Path("/sys/bus/dax/devices")
_NODES = Path("/sys/devices/system/node")
_TIMEOUT_S = 30.0


def create_region() -> str:
    """One region over the whole device, without interleaving; returns its name."""
    _wait("an endpoint of the CXL device", lambda: list(_DEVICES.glob("endpoint*/decoder*.0")))
    (decoder,) = _DEVICES.glob("endpoint*/decoder*.0")
    root = _DEVICES / "decoder0.0"
    size = (_DEVICES / "mem0/ram/size").read_text().strip()
    region = (root / "create_ram_region").read_text().strip()
    (root / "create_ram_region").write_text(region)
    folder = _DEVICES / region
    (folder / "interleave_granularity").write_text("256")
    (folder / "interleave_ways").write_text("1")
    (decoder / "mode").write_text("ram")
    (decoder / "dpa_size").write_text(size)
    (folder / "size").write_text(size)
    (folder / "target0").write_text(decoder.name)
    (folder / "commit").write_text("1")
    Path("/sys/bus/cxl/drivers/cxl_region/bind").write_text(region)
    return region


def wait_for_node() -> int:
    """The node that the region's DAX device became, once all of its memory is online."""
    _wait("a DAX device", lambda: list(_DAX.glob("dax*")))
    (device,) = _DAX.glob("dax*")
    node = int((device / "target_node").read_text())

    def online() -> bool:
        blocks = list((_NODES / f"node{node}").glob("memory*/state"))
        return bool(blocks) and all(block.read_text().strip() == "online" for block in blocks)

    _wait(f"the memory of node {node}", online)
    return node


def _wait(what: str, ready: object) -> None:
    assert callable(ready)
    deadline = time.monotonic() + _TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"vm: {what} did not appear within {_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


if __name__ == "__main__":
    created = create_region()
    sys.stdout.write(f"vm: {created} is node {wait_for_node()}\n")
